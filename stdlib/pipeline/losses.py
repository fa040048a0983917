"""Losses of microbatches that add up to the loss of their batch.

A mean over rows of the batch is the mean of the microbatches' means, each by its number of rows. `cross_entropy` and
`nll_loss` divide by the targets that count (`ignore_index`) or by their weights: by those of the whole batch, which
depend on targets alone and so are known before any stage has run. Whether a loss of the user's adds up is tried out on
numbers.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from monarch.compiler.errors import MonarchError, ProgramError
from monarch.language.recorder.recording import outside_programs
from monarch.language.source import user_source
from monarch.stdlib.pipeline.dry_run import examples

Loss = Callable[[Any, Any], torch.Tensor]

OF_CLASSES = {F.cross_entropy: inspect.signature(F.cross_entropy), F.nll_loss: inspect.signature(F.nll_loss)}
"""Losses whose mean is over the targets that count, not over rows."""

_MOST = 2**24
"""Elements of an output with which a loss is tried out."""


class _Run(Enum):
    """The code that runs: the model, or a loss, and its purpose."""

    MODEL = auto()
    COUNTING = auto()
    """A loss, to find its divisors."""
    MICROBATCH = auto()
    TRIAL = auto()
    """A loss, to see how it behaves, on plain numbers or without data."""
    BATCH = auto()
    """The loss of the whole batch, which means what PyTorch's does."""


class Counted:
    """The means of `cross_entropy` and `nll_loss` in a step's losses, over the targets of the whole batch."""

    def __init__(self, rows: Sequence[int], reduction: str) -> None:
        """`rows` are those of each microbatch; `reduction` says whether a step's loss is their losses' mean or sum."""
        self.rows = rows
        self.reduction = reduction
        self.found: list[torch.Tensor] = []
        """The divisor of each such call of a loss: over all microbatches."""
        self._run = _Run.MODEL
        self._counts: list[torch.Tensor] = []
        self._microbatch = self._call = 0

    def count(self, loss: Loss, output: Any, targets: Sequence[Any]) -> None:
        """Find the divisors of a step's losses, from each microbatch's targets: `output` is like the first's."""
        with torch.random.fork_rng(devices=()), torch.no_grad(), self._running(_Run.COUNTING):
            for rows, target in zip(self.rows, targets, strict=True):
                self._counts = []
                loss(self._blank(output, rows), target)
                if not self._counts:
                    return
                pairs = zip(self.found, self._counts, strict=True)
                self.found = [a + b for a, b in pairs] if self.found else self._counts

    def _blank(self, output: Any, rows: int) -> Any:
        """Zeros like the first microbatch's output, with so many rows."""

        def blank(like: torch.Tensor) -> torch.Tensor:
            shape = (rows, *like.shape[1:]) if like.ndim and like.shape[0] == self.rows[0] else tuple(like.shape)
            return torch.zeros(shape, dtype=like.dtype)

        return pytree.tree_map_only(torch.Tensor, blank, output)

    @contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        before, self._run = self._run, run
        try:
            yield
        finally:
            self._run = before

    def weighing(self, microbatch: int) -> AbstractContextManager[None]:
        """Run the loss of a microbatch."""
        self._microbatch, self._call = microbatch, 0
        return self._running(_Run.MICROBATCH)

    def trying(self) -> AbstractContextManager[None]:
        """Run a loss to see how it behaves, on plain numbers or without data."""
        return self._running(_Run.TRIAL)

    def of_all(self) -> AbstractContextManager[None]:
        """Run the loss of the whole batch, which means what PyTorch's does."""
        return self._running(_Run.BATCH)

    def mean(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A call of `cross_entropy` or `nll_loss`: None for one that is no mean over targets that are classes. The
        step's value of it for all microbatches, by `reduction`, is the batch's mean. Raises ProgramError for one
        outside of `loss_fn`, and with arguments that PyTorch has deprecated."""
        if self._run is _Run.BATCH:
            return None
        bound = OF_CLASSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        target = given["target"]
        legacy = given["size_average"] is not None or given["reduce"] is not None
        if target.is_floating_point() or (given["reduction"] != "mean" and not legacy):
            return None
        if self._run is _Run.MODEL or (legacy and self._run is not _Run.TRIAL):
            raise ProgramError(
                f"{func.__name__} in the model, over the targets of a microbatch"
                if not legacy
                else f"{func.__name__} with size_average or reduce, which PyTorch has deprecated",
                hint="its mean is over the targets that count, of all microbatches: call it in loss_fn, with "
                'reduction="mean".\npipe.step(x, target=y, loss_fn=F.cross_entropy)',
                source=user_source(),
            )
        if self._run is _Run.COUNTING:
            self._counts.append(_counting(target, given["weight"], given["ignore_index"]))
        given["reduction"] = "sum"
        summed: torch.Tensor = func(*bound.args, **bound.kwargs)
        if self._run is not _Run.MICROBATCH:
            return summed / target.numel() if self.reduction == "mean" else summed
        whole = self.found[self._call].to(summed.dtype)
        self._call += 1
        part = sum(self.rows) / self.rows[self._microbatch] if self.reduction == "mean" else 1
        return summed / whole * part


def _counting(target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """The divisor of a mean over these targets."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight[torch.where(counts, target, 0)] * counts).sum()


def adds_up(loss: Loss, counted: Counted, output: Any, target: Any, rows: Sequence[int] = (2, 1)) -> bool | None:
    """Whether the losses of microbatches of so many `rows` add up to that of the batch: tried out on numbers, where
    `loss` takes plain tensors of the shapes of the first microbatch's, and gives the same twice; None where it cannot
    be. Raises ProgramError where they do with the other reduction."""
    if len(counted.rows) == 1:
        return True
    given, count, reduction = counted.rows[0], sum(rows), counted.reduction
    tensors = [each for each in pytree.tree_leaves((output, target)) if isinstance(each, torch.Tensor)]
    if sum(each.numel() for each in tensors) // given * count > _MOST:
        return None
    try:
        with (
            counted.trying(),
            outside_programs(),
            torch.random.fork_rng(devices=()),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            tried, digits = _try(loss, output, target, given, rows)
    except _NOT_TRIED:
        return None  # it reads values on workers, or other numbers than these
    if tried is None:
        return None
    whole, *parts = tried
    mean, total = sum(own * part for own, part in zip(rows, parts, strict=True)) / count, sum(parts)

    def close(found: float, wanted: float) -> bool:
        return abs(found - wanted) <= digits * max(abs(found), abs(wanted), 1e-6) or found != found

    if close(whole, mean if reduction == "mean" else total):
        return True
    if not close(whole, total) and not close(whole, mean):
        return False
    is_sum = "it is a sum over its rows: say so, pipe.step(…, reduction='sum')."
    is_mean = "it is a mean over its rows: leave out reduction='sum'."
    of_each = ", ".join(f"on {own} of them {part:.4g}" for own, part in zip(rows, parts, strict=True))
    raise ProgramError(
        f"the losses of microbatches do not add up to the loss of the batch, as reduction={reduction!r} has it",
        hint=f"{is_sum if close(whole, total) else is_mean}\n"
        f"tried out on {count} rows it is {whole:.4g}, {of_each}. With one microbatch any loss is exact.",
        source=user_source(),
    )


_NOT_TRIED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, MonarchError)


def _try(loss: Loss, output: Any, target: Any, given: int, rows: Sequence[int]) -> tuple[list[float] | None, float]:
    """The loss of numbers in the place of the `given` rows, of all `rows` and of each part of them, or None for one
    that is never the same; and how far equal numbers may be apart. Halves are tried as float32 where the loss takes
    that: theirs have too few digits to tell a mean of weighted rows from a mean."""
    tensors = [each for each in pytree.tree_leaves((output, target)) if isinstance(each, torch.Tensor)]
    widest = max((torch.finfo(each.dtype).eps for each in tensors if each.is_floating_point()), default=_FLOAT)
    if widest > _FLOAT:
        try:
            return _tried(loss, output, target, given, rows, wide=True), 100 * _FLOAT
        except _NOT_TRIED:
            pass
    return _tried(loss, output, target, given, rows, wide=False), 4 * widest if widest > _FLOAT else 100 * _FLOAT


_FLOAT = torch.finfo(torch.float32).eps


def _tried(loss: Loss, output: Any, target: Any, given: int, rows: Sequence[int], wide: bool) -> list[float] | None:
    generator, count = torch.Generator().manual_seed(0), sum(rows)

    def made(like: torch.Tensor) -> torch.Tensor:
        shape = (count, *like.shape[1:]) if like.ndim and like.shape[0] == given else tuple(like.shape)
        found = torch.rand(examples(shape), generator=generator, dtype=torch.float64)
        dtype = torch.float32 if wide and like.dtype in (torch.bfloat16, torch.float16) else like.dtype
        return found.to(dtype) if dtype.is_floating_point else found.round().to(dtype)

    whole = pytree.tree_map_only(torch.Tensor, made, (output, target))

    def of(start: int, stop: int) -> float:
        def part(value: torch.Tensor) -> torch.Tensor:
            return value[start:stop] if value.ndim and value.shape[0] == count else value

        return float(loss(*pytree.tree_map_only(torch.Tensor, part, whole)))

    first = of(0, count)
    ends = [*accumulate(rows, initial=0)]
    return [first, *(of(*part) for part in pairwise(ends))] if first == of(0, count) else None
