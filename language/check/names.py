"""The values of names of the file's own level, without order: modules, optimizers, meshes, tensors, functions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from monarch.compiler.errors import LayoutError
from monarch.compiler.types import DTYPES, MeshSpec
from monarch.language.check.kinds import (
    ARGUMENT,
    PYTHON,
    SOME,
    TENSOR_METHODS,
    UNKNOWN,
    AbstractValue,
    Kind,
    container,
    entry_of,
    iterated,
    join_all,
    named,
)
from monarch.language.check.scopes import Binding, Class, File, Function, Scope
from monarch.language.layouts import annotated_with

_TENSOR_NAMES = {"Tensor", "DistributedTensor", "FloatTensor", "LongTensor"}
_PYTHON_NAMES = {"int", "float", "bool", "str", "bytes", "complex", "None", "Path", "dtype", "device", "Literal"}
_MESH_VIEWS = {"rename", "split", "flatten", "slice"}


def is_monarch(dotted: str, name: str) -> bool:
    """Whether a dotted name is `monarch`'s `name`, wherever it was imported from."""
    root, _, rest = dotted.partition(".")
    return root == "monarch" and rest.rpartition(".")[2] == name


class Names:
    """Looks up the values of a file's names."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.evaluate: Callable[[ast.expr, Scope], AbstractValue]
        """The value of an expression of a scope, outside of programs: the code that goes through expressions implements
        it."""
        self._known: dict[tuple[int, str], AbstractValue] = {}
        self._calls: dict[int, list[tuple[ast.Call, Scope]]] | None = None
        self._open: set[tuple[int, str]] = set()

    # -- values --------------------------------------------------------------------------------------------------

    def static(self, scope: Scope, name: str) -> AbstractValue:
        """The possible value of a name of a scope, after all its bindings."""
        if name in scope.outer:
            return UNKNOWN
        bound = (binding for binding in scope.bindings[name] if binding.how != "augmented")
        return self._once((id(scope), name), (partial(self._bound, binding, scope) for binding in bound))

    def _once(self, key: tuple[int, str], found: Iterable[Callable[[], AbstractValue]]) -> AbstractValue:
        """The possible value of a name that is one of these, found once; not known while it is being found."""
        if key not in self._known:
            if key in self._open:
                return UNKNOWN
            self._open.add(key)
            try:
                self._known[key] = _any_of([find() for find in found])
            finally:
                self._open.discard(key)
        return self._known[key]

    def _bound(self, binding: Binding, scope: Scope) -> AbstractValue:
        if binding.how == "import":
            return AbstractValue(Kind.IMPORTED, dotted=binding.dotted)
        if binding.how == "def":
            node = binding.node
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            function = self.file.functions[node]
            if any(self.makes_program(decorator, scope) for decorator in node.decorator_list):
                return AbstractValue(Kind.PROGRAM, function=function)
            if any(self._makes_op(decorator, scope) for decorator in node.decorator_list):
                return UNKNOWN
            return AbstractValue(Kind.FUNCTION, function=function)
        if binding.how == "class" and binding.node is not None:
            return AbstractValue(Kind.CLASS, cls=self.file.classes[binding.node])
        if binding.how == "parameter":
            function_ = self.file.functions.get(scope.node)
            if isinstance(binding.node, ast.arg) and function_ is not None:
                if function_.owner is not None and self.is_self(binding.node, function_):
                    return AbstractValue(Kind.INSTANCE, cls=function_.owner)
                found = self.parameter(binding.node, function_)
                # A function's tensor may be plain; only a program's is on the mesh.
                return SOME if found is not None and found.kind is Kind.TENSOR else found or UNKNOWN
            return UNKNOWN
        if binding.value is None:
            return UNKNOWN
        value = self.evaluate(binding.value, scope)
        if binding.how == "loop":
            value = iterated(value)
        for place in binding.path:
            value = value.items[place] if value.items is not None and place < len(value.items) else entry_of(value)
        return value

    # -- classes -------------------------------------------------------------------------------------------------

    def bases(self, cls: Class) -> Iterator[Class]:
        """A class of the file and those of its bases that are in the file."""
        seen: set[int] = set()
        stack = [cls]
        while stack:
            found = stack.pop(0)
            if id(found) in seen:
                continue
            seen.add(id(found))
            yield found
            parent = found.scope.parent
            for base in found.node.bases:
                if isinstance(base, ast.Name) and parent is not None and (home := parent.home(base.id)) is not None:
                    for binding in home.bindings[base.id]:
                        if binding.how == "class" and binding.node in self.file.classes:
                            stack.append(self.file.classes[binding.node])

    def method(self, cls: Class, name: str) -> Function | None:
        return next((found.methods[name] for found in self.bases(cls) if name in found.methods), None)

    def is_module(self, cls: Class) -> bool:
        """Whether a class of the file is a torch.nn.Module."""
        return any(
            named(self.file.dotted(base, found.scope.parent or found.scope), ("torch.nn",))
            for found in self.bases(cls)
            for base in found.node.bases
        )

    def attribute(self, cls: Class, name: str) -> AbstractValue:
        """The possible value of `self.name`."""
        bases = list(self.bases(cls))
        given = [each for base in bases for each in base.attributes.get(name, ())]
        found = [partial(self.evaluate, value, scope) for value, scope in given]
        found += [partial(self.static, base.scope, name) for base in bases if name in base.scope.bindings]
        return self._once((id(cls), name), found)

    def is_self(self, parameter: ast.arg, function: Function) -> bool:
        positional = (*function.node.args.posonlyargs, *function.node.args.args)
        static = not isinstance(function.node, ast.Lambda) and any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.node.decorator_list
        )
        return bool(positional) and positional[0] is parameter and not static

    # -- parameters ----------------------------------------------------------------------------------------------

    def parameter(self, parameter: ast.arg, function: Function) -> AbstractValue | None:
        """The value that an annotation gives a parameter; None where it has no meaning here."""
        if parameter.annotation is None:
            return None
        alias = self.alias(parameter.annotation, function.scope)
        annotation = next(annotated_with(alias), alias)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            text = annotation.value.strip()
            dtype, bracket, _ = text.partition("[")
            if bracket and dtype.strip() in DTYPES:
                return replace(ARGUMENT, boolean=dtype.strip() == "bool")
            try:
                annotation = ast.parse(text, mode="eval").body
            except (SyntaxError, ValueError):
                return None
        return self._annotated(annotation, function.scope)

    def alias(self, annotation: ast.expr, scope: Scope) -> ast.expr:
        """The meaning of a name in the file, where that is `Annotated[...]`; else the annotation itself."""
        home = scope.home(annotation.id) if isinstance(annotation, ast.Name) else None
        if home is not None and isinstance(annotation, ast.Name):
            for binding in home.bindings[annotation.id]:
                if binding.value is not None and any(True for _ in annotated_with(binding.value)):
                    return binding.value
        return annotation

    def _annotated(self, annotation: ast.expr, scope: Scope) -> AbstractValue | None:
        if isinstance(annotation, ast.Constant):
            return PYTHON if annotation.value is None else None
        if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
            sides = [self._annotated(side, scope) for side in (annotation.left, annotation.right)]
            return None if None in sides else join_all(side for side in sides if side is not None)
        if isinstance(annotation, ast.Subscript):
            head = ast.unparse(annotation.value)
            last = head.rpartition(".")[2]
            if head in DTYPES:
                return ARGUMENT
            parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            found = [self._annotated(part, scope) or UNKNOWN for part in parts]
            if last == "Optional":
                return found[0]
            if last in ("list", "List", "Sequence", "Iterable", "set", "Set"):
                return container([found[0]], known=False)
            if last in ("dict", "Dict", "Mapping"):
                return replace(container(found[-1:], known=False), mapping=True)
            if last in ("tuple", "Tuple"):
                many = isinstance(parts[-1], ast.Constant) and parts[-1].value is Ellipsis
                return container(found[:1] if many else found, known=not many)
            return PYTHON if last == "Literal" else None
        name = ast.unparse(annotation).rpartition(".")[2]
        if name in _TENSOR_NAMES:
            return ARGUMENT
        if name in _PYTHON_NAMES:
            return PYTHON
        dotted = self.file.dotted(annotation, scope)
        if dotted.startswith("torch.nn."):
            return AbstractValue(Kind.MODULE)
        if isinstance(annotation, ast.Name) and (home := scope.home(annotation.id)) is not None:
            found_class = next((b.node for b in home.bindings[annotation.id] if b.how == "class"), None)
            if found_class is not None:
                return AbstractValue(Kind.INSTANCE, cls=self.file.classes[found_class])
        return None

    def used_as_tensor(self, name: str, function: Function) -> bool:
        """Whether a function uses a parameter in a way that only tensors allow."""
        for statement in function.body:
            for part in ast.walk(statement):
                if isinstance(part, ast.Attribute) and _is(part.value, name) and part.attr in TENSOR_METHODS:
                    return True
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.MatMult):
                    if _is(part.left, name) or _is(part.right, name):
                        return True
                if isinstance(part, ast.Call) and part.args and _is(part.args[0], name):
                    dotted = self.file.dotted(part.func, function.scope)
                    if is_monarch(dotted, "layout") or dotted.startswith(("torch.nn.functional.", "torch.nn.init.")):
                        return True
                    if dotted.startswith("torch.") and dotted.partition(".")[2] in TENSOR_METHODS:
                        return True
        return False

    def passed(self, function: Function) -> set[str]:
        """The parameters of a program that the file's own calls give tensors: `step(x)`, `step.trace(x)`."""
        arguments = function.node.args
        positional = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
        if function.owner is not None:
            positional = positional[1:]
        found: set[str] = set()
        for call, scope in self._calls_of().get(id(function.node), ()):
            named_ = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
            for name, value in (*zip(positional, call.args, strict=False), *named_):
                if not isinstance(value, ast.Starred) and self.evaluate(value, scope).is_tensor:
                    found.add(name)
        return found

    def _calls_of(self) -> dict[int, list[tuple[ast.Call, Scope]]]:
        """The file's calls of its own functions, by id of the function's node."""
        if self._calls is None:
            self._calls = {}
            known = {function.name for function in self.file.functions.values()}
            for call, scope in self.file.calls:
                callee = call.func
                if isinstance(callee, ast.Attribute) and callee.attr in ("trace", "compile", "inspect"):
                    callee = callee.value
                if isinstance(callee, ast.Name) or (isinstance(callee, ast.Attribute) and callee.attr in known):
                    function = self.evaluate(callee, scope).function
                    if function is not None:
                        self._calls.setdefault(id(function.node), []).append((call, scope))
        return self._calls

    # -- programs and meshes -------------------------------------------------------------------------------------

    def makes_program(self, expression: ast.expr, scope: Scope) -> bool:
        """Whether a decorator is `monarch.program`, bare or called."""
        if isinstance(expression, ast.Call):
            if expression.args:
                return False
            expression = expression.func
        return is_monarch(self.file.dotted(expression, scope), "program")

    def _makes_op(self, expression: ast.expr, scope: Scope) -> bool:
        """Whether a decorator makes an op of a function, which then runs on plain tensors."""
        dotted = self.file.dotted(expression.func if isinstance(expression, ast.Call) else expression, scope)
        return is_monarch(dotted, "remote") or dotted == "torch.library.custom_op"

    def mesh(self, call: ast.Call, scope: Scope) -> MeshSpec | None:
        """The mesh that a call makes, where its dims are written out: `Mesh(data=4)`, `Mesh.abstract(data=4)`,
        `Mesh(shape=(4, 2), mesh_dim_names=("a", "b"))`."""
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if None in keywords:
            return None
        given = dict(zip(("shape", "mesh_dim_names"), call.args, strict=False)) | {
            key: keywords.pop(key) for key in ("shape", "mesh_dim_names") if key in keywords
        }
        try:
            if given:
                shape = ast.literal_eval(given["shape"]) if "shape" in given else None
                names = ast.literal_eval(given["mesh_dim_names"]) if "mesh_dim_names" in given else None
                if shape is None or keywords:
                    return None
                names = names if names is not None else [f"dim{place}" for place in range(len(shape))]
                dims = list(zip(names, shape, strict=True))
            else:
                dims = [(str(name), ast.literal_eval(value)) for name, value in keywords.items()]
            if not all(isinstance(name, str) and type(size) is int for name, size in dims):
                return None
            return MeshSpec(tuple(dims))
        except (ValueError, TypeError, SyntaxError, LayoutError, MemoryError, RecursionError):
            return None

    def is_mesh_call(self, call: ast.Call, scope: Scope) -> bool:
        dotted = self.file.dotted(call.func, scope)
        return is_monarch(dotted, "Mesh") or (dotted.endswith("Mesh.abstract") and dotted.startswith("monarch."))

    def is_mesh_view(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Attribute) and call.func.attr in _MESH_VIEWS

    def mesh_of(self, expression: ast.expr, scope: Scope) -> MeshSpec | None:
        """The mesh that a name or a call stands for, where it is written out in the file, once."""
        if isinstance(expression, ast.Call) and self.is_mesh_call(expression, scope):
            return self.mesh(expression, scope)
        if isinstance(expression, ast.Name) and (home := scope.home(expression.id)) is not None:
            bindings = home.bindings[expression.id]
            if len(bindings) == 1 and bindings[0].how == "assign" and not bindings[0].path:
                value = bindings[0].value
                if isinstance(value, ast.Call) and self.is_mesh_call(value, home):
                    return self.mesh(value, home)
        return None


def _any_of(values: list[AbstractValue]) -> AbstractValue:
    """The value of a name with several bindings, in an order that is not known."""
    value = join_all(values)
    return SOME if value.is_tensor and any(other.kind is not value.kind for other in values) else value


def _is(expression: ast.expr, name: str) -> bool:
    return isinstance(expression, ast.Name) and expression.id == name
