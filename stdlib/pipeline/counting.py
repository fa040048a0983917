"""Whether a model's Python computes with the number of rows that it is given: `h.sum(0) / len(h)`, `if len(h) > 8`.

In a microbatch that is another number than in the batch, and nothing in the program shows where it came from. So the
model is run twice more, on the meta device: with the rows of the first microbatch, and with those of the batch. What it
calls then differs in sizes (`x.view(len(x), -1)`), which is right; or in numbers, or in which functions it calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.language.recorder.recording import outside_programs
from monarch.language.source import user_source
from monarch.stdlib.pipeline.inner import transform

_BY_SIZE = frozenset(
    (
        *("view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "as_strided", "unfold", "resize"),
        *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "eye", "arange", "linspace", "logspace"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "split", "split_with_sizes", "chunk", "tensor_split"),
    )
)
"""Functions that take sizes: counts of rows are right there, as far as the result's rows can be followed."""
_FILLED = frozenset(("full", "new_full", "randint"))
"""Those of them that take numbers besides; sizes come in a tuple."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Call:
    """One call that the model makes of a function of PyTorch's, and what it gives."""

    func: Any
    name: str
    numbers: tuple[tuple[bool, Any], ...]
    """Arguments that are no tensors, each with whether it stands in a list, tuple or dict."""
    results: Shapes


@dataclass(frozen=True)
class Other:
    """A call that is another for the rows of the batch than for those of a microbatch: in `size` alone, or else in the
    number `own` that is `whole` for the batch."""

    size: bool
    own: Any
    whole: Any
    source: Source | None


@dataclass
class Counts:
    """What a model calls for the rows of a microbatch, and how that differs for those of the batch.

    `ends`  the number of the first call in whose place there is another function, its name, and its line
    """

    calls: list[Call] = field(default_factory=list)
    results: list[Shapes] = field(default_factory=list)
    """Shapes of what each call gives for the rows of the batch."""
    sources: dict[int, Source | None] = field(default_factory=dict)
    """The lines of calls that take sizes."""
    others: dict[int, Other] = field(default_factory=dict)
    ends: tuple[int, str, Source | None] | None = None

    def of(self, number: int) -> tuple[Call, Shapes] | None:
        """A call by its number, and the shapes of what it gives for the rows of the batch, if it comes there too."""
        return (self.calls[number], self.results[number]) if number < len(self.results) else None


class _Ends(Exception):
    """The model calls other functions from here on."""


class _Noting(TorchFunctionMode):
    """Notes what is called, on tensors without data."""

    def __init__(self, counts: Counts, whole: bool) -> None:
        super().__init__()
        self._counts = counts
        self._whole = whole
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What stands for tensors with data, by their ids."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._without_data, (args, kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__" or func is torch._C._set_grad_enabled or transform() is not None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        numbers = tuple(_numbers(args, kwargs, name))
        shapes = tuple(tuple(each.shape) for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor))
        if self._whole:
            self._compare(Call(func, name, numbers, shapes))
        else:
            self._counts.calls.append(Call(func, name, numbers, shapes))
        return result

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._known:
            made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
            self._known[id(tensor)] = tensor, made.requires_grad_(tensor.requires_grad)
        return self._known[id(tensor)][1]

    def _compare(self, call: Call) -> None:
        counts = self._counts
        number = len(counts.results)
        own = counts.calls[number] if number < len(counts.calls) else None
        if own is None or own.func is not call.func or len(own.numbers) != len(call.numbers):
            counts.ends = number, call.name, user_source()
            raise _Ends
        counts.results.append(call.results)
        if call.name in _BY_SIZE:
            counts.sources[number] = user_source()
        for (inner, mine), (_, theirs) in zip(own.numbers, call.numbers, strict=True):
            if type(mine) is not type(theirs) or (mine != theirs and not (mine != mine and theirs != theirs)):
                size = type(mine) is int and call.name in _BY_SIZE and (inner or call.name not in _FILLED)
                before = counts.others.get(number)
                if before is None or before.size:
                    counts.others[number] = Other(size, mine, theirs, user_source())


def _numbers(args: Any, kwargs: Any, name: str) -> Iterator[tuple[bool, Any]]:
    """What a call is given besides tensors. A slice of all that there is has no end."""
    stack: list[tuple[bool, Any, int | None]] = [(False, each, None) for each in (*args, *kwargs.values())]
    if name == "__getitem__" and isinstance(args[0], torch.Tensor):
        at = args[1] if isinstance(args[1], tuple) else (args[1],)
        sizes = [*args[0].shape][: len(at)] if all(isinstance(each, (slice, int)) for each in at) else []
        stack = [(False, each, size) for each, size in zip(at, sizes or [None] * len(at), strict=False)]
    for inner, value, size in stack:
        if isinstance(value, slice):
            stop = None if isinstance(value.stop, int) and size is not None and value.stop >= size else value.stop
            yield from ((inner, each) for each in (value.start, stop, value.step) if not isinstance(each, torch.Tensor))
        elif isinstance(value, (list, tuple, dict)):
            for leaf in pytree.tree_leaves(list(value) if isinstance(value, tuple) else value):
                if not isinstance(leaf, torch.Tensor):
                    yield True, leaf
        elif isinstance(value, (bool, int, float, complex, str, torch.dtype)):
            yield inner, value


def counts_of(
    run: Callable[..., Any], given: Any, own: int, whole: int, undone: Callable[[], AbstractContextManager[None]]
) -> Counts | None:
    """What `run` calls for `own` rows of what it is `given`, and how that differs for `whole`; None where that cannot
    be told: what does not run without data, or differs from one run to the next. `undone` gives a context behind which
    Python is as before."""
    calls = _run(run, given, own, undone, None)
    counts = None if calls is None else _run(run, given, whole, undone, calls)
    if counts is not None and (counts.ends or any(not each.size for each in counts.others.values())):
        again = _run(run, given, own, undone, calls)
        if again is None or again.ends or again.others:
            return None
    return counts


def _run(
    run: Callable[..., Any],
    given: Any,
    rows: int,
    undone: Callable[[], AbstractContextManager[None]],
    expected: Counts | None,
) -> Counts | None:
    counts = Counts() if expected is None else Counts(expected.calls)
    first = next(
        (leaf.shape[0] for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.ndim), 0
    )
    try:
        with undone(), outside_programs(without_data=True), torch.random.fork_rng(devices=()), torch.device("meta"):
            args, kwargs = pytree.tree_map(lambda leaf: _like(leaf, rows, first), given)
            with warnings.catch_warnings(), _Noting(counts, expected is not None):
                warnings.simplefilter("ignore")
                run(*args, **kwargs)
    except _Ends:
        return counts
    except Exception:  # any code of the user's, which need not run without data
        return None
    if expected is not None and len(counts.results) < len(counts.calls):
        counts.ends = len(counts.results), counts.calls[len(counts.results)].name, None
    return counts


def _like(leaf: Any, rows: int, given: int) -> Any:
    """A tensor without data, with so many rows where it has those that are given."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (rows, *leaf.shape[1:]) if leaf.ndim and leaf.shape[0] == given else tuple(leaf.shape)
    return torch.empty(shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)


def counts_rows(name: str, other: Other, own: int, whole: int) -> ProgramError:
    """The error of a call that takes a number of rows, or what follows from one."""
    return ProgramError(
        f"{name} takes {other.own} for the {own} rows of a microbatch, and {other.whole} for the {whole} of the batch",
        hint="a number that follows from how many rows there are is another in each microbatch. Call what counts them "
        f"itself,\nsuch as h.mean(0) for h.sum(0) / len(h); give the number as an argument, pipe.step(x, {whole}, …); "
        "or say\npipeline(…, mixes_rows=True), where each microbatch counts its own.",
        source=other.source,
    )


def other_way(name: str, own: int, whole: int, source: Source | None) -> ProgramError:
    """The error of a model that calls a function for one number of rows and not for the other."""
    return ProgramError(
        f"the model calls {name} for the {whole} rows of the batch, and not for the {own} of a microbatch"
        if source is not None
        else f"the model calls {name} for the {own} rows of a microbatch, and not for the {whole} of the batch",
        hint="which functions it calls may not depend on how many rows there are; with pipeline(…, mixes_rows=True) "
        "each microbatch\ngoes its own way.",
        source=source or user_source(),
    )
