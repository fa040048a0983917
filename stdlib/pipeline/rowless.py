"""Values that a model computes from the number of rows and from no row: `torch.ones(len(h)).sum()`.

A tensor with so many entries is right, as `torch.ones(len(h), 1)` is; values computed from it need not be. So they are
computed, on numbers, for the rows of a microbatch and for those of the batch. A value without such a dim has to be the
same for both. A value that an op takes with rows has to have, in the batch, each microbatch's entries for its rows.
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
"""Numbers of tensors; None for random ones, for too many, and where computing them fails."""


@dataclass(frozen=True)
class Result:
    """A result of a call: whether it has rows, and whether its sizes differ for those of the batch."""

    rows: bool
    differs: bool


@dataclass
class _Rowless:
    """A value that follows from no row. `counted` says that a size of it follows from their number."""

    number: torch.Tensor | None
    counted: bool


class RowlessValues(DryRun):
    """Computes, beside the model's calls, the values that follow from no row."""

    def __init__(self, device: str, results: Sequence[Sequence[Result]]) -> None:
        """`results` are those of each call."""
        super().__init__(device)
        self._results = results
        self._next = 0
        self._rowless: Any = WeakIdKeyDictionary()
        self._rows: Any = WeakIdKeyDictionary()
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """Copies of numbers, by their ids and versions: the model may write to them later."""
        self.lost: dict[int, tuple[str, Values, Source | None]] = {}
        """Calls that take values of such a size and whose results have none: these results."""
        self.met: dict[int, tuple[str, Values, Source | None]] = {}
        """Calls that take rows with values of such a size: these values."""
        self.sized: dict[int, Source | None] = {}
        """All of these calls, with those that take rows by their numbers."""

    def called(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        number, self._next = self._next, self._next + 1
        if number >= len(self._results):
            raise Diverged
        given, made, known = tensors_of((args, kwargs)), tensors_of(result), self._results[number]
        rowless = [self._rowless[each] for each in given if each in self._rowless]
        counted = [each for each in rowless if each.counted]
        if any(each.rows for each in known):
            if counted:
                self.sized[number] = user_source()
            if counted and name != "__getitem__":  # the compiler follows rows that are taken by number
                self.met[number] = name, [self._copy(each.number) for each in counted], user_source()
            for each in made:
                self._rowless.pop(each, None)
                self._rows[each] = True
        elif name == "__setitem__" and any(each in self._rows for each in given):
            self._rowless.pop(given[0], None)  # rows from here on
            self._rows[given[0]] = True
        elif counted or any(each.differs for each in known) or len(rowless) == len(given):
            values = self._computed(func, name, args, kwargs, made)
            if counted and made and not all(each.differs for each in known):
                kept = [self._copy(value) for value, each in zip(values, known, strict=True) if not each.differs]
                self.lost[number] = name, kept, user_source()
            for each, value, of in zip(made, values, known, strict=True):
                self._rowless[each] = _Rowless(value, of.differs)

    def read(self, func: Any, args: Any, result: Any) -> None:
        of = args[0] if args else None
        if isinstance(of, torch.Tensor) and isinstance(result, torch.Tensor):
            if of in self._rows:
                self._rows[result] = True
            elif of in self._rowless:
                (value,) = self._computed(func, "", args, {}, [result])
                self._rowless[result] = _Rowless(value, self._rowless[of].counted)

    def _computed(self, func: Any, name: str, args: Any, kwargs: Any, made: Sequence[torch.Tensor]) -> Values:
        """The numbers of a call's results: its arguments have their own, or made-up ones."""
        given = tensors_of((args, kwargs))
        unknown = any(each in self._rowless and self._rowless[each].number is None for each in given)
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
            return self._rowless[leaf].number if leaf in self._rowless else made_up(tuple(leaf.shape), leaf.dtype)
        return "cpu" if isinstance(leaf, (str, torch.device)) and str(leaf) == "meta" else leaf

    def _copy(self, number: torch.Tensor | None) -> torch.Tensor | None:
        if number is None:
            return None
        key = id(number), number._version
        if key not in self._copies:
            self._copies[key] = number, number.clone()
        return self._copies[key][1]


def same(own: Values, whole: Values) -> bool:
    """Whether the values for the rows of a microbatch equal those for the rows of the batch."""
    return all(a is not None and b is not None and _close(a, b) for a, b in zip(own, whole, strict=True))


def same_by_rows(own: Values, whole: Values, rows: Sequence[int]) -> bool:
    """Whether each microbatch, of so many `rows`, has the batch's values for its rows; yes for unknown values."""
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
