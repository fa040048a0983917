"""Whether a model's Python computes with the number of rows that it is given: `h.sum(0) / len(h)`, `if len(h) > 8`.

In a microbatch that is another number than in the batch, and nothing in the program shows where it came from. So the
model is run twice more, on the meta device: with the rows of the first microbatch, and with those of the batch. What it
calls then differs in sizes (`x.view(len(x), -1)`), which is right; or in numbers, or in which functions it calls.
A model that does not run without data is run with numbers that are made up, as far as it is small; where that fails
too, a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.language.recorder.recording import outside_programs
from monarch.language.source import raised_at, user_source
from monarch.stdlib.pipeline.dry_run import Diverged, DryRun, examples, made_up, tensors_of
from monarch.stdlib.pipeline.rowless import Computing, Result, same, same_by_rows

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
class TorchCall:
    """One call that the model makes of a function of PyTorch's, and what it gives."""

    func: Any
    name: str
    numbers: tuple[tuple[bool, Any], ...]
    """Arguments that are no tensors, each with whether it stands in a list, tuple or dict."""
    results: Shapes


@dataclass(frozen=True)
class Other:
    """A call that is another for the rows of the batch than for those of a microbatch: in `size` alone, or else in the
    number `own` that is `whole` for the batch. With `gives` it gives these, and does not take them."""

    size: bool
    own: Any
    whole: Any
    source: Source | None
    gives: bool = False


@dataclass
class Counts:
    """What a model calls for the rows of a microbatch, and how that differs for those of the batch.

    `ends`  the number of the first call in whose place there is another function, its name, and its line
    """

    calls: list[TorchCall] = field(default_factory=list)
    results: list[Shapes] = field(default_factory=list)
    """Shapes of what each call gives for the rows of the batch."""
    sources: dict[int, Source | None] = field(default_factory=dict)
    """The lines of calls that take sizes, and of those that give several that differ."""
    others: dict[int, Other] = field(default_factory=dict)
    numbered: dict[int, Source | None] = field(default_factory=dict)
    """The lines of calls that take rows with what microbatches do not have as the batch: `ones(len(h)).cumsum(0)`."""
    sized: dict[int, Source | None] = field(default_factory=dict)
    """The lines of calls that take rows with what has a size that follows from how many there are."""
    ends: tuple[int, str, Source | None] | None = None

    def of(self, number: int) -> tuple[TorchCall, Shapes] | None:
        """A call by its number, and the shapes of what it gives for the rows of the batch, if it comes there too."""
        return (self.calls[number], self.results[number]) if number < len(self.results) else None


@dataclass(frozen=True)
class Unseen:
    """Why what a model calls could not be compared, and the line where that showed."""

    why: str
    source: Source | None


class _Noting(DryRun):
    """Notes what is called."""

    def __init__(self, device: str, counts: Counts, whole: bool) -> None:
        super().__init__(device)
        self._counts = counts
        self._whole = whole

    def called(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        numbers = tuple(_numbers(args, kwargs, name))
        call = TorchCall(func, name, numbers, tuple(tuple(each.shape) for each in tensors_of(result)))
        if self._whole:
            self._compare(call)
        else:
            self._counts.calls.append(call)

    def _compare(self, call: TorchCall) -> None:
        counts = self._counts
        number = len(counts.results)
        own = counts.calls[number] if number < len(counts.calls) else None
        if own is None or own.func is not call.func or len(own.numbers) != len(call.numbers):
            counts.ends = number, call.name, user_source()
            raise Diverged
        counts.results.append(call.results)
        several = (zip(a, b, strict=False) for a, b in zip(own.results, call.results, strict=False))
        if call.name in _BY_SIZE or any(sum(a != b for a, b in sizes) > 1 for sizes in several):
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
    run: Callable[..., Any],
    given: Any,
    rows: Sequence[int],
    undone: Callable[[], AbstractContextManager[None]],
    dims: Mapping[int, Sequence[int | None]] | None = None,
) -> Counts | Unseen:
    """What `run` calls for the rows of the first microbatch of what it is `given`, and how that differs for those of
    the batch; `rows` are those of each microbatch. Without data, or where that fails, with numbers that are made up.
    `undone` gives a context behind which Python is as before. `dims` are known ones that have rows, of what calls give:
    then what follows from no row is computed."""
    first = next((each.shape[0] for each in tensors_of(given) if each.ndim), 0)
    rows = examples(rows)
    own, whole = rows[0], sum(rows)

    def ran(count: int, device: str, mode: DryRun) -> Unseen | None:
        try:
            with undone(), outside_programs(without_data=True), torch.random.fork_rng(devices=()), torch.device(device):
                args, kwargs = pytree.tree_map(lambda leaf: _like(leaf, count, first, device), given)
                with warnings.catch_warnings(), mode:
                    warnings.simplefilter("ignore")
                    run(*args, **kwargs)
        except Diverged:
            pass
        except Exception as error:  # any code of the user's, which need not run apart from the program
            return Unseen(f"{type(error).__name__}: {error}", raised_at(error))
        return None

    def compared(device: str) -> Counts | Unseen:
        calls = Counts()
        counts, again = Counts(calls.calls), Counts(calls.calls)
        for count, each, is_whole in ((own, calls, False), (whole, counts, True)):
            if (failed := ran(count, device, _Noting(device, each, is_whole))) is not None:
                return failed
        _end(counts)
        if dims is not None and (results := _results(counts, dims)) is not None:
            computing = Computing(device, results), Computing(device, results)
            for count, mode in zip((own, whole), computing, strict=True):
                if (failed := ran(count, device, mode)) is not None:
                    return failed
            _note_fresh(counts, *computing, rows)
        if counts.ends or any(not each.size for each in counts.others.values()):
            failed = ran(own, device, _Noting(device, again, True))
            _end(again)
            if failed is not None or again.ends or again.others:
                return failed or Unseen("what it calls differs from one run to the next", None)
        return counts

    found = compared("meta")
    return found if isinstance(found, Counts) else compared("cpu")


def _end(counts: Counts) -> None:
    """Note that the model has called less than it did before, if it has."""
    number = len(counts.results)
    if counts.ends is None and number < len(counts.calls):
        counts.ends = number, counts.calls[number].name, None


def _results(counts: Counts, dims: Mapping[int, Sequence[int | None]]) -> list[list[Result]] | None:
    """What is known of the results of each call; None where all that differ have rows."""
    found: list[list[Result]] = []
    for number, (call, whole) in enumerate(zip(counts.calls, counts.results, strict=False)):
        differ = [a != b for a, b in zip(call.results, whole, strict=False)]
        known = dims.get(number)
        if len(differ) != len(call.results) or len(whole) != len(differ):
            break
        if known is not None and len(known) != len(differ):
            known = [None] * len(differ)  # of tensors that are on no mesh
        rows = differ if known is None else [dim is not None for dim in known]
        found.append([Result(*each) for each in zip(rows, differ, strict=True)])
    return found if any(each.differs and not each.rows for results in found for each in results) else None


def _note_fresh(counts: Counts, own: Computing, whole: Computing, rows: Sequence[int]) -> None:
    """Note calls that give another value for so many rows, or take one that microbatches do not have as the batch."""
    counts.sized.update(whole.sized)
    for number, (name, values, source) in whole.lost.items():
        mine = own.lost.get(number, (name, [None] * len(values), source))[1]
        if not same(mine, values):
            counts.others.setdefault(number, Other(False, "one value", "another", source, gives=True))
    for number, (_, values, source) in whole.met.items():
        if number in own.met and not same_by_rows(own.met[number][1], values, rows):
            counts.numbered[number] = source


def _like(leaf: Any, rows: int, given: int, device: str) -> Any:
    """A tensor to run with, with so many rows where it has those that are given."""
    if not isinstance(leaf, torch.Tensor):
        return examples([leaf])[0]
    shape = (rows, *leaf.shape[1:]) if leaf.ndim and leaf.shape[0] == given else tuple(leaf.shape)
    return made_up(examples(shape), leaf.dtype, device).requires_grad_(leaf.requires_grad)


def counts_rows(name: str, other: Other, own: int, whole: int) -> ProgramError:
    """The error of a call that takes a number of rows, or what follows from one."""
    verb = "gives" if other.gives else "takes"
    return ProgramError(
        f"{name} {verb} {other.own} for the {own} rows of a microbatch, and {other.whole} for the {whole} of the batch",
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


def warn_unseen(unseen: Unseen) -> None:
    """Say that a model could not be compared: a UserWarning, once for each line."""
    at = unseen.source or user_source()
    file, line = (at.own.file, at.own.line) if at is not None else ("a pipeline", 0)
    warnings.warn_explicit(
        f"whether the model computes with how many rows it is given could not be seen: {unseen.why}.\n"
        "  It was run apart from the mesh, without data and with numbers that are made up. A number such as len(h) "
        "would be that\n  of a microbatch, without an error. Where it computes each row from itself alone, and with "
        "no such number, say\n  pipeline(…, mixes_rows=True), with which nothing is looked for.",
        UserWarning,
        file,
        line,
        registry=_warned,
    )


_warned: dict[Any, Any] = {}
