"""CUDA graphs: a step's stretches, launched at once.

A plan says which of its instructions are one stretch (`compiler.plan.stretches`). Each is run as it is for some steps,
then recorded, and from then on replayed. A graph holds addresses, so its inputs have to be where they were when it was
recorded, and its results are in the same place in every step:

    state that stays where it is     is read and written there, and its address compared before each replay
    what another graph has made      is read there
    all else                         is copied into fixed memory first, once a step: arguments, what collectives give
    what the step gives              is copied out at its end, unless it is state

All graphs of a plan are recorded in the order in which they run, into one pool of memory: the next graph may use the
memory that only the former one needed. So they are given up together, where an address is another one now, and recorded
again, in order, in the next step. A plan that would be recorded again and again is run without them, and so is one that
cannot be recorded; a warning says so once.

The next step reads nothing that a failed one has left: all fixed memory is written before it is read.

Written from torch's documentation. Not yet run on a GPU: in tests a stand-in records on CPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from monarch.compiler.execution.events import say
from monarch.compiler.plan import Plan
from monarch.compiler.plan.stretches import Stretch, staying, stretches_of
from monarch.runtime.worker.frame import Function, Locate, Location

WARM_UP = 2
"""Steps before the one in which graphs are recorded: the first ones set up libraries, which must not be part of a
graph."""

MOST_IN_A_ROW = 4
"""So often are graphs recorded again with fewer than `SETTLED` steps in between."""
SETTLED = 50


class Recorder:
    """Records launches on a device, for one plan at a time. `aside` is the stream of the first steps: libraries have
    memory and handles for each stream, which must not be made while one is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def record(self, function: Callable[[], tuple[Any, ...]]) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """A graph that replays the launches of the function, and the function's results: tensors that a replay fills.
        Nothing is computed yet. Raises the function's errors, and RuntimeError where its calls cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        failed: Exception | None = None
        made: tuple[Any, ...] = ()
        try:
            # Other threads may go on meanwhile: NCCL's look after works, and actors have the GPU too. The stream is the
            # current one once more around it all, for torch leaves it current where a recording fails.
            with (
                torch.cuda.stream(self._stream),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    made = function()
                except Exception as error:  # raised below: torch's error of the recording is only its consequence
                    failed = error
        except RuntimeError as error:
            with suppress(RuntimeError):  # the allocator believes that it goes on, unless it has ended
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise failed or error from None
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # it refers to the function's tensors
        return graph.replay, made


class Graphs:
    """The graphs of one plan on one device. `where` is the worker's name in messages."""

    def __init__(self, plan: Plan, device: torch.device, where: str) -> None:
        self.stretches: Sequence[Stretch] = stretches_of(plan).stretches
        self.given_up = False
        self.recorded = 0
        """How often all were recorded."""
        self._plan = plan
        self._device = device
        self._where = where
        self._staying = staying(plan)
        self._captured: list[weakref.ref[_Captured]] = []  # they hold this: all of it ends with the frame
        self.recorder: Recorder | None = None
        self._warm = 0
        self._steps = 0  # since they were recorded
        self._in_a_row = 0
        self._recording = False
        self.fixed: dict[int, torch.Tensor] = {}
        """By slot, the fixed memory into which its value is copied."""
        self._leaving: list[int] | None = None
        """The results whose memory the next step overwrites."""

    # -- called by a frame
    # ------------------------------------------------------------------------------------------------

    def captured(self, stretch: Stretch, function: Function, locate: Locate) -> Function:
        made = _Captured(self, stretch, function, locate)
        self._captured.append(weakref.ref(made))
        return made

    def around(self, step: Function) -> Function:
        def run(arguments: list[Any]) -> tuple[Any, ...]:
            self._recording = self._warm >= WARM_UP and not self.given_up
            results = step(arguments)
            if self._warm < WARM_UP:
                self._warm += 1
                return results
            self._steps += 1
            if self._leaving is None:
                owned = self.owned()
                self._leaving = [at for at, result in enumerate(results) if _lies_in(result, owned)]
            return _copied_out(results, self._leaving)

        return run

    # -- what its stretches call -----------------------------------------------------------------------------------

    def aside(self) -> AbstractContextManager[None]:
        """Where a stretch runs that is not replayed."""
        return nullcontext() if self._warm >= WARM_UP or self.given_up else self._its_recorder().aside()

    @property
    def recording(self) -> bool:
        """Whether a stretch that is not recorded yet is to be, in this step."""
        return self._recording

    def stays(self, slot: int) -> bool:
        return slot in self._staying

    def owned(self) -> set[int]:
        """The addresses of all memory that graphs write, and that is not state."""
        return {address for each in self._all() for address in each.owned}

    def record(
        self, function: Callable[[], tuple[Any, ...]], locate: Locate
    ) -> tuple[Callable[[], None], tuple[Any, ...]] | None:
        """None where it cannot be."""
        self._leaving = None
        if not any(each.is_recorded for each in self._all()):
            self.recorded += 1
            self._steps = 0
        try:
            return self._its_recorder().record(function)
        except Exception as error:  # where it is the program's fault, it is raised again when that is run without
            at = locate(error.__traceback__)
            self.give_up(
                f"{'it' if at is None else self._described(at)} cannot be recorded: {type(error).__name__}: {error}"
            )
            return None

    def _described(self, at: Location) -> str:
        instruction = self._plan.instructions[at.number]
        source = self._plan.sources[instruction.source] if instruction.source >= 0 else None
        return instruction.op if source is None else f"{instruction.op} ({source})"

    def moved(self) -> None:
        """Some state has another address now."""
        self._in_a_row = self._in_a_row + 1 if self._steps < SETTLED else 1
        if self._in_a_row > MOST_IN_A_ROW:
            self.give_up(f"its state was somewhere else {self._in_a_row} times in a row")
        self._drop()

    def _all(self) -> list[_Captured]:
        return [each for ref in self._captured if (each := ref()) is not None]

    def _its_recorder(self) -> Recorder:
        if self.recorder is None:
            self.recorder = Recorder(self._device)
        return self.recorder

    def _drop(self) -> None:
        """Not to be recorded in this step: the first stretches of it are past."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # some may run
        for each in self._all():
            each.drop()
        self.fixed.clear()
        self.recorder = None
        self._recording = False
        self._leaving = None

    def give_up(self, why: str) -> None:
        self.given_up = True
        self._drop()
        say("graphs", f"{self._where} runs '{self._plan.name}' without CUDA graphs from here on: {why}")


_Fed = Sequence[tuple[list[torch.Tensor], list[int]]]


@dataclass
class _Recording:
    """`fed` has, for each dtype, the fixed tensors and the places of the arguments that are copied into them; `direct`
    has the places of the arguments that are read in place, and `lie` their addresses. `gives` makes the results, of the
    arguments."""

    replay: Callable[[], None]
    fed: _Fed
    direct: list[int]
    lie: list[tuple[int, tuple[int, ...]]]
    gives: list[Callable[[Sequence[Any]], Any]]

    def feed(self, given: Sequence[Any]) -> None:
        _feed(self.fed, given)


class _Captured:
    """A stretch: `function` runs it as it is."""

    def __init__(self, graphs: Graphs, stretch: Stretch, function: Function, locate: Locate) -> None:
        self._graphs = graphs
        self._locate = locate
        self._stretch = stretch
        self._function = function
        self._now: _Recording | None = None
        self.owned: frozenset[int] = frozenset()

    @property
    def is_recorded(self) -> bool:
        return self._now is not None

    def drop(self) -> None:
        self._now = None
        self.owned = frozenset()

    def __call__(self, given: list[Any]) -> tuple[Any, ...]:
        now = self._now
        if now is not None and now.lie != _places(given, now.direct):
            self._graphs.moved()
            now = None
        if now is None and self._graphs.recording:
            now = self._record(given)
        elif now is not None:
            now.feed(given)
        if now is None:
            with self._graphs.aside():
                return self._function(given)
        now.replay()
        return tuple([make(given) for make in now.gives])

    def _record(self, given: list[Any]) -> _Recording | None:
        """The fixed tensors have these values already."""
        if not all(isinstance(value, torch.Tensor) for value in given):
            self._graphs.give_up("it computes with what is no tensor")
            return None
        owned = self._graphs.owned()
        fixed: list[Any] = list(given)
        fed: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
        direct: list[int] = []
        staying: dict[int, int] = {}
        for at, (slot, value) in enumerate(zip(self._stretch.reads, given, strict=True)):
            if self._graphs.stays(slot) or _lies_in(value, owned):
                direct.append(at)
                if self._graphs.stays(slot) and value.numel():
                    staying.setdefault(_address(value), at)
                continue
            if (there := self._graphs.fixed.get(slot)) is not None:  # a stretch before this one has it copied
                fixed[at] = there
                continue
            fixed[at] = self._graphs.fixed[slot] = torch.empty_like(value)
            group = fed.setdefault(value.dtype, ([], []))
            group[0].append(fixed[at])
            group[1].append(at)
        lie = _places(given, direct)
        _feed([*fed.values()], given)
        found = self._graphs.record(lambda: self._function(list(fixed)), self._locate)
        if found is None:
            return None
        replay, made = found
        gives = [_again(value, fixed, staying) for value in made]
        kept = [*(each for group in fed.values() for each in group[0]), *_tensors(made)]
        self.owned = frozenset(_address(each) for each in kept) - staying.keys()
        self._now = _Recording(replay, [*fed.values()], direct, lie, gives)
        return self._now


def _again(value: Any, fixed: Sequence[Any], staying: dict[int, int]) -> Callable[[Sequence[Any]], Any]:
    """A function that gives a result after each replay: the same tensor, or, for state, the argument that it is or
    views. So no graph keeps state that a program has let go of."""
    if isinstance(value, list | tuple):
        parts = [_again(each, fixed, staying) for each in value]
        return lambda given: tuple(part(given) for part in parts)
    at = staying.get(_address(value)) if isinstance(value, torch.Tensor) else None
    if at is None or value.dtype != fixed[at].dtype:
        return lambda given: value
    place: int = at
    if value is fixed[place]:
        return lambda given: given[place]
    size, stride, ahead = value.size(), value.stride(), value.storage_offset() - fixed[place].storage_offset()

    def view(given: Sequence[Any]) -> torch.Tensor:
        state: torch.Tensor = given[place]
        return state.as_strided(size, stride, state.storage_offset() + ahead)

    return view


def _feed(fed: _Fed, given: Sequence[Any]) -> None:
    for fixed, places in fed:
        torch._foreach_copy_(fixed, [given[at] for at in places])


def _places(values: Sequence[Any], at: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    return [(values[each].data_ptr(), values[each].stride()) for each in at]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _lies_in(value: Any, addresses: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and _address(value) in addresses


def _copied_out(results: tuple[Any, ...], leaving: Sequence[int]) -> tuple[Any, ...]:
    if not leaving:
        return results
    found = list(results)
    groups: dict[torch.dtype, list[int]] = {}
    for at in leaving:
        groups.setdefault(found[at].dtype, []).append(at)
    for places in groups.values():
        own = [torch.empty_like(results[at]) for at in places]
        torch._foreach_copy_(own, [results[at] for at in places])
        for at, each in zip(places, own, strict=True):
            found[at] = each
    return tuple(found)
