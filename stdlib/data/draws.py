"""The random numbers that a source draws in the thread that reads it.

PyTorch's default generator is one for all threads, and programs draw from it meanwhile. So that neither changes the
other's numbers, ops without a generator get one of the thread's, seeded by the stream's seed and the place in it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from monarch.stdlib.data.columns import DataError


@functools.cache
def _place_of_generator(op: Any) -> int | None:
    """Which argument of an op is its generator: -1 of a random op that has none, None of one that is not random."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None
    names = [each.name for each in op._schema.arguments]
    return names.index("generator") if "generator" in names else -1


@functools.cache
def _with_generator(op: Any) -> Any:
    """The overload of a random op that takes a generator; None where there is none."""
    arguments = [(each.name, str(each.type)) for each in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        other = getattr(op.overloadpacket, name)
        found = [(each.name, str(each.type)) for each in other._schema.arguments]
        if "generator" in dict(found) and [each for each in found if each[0] != "generator"] == [
            each for each in arguments if each[0] != "generator"
        ]:
            return other
    return None


class Draws(TorchDispatchMode):
    """While it is entered, random ops of this thread draw from its own generator. `seed_of` gives the seed of a place;
    it is asked at the first draw. Raises DataError for an op that takes no generator."""

    def __init__(self, seed_of: Callable[..., int], *place: int) -> None:
        super().__init__()
        self._seed_of, self._place = seed_of, place
        self._generator = torch.Generator()
        self._seeded = False
        self._process = os.getpid()

    def at(self, *place: int) -> None:
        """Begin anew with the numbers of another place."""
        self._place, self._seeded = place, False

    @property
    def drawn(self) -> bool:
        """Whether something was drawn at this place."""
        return self._seeded

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch's wrapper around it loads Dynamo: seconds at the first op, and half of each op's time.
        return False

    # As TorchDispatchMode's own, without its flags: they are one for all threads.
    def __enter__(self) -> Draws:
        _push_mode(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = _place_of_generator(op)
        if at is not None and os.getpid() == self._process:
            given = kwargs.get("generator")
            if 0 <= at < len(args):
                given, args = args[at], args[:at]  # it is the last one where it is no keyword
            if given is None and _on_cpu(args, kwargs):
                other = _with_generator(op)
                if other is None:
                    raise DataError(
                        f"{op} takes no generator, and the program draws from PyTorch's meanwhile",
                        hint="read the data set in workers: a DataLoader with num_workers=1.",
                    )
                if not self._seeded:
                    self._generator.manual_seed(self._seed_of(*self._place))
                    self._seeded = True
                op, given = other, self._generator
            kwargs = {**kwargs, "generator": given} if given is not None else kwargs
        return op(*args, **kwargs)


def _on_cpu(args: tuple[Any, ...], kwargs: Any) -> bool:
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            return each.device.type == "cpu"
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"
