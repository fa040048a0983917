"""`@monarch.program`: a Python function that is traced once for each signature, compiled, and then run by one
command."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.graph import Graph
from monarch.compiler.loading import load
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.sizes import parse_bytes
from monarch.compiler.symbols import Scope, has_names
from monarch.compiler.types import TensorType
from monarch.language.compile import compile_graph, compiles_templates, partition_graph
from monarch.language.errors import TracedAgainWarning
from monarch.language.programs.arrays import ARRAYS, as_annotated
from monarch.language.programs.environment import Environment, find_environment
from monarch.language.programs.named import Families, Specialised, bound, family_of, symbols_for, values_of
from monarch.language.programs.nodes import Path
from monarch.language.programs.signature import parameters, signature, tensor_annotations, written
from monarch.language.programs.trace import Attempt, Trace, trace
from monarch.language.programs.variant import Compiled, Variant, first_run, type_of
from monarch.language.recorder.recording import current_program, turns
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh, open_meshes
from monarch.language.tensors.tensor import DistributedTensor

if TYPE_CHECKING:
    from monarch.compiler.inspect.inspection import Inspection
    from monarch.compiler.inspect.survival import Survival

Rounding = Literal["eager", "chain"]
Backend = Literal["monarch", "gloo", "nccl"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Traced:
    """A program's graph, for reading: `print(step.trace(x).graph)`."""

    graph: Graph
    options: CompileOptions

    def partition(self) -> Traced:
        """The graph with local types and explicit collectives. Raises LayoutError and RuleError."""
        return Traced(partition_graph(self.graph, self.options), self.options)

    def compile(self) -> Plan:
        """The plan that workers run."""
        return compile_graph(self.graph, self.options, report=True)

    def __str__(self) -> str:
        return str(self.graph)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OFTEN = 8
"""After so many traces in which the same place has changed, the program says so."""
_SIGNATURES, _PLANS, _VARIANTS = 256, 64, 8
"""How many signatures a program remembers, and of each how many plans and traces: those that were used last."""


class Remembered(NamedTuple):
    """How much of one signature a program remembers: `traces` that later calls may fit, and the `plans` they share."""

    traces: int
    plans: int


class _Entry:
    """What a program knows of one signature."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.compiled: list[Compiled] = []
        self.moving: set[Path] = set()
        self.again: dict[Path | None, int] = {}
        """How often the program was traced again for what is at a place."""


class _Memory:
    """What a program has learnt from its calls."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.varying: set[tuple[str, str]] = set()
        self.specialised = Specialised()
        self.forget(mesh)

    def forget(self, mesh: Mesh | None) -> None:
        """Begin anew, with the mesh that the program is given, if any."""
        self.entries: dict[Any, _Entry] = {}
        self.last: tuple[Any, _Entry] = None, _Entry()
        """The signature that was called last, which is compared without its hash."""
        self.families = Families()
        self.resolved = mesh
        self.only: Mesh | None = None
        """The only mesh of the process when the program needed one: kept until it is closed."""


class Program(Generic[P, R]):
    """A function that runs on a mesh. Made by `monarch.program`."""

    __wrapped_program__ = True

    def __init__(self, function: Callable[P, R], mesh: Mesh | None, options: CompileOptions) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._mesh = mesh
        self.options = options
        self._memory = _Memory(mesh)
        self._bound: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        """What its methods consist of, but for the object that each is bound to, by its id."""
        self._annotations = tensor_annotations(function)
        self._names_sizes = any(has_names(type_.shape) for type_ in self._annotations.values())
        self._positions = [
            (number, parameter.name)
            for number, parameter in enumerate(parameters(function))
            if parameter.name in self._annotations and parameter.kind in _POSITIONAL
        ]

    # -- calls ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step on the workers. Returns at once: tensors in the result are waited for when they are read."""
        if current_program() is not None:
            return self.__wrapped__(*args, **kwargs)  # a program within a program is part of it
        with turns:
            return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        memory = self._memory
        if memory.only is not None and memory.only.is_closed:
            memory.forget(self._mesh)
        args, kwargs = self._converted(args, kwargs)
        key, leaves, spec = signature(args, kwargs)
        mesh = memory.resolved
        if mesh is not None and mesh.pending is not None:
            mesh.flush()
        last = memory.last
        entry = last[1] if key == last[0] else self._entry(key, args, kwargs)
        for variant in entry.variants:
            found = variant.holds(leaves)
            if found is not None:
                if variant is not entry.variants[0]:
                    entry.variants.remove(variant)
                    entry.variants.insert(0, variant)
                return variant.run(leaves, found)
        named = self._named(args, kwargs) if self._names_sizes else []
        values = values_of(named, self._annotations)
        family = None
        if values and self._keeps_names:
            family = family_of(leaves, spec, named, self._annotations, values)
        if family is not None and (known := self._memory.families.find(family, values, leaves)) is not None:
            variant, found = known
            entry.variants = [variant, *entry.variants[: _VARIANTS - 1]]
            return variant.run(leaves, found)
        return self._trace_and_run(entry, args, kwargs, leaves, spec, values, family)

    def _entry(self, key: Any, args: Any, kwargs: Any) -> _Entry:
        """What is known of a signature, which stands at the end from now on."""
        entries = self._memory.entries
        entry = entries.pop(key, None)
        if entry is None:
            self._check_annotations(args, kwargs)
            entry = _Entry()
            if len(entries) >= _SIGNATURES:
                del entries[next(iter(entries))]
        entries[key] = entry
        self._memory.last = key, entry
        return entry

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: what it learns is each object's own, for what it closes over is the object's."""
        if instance is None:
            return self
        function = self.__wrapped__.__get__(instance, owner)
        known = self._bound.get(id(instance))
        if known is not None and known[0]() is instance:
            made: Any = Program.__new__(Program)
            made.__dict__.update(known[1])
            made.__wrapped__ = function
        else:
            made, bound, key = Program(function, self._mesh, self.options), self._bound, id(instance)
            parts = {name: value for name, value in vars(made).items() if name != "__wrapped__"}
            try:
                bound[key] = weakref.ref(instance, lambda _: bound.pop(key, None)), parts
            except TypeError:
                raise ProgramError(
                    f"'{getattr(self, '__name__', 'program')}' is a program, and objects of class "
                    f"'{type(instance).__name__}' allow no weak references",
                    hint="add '__weakref__' to its __slots__, or say @dataclass(slots=True, weakref_slot=True).",
                    source=user_source(),
                ) from None
        return made

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", "program")

    @property
    def _keeps_names(self) -> bool:
        """Whether its plans can be for all values of named sizes."""
        options = self.options
        return options.target == "cpu" and options.memory_limit is None and compiles_templates()

    def _trace_and_run(
        self,
        entry: _Entry,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        spec: Any,
        values: dict[str, int],
        family: Any,
    ) -> Any:
        """Run the function, which says what this call does; later calls do the same while its guards hold."""
        place: Path | None = None
        if entry.variants:
            last = entry.variants[0]
            moved, place = last.guards.moved(leaves)
            entry.moving.update(moved)
            for length in range(len(place or ())):
                if (hyperparameter := last.trace.fixed.get((place or ())[: length + 1])) is not None:
                    self._memory.varying.add(hyperparameter)
        entry.variants = [variant for variant in entry.variants if not variant.guards.dead]
        attempt = Attempt()
        try:
            found, compiled = self._traced(entry, args, kwargs, leaves, spec, values, family, attempt)
            if compiled in entry.compiled:
                entry.compiled.remove(compiled)
            entry.compiled = [compiled, *entry.compiled[: _PLANS - 1]]
            result = first_run(compiled, found, leaves, attempt)
        except BaseException:
            attempt.take_back()
            raise
        if found.cannot is None:
            variant = Variant(compiled, found)
            entry.variants = [variant, *entry.variants[: _VARIANTS - 1]]
            if compiled.template is not None:
                self._memory.families.keep(family, variant)
            why: tuple[str, Source | None] | None = None
            if place is not None:
                name = next((step for step in reversed(place) if isinstance(step, str)), "")
                why = f"'{name}' is another at each call", found.line(name)
        else:
            place, why = None, found.cannot
        self._say(entry, place, why)
        if compiled.template is None and self._keeps_names:
            self._memory.specialised.note(self._name, leaves, self._names(args, kwargs, leaves), self._annotations)
        found.release()
        return result

    def _traced(
        self,
        entry: _Entry,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        spec: Any,
        values: dict[str, int],
        family: Any,
        attempt: Attempt,
    ) -> tuple[Trace, Compiled]:
        """A trace and its plan: for all values of the named sizes where `family` says so and that can be."""
        symbols = None if family is None else symbols_for(values)
        failed: Exception | None = None
        if symbols is not None:
            try:
                return self._traced_once(entry, args, kwargs, leaves, spec, values, family, symbols, attempt)
            except Exception as error:  # whatever it is: without names either it is the user's to see, or there is none
                attempt.take_back()
                failed = error
        found = self._traced_once(entry, args, kwargs, leaves, spec, values, family, None, attempt)
        if failed is not None:
            self._memory.specialised.why(self._name, failed)
        return found

    def _traced_once(
        self,
        entry: _Entry,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        spec: Any,
        values: dict[str, int],
        family: Any,
        symbols: Any,
        attempt: Attempt,
    ) -> tuple[Trace, Compiled]:
        found = self._trace(args, kwargs, leaves, spec, entry.moving, values, symbols, attempt)
        compiled = next((known for known in entry.compiled if known.serves(found)), None)
        if compiled is None and symbols is not None:
            compiled = self._memory.families.compiled(family, values, found)
        return found, compiled or Compiled(found, self.options, values)

    def _say(self, entry: _Entry, place: Path | None, why: tuple[str, Source | None] | None) -> None:
        """Say once that a program is traced again at each call."""
        if why is None:
            return
        entry.again[place] = entry.again.get(place, 0) + 1
        if entry.again[place] == (2 if place is None else _OFTEN):
            what, source = why
            where, name = f"{source}: " if source else "", getattr(self, "__name__", "program")
            warnings.warn(
                f"{where}the program '{name}' is traced again at each call, which takes milliseconds: {what}. "
                "Pass what changes as an argument, or keep it in a tensor.",
                TracedAgainWarning,
                stacklevel=4,
            )

    @property
    def remembered(self) -> list[Remembered]:
        """What the program remembers of each signature, the one called last at the end."""
        return [Remembered(len(entry.variants), len(entry.compiled)) for entry in self._memory.entries.values()]

    # -- looking -------------------------------------------------------------------------------------------------

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """The graph for these arguments, with global types. Traces the function, and changes nothing."""
        return Traced(self._look(args, kwargs), self.options)

    def compile(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """The plan for these arguments: `plan.save("step.mplan")`. Traces the function, and changes nothing."""
        return self.trace(*args, **kwargs).compile()

    def inspect(self, *args: P.args, **kwargs: P.kwargs) -> Inspection:
        """The inspector on what the program becomes for these arguments: its page in a notebook, a summary in a
        terminal; `.save("page.html")` writes the page. Traces and compiles the function; runs and changes nothing."""
        made: Inspection = load("monarch.compiler.inspect.inspection:Inspection")(self.compile(*args, **kwargs))
        return made

    def survives(self, *args: P.args, **kwargs: P.kwargs) -> Survival:
        """Which losses of one or two workers or hosts the program's state survives, for these arguments, in the copies
        that its layouts have, and which tensors do not: `print(train_step.survives(x, y))`. The hosts are those of the
        mesh. Traces and compiles the function; runs and changes nothing."""
        traced = self.trace(*args, **kwargs)
        mesh = self._memory.resolved
        hosts = mesh.host_count if mesh is not None else 1
        made: Survival = load("monarch.compiler.inspect.survival:Survival")(traced.compile(), hosts)
        return made

    def _repr_html_(self) -> str:
        """Name, signature and mesh, for a notebook. Traces nothing."""
        code = getattr(inspect.unwrap(self.__wrapped__), "__code__", None)
        mesh = self._memory.resolved or find_environment(self.__wrapped__).mesh()
        shown: list[tuple[str, TensorType | str]] = []
        for parameter in parameters(self.__wrapped__):
            annotated = self._annotations.get(parameter.name)
            shown.append((str(parameter).partition(":")[0].partition("=")[0], annotated or written(parameter)))
        known = len(self._memory.entries)
        notes = [f"traced for {known} signature{'s' * (known != 1)}"] if known else []
        if mesh is None:
            notes.append("its mesh is that of its arguments")
        draw = load("monarch.compiler.inspect.html:program_html")
        html: str = draw(
            getattr(self, "__name__", "program"),
            shown,
            mesh.spec if mesh is not None else None,
            mesh.ranks if mesh is not None else None,
            str(Source(code.co_filename, code.co_firstlineno)) if code is not None else "",
            notes,
        )
        return html

    def _look(self, args: Any, kwargs: Any) -> Graph:
        args, kwargs = self._converted(args, kwargs)
        _, leaves, spec = signature(args, kwargs)
        self._check_annotations(args, kwargs)
        values = values_of(self._named(args, kwargs), self._annotations)
        attempt = Attempt()
        try:
            found = self._trace(args, kwargs, leaves, spec, set(), values, None, attempt)
            graph = found.graph
        finally:
            attempt.take_back()
        found.release()
        return graph

    # -- tracing -------------------------------------------------------------------------------------------------

    def _trace(
        self,
        args: Any,
        kwargs: Any,
        leaves: list[Any],
        spec: Any,
        moving: set[Path],
        values: Mapping[str, int],
        symbols: Any,
        attempt: Attempt,
    ) -> Trace:
        environment = find_environment(self.__wrapped__)
        mesh = self._find_mesh(leaves, environment)
        self._memory.resolved = mesh
        types = {
            number: self._type(leaf, args, kwargs, mesh, values, None if symbols is None else symbols.scope)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        if spec is None:
            _, spec = pytree.tree_flatten((args, kwargs))
        name = getattr(self, "__name__", "program")
        names = self._names(args, kwargs, leaves)
        given = pytree.tree_leaves((args, kwargs))
        return trace(
            self.__wrapped__,
            name,
            mesh,
            environment,
            leaves,
            spec,
            given,
            types,
            names,
            self._memory.varying,
            moving,
            symbols,
            attempt,
        )

    def _names(self, args: Any, kwargs: Any, leaves: list[Any]) -> dict[int, str]:
        """The parameters' names of the tensors that are arguments themselves, by their place among the leaves."""
        try:
            bound = inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        except TypeError:  # a wrong call: running the function says so in Python's words
            return {}
        found = {id(value): name for name, value in bound.arguments.items() if isinstance(value, torch.Tensor)}
        return {number: found[id(leaf)] for number, leaf in enumerate(leaves) if id(leaf) in found}

    def _find_mesh(self, leaves: list[Any], environment: Environment) -> Mesh:
        if self._mesh is not None:
            return self._mesh
        for leaf in leaves:
            if isinstance(leaf, DistributedTensor):
                return leaf.mesh
        mesh = environment.mesh()
        if mesh is not None:
            return mesh
        if self._memory.only is None or self._memory.only.is_closed:
            self._memory.only = self._only_mesh()
        return self._memory.only

    def _only_mesh(self) -> Mesh:
        """The mesh of a script that has one."""
        meshes = open_meshes()
        if len(meshes) == 1:
            return meshes[0]
        name = getattr(self, "__name__", "the program")
        if meshes:
            listed = "\n".join(f"  {mesh!r}" for mesh in meshes)
            raise ProgramError(
                f"{name} has no mesh, and this process has {len(meshes)}",
                hint="none of its arguments is on one, and nothing that it closes over is. The open meshes:\n"
                f"{listed}\nSay which: @monarch.program(mesh=...), or pass it a distributed tensor.",
                source=user_source(),
            )
        raise ProgramError(
            f"{name} has no mesh",
            hint="none of its arguments is on one, nothing that it closes over is, and this process has no open mesh.\n"
            "Make one: mesh = Mesh(data=4), and say @monarch.program(mesh=mesh) where there are several.",
            source=user_source(),
        )

    # -- signatures ----------------------------------------------------------------------------------------------

    def _type(
        self, leaf: torch.Tensor, args: Any, kwargs: Any, mesh: Mesh, values: Mapping[str, int], scope: Scope | None
    ) -> TensorType:
        for name, argument in self._named(args, kwargs):
            if argument is leaf and (self._names_sizes or not isinstance(leaf, DistributedTensor)):
                self._annotations[name].check(mesh.spec, f"'{name}'")
                return bound(self._annotations[name], values, scope)
        return type_of(leaf)

    def _converted(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with tensors for numbers, lists and arrays where the annotation names a tensor type."""
        for number, name in self._positions:
            if number < len(args) and isinstance(args[number], ARRAYS):
                made = as_annotated(args[number], self._annotations[name], name)
                args = (*args[:number], made, *args[number + 1 :])
        for name in kwargs:
            if isinstance(kwargs[name], ARRAYS) and name in self._annotations:
                kwargs = {**kwargs, name: as_annotated(kwargs[name], self._annotations[name], name)}
        return args, kwargs

    def _named(self, args: Any, kwargs: Any) -> list[tuple[str, Any]]:
        """The arguments that have a tensor type as annotation."""
        if not self._annotations:
            return []
        bound = inspect.signature(self.__wrapped__).bind(*args, **kwargs)
        return [(name, value) for name, value in bound.arguments.items() if name in self._annotations]

    def _check_annotations(self, args: Any, kwargs: Any) -> None:
        named = self._named(args, kwargs)
        values = values_of(named, self._annotations)
        for name, value in named:
            wanted = self._annotations[name]
            if isinstance(value, torch.Tensor) and value.ndim == wanted.ndim:
                wanted = bound(wanted, values, None)
            if not isinstance(value, torch.Tensor):
                raise ProgramError(
                    f"argument '{name}' is {type(value).__name__}, and is annotated as {wanted}",
                    hint="pass a tensor: torch.as_tensor(...), or mesh.from_shards(...) of what actors return.",
                    source=user_source(),
                )
            found = type_of(value)
            if found == wanted or (
                not isinstance(value, DistributedTensor) and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            ):
                continue
            what, remedy = "type", f"Change the annotation, or pass a tensor of type {wanted}."
            if (found.dtype, found.shape) == (wanted.dtype, wanted.shape):
                what, remedy = (
                    "layout",
                    f"Call {name}.redistribute('{wanted.layout}') before, or change the annotation.",
                )
            raise ProgramError(
                f"argument '{name}' of {getattr(self, '__name__', 'the program')} has another {what}"
                " than its annotation",
                hint=f"'{name}' is {found}, and is annotated as {wanted}.\n{remedy}",
                source=user_source(),
            )


@overload
def program(
    function: Callable[P, R],
    /,
    *,
    mesh: Mesh | None = None,
    memory_limit: str | int | None = None,
    rounding: Rounding = "eager",
    collectives: Backend = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
    strict: bool = False,
) -> Program[P, R]: ...
@overload
def program(
    *,
    mesh: Mesh | None = None,
    memory_limit: str | int | None = None,
    rounding: Rounding = "eager",
    collectives: Backend = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
    strict: bool = False,
) -> Callable[[Callable[P, R]], Program[P, R]]: ...
def program(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    memory_limit: str | int | None = None,
    rounding: Rounding = "eager",
    collectives: Backend = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
    strict: bool = False,
) -> Any:
    """Make a function a program: traced once for each signature, compiled, and run on the workers by one command a
    call.

        @monarch.program
        def train_step(tokens: "i64[16@data, 128]", targets: "i64[16@data, 128]"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

    Arguments and results are pytrees. Tensors among the arguments are the program's inputs: laid out as the
    annotation says, or as the distributed tensor is, or replicated. Where the annotation is a tensor type, numbers,
    lists and NumPy arrays become tensors, as by `torch.as_tensor`: Python's numbers take the annotation's dtype, and
    NumPy's have to have it. Floats are inputs too; other Python values are part of the signature: another value
    traces anew. Distributed tensors that the function closes over are its state, read and updated in place on the
    workers. The mesh is `mesh`, or that of the arguments, or that of what the function closes over, or the only open
    one of the process.

    A type checker accepts the type in `Annotated`, with a name for a type that is used again:

        Tokens = Annotated[torch.Tensor, "i64[16@data, 128]"]

        @monarch.program
        def train_step(tokens: Tokens, targets: Tokens): ...

    `torch.compile` of a program is the program.

    `memory_limit` is the most that a worker may hold at once, parameters, optimizer state and inputs included: "2 GiB",
    or a number of bytes. Within it, values are computed again for the backward pass rather than kept, with the same
    bits; a limit that cannot be kept is an error when the program is compiled, with what lives at the peak.

    `rounding` says when values in bf16 and f16 are rounded in generated kernels: "eager", after every op, as PyTorch
    does, or "chain", only where a kernel stores them.

    `collectives` says what moves tensors between workers: "monarch", which is Monarch's own, or process groups of
    `torch.distributed`, "gloo" on CPUs (with the same bits) or "nccl" on GPUs (beside what they compute, and sums are
    NCCL's own).

    `target` is what the workers are to run it on: "cpu", or a GPU by its kind, "cuda:90". The workers of a host take
    its GPUs in turns; tensors lie where the last program needed them. This has not run on a GPU yet (docs/kernels.md).

    `cuda_graphs` has workers record what a step launches between its collectives, and launch it at once from the fourth
    step on; for GPUs of NVIDIA's, and as little tried on one.

    `strict` makes an op that every worker would compute whole, for want of a sharding rule, an error with its line and
    the way out (RuleError). Without it the op runs, and a PerformanceWarning says once what was gathered for it.

    The function itself runs when it is traced: on the first call of a signature, and whenever something that it has
    read in Python is no longer what it was: an attribute, a global, an entry of a list, a tensor bound anew. What it
    writes into Python (`self.average = ...`, `history.append(loss)`) is there after every call, whether traced or not;
    only `print` and logging happen when it is traced. A program that reads what cannot be checked (the time, a random
    number of Python's) is traced at each call, and a TracedAgainWarning says so once. Where a call raises, Python's
    state is what it was before. Results carry no autograd history.
    """
    options = CompileOptions(
        target=target,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit, "memory_limit"),
        rounding=rounding,
        collectives=collectives,
        cuda_graphs=cuda_graphs,
        strict=strict,
    )
    if function is None:
        return lambda inner: Program(inner, mesh, options)
    return Program(function, mesh, options)
