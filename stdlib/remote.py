"""`monarch.remote`: a function of the user's, run in the processes of actors, or on tensors by a mesh's workers."""

from __future__ import annotations

import base64
import hashlib
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from typing import Any, Literal, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import cloudpickle
import numpy
import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import PerformanceWarning, ProgramError
from monarch.compiler.loading import unwatched
from monarch.language import DistributedTensor
from monarch.language.programs.signature import parameters
from monarch.language.recorder.dispatch import find_mesh
from monarch.language.recorder.recording import current_program, outside_programs
from monarch.language.source import user_source
from monarch.language.tensors.shapes import make_fake
from monarch.runtime.actors.functions import Remote
from monarch.stdlib.remote_numbers import Elements, example, kind_of, operand, watched

P = ParamSpec("P")
R = TypeVar("R")
Propagate = Callable[..., Any] | Literal["mocked"]

TENSOR = torch.Tensor
_PLAIN = (int, float, complex, str, bytes, type(None), numpy.generic, torch.dtype)
MANY_VALUES = 8
"""With how many ops of one function a warning says so."""
MANY_OPS = 64
"""After so many ops of one function PyTorch gets no further ones."""


@overload
def remote(function: Callable[P, Coroutine[Any, Any, R]], /) -> Remote[P, R]: ...
@overload
def remote(function: Callable[P, R], /) -> Remote[P, R]: ...
@overload
def remote(function: Callable[P, R], /, *, propagate: Propagate) -> RemoteOp[P, R]: ...
@overload
def remote(*, propagate: Propagate) -> Callable[[Callable[P, R]], RemoteOp[P, R]]: ...
def remote(function: Any = None, /, *, propagate: Propagate | None = None) -> Any:
    """A function that can be run in every process of a mesh, also as a decorator.

        @monarch.remote
        def free_memory(device: int) -> int: ...

        with procs.activate():
            free_memory.call(0).get()

    Arguments and results are sent as an endpoint's are; `current_rank()` is the process' place in the mesh. Its errors
    in a `call` are raised at the caller, as `ActorError`.

    With `propagate` it can also be called on tensors of a mesh, in programs and outside of them, and each worker runs
    it. `propagate` takes the same arguments, with tensors that have no data, and gives tensors of the results' shapes
    and dtypes; "mocked" stands for the function itself.

        @monarch.remote(propagate=lambda image: image.new_empty(3, 8))
        def features(image: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(some_library(image.numpy()))

        y = features(x)

    It is an op as those of `torch.library.custom_op`: in per-worker code each worker calls it with its own tensors, and
    elsewhere with the whole of each, so that it has to give the same for the same arguments. A call whose results
    nobody reads may not be made. It has no gradient. Arguments may be nested in tuples, lists and dicts.

    A float, an int or a NumPy scalar is an operand: the worker has it in its type, and one trace and one plan serve all
    values. Where `propagate` asks for its value (a size, a branch, `int(n)`) it is part of the op, as bools, strings,
    dtypes, ints of more than 64 bits and what the function closes over are: the op is traced and compiled for each
    value, which a PerformanceWarning says at the eighth.

    Raises ProgramError for a call without a tensor that is on a mesh, for other arguments, and where `propagate` gives
    something else than tensors; a worker raises for a result that is not of the shape and dtype that `propagate` says.
    """
    if function is None:
        return partial(remote, propagate=propagate)
    if propagate is None:
        return Remote(function)
    if propagate != "mocked" and not callable(propagate):
        raise ProgramError(
            f"propagate={propagate!r}",
            hint="it is a function that gives tensors of the results' shapes, or 'mocked', which runs the function "
            "itself on tensors without data.",
            source=user_source(),
        )
    return RemoteOp(function, function if propagate == "mocked" else propagate)


class RemoteOp(Remote[P, R]):
    """A function that can be called on tensors of a mesh too: the result of `remote(propagate=…)`."""

    def __init__(self, function: Callable[P, R], propagate: Callable[..., Any]) -> None:
        super().__init__(function)
        self._propagate = propagate

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Have the workers run it: see `remote`."""
        with unwatched():  # it asks for types, which are not the program's to know
            leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        places: list[Any] = []
        for leaf in leaves:
            kind = TENSOR if isinstance(leaf, torch.Tensor) else kind_of(leaf)
            if kind is None and not isinstance(leaf, _PLAIN):
                raise ProgramError(
                    f"the remote function '{self.__name__}' is called with a {type(leaf).__name__}",
                    hint="on tensors of a mesh it takes tensors, numbers, strings, dtypes and None: close over others.",
                    source=user_source(),
                )
            places.append((leaf,) if kind is None else kind)
        if not any(isinstance(tensor, DistributedTensor) for tensor in tensors):
            raise ProgramError(
                f"the remote function '{self.__name__}' is called without a tensor that is on a mesh",
                hint="pass it one, whose workers run it; call(...) in `with procs.activate():` runs it in actors' "
                "processes.",
                source=user_source(),
            )
        call, made, structure = self._call(leaves, spec, places)
        mesh = find_mesh(tensors)
        assert mesh is not None
        operands = [
            leaf if place is TENSOR else operand(leaf, place, mesh)
            for leaf, place in zip(leaves, call.places, strict=True)
            if not isinstance(place, tuple)
        ]
        name, op = _op_of(call, len(operands), len(made))
        self._note(name, call, leaves, places)
        found = op(*operands)
        return pytree.tree_unflatten([found] if isinstance(found, torch.Tensor) else list(found), structure)

    def _call(
        self, leaves: list[Any], spec: pytree.TreeSpec, places: list[Any]
    ) -> tuple[_Call, list[torch.Tensor], pytree.TreeSpec]:
        """The op's call, and what `propagate` gives. Numbers whose values it asks for stay in the op."""
        empty = [
            make_fake(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]
        asked: set[int] = set()
        stand_ins = [
            watched(leaf, at, asked) if isinstance(place, type) and place is not TENSOR else leaf
            for at, (leaf, place) in enumerate(zip(empty, places, strict=True))
        ]
        call = _Call(self._function, self._propagate, spec, places, empty, self.__name__)
        with outside_programs():
            try:
                with Elements():
                    made = call.called(self._propagate, stand_ins)
            except Exception:  # of a stand-in, or the function's own, which is then raised once more
                made = None
                asked |= {at for at, place in enumerate(places) if not isinstance(place, tuple) and place is not TENSOR}
        for at in asked:  # a program's number is guarded from now on
            empty[at] = float(leaves[at]) if isinstance(leaves[at], torch.SymFloat) else leaves[at]
            call.places[at] = (empty[at],)
        if made is None:
            with outside_programs():
                made = call.called(self._propagate, empty)
        return call, *made

    def _note(self, name: str, call: _Call, leaves: list[Any], places: list[Any]) -> None:
        """Say once that there is another op for each value of an argument."""
        kinds = tuple(None if isinstance(place, tuple) else place for place in places)
        forms = _SEEN.setdefault(self, {})
        if (call.spec, kinds) not in forms and len(forms) == MANY_VALUES:
            return
        ops = forms.setdefault((call.spec, kinds), {})
        if len(ops) == MANY_VALUES or name in ops:
            return
        ops[name] = [entry[0] if isinstance(entry, tuple) else None for entry in call.places]
        if len(ops) < MANY_VALUES:
            return
        paths = [self._spelled(path) for path, _ in pytree.tree_flatten_with_path(call.arguments(leaves))[0]]
        ways = []
        for at, path in enumerate(paths):
            values = {(type(plain[at]), repr(plain[at])) for plain in ops.values()}
            if len(values) > 1:
                asks = isinstance(places[at], type)
                why = (
                    "`propagate` needs its value: have shapes follow from tensors' shapes"
                    if asks
                    else "pass changing values as numbers or tensors"
                )
                ways.append(f"'{path}' ({leaves[at]!r} now; {why})")
        what = (
            "; ".join(ways) or "what it closes over, or the number of its arguments: pass changing values as arguments"
        )
        source = user_source()
        where = f"{source}: " if source else ""
        warnings.warn(
            f"{where}the remote function '{self.__name__}' is traced and compiled for each value of {what}. "
            f"This is number {MANY_VALUES}.",
            PerformanceWarning,
            stacklevel=3,
        )

    def _spelled(self, path: Any) -> str:
        """An argument as it is written in the function: "bins", "pair['a']"."""
        if path[0].idx == 1:  # a keyword
            return f"{path[1].key}{pytree.keystr(path[2:])}"
        names = [each.name for each in parameters(self._function)]
        at = path[1].idx
        return f"{names[at] if at < len(names) else f'argument {at}'}{pytree.keystr(path[2:])}"


_SEEN: WeakKeyDictionary[RemoteOp[..., Any], dict[Any, dict[str, list[Any]]]] = WeakKeyDictionary()
"""For each function and form of its calls the first ops that these were of, with the arguments that stay in them."""


class _Call:
    """One way to call a function. `places` says of each argument whether it is an operand, a tensor (`TENSOR`) or a
    number (its type), or stays in the op, as a tuple of one; `examples` have the numbers of one such call."""

    def __init__(
        self,
        function: Callable[..., Any],
        propagate: Callable[..., Any],
        spec: pytree.TreeSpec,
        places: list[Any],
        examples: list[Any],
        name: str,
    ) -> None:
        self.function, self.propagate, self.spec, self.name = function, propagate, spec, name
        self.places = list(places)
        self.examples = [None if isinstance(each, torch.Tensor) else example(each) for each in examples]

    def run(self, *operands: torch.Tensor) -> Any:
        """The function's results on a worker: tensors of their own memory."""
        given = [x if kind is TENSOR else kind(x.item()) for x, kind in zip(operands, self._kinds(), strict=True)]
        made, _ = self.called(self.function, self._filled(given))
        if self.propagate is not self.function:
            empty = [
                torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x for x in given
            ]
            said, _ = self.called(self.propagate, self._filled(empty))
            for at, (found, wanted) in enumerate(zip(made, said, strict=True)):
                if found.shape != wanted.shape or found.dtype != wanted.dtype:
                    raise RuntimeError(
                        f"result {at} of the remote function '{self.name}' is {found.dtype}{list(found.shape)}, and "
                        f"propagate says {wanted.dtype}{list(wanted.shape)}"
                    )
        own = [each.clone() for each in made]
        return own[0] if len(own) == 1 else tuple(own)

    def fake(self, *operands: torch.Tensor) -> Any:
        """The same on tensors without data. The numbers are those of the op's first call, for others make no
        difference: `propagate` is asked at each call whether its numbers do, for the shapes of that call."""
        places = [at for at, place in enumerate(self.places) if not isinstance(place, tuple)]
        given = [
            x if kind is TENSOR else kind(self.examples[at])
            for x, kind, at in zip(operands, self._kinds(), places, strict=True)
        ]
        made, _ = self.called(self.propagate, self._filled(given))
        own = [torch.empty_like(each, device=operands[0].device) for each in made]
        return own[0] if len(own) == 1 else tuple(own)

    def called(self, function: Callable[..., Any], leaves: list[Any]) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
        """The function's results for these arguments, and their nesting."""
        args, kwargs = self.arguments(leaves)
        made, structure = pytree.tree_flatten(function(*args, **kwargs))
        if not made or not all(isinstance(each, torch.Tensor) for each in made):
            kinds = ", ".join(type(each).__name__ for each in made) or "nothing"
            raise ProgramError(
                f"the remote function '{self.name}' gives {kinds}", hint="on tensors of a mesh it gives tensors."
            )
        return made, structure

    def arguments(self, leaves: list[Any]) -> tuple[Any, Any]:
        """Positional arguments and keywords."""
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def _kinds(self) -> list[type]:
        return [place for place in self.places if not isinstance(place, tuple)]

    def _filled(self, operands: list[Any]) -> list[Any]:
        given = iter(operands)
        return [place[0] if isinstance(place, tuple) else next(given) for place in self.places]


_OPS: dict[str, Any] = {}
"""The ops of functions, by their computation: calls of equal functions with equal plain arguments are of one op."""
_FORMS: Counter[str] = Counter()
"""How many of these there are of a function's name and so many operands and results."""


def _op_of(call: _Call, operands: int, results: int) -> tuple[str, Callable[..., Any]]:
    """An op and its name. PyTorch forgets no op: of a function with many values of arguments that stay in the op, as a
    path that is another at each call, the later calls are of one op, which has their functions as text."""

    def pickled() -> bytes:
        spec = pytree.treespec_dumps(call.spec)
        return cloudpickle.dumps((call.function, call.propagate, call.places, spec, call.name, operands, results))

    def digest() -> str:
        return hashlib.sha256(pickled()).hexdigest()[:16]

    recording = current_program()
    python = None if recording is None else recording.repeatable
    try:
        text = digest() if python is None else python.read(f"remote '{call.name}'", digest)
    except Exception as error:  # pickling runs code of the user's classes
        raise ProgramError(
            f"the remote function '{call.name}' cannot be sent to the workers: {error}",
            hint="the values that it reads and closes over must pickle.",
            source=user_source(),
        ) from error
    word = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in call.name)
    name = f"monarch_remote::{word}_{text}"
    if name in _OPS:
        return name, _OPS[name]
    takes = ", ".join(f"Tensor x{number}" for number in range(operands))
    gives = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    form = f"monarch_remote::{word}_{operands}_{results}"
    if _FORMS[form] < MANY_OPS:
        _FORMS[form] += 1
        _OPS[name] = torch.library.custom_op(name, call.run, mutates_args=(), schema=f"({takes}) -> {gives}")
        _OPS[name].register_fake(call.fake)
        return name, _OPS[name]
    if form not in _OPS:
        _OPS[form] = torch.library.custom_op(form, _run, mutates_args=(), schema=f"(str function, {takes}) -> {gives}")
        _OPS[form].register_fake(_fake)
    return name, partial(_OPS[form], base64.b64encode(zlib.compress(pickled())).decode())


def _run(text: str, *operands: torch.Tensor) -> Any:
    return _of_text(text).run(*operands)


def _fake(text: str, *operands: torch.Tensor) -> Any:
    with unwatched():  # what it reads is noted where `propagate` itself is asked
        return _of_text(text).fake(*operands)


@lru_cache(maxsize=MANY_OPS)
def _of_text(text: str) -> _Call:
    """The call that was pickled. For its numbers others make no difference."""
    function, propagate, places, spec, name, *_ = cloudpickle.loads(zlib.decompress(base64.b64decode(text)))
    numbers = [None if place is TENSOR or isinstance(place, tuple) else place(1) for place in places]
    return _Call(function, propagate, pytree.treespec_loads(spec), places, numbers, name)
