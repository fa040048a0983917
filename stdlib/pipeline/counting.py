"""Whether a model's Python computes with the number of its rows: `h.sum(0) / len(h)`, `if len(h) > 8`.

This number differs between a microbatch and the batch, and nothing in the program shows where it came from. So the
model is run twice more, on the meta device: with the rows of the first microbatch, and with those of the batch. Its
calls may differ in sizes (`x.view(len(x), -1)`), which is right; in other numbers and in functions they may not.
A model that does not run without data is run with made-up numbers, as far as it is small; where that fails too, a
warning says so.
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
from monarch.stdlib.pipeline.rowless import Result, RowlessValues, same, same_by_rows

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
    """One call of the model of a function of PyTorch's, with the shapes of its results."""

    func: Any
    name: str
    numbers: tuple[tuple[bool, Any], ...]
    """Arguments that are no tensors, each with whether it is in a list, tuple or dict."""
    results: Shapes


@dataclass(frozen=True)
class CallDifference:
    """A call that differs between a microbatch and the batch: in a `size` alone, or else in the number `own`, which is
    `whole` for the batch. With `gives` it returns these, and does not take them."""

    size: bool
    own: Any
    whole: Any
    source: Source | None
    gives: bool = False


@dataclass
class CallComparison:
    """The calls of a model for the rows of a microbatch, and how they differ for those of the batch.

    `results`      shapes of each call's results for the rows of the batch
    `sources`      the lines of calls that take sizes, and of those with several results that differ
    `differences`  the calls that differ, by number
    `numbered`     the lines of calls that take rows with values in which a microbatch differs from its part of the
                   batch: `ones(len(h)).cumsum(0)`
    `sized`        the lines of calls that take rows with values of a size that follows from the number of rows
    `diverges`     the number of the first call in whose place there is another function, its name, and its line
    """

    calls: Sequence[TorchCall]
    results: list[Shapes] = field(default_factory=list)
    sources: dict[int, Source | None] = field(default_factory=dict)
    differences: dict[int, CallDifference] = field(default_factory=dict)
    numbered: dict[int, Source | None] = field(default_factory=dict)
    sized: dict[int, Source | None] = field(default_factory=dict)
    diverges: tuple[int, str, Source | None] | None = None

    def of(self, number: int) -> tuple[TorchCall, Shapes] | None:
        """A call by its number, and the shapes of its results for the rows of the batch, if the model makes it there
        too."""
        return (self.calls[number], self.results[number]) if number < len(self.results) else None

    @property
    def has_other_numbers(self) -> bool:
        """Whether a call takes another number for the batch, which is no size."""
        return any(not each.size for each in self.differences.values())


class NotComparable(Exception):
    """The calls of a model could not be compared: why, and at which line."""

    def __init__(self, why: str, source: Source | None) -> None:
        super().__init__(why)
        self.why = why
        self.source = source


class _Recorder(DryRun):
    """Records the calls of a run."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.calls: list[TorchCall] = []

    def called(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        shapes = tuple(tuple(each.shape) for each in tensors_of(result))
        self.take(TorchCall(func, name, tuple(_numbers(args, kwargs, name)), shapes))

    def take(self, call: TorchCall) -> None:
        """Note the next call."""
        self.calls.append(call)


class _Comparer(_Recorder):
    """Compares the calls of a run with those of one before. Raises Diverged at the first one of another function."""

    def __init__(self, device: str, calls: Sequence[TorchCall]) -> None:
        super().__init__(device)
        self.found = CallComparison(calls)

    def take(self, call: TorchCall) -> None:
        found = self.found
        number = len(found.results)
        own = found.calls[number] if number < len(found.calls) else None
        if own is None or own.func is not call.func or len(own.numbers) != len(call.numbers):
            found.diverges = number, call.name, user_source()
            raise Diverged
        found.results.append(call.results)
        several = (zip(a, b, strict=False) for a, b in zip(own.results, call.results, strict=False))
        if call.name in _BY_SIZE or any(sum(a != b for a, b in sizes) > 1 for sizes in several):
            found.sources[number] = user_source()
        for (inner, mine), (_, theirs) in zip(own.numbers, call.numbers, strict=True):
            if type(mine) is not type(theirs) or (mine != theirs and not (mine != mine and theirs != theirs)):
                size = type(mine) is int and call.name in _BY_SIZE and (inner or call.name not in _FILLED)
                before = found.differences.get(number)
                if before is None or before.size:
                    found.differences[number] = CallDifference(size, mine, theirs, user_source())


def _numbers(args: Any, kwargs: Any, name: str) -> Iterator[tuple[bool, Any]]:
    """The arguments of a call besides tensors. A slice that goes to the end of its dim has no end."""
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


def compare_calls(
    run: Callable[..., Any],
    given: Any,
    rows: Sequence[int],
    undone: Callable[[], AbstractContextManager[None]],
    dims: Mapping[int, Sequence[int | None]] | None = None,
) -> CallComparison:
    """Compare the calls of `run` for the rows of the first microbatch of its arguments `given` with those for the rows
    of the batch; `rows` are those of each microbatch. The runs have no data or, where that fails, made-up numbers.

    `undone` gives a context behind which Python is as before. `dims` are the dims with rows of the calls' results, as
    far as they are known: then values that follow from no row are computed and compared too. Raises NotComparable.
    """
    dry = _DryRuns(run, given, undone)
    try:
        return dry.compare("meta", examples(rows), dims)
    except NotComparable:
        return dry.compare("cpu", examples(rows), dims)


class _DryRuns:
    """Runs a function apart from the program, with some number of rows."""

    def __init__(self, run: Callable[..., Any], given: Any, undone: Callable[[], AbstractContextManager[None]]) -> None:
        self._run, self._given, self._undone = run, given, undone
        self._rows = next((each.shape[0] for each in tensors_of(given) if each.ndim), 0)

    def compare(
        self, device: str, rows: Sequence[int], dims: Mapping[int, Sequence[int | None]] | None
    ) -> CallComparison:
        own, whole = rows[0], sum(rows)
        recorder = _Recorder(device)
        self._under(recorder, own, device)
        found = self._compared(recorder.calls, whole, device)
        if dims is not None and (results := _results(found, dims)) is not None:
            values = RowlessValues(device, results), RowlessValues(device, results)
            for mode, count in zip(values, (own, whole), strict=True):
                self._under(mode, count, device)
            _note_rowless(found, *values, rows)
        if found.diverges or found.has_other_numbers:
            again = self._compared(recorder.calls, own, device)
            if again.diverges or again.differences:
                raise NotComparable("its calls differ from one run to the next", None)
        return found

    def _compared(self, calls: Sequence[TorchCall], rows: int, device: str) -> CallComparison:
        comparer = _Comparer(device, calls)
        self._under(comparer, rows, device)
        found, number = comparer.found, len(comparer.found.results)
        if found.diverges is None and number < len(calls):  # it has made fewer calls
            found.diverges = number, calls[number].name, None
        return found

    def _under(self, mode: DryRun, rows: int, device: str) -> None:
        """Run the function for so many rows, as far as `mode` goes along."""
        try:
            with self._undone(), outside_programs(without_data=True), torch.random.fork_rng(devices=()):
                with torch.device(device), warnings.catch_warnings():
                    args, kwargs = pytree.tree_map(lambda leaf: _like(leaf, rows, self._rows, device), self._given)
                    warnings.simplefilter("ignore")
                    with mode:
                        self._run(*args, **kwargs)
        except Diverged:
            pass
        except Exception as error:  # any code of the user's, which need not run apart from the program
            raise NotComparable(f"{type(error).__name__}: {error}", raised_at(error)) from None


def _results(found: CallComparison, dims: Mapping[int, Sequence[int | None]]) -> list[list[Result]] | None:
    """The known facts about the results of each call; None where all that differ have rows."""
    known_results: list[list[Result]] = []
    for number, (call, whole) in enumerate(zip(found.calls, found.results, strict=False)):
        differ = [a != b for a, b in zip(call.results, whole, strict=False)]
        known = dims.get(number)
        if len(differ) != len(call.results) or len(whole) != len(differ):
            break
        if known is not None and len(known) != len(differ):
            known = [None] * len(differ)  # of tensors that are on no mesh
        rows = differ if known is None else [dim is not None for dim in known]
        known_results.append([Result(*each) for each in zip(rows, differ, strict=True)])
    rowless = any(each.differs and not each.rows for results in known_results for each in results)
    return known_results if rowless else None


def _note_rowless(found: CallComparison, own: RowlessValues, whole: RowlessValues, rows: Sequence[int]) -> None:
    """Note calls whose results that follow from no row differ, and calls that take rows with values in which a
    microbatch differs from its part of the batch."""
    found.sized.update(whole.sized)
    for number, (name, values, source) in whole.lost.items():
        mine = own.lost.get(number, (name, [None] * len(values), source))[1]
        if not same(mine, values):
            found.differences.setdefault(number, CallDifference(False, "one value", "another", source, gives=True))
    for number, (_, values, source) in whole.met.items():
        if number in own.met and not same_by_rows(own.met[number][1], values, rows):
            found.numbered[number] = source


def _like(leaf: Any, rows: int, given: int, device: str) -> Any:
    """A tensor like an argument, with `rows` rows where it has the `given` ones."""
    if not isinstance(leaf, torch.Tensor):
        return examples([leaf])[0]
    shape = (rows, *leaf.shape[1:]) if leaf.ndim and leaf.shape[0] == given else tuple(leaf.shape)
    return made_up(examples(shape), leaf.dtype, device).requires_grad_(leaf.requires_grad)


def counts_rows(name: str, found: CallDifference, own: int, whole: int) -> ProgramError:
    """The error of a call that takes a number of rows, or a number that follows from one."""
    verb = "gives" if found.gives else "takes"
    return ProgramError(
        f"{name} {verb} {found.own} for the {own} rows of a microbatch, and {found.whole} for the {whole} of the batch",
        hint="a number that follows from the number of rows differs in each microbatch. Call what counts them "
        f"itself,\nsuch as h.mean(0) for h.sum(0) / len(h); give the number as an argument, pipe.step(x, {whole}, …); "
        "or say\npipeline(…, mixes_rows=True), where each microbatch counts its own.",
        source=found.source,
    )


def other_way(name: str, own: int, whole: int, source: Source | None) -> ProgramError:
    """The error of a model that calls a function for one number of rows and not for the other."""
    return ProgramError(
        f"the model calls {name} for the {whole} rows of the batch, and not for the {own} of a microbatch"
        if source is not None
        else f"the model calls {name} for the {own} rows of a microbatch, and not for the {whole} of the batch",
        hint="its calls may not depend on the number of rows; with pipeline(…, mixes_rows=True) "
        "each microbatch\ntakes its own branch.",
        source=source or user_source(),
    )


def warn_not_comparable(why: str, source: Source | None) -> None:
    """Warn that the calls of a model could not be compared: a UserWarning, once for each line."""
    at = source or user_source()
    file, line = (at.own.file, at.own.line) if at is not None else ("a pipeline", 0)
    warnings.warn_explicit(
        f"Monarch could not check whether the model computes with its number of rows: {why}.\n"
        "  It was run apart from the mesh, without data and with made-up numbers. A number such as len(h) "
        "would be that\n  of a microbatch, without an error. Where it computes each row from itself alone, and with "
        "no such number, say\n  pipeline(…, mixes_rows=True), which turns this check off.",
        UserWarning,
        file,
        line,
        registry=_warned,
    )


_warned: dict[Any, Any] = {}
