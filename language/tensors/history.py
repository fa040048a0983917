"""The history of a program's results, which ends at the program: backward() raises where it comes to it.

In PyTorch `y = step(x)` leads to what `step` reads. Here no gradient goes through the call, so that a loss which mixes
`y` with others would train these alone: a wrong gradient, without a word. Each result that requires a gradient has one
node for a history, by which PyTorch's autograd knows what depends on it, and whose backward is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from monarch.compiler.errors import ProgramError, Source
from monarch.language.source import user_source

_ANCHOR = torch.zeros((), requires_grad=True)
"""The target of a node, for PyTorch makes none without."""


@dataclass(slots=True)
class End:
    """The end of a history: a result of a call of `program`, which is defined at the line `source`."""

    program: str
    source: Source | None
    cells: Sequence[Any] = ()
    """The storages that the call has read."""
    before: Sequence[weakref.ref[Any]] = ()
    """Those that the calls which made its arguments have read: these calls are not led to, lest a loop that passes each
    call's results to the next keeps all of them."""

    def of(self, cells: Sequence[Any], through: Sequence[torch.Tensor]) -> tuple[End, Sequence[torch.Tensor]]:
        """Where the history of a call's results ends, which has read these cells, and those of its arguments that
        require a gradient to which it leads."""
        if not through:
            return End(self.program, self.source, cells), ()
        led: list[torch.Tensor] = []
        before: dict[int, weakref.ref[Any]] = {}
        own = {*map(id, cells)}
        for tensor in through:
            end = end_of(tensor)
            if end is None:
                led.append(tensor)
                continue
            earlier = [cell for ref in end.before if (cell := ref()) is not None]
            before |= {id(cell): weakref.ref(cell) for cell in (*end.cells, *earlier) if id(cell) not in own}
        return End(self.program, self.source, cells, [*before.values()]), led

    def has_read(self, cells: set[int]) -> bool:
        """Whether one of these cells, by id, has been read."""
        earlier = (cell for ref in self.before if (cell := ref()) is not None)
        return not cells.isdisjoint(map(id, (*self.cells, *earlier)))

    def error(self) -> ProgramError:
        """The error of a gradient that would have to go on."""
        name, where = self.program, f" ({self.source})" if self.source else ""
        return ProgramError(
            f"a gradient goes to a result of the program '{name}'{where}, whose history ends with the call: "
            "the tensors that the program has read would get no gradient",
            hint=f"y = {name}(x); (y.sum() + penalty).backward()            # wrong\n"
            f"y = {name}(x).detach(); (y.sum() + penalty).backward()   # right where y is a constant\n"
            "@monarch.program                                   # right where the tensors that it reads are trained\n"
            f"def train(x): ({name}(x).sum() + penalty).backward()",
            source=user_source(),
        )


Ending = tuple[End, Sequence[torch.Tensor]]
"""Where a history ends, and the arguments of the call to which it leads."""


class _Ends(torch.autograd.Function):
    """A node of such a history."""

    @staticmethod
    def forward(ctx: Any, end: End, make: Callable[..., Any], args: Any, *through: torch.Tensor) -> Any:
        ctx.end = end
        return make(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.end.error()


class _EndsInPlace(_Ends):
    """That of a tensor which was there before, and has been written in place."""

    @staticmethod
    def forward(ctx: Any, end: End, tensor: torch.Tensor, *through: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.end = end
        ctx.mark_dirty(tensor)
        return tensor


_apply: Callable[..., Any] = super(torch.autograd.Function, _Ends).apply
"""Without what `Function.apply` does for arguments that this one never has."""
_NODES: Any = _Ends._backward_cls, _EndsInPlace._backward_cls


def ended(end: Ending, make: Callable[..., Any], *args: Any) -> Any:
    """The tensor that `make(*args)` makes, with a history that ends there."""
    if torch.is_grad_enabled():
        return _apply(end[0], make, args, _ANCHOR, *end[1])
    with torch.enable_grad():  # the program has enabled it for itself
        return _apply(end[0], make, args, _ANCHOR, *end[1])


def end_in_place(end: Ending, tensor: torch.Tensor) -> None:
    """Give a tensor such a history, in place of the one that it has."""
    with torch.no_grad():
        tensor.detach_()
    with torch.enable_grad():
        _EndsInPlace.apply(end[0], tensor, _ANCHOR, *end[1])


def end_of(tensor: torch.Tensor) -> End | None:
    """Where the history of a tensor ends, if it is a program's result itself."""
    node: Any = tensor.grad_fn
    return node.end if type(node) in _NODES else None


def _check_asked(outputs: Iterable[Any], asked: Iterable[Any]) -> None:
    """Raise ProgramError where a history between these ends at a call that has read one of those that are asked for.
    PyTorch runs only the nodes that lead to them, and does not know that this one would."""
    cells = {id(ref.cell) for tensor in asked if (ref := getattr(tensor, "_ref", None)) is not None}
    waiting = [getattr(each, "grad_fn", None) for each in outputs] if cells else []
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        if type(node) in _NODES and node.end.has_read(cells):
            raise node.end.error()
        following = {each for each, _ in node.next_functions} - seen
        seen |= following
        waiting += following


@wraps(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
def _run_backward(
    outputs: Any, gradients: Any, retain: Any, create: Any, asked: Any, *args: Any, **options: Any
) -> Any:
    """The check of `backward()` and `grad()`: with `asked`, of some tensors alone."""
    if asked:
        _check_asked(outputs, asked)
    return _RUN(outputs, gradients, retain, create, asked, *args, **options)


_RUN: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined, assignment]
