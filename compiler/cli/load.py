"""`train.py:train_step`: import a user's file without workers, and find and trace the program in it.

The file is imported as a module of its own name, with its folder first on the path, and `__name__` is not "__main__".
Its meshes have no workers: values on them have types and no data.

What stands after the colon is the name of a program at the file's top level, or a path to one: `trainer.step` for a
method of an object, `make_step()` for a program that a function without arguments makes.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.utils import _pytree as pytree

from monarch.compiler.cli.arguments import arguments_of
from monarch.compiler.cli.look import no_program
from monarch.compiler.cli.without_workers import without_workers
from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.errors import LayoutError, MonarchError, ProgramError, Source, did_you_mean
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import compile_graph, compile_template
from monarch.compiler.plan import CompileOptions, MeshSpec, Plan
from monarch.compiler.plan.file import load_plan
from monarch.compiler.schedule.family import with_sizes
from monarch.compiler.search.door import compile_found
from monarch.compiler.symbols import Scope
from monarch.language.programs.environment import find_environment
from monarch.language.programs.program import Program
from monarch.language.source import belongs_to_user, outermost
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor

outermost(__file__)

PATH = re.compile(r"[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*(?:\(\))?)*")


@dataclass(frozen=True)
class LoadedProgram:
    """A program of a user's file, traced for the signature that was asked for.

    `file`   the file that it stands in
    `path`   what stood after the colon: "train_step", "trainer.step"
    `graph`  the traced graph, with global types
    `options`  how it is compiled, if nothing else is asked for
    `named`  where sizes have names and no values, the graph for all of them, and what was decided on them. `graph` is
             for an example
    """

    file: Path
    path: str
    graph: Graph
    options: CompileOptions
    named: tuple[Graph, Scope] | None = None

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def mesh(self) -> MeshSpec:
        return self.graph.mesh

    def limited(self, memory_limit: int) -> LoadedProgram:
        """The same program, of which a worker holds at most so many bytes."""
        return replace(self, options=replace(self.options, memory_limit=memory_limit))

    def compile(
        self,
        target: str | None = None,
        progress: Callable[[str, float, Graph], None] | None = None,
        *,
        strict: bool = False,
        cluster: Cluster | None = None,
        binaries: bool = True,
    ) -> Plan:
        """The plan, with the report that the inspector shows. `strict` where the program is, too. `cluster` and
        `binaries` are `compile_graph`'s; the plan's costs say the memory of a worker of the cluster's."""
        options = self.options
        options = replace(options, target=target or options.target, strict=strict or options.strict)
        compiled = compile_found if options.layouts else compile_graph
        plan = compiled(self.graph, options, report=True, progress=progress, cluster=cluster, binaries=binaries)
        memory = None if cluster is None else cluster.shared(self.mesh.workers).memory
        if cluster is not None and memory is not None:
            plan = replace(plan, costs=plan.costs | {"machine": {"name": cluster.name, "memory": memory}})
        if self.named is None:
            return plan
        graph, scope = self.named
        try:
            if options.target != "cpu" or options.memory_limit is not None or options.layouts:
                raise MonarchError("a GPU's plan, one with a memory limit and one in layouts found are for one size")
            if graph.parts:
                raise MonarchError("a plan file of several meshes is for one size")
            return with_sizes(plan, compile_template(graph, options, scope))
        except MonarchError as error:
            raise unnamed(self.path, scope.examples, error.message) from None


def read_plan(file: Path, *, report: bool = True) -> Plan:
    """A plan's file, if need be without its report. Raises MonarchError where it is none, and where it is a program."""
    return load_plan(no_program(file), report=report)


def load_program(
    spec: str,
    mesh: MeshSpec | None = None,
    given: Mapping[str, str] | None = None,
    first_call: bool = False,
    memory_limit: int | None = None,
) -> LoadedProgram:
    """The program that `spec` names ("train.py:train_step"; the part after the colon may be left out where the file has
    one program), traced.

    `mesh` gives sizes for the dims of the meshes that the file makes, `given` the arguments by parameter name, as text
    ("f32[64@data, 1024]", "0.1"). The trace is that of the second call, which all later calls share, where the first
    makes state such as an optimizer's; with `first_call` it is that of the first. `memory_limit` takes the place of the
    program's own. Raises MonarchError.
    """
    file, path = _split(spec)
    sizes = dict(mesh.sizes) if mesh is not None else {}
    with without_workers(sizes, [str(file)]):
        module = import_file(file)
        path = path or _only(file, module)
        program = _on_mesh(_find(module, file, path), mesh, module, path)
        options = replace(program.options, memory_limit=memory_limit or program.options.memory_limit)
        program.options = replace(options, memory_limit=None, layouts="", machine="")  # calls are made to trace alone
        with users_errors(f"tracing {path}"):
            args, kwargs, examples = arguments_of(program, path, module, given or {})
            _check_mesh(program, args, kwargs, path)
            graph = program.trace(*args, **kwargs).graph
            if not first_call and graph.updates.keys() - graph.states.keys():
                program(*args, **kwargs)
                graph = program.trace(*args, **kwargs).graph
            named = _named(program, path, args, kwargs, examples) if examples else None
    if mesh is not None:
        _check_dims(mesh, graph.mesh, path)
    return LoadedProgram(file, path, graph, options, named)


def _named(
    program: Program[Any, Any], path: str, args: Any, kwargs: Any, examples: Mapping[str, int]
) -> tuple[Graph, Scope] | None:
    try:
        return program.trace_named(*args, **kwargs)
    except Exception as error:  # whatever PyTorch says of an op whose shape function takes no names
        why = getattr(error, "message", None) or str(error).partition("\n")[0] or type(error).__name__
        raise unnamed(path, examples, why) from error


def unnamed(path: str, examples: Mapping[str, int], why: str) -> ProgramError:
    """An error for sizes without a value, for all of which there can be no plan."""
    names = ", ".join(examples)
    return ProgramError(
        f"{path} cannot be compiled for all values of {names}: {why}",
        hint="say for which: --arg 'x=f32[64, 8]', or return arguments from a function example_inputs() beside the "
        "program.",
    )


def _split(spec: str) -> tuple[Path, str]:
    name, colon, path = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "")
    file = Path(name if colon or spec.endswith(".py") else spec)
    if file.suffix != ".py":
        raise ProgramError(f"{spec} names no program", hint="write FILE.py:PROGRAM, such as train.py:train_step.")
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        near = get_close_matches(file.stem, _python_files(file.parent), n=1)
        raise ProgramError(f"{file} {what}", hint=f"did you mean {file.with_name(near[0])}.py?" if near else "")
    if path and not PATH.fullmatch(path):
        raise ProgramError(
            f"'{path}' is not the name of a program",
            hint="it is a name, train_step, or a path to a program: trainer.step, make_step().",
        )
    return file, path


def _python_files(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.py")] if folder.is_dir() else []


# -- importing -------------------------------------------------------------------------------------------------------


def import_file(file: Path) -> ModuleType:
    """Import a user's file as a module of its own name. Raises ProgramError at the line that failed."""
    file = file.resolve()
    folder, name = _package(file)
    while name in sys.modules or name in sys.stdlib_module_names:  # the file must not take the place of a library
        name += "_"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for each in (folder, str(file.parent)):
        if each not in sys.path:
            sys.path.insert(0, each)
    sys.modules[name] = module
    try:
        with users_errors(f"importing {file.name}"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _package(file: Path) -> tuple[str, str]:
    """The folder from which a file is imported, and its name from there: "train"; "package.train" in a package, whose
    modules it may import relatively."""
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        folder, name = folder.parent, f"{folder.name}.{name}"
    return str(folder), name


@contextmanager
def users_errors(doing: str) -> Iterator[None]:
    """Errors of the user's own code, as one message with the user's line."""
    try:
        yield
    except MonarchError as error:
        if error.source is None:
            error.source = _users_line(error)
        raise
    except SyntaxError as error:
        source = Source(error.filename or "", error.lineno or 0, error.offset or 0, error.end_offset or 0)
        raise ProgramError(f"{doing}: {error.msg}", source=source if error.filename else None) from error
    except SystemExit as error:
        hint = 'put the code that runs the program below if __name__ == "__main__":'
        raise ProgramError(f"{doing} ended the process (sys.exit)", hint=hint, source=_users_line(error)) from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ProgramError(
            f"{what}, raised while {doing}", hint="--debug shows the traceback.", source=_users_line(error)
        ) from error


def _users_line(error: BaseException) -> Source | None:
    """The innermost line of the user's in an error's traceback."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code: CodeType = frame.f_code
        if code.co_filename == __file__:
            return None
        if belongs_to_user(code):
            return Source(code.co_filename, line)
    return None


# -- finding the program ---------------------------------------------------------------------------------------------


def programs(module: ModuleType) -> dict[str, Program[Any, Any]]:
    """The programs of a module that a path leads to: those at its top level, and methods of objects there."""
    found: dict[str, Program[Any, Any]] = {}
    for name, value in list(vars(module).items()):
        if isinstance(value, Program):
            found[name] = value
        elif not isinstance(value, type | ModuleType):
            for key in vars(type(value)) if type(value).__module__ == module.__name__ else ():
                if isinstance(method := getattr(value, key, None), Program):
                    found[f"{name}.{key}"] = method
    return found


def _known(file: Path, module: ModuleType) -> str:
    """The right spelling for a name that is no program."""
    names = list(programs(module))
    if names:
        return f"the programs of {file.name} are {', '.join(names)}."
    methods = [
        f"{name}.{key}"
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
        for key, method in vars(value).items()
        if isinstance(method, Program)
    ]
    functions = [
        value for value in vars(module).values() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    makers = [f"{each.__name__}()" for each in functions if _may_make_one(each)]
    hint = f"{file.name} has no program at its top level: decorate a function there with @monarch.program."
    if methods:
        hint += f"\n{', '.join(methods)} needs an object: make one in the file, and name it: trainer.step."
    if makers:
        hint += f"\nA function that makes and returns one can be named with (): {', '.join(makers)}?"
    for function in functions:
        for name in _programs_within(function) if function.__name__ + "()" not in makers else ():
            hint += (
                f"\n'{name}' is a program within {function.__name__}(): move it to a function without arguments that "
                f"ends in 'return {name}', and name it with (): {file.name}:make_{name}()."
            )
    return hint


def _may_make_one(function: FunctionType) -> bool:
    """Whether a function can be called without arguments, and returns an object that may be or have a program: not
    where it has programs and returns none of them."""
    if _needed(function) or (tree := _tree(function)) is None:
        return False
    own = _programs_within(function)
    returned = [
        node.value for node in _outside_functions(tree) if isinstance(node, ast.Return) and node.value is not None
    ]
    named = {node.id for value in returned for node in ast.walk(value) if isinstance(node, ast.Name)}
    return any(not isinstance(value, ast.Constant) for value in returned) and (not own or bool(named.intersection(own)))


def _programs_within(function: FunctionType) -> list[str]:
    """The names of the programs that a function defines."""
    return [
        node.name
        for node in _outside_functions(_tree(function))
        if isinstance(node, ast.FunctionDef)
        and any(re.match(r"(.*\.)?program\b", ast.unparse(each)) for each in node.decorator_list)
    ]


def _tree(function: FunctionType) -> ast.FunctionDef | None:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):  # made in another way than by a file
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _outside_functions(tree: ast.AST | None) -> Iterator[ast.AST]:
    """The statements of a function, without those of functions in it: these themselves are there."""
    for node in () if tree is None else ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _outside_functions(node)


def _only(file: Path, module: ModuleType) -> str:
    names = list(programs(module))
    if len(names) != 1:
        what = "no program" if not names else f"{len(names)} programs"
        raise ProgramError(f"{file.name} has {what}: name one: {file.name}:NAME", hint=_known(file, module))
    return names[0]


def _find(module: ModuleType, file: Path, path: str) -> Program[Any, Any]:
    value: Any = module
    reached = ""
    for part in path.split("."):
        name = part.removesuffix("()")
        try:
            value = getattr(value, name)
        except AttributeError:
            hint = did_you_mean(path, programs(module), "\n")
            where = f"'{reached}' of {file.name}" if reached else file.name
            raise ProgramError(f"{where} has no '{name}'", hint=hint + _known(file, module)) from None
        reached = f"{reached}.{part}" if reached else part
        if part != name:
            value = _call(value, reached)
    if not isinstance(value, Program):
        what = "a function" if inspect.isfunction(value) else f"a {type(value).__name__}"
        hint = _known(file, module)
        if inspect.isfunction(value) and programs(module) and _may_make_one(value):
            hint += f"\nIf it makes a program, name its result: '{file.name}:{path}()'."
        raise ProgramError(f"'{path}' of {file.name} is no program: it is {what}", hint=hint)
    if _needed(value.__wrapped__)[:1] == ["self"]:
        method = value.__wrapped__.__name__
        raise ProgramError(
            f"'{path}' of {file.name} is a method, and it closes over an object",
            hint=f"make an object in the file and name it, as trainer.{method}, or a function that makes one, "
            f"as make_trainer().{method}.",
        )
    return value


def _call(maker: Any, path: str) -> Any:
    if not callable(maker) or isinstance(maker, Program) or _needed(maker):
        what = f"it needs {', '.join(_needed(maker))}" if callable(maker) else f"it is a {type(maker).__name__}"
        what = "it is a program, not a function that makes one" if isinstance(maker, Program) else what
        raise ProgramError(f"{path} cannot be called without arguments: {what}")
    with users_errors(f"calling {path}"):
        return maker()


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters that a function cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]


# -- its mesh --------------------------------------------------------------------------------------------------------


def _on_mesh(program: Program[Any, Any], mesh: MeshSpec | None, module: ModuleType, path: str) -> Program[Any, Any]:
    """The program, on a mesh of the sizes asked for where it has none of its own."""
    own = program._mesh or find_environment(program.__wrapped__).mesh() or _only_mesh(module)
    if mesh is None:
        made = own is not None and program._mesh is None and find_environment(program.__wrapped__).mesh() is None
        return Program(program.__wrapped__, own, program.options) if made else program
    if own is None:
        sized = Mesh([size for _, size in mesh.dims], mesh.names)
        return Program(program.__wrapped__, sized, program.options)
    _check_dims(mesh, own.spec, path)
    return program


def _only_mesh(module: ModuleType) -> Mesh | None:
    """The mesh of a file that has one, as programs find it when they are called."""
    meshes = {id(value): value for value in vars(module).values() if isinstance(value, Mesh)}
    return next(iter(meshes.values())) if len(meshes) == 1 else None


def _check_mesh(program: Program[Any, Any], args: Any, kwargs: Any, path: str) -> None:
    on_one = any(isinstance(leaf, DistributedTensor) for leaf in pytree.tree_leaves((args, kwargs)))
    if not on_one and program._mesh is None and find_environment(program.__wrapped__).mesh() is None:
        raise ProgramError(
            f"{path} has no mesh: nothing that it closes over is on one",
            hint="say which: --mesh data=2,model=2, or @monarch.program(mesh=mesh) in the file.",
        )


def _check_dims(asked: MeshSpec, own: MeshSpec, path: str) -> None:
    for name in asked.names:
        if name not in own.sizes:
            raise LayoutError(
                f"--mesh names '{name}', which is no dim of the mesh of {path}",
                hint=f"--mesh asks for {asked}; the program's mesh has the dims {', '.join(own.names) or 'none'}.",
            )
