"""What a model computes from how many rows there are, and from no row: `torch.ones(len(h)).sum()`.

A tensor of so many entries is right, as `torch.ones(len(h), 1)` is; what is computed from it need not be. So it is
computed, on numbers, for the rows of a microbatch and for those of the batch: what has no such dim any more has to be
the same for both, and what meets rows has to have, in the batch, what each microbatch has for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from monarch.compiler.errors import Source
from monarch.language.source import user_source
from monarch.stdlib.pipeline.dry_run import MOST, Diverged, DryRun, made_up, tensors_of

Values = list[torch.Tensor | None]
"""Numbers of tensors; None where they are drawn, too many, or not to be had."""


@dataclass(frozen=True)
class Result:
    """Of a tensor that a call gives: whether it has rows, and whether it has other sizes for those of the batch."""

    rows: bool
    differs: bool


@dataclass
class _Fresh:
    """A value that follows from no row. `counted` says that a size of it follows from how many there are."""

    number: torch.Tensor | None
    counted: bool


class Computing(DryRun):
    """Computes, beside what the model calls, what follows from no row."""

    def __init__(self, device: str, results: Sequence[Sequence[Result]]) -> None:
        """`results` are those of each call."""
        super().__init__(device)
        self._results = results
        self._next = 0
        self._fresh: Any = WeakIdKeyDictionary()
        self._rows: Any = WeakIdKeyDictionary()
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """Of numbers, by their ids and how often they were written: the model may write them later."""
        self.lost: dict[int, tuple[str, Values, Source | None]] = {}
        """Calls whose results have no such size any more: what they give."""
        self.met: dict[int, tuple[str, Values, Source | None]] = {}
        """Calls that take rows with values of such a size: these."""
        self.sized: dict[int, Source | None] = {}
        """All of these calls, with those that take rows by their numbers."""

    def called(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        number, self._next = self._next, self._next + 1
        if number >= len(self._results):
            raise Diverged
        given, made, known = tensors_of((args, kwargs)), tensors_of(result), self._results[number]
        fresh = [self._fresh[each] for each in given if each in self._fresh]
        counted = [each for each in fresh if each.counted]
        if any(each.rows for each in known):
            if counted:
                self.sized[number] = user_source()
            if counted and name != "__getitem__":  # which rows it takes by their numbers the compiler follows
                self.met[number] = name, [self._copy(each.number) for each in counted], user_source()
            for each in made:
                self._fresh.pop(each, None)
                self._rows[each] = True
        elif name == "__setitem__" and any(each in self._rows for each in given):
            self._fresh.pop(given[0], None)  # rows from here on
            self._rows[given[0]] = True
        elif counted or any(each.differs for each in known) or len(fresh) == len(given):
            values = self._computed(func, name, args, kwargs, made)
            if counted and made and not all(each.differs for each in known):
                kept = [self._copy(value) for value, each in zip(values, known, strict=True) if not each.differs]
                self.lost[number] = name, kept, user_source()
            for each, value, of in zip(made, values, known, strict=True):
                self._fresh[each] = _Fresh(value, of.differs)

    def read(self, func: Any, args: Any, result: Any) -> None:
        of = args[0] if args else None
        if isinstance(of, torch.Tensor) and isinstance(result, torch.Tensor):
            if of in self._rows:
                self._rows[result] = True
            elif of in self._fresh:
                (value,) = self._computed(func, "", args, {}, [result])
                self._fresh[result] = _Fresh(value, self._fresh[of].counted)

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any, made: Sequence[torch.Tensor]) -> Values:
        """The numbers of what a call has made: what it is given has its own, or some that are made up."""
        given = tensors_of((args, kwargs))
        unknown = any(each in self._fresh and self._fresh[each].number is None for each in given)
        if unknown or any(each.numel() > MOST for each in (*given, *made)):
            return [None] * len(made)
        before = torch.get_rng_state()
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                args, kwargs = pytree.tree_map(self._number, (args, kwargs))
                found = tensors_of(func(*args, **kwargs))
                if name.endswith("empty") or name == "empty_like":
                    found = [each.zero_() for each in found]
        except Exception:  # any function of PyTorch's, of numbers that are made up
            return [None] * len(made)
        drawn = not torch.equal(before, torch.get_rng_state())
        same = [tuple(each.shape) for each in found] == [tuple(each.shape) for each in made]
        return [None] * len(made) if drawn or not same else list(found)

    def _number(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._fresh[leaf].number if leaf in self._fresh else made_up(tuple(leaf.shape), leaf.dtype)
        return "cpu" if isinstance(leaf, (str, torch.device)) and str(leaf) == "meta" else leaf

    def _copy(self, number: torch.Tensor | None) -> torch.Tensor | None:
        if number is None:
            return None
        key = id(number), number._version
        if key not in self._copies:
            self._copies[key] = number, number.clone()
        return self._copies[key][1]


def same(own: Values, whole: Values) -> bool:
    """Whether what is computed for the rows of a microbatch is what is computed for those of the batch."""
    return all(a is not None and b is not None and _close(a, b) for a, b in zip(own, whole, strict=True))


def same_by_rows(own: Values, whole: Values, rows: Sequence[int]) -> bool:
    """Whether each microbatch, of so many `rows`, has for its own rows what the batch has for them; yes for what is
    not known."""
    pairs = zip(own, whole, strict=True)
    return all(a is None or b is None or _close_by_rows(a, b, rows) for a, b in pairs)


def _close_by_rows(own: torch.Tensor, whole: torch.Tensor, rows: Sequence[int]) -> bool:
    dims = [dim for dim, (a, b) in enumerate(zip(own.shape, whole.shape, strict=True)) if a != b]
    if any(own.shape[dim] % rows[0] or own.shape[dim] * sum(rows) != whole.shape[dim] * rows[0] for dim in dims):
        return True  # such a size has no rows: it cannot be taken with them
    for k in range(len(rows)):
        mine, theirs = own, whole
        for dim in dims:
            within = own.shape[dim] // rows[0]
            at = torch.arange(whole.shape[dim]).view(-1, within)[k :: len(rows)].flatten()
            theirs, mine = theirs.index_select(dim, at), mine.narrow(dim, 0, len(at))
        if not _close(mine, theirs):
            return False
    return True


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    dtype = torch.complex128 if a.is_complex() else torch.float64
    return a.shape == b.shape and torch.allclose(a.to(dtype), b.to(dtype), rtol=1e-3, atol=1e-6, equal_nan=True)
