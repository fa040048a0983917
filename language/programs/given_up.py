"""Gradients that a call makes anew without reading them: the workers free them before they take the step, rather than
hold both. Python keeps them until the workers are given the step, which may be refused before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

from monarch.compiler.execution.executor import Handle
from monarch.language.programs.handlers import ALL, HandlersLater
from monarch.language.tensors.mesh import Mesh

_Held = tuple[Any, Any]
"""A leaf and its gradient."""


class GivenUp:
    """The gradients of some leaves, which have none meanwhile."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self.leaves: Sequence[Any] = ()

    def take(self, leaves: Sequence[Any]) -> list[Handle]:
        """Take the leaves' gradients. Gives the handles of those that nobody else can reach."""
        self.leaves = leaves
        self._held = [(leaf, leaf.grad) for leaf in leaves]
        for held in self._held:
            held[0].grad = None
        return [held[1]._ref.cell.handle for held in self._held if _counts(held) == _ALONE]

    def give_back(self, mesh: Mesh, refused: Callable[[], bool]) -> None:
        """Let the leaves have them again, as before, where the step has been refused."""
        with HandlersLater(ctrl_c=ALL):
            mesh.bind()  # an interrupt may have come between two of the step's changes in Python
            for leaf, grad in self._held if refused() else ():
                if leaf.grad is None:
                    leaf.grad = grad


def _counts(held: _Held) -> tuple[int, int, int, int, int]:
    """How many hold a gradient (in C++ and in Python), what it is a view of, its storage and the handle of that, with
    who asks."""
    grad = held[1]
    ref = grad._ref
    cell = ref.cell
    handle = cell.handle
    views, most = 0, getrefcount(ref)
    while ref.parent is not None:  # views of one another, which all hold the cell
        ref, views = ref.parent, views + 1
        most = max(most, getrefcount(ref))
    return grad._use_count(), getrefcount(grad), most, getrefcount(cell) - views, getrefcount(handle)


def _alone() -> tuple[int, int, int, int, int]:
    """The counts where each is held by the one before alone: they depend on Python's version."""
    ref = SimpleNamespace(cell=SimpleNamespace(handle=object()), parent=None)
    held = None, SimpleNamespace(_ref=ref, _use_count=lambda: 1)
    del ref
    return _counts(held)


_ALONE = _alone()
