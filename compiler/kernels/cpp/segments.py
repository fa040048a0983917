"""The facts about a nest's values that its emitter needs: along which loops they vary, after which reductions they
come, and in which segments they are computed.

Reductions that depend on each other follow each other as *segments* of loops. A value that varies along reduced dims
and is needed by several segments is kept in a small array, or computed again where that is cheaper. What an output may
overwrite is not stored before it was loaded for the last time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from monarch.compiler.kernels.cpp import expressions
from monarch.compiler.kernels.cpp.schedule import Schedule
from monarch.compiler.kernels.cpp.simplify import Simple
from monarch.compiler.loops.ir import Constant, Load, Op, Position, Reduce, Store
from monarch.compiler.loops.nests import operands

BLOCK = 512
"""Columns that are reduced at a time: their accumulators stay in the L1 cache."""
_MOST_KEPT = 256 << 10
"""Bytes of a thread's stack for values that later segments need again."""
_MOST_STAGED = 16
"""Tiles on the stack."""
_CHEAP = 3
"""The most that computing a value again may cost instead of keeping it."""


@dataclass
class Segment:
    """Loops that run one after the other within the kept loops: `reduced` ones or, for columns, those along the block.

    `targets` are its statements, `needed` all that it computes, `kept` the part of these that is written to arrays for
    later segments."""

    phase: int
    reduced: bool
    targets: list[int] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)


class Segments:
    """Of a simplified nest under a schedule. `buffers` are the dtypes of the kernel's buffers, `overwrites` has, for
    the buffer of each store, the inputs whose memory it may be given."""

    def __init__(
        self,
        simple: Simple,
        schedule: Schedule,
        buffers: Sequence[torch.dtype],
        overwrites: dict[int, frozenset[int]],
    ) -> None:
        self.nest = simple.nest
        self.origin = simple.origin
        self.schedule = schedule
        self.buffers = buffers
        self.body = self.nest.body
        self.reduced = frozenset(schedule.reduced)
        self.row = math.prod(self.nest.dims[dim] for dim in schedule.reduced)
        self.dtypes = self._dtypes()
        self.varies = self._varies()
        self.phases = self._phases()
        self._overwrites = overwrites
        self.staged = self._staged()
        self.segments = self._segments()

    def _dtypes(self) -> list[torch.dtype]:
        found: list[torch.dtype] = []
        for statement in self.body:
            match statement:
                case Load(buffer) | Store(buffer):
                    found.append(self.buffers[buffer])
                case Constant(_, dtype) | Op(_, _, dtype):
                    found.append(dtype)
                case Position():
                    found.append(torch.int64)
                case Reduce(_, arg):
                    found.append(found[arg])
        return found

    def _varies(self) -> list[frozenset[int]]:
        """As in `Nest`; but results of reductions are arrays along a block of columns."""
        along_block = frozenset({self.schedule.vector} if self.schedule.columns else ())
        found: list[frozenset[int]] = []
        for number, statement in enumerate(self.body):
            own = self.nest.varies[number]
            for operand in operands(statement):
                own |= found[operand]
            if isinstance(statement, Reduce):
                own = (own - self.reduced) | along_block
            found.append(own)
        return found

    def _phases(self) -> list[int]:
        """How many reductions that depend on each other come before a value."""
        found: list[int] = []
        for statement in self.body:
            phase = max((found[operand] for operand in operands(statement)), default=0)
            found.append(phase + isinstance(statement, Reduce))
        return found

    def _staged(self) -> frozenset[int]:
        """Loads of consecutive elements along the tile's dim, and at a stride along the vectors'."""
        tile, vector = self.schedule.tile, self.schedule.vector
        found = [
            number
            for number, statement in enumerate(self.body)
            if tile >= 0
            and isinstance(statement, Load)
            and statement.gather < 0
            and statement.index.strides[tile] == 1
            and statement.index.strides[vector] > 1
        ]
        return frozenset(found[:_MOST_STAGED])

    def is_scalar(self, number: int) -> bool:
        """Whether a value is computed outside all segments, once and for all."""
        along = self.varies[number]
        return not along & self.reduced and not (self.schedule.columns and self.schedule.vector in along)

    def _loaded_later(self, store: int, after: int) -> int:
        """The last segment beyond `after` that loads from memory which a store may overwrite, or -1."""
        target = self.body[store]
        assert isinstance(target, Store)
        inputs = self._overwrites.get(target.buffer, frozenset())
        last = -1
        for at in range(after + 1, len(self.segments)):
            for number in self.segments[at].needed:
                statement = self.body[number]
                if isinstance(statement, Load) and statement.buffer in inputs:
                    last = at
        return last

    def _segments(self) -> list[Segment]:
        if not self.schedule.reduced:
            return []
        late: dict[int, int] = {}
        while True:
            self.segments = self._plan(late)
            for at, segment in enumerate(self.segments):
                for number in segment.targets:
                    if isinstance(self.body[number], Store):
                        if (to := self._loaded_later(number, at)) >= 0:
                            late[number] = self.segments[to].phase
            again = {number: phase for number, phase in late.items() if phase > self._segment_of(number).phase}
            if not again:
                return self.segments

    def _segment_of(self, target: int) -> Segment:
        return next(segment for segment in self.segments if target in segment.targets)

    def _plan(self, late: dict[int, int]) -> list[Segment]:
        found: dict[tuple[int, bool], Segment] = {}
        for number, statement in enumerate(self.body):
            gathers = isinstance(statement, Load) and statement.gather >= 0
            if not isinstance(statement, (Reduce, Store)) and not gathers:
                continue
            along = self.varies[number]
            if isinstance(statement, Reduce):
                place = self.phases[number] - 1, True
            elif self.is_scalar(number):
                continue
            else:
                place = late.get(number, self.phases[number]), bool(along & self.reduced)
            found.setdefault(place, Segment(*place)).targets.append(number)
        # A phase has the loops along the block before those that reduce.
        segments = [found[place] for place in sorted(found)]
        if self.schedule.columns:
            for phase in range(max((segment.phase for segment in segments), default=0) + 1):
                if (phase, False) not in found:
                    found[phase, False] = Segment(phase, False)
            segments = [found[place] for place in sorted(found)]
        self.computed: dict[int, Segment] = {}
        self.keeper: dict[int, Segment] = {}
        self.kept_bytes = 0
        for at, segment in enumerate(segments):
            self._need(segment.targets, at, segments)
        return segments

    def _need(self, numbers: Iterable[int], at: int, segments: list[Segment]) -> None:
        """Have values computed in segment `at`, with all that they take, or kept from earlier ones."""
        segment, pending = segments[at], set(numbers)
        for number in range(max(pending, default=-1), -1, -1):
            if number not in pending or number in segment.needed or number in self.keeper:
                continue
            statement = self.body[number]
            if number not in segment.targets and (isinstance(statement, Reduce) or self.is_scalar(number)):
                continue
            if self._costs[number] > _CHEAP and self._room_to_keep(number):
                before = self.computed.get(number)
                if before is None and not self.varies[number] & self.reduced:
                    # For columns: computed once along the block, not once in each row.
                    place = next(i for i, s in enumerate(segments) if not s.reduced and s.phase == self.phases[number])
                    if place < at:
                        self._need([number], place, segments)
                        before = segments[place]
                if before is not None and before is not segment:
                    before.kept.add(number)
                    self.keeper[number] = before
                    self.kept_bytes += self._bytes_to_keep(number)
                    continue
            segment.needed.add(number)
            self.computed.setdefault(number, segment)
            pending.update(operands(statement))

    def _room_to_keep(self, number: int) -> bool:
        along = self.varies[number]
        if isinstance(self.body[number], (Store, Reduce)) or self.schedule.vector not in along:
            return False
        if self.schedule.columns and along & self.reduced:
            return False
        return self.kept_bytes + self._bytes_to_keep(number) <= _MOST_KEPT

    def _bytes_to_keep(self, number: int) -> int:
        return self.dtypes[number].itemsize * (BLOCK if self.schedule.columns else self.row)

    @cached_property
    def _costs(self) -> list[float]:
        """The cost of computing each value again in another segment."""
        found: list[float] = []
        for number, statement in enumerate(self.body):
            cost = sum(found[operand] for operand in operands(statement))
            match statement:
                case Load(_, index, gather):
                    vector = self.schedule.vector
                    cost += 8 if gather >= 0 or index.strides[vector] > 1 else 1
                case Op(name):
                    cost += expressions.COSTS.get(name, 1)
                case Reduce():
                    cost = 1
            found.append(0.0 if self.is_scalar(number) else float(min(cost, 1e6)))
        return found
