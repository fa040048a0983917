"""Tensors that programs and actors of one process give each other by reference.

A worker that runs in a process of actors *lends* values to them: the command LEND puts them here at its place in the
order of commands, for as many messages as come to this process, and the reader of a message takes them. A loan is a
tensor over the worker's own memory, and keeps that memory. As long as the loan exists, the worker does not write to
this memory: a step that would replace the value in place works on a copy (`state`).

A tensor that an actor returns for a program waits here as a *gift* until the command ADOPT makes it a value of the
worker's.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from monarch.compiler.plan import MonarchError


class Loan:
    """A worker's tensor, as others see it. `held` says, for as long as this or any tensor of it lives, that it does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype, self._shape, self._strides = tensor.dtype, tensor.shape, tensor.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self._owner: Any = None
        if tensor.numel():
            self._owner = (ctypes.c_char * (span * tensor.element_size())).from_address(tensor.data_ptr())
            self._owner.tensor = tensor

    def held(self) -> weakref.ref[Any] | None:
        return None if self._owner is None else weakref.ref(self._owner)

    def tensor(self) -> torch.Tensor:
        """Not the worker's own object, which was made in inference mode and could not be differentiated through."""
        if self._owner is None:
            return torch.empty(self._shape, dtype=self._dtype)
        return torch.frombuffer(self._owner, dtype=self._dtype).as_strided(self._shape, self._strides)


class Actors(Protocol):
    """The part of the exchange that a worker in a process of actors uses."""

    def lend(self, token: int, loans: Sequence[Loan | str], messages: int) -> None: ...

    def adopt(self, token: int) -> list[torch.Tensor]: ...


@dataclass
class _Lent:
    loans: Sequence[Loan | str]
    messages: int
    """How many are still to be read, or dropped."""


class Loans:
    """Of one worker. `lend` and `end` are called in its thread, the others by actors."""

    def __init__(self, mesh: str) -> None:
        self._mesh = mesh
        self._changed = threading.Condition()
        self.lent: dict[int, _Lent] = {}
        self.read_early: dict[int, int] = {}  # dropped messages whose tensors the worker has not lent yet
        self._over = False
        of_mesh[mesh] = self

    def lend(self, token: int, loans: Sequence[Loan | str], messages: int) -> None:
        """To so many messages. A string says why there is no value."""
        with self._changed:
            messages -= self.read_early.pop(token, 0)
            if messages > 0:
                self.lent[token] = _Lent(loans, messages)
            self._changed.notify_all()

    def end(self) -> None:
        """The worker has ended. Its loans can still be taken."""
        with self._changed:
            self._over = True
            self.read_early.clear()
            self._changed.notify_all()
            self._forget()

    def wait(self, token: int) -> None:
        """Until the worker has lent it, or ended."""
        with self._changed:
            self._changed.wait_for(lambda: token in self.lent or self._over)

    def take(self, token: int, index: int) -> torch.Tensor:
        self.wait(token)
        with self._changed:
            lent = self.lent.get(token)
        if lent is None:
            raise _over()
        loan = lent.loans[index]
        if isinstance(loan, str):
            raise MonarchError(f"a tensor of a program has no value: {loan}")
        return loan.tensor()

    def read(self, token: int) -> None:
        """A message was read, or dropped."""
        with self._changed:
            lent = self.lent.get(token)
            if lent is not None:
                lent.messages -= 1
                if not lent.messages:
                    del self.lent[token]
                    self._forget()
            elif not self._over:
                self.read_early[token] = self.read_early.get(token, 0) + 1

    def _forget(self) -> None:
        if self._over and not self.lent:
            of_mesh.pop(self._mesh, None)


of_mesh: dict[str, Loans] = {}

Reference = tuple[str, int]
"""The mesh that lends, and the number of the loan: a message refers to its tensors by both."""


def take(mesh: str, token: int, index: int, parameter: bool, requires_grad: bool) -> torch.Tensor:
    """The tensor that a message refers to, once the worker has lent it: distributed tensors are pickled as such a
    reference."""
    loans = of_mesh.get(mesh)
    if loans is None:
        raise _over()
    tensor = loans.take(token, index)
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def wait(reference: Reference) -> None:
    loans = of_mesh.get(reference[0])
    if loans is not None:
        loans.wait(reference[1])


def read(reference: Reference) -> None:
    loans = of_mesh.get(reference[0])
    if loans is not None:
        loans.read(reference[1])


def _over() -> MonarchError:
    return MonarchError(
        "the mesh of a tensor in this message is no more: it was closed, or has lost a worker",
        hint="wait for the call before the mesh is closed: actors.step.call(x).get().",
    )


class Gifts:
    """Tensors that actors of this process have returned for programs, by the number of the call and the process that
    returned them."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._unwanted: set[tuple[str, int]] = set()  # dropped before given: the actor has not come to the call yet
        self._lock = threading.Lock()

    def give(self, caller: str, token: int, tensors: list[torch.Tensor]) -> None:
        """Once for each call: nothing, where the call failed."""
        with self._lock:
            if (caller, token) in self._unwanted:
                self._unwanted.remove((caller, token))
            else:
                self._waiting[caller, token] = tensors

    def adopt(self, caller: str, token: int) -> list[torch.Tensor]:
        """Raises KeyError where there is nothing, any more."""
        with self._lock:
            return self._waiting.pop((caller, token))

    def drop(self, caller: str, token: int) -> None:
        """It is not wanted, now or when it comes."""
        with self._lock:
            if self._waiting.pop((caller, token), None) is None:
                self._unwanted.add((caller, token))

    def gone(self, caller: str) -> None:
        """A process has ended: no program will ask for its gifts."""
        with self._lock:
            self._waiting = {key: tensors for key, tensors in self._waiting.items() if key[0] != caller}
            self._unwanted = {key for key in self._unwanted if key[0] != caller}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unwanted)
