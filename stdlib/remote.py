"""`monarch.remote`: a function of the user's, run in the processes of actors, or on tensors by a mesh's workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, overload

import cloudpickle
import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError
from monarch.language import DistributedTensor
from monarch.language.recorder.recording import current_program
from monarch.language.source import user_source
from monarch.runtime.actors.functions import Remote

P = ParamSpec("P")
R = TypeVar("R")
Propagate = Callable[..., Any] | Literal["mocked"]


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

    Arguments and results are sent as an endpoint's are; `current_rank()` is the process' place in the mesh. What it
    raises in a `call` is raised at the caller, as `ActorError`.

    With `propagate` it can also be called on tensors of a mesh, in programs and outside of them, and each worker runs
    it. `propagate` takes the same arguments, with tensors that have no data, and gives tensors of the results' shapes
    and dtypes; "mocked" stands for the function itself.

        @monarch.remote(propagate=lambda image: image.new_empty(3, 8))
        def features(image: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(some_library(image.numpy()))

        y = features(x)

    It is an op as those of `torch.library.custom_op`: in per-worker code each worker calls it with its own tensors, and
    elsewhere with the whole of each, so that it has to give the same for the same arguments. A call whose results
    nobody reads may not be made. It has no gradient. Tensors may be nested in tuples, lists and dicts; other arguments
    are plain numbers, strings and None. Raises ProgramError for a call without a tensor that is on a mesh, for other
    arguments, and where `propagate` gives something else than tensors; a worker raises for a result that is not of the
    shape and dtype that `propagate` says.
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
    """A function that can be called on tensors of a mesh too: what `remote(propagate=…)` gives."""

    def __init__(self, function: Callable[P, R], propagate: Callable[..., Any]) -> None:
        super().__init__(function)
        self._propagate = propagate

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Have the workers run it: see `remote`."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        plain = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        for value in (entry[0] for entry in plain if entry is not None):
            if type(value) not in (int, float, bool, str, type(None)):
                raise ProgramError(
                    f"the remote function '{self.__name__}' is called with a {type(value).__name__}",
                    hint="on tensors of a mesh it takes tensors, plain numbers, strings and None: pass a number that a "
                    "program takes as a tensor.",
                    source=user_source(),
                )
        if not any(isinstance(tensor, DistributedTensor) for tensor in tensors):
            raise ProgramError(
                f"the remote function '{self.__name__}' is called without a tensor that is on a mesh",
                hint="pass it one, whose workers run it; call(...) in `with procs.activate():` runs it in actors' "
                "processes.",
                source=user_source(),
            )
        call = _Call(self._function, self._propagate, spec, tuple(plain), self.__name__)
        made, structure = call.shapes([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors])
        found = _op_of(call, len(tensors), len(made))(*tensors)
        results: R = pytree.tree_unflatten([found] if isinstance(found, torch.Tensor) else list(found), structure)
        return results


class _Call:
    """One way to call a function: all but the tensors. `plain` has None for these, and tuples of one for the rest."""

    def __init__(
        self,
        function: Callable[..., Any],
        propagate: Callable[..., Any],
        spec: pytree.TreeSpec,
        plain: tuple[tuple[Any] | None, ...],
        name: str,
    ) -> None:
        self.function, self.propagate, self.spec, self.plain, self.name = function, propagate, spec, plain, name

    def shapes(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
        """What `propagate` gives."""
        return self._called(self.propagate, tensors)

    def run(self, *tensors: torch.Tensor) -> Any:
        """What the function gives on a worker: tensors of their own memory."""
        made, _ = self._called(self.function, list(tensors))
        if self.propagate is not self.function:
            said, _ = self.shapes([torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors])
            for at, (found, wanted) in enumerate(zip(made, said, strict=True)):
                if found.shape != wanted.shape or found.dtype != wanted.dtype:
                    raise RuntimeError(
                        f"result {at} of the remote function '{self.name}' is {found.dtype}{list(found.shape)}, and "
                        f"propagate says {wanted.dtype}{list(wanted.shape)}"
                    )
        own = [each.clone() for each in made]
        return own[0] if len(own) == 1 else tuple(own)

    def fake(self, *tensors: torch.Tensor) -> Any:
        """The same on tensors without data."""
        made, _ = self.shapes(list(tensors))
        own = [torch.empty_like(each, device=tensors[0].device) for each in made]
        return own[0] if len(own) == 1 else tuple(own)

    def _called(
        self, function: Callable[..., Any], tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
        given = iter(tensors)
        leaves = [next(given) if entry is None else entry[0] for entry in self.plain]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made, structure = pytree.tree_flatten(function(*args, **kwargs))
        if not made or not all(isinstance(each, torch.Tensor) for each in made):
            kinds = ", ".join(type(each).__name__ for each in made) or "nothing"
            raise ProgramError(
                f"the remote function '{self.name}' gives {kinds}", hint="on tensors of a mesh it gives tensors."
            )
        return made, structure


_OPS: dict[str, Any] = {}
"""The ops of functions, by what they compute: calls of equal functions with equal plain arguments are of one op."""


def _op_of(call: _Call, operands: int, results: int) -> Any:
    parts = call.function, call.propagate, call.plain, pytree.treespec_dumps(call.spec), operands, results

    def digest() -> str:
        return hashlib.sha256(cloudpickle.dumps(parts)).hexdigest()[:16]

    recording = current_program()
    python = None if recording is None else recording.repeatable
    try:
        text = digest() if python is None else python.read(f"remote '{call.name}'", digest)
    except Exception as error:  # pickling runs code of the user's classes
        raise ProgramError(
            f"the remote function '{call.name}' cannot be sent to the workers: {error}",
            hint="what it reads and closes over has to be of classes that pickle.",
            source=user_source(),
        ) from error
    word = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in call.name)
    name = f"monarch_remote::{word}_{text}"
    if name not in _OPS:
        takes = ", ".join(f"Tensor x{number}" for number in range(operands))
        gives = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
        op = torch.library.custom_op(name, call.run, mutates_args=(), schema=f"({takes}) -> {gives}")
        op.register_fake(call.fake)
        _OPS[name] = op
    return _OPS[name]
