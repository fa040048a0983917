"""After a worker's death: which values go from which workers to which, and which ones the controller itself can place
again. No I/O."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from monarch.compiler.plan import MeshSpec, TensorType
from monarch.runtime.controller.placing import places_of
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import RemoteTensor, Step
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place

KEPT_BYTES = 64 << 20
"""So many bytes of the tensors that the controller placed are kept for as long as their handles live."""

_COPY_BYTES, _COPY_VALUES = 16 << 20, 256
"""The most that one command copies: workers that neither give nor get hold as much for a moment."""

Pairs = tuple[tuple[int, int], ...]
"""Workers that have values, each with one that is to get them."""


class Located(NamedTuple):
    """A value's type, and the workers that have it."""

    type: TensorType
    place: Place


def located(handle: RemoteTensor) -> Located:
    """The type and the workers of a handle's value."""
    return Located(handle.type, handle.owner.place)


@dataclass
class _Kept:
    handle: weakref.ref[RemoteTensor]
    id: int
    size: int
    steps: list[Step]
    until: int | None = None
    """The last step that may use it, once nobody else can."""


class Placed:
    """Tensors that the controller placed, and of which some worker has the only copy: kept until no step can need them;
    at most `KEPT_BYTES` of them for longer than the steps that are under way."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._kept: list[_Kept] = []
        self._look_at = 64

    def keep(self, handle: RemoteTensor, steps: list[Step], size: int) -> None:
        """Keep the steps that place a value of so many bytes."""
        self._kept.append(_Kept(weakref.ref(handle), handle.id, size, steps))
        if len(self._kept) >= self._look_at:
            self.forget()
            self._look_at = 64 + 2 * len(self._kept)

    def forget(self) -> None:
        """Drop the tensors that no step needs any more."""
        state, room, kept = self._state, KEPT_BYTES, []
        for each in reversed(self._kept):
            handle = each.handle()
            if handle is not None and handle.taken_by is None:
                each.until = None
                done = each.steps[-1].sequence < state.finished_commands
                room -= each.size
                drop = done and room < 0
            else:
                each.until = state.last.sequence if each.until is None else each.until
                drop = each.until < state.finished_commands
            if not drop:
                kept.append(each)
        kept.reverse()
        self._kept = kept

    def has(self, id: int) -> bool:
        """Whether a handle's value can be placed again."""
        return any(each.id == id for each in self._kept)

    def moved(self, handles: Mapping[int, RemoteTensor]) -> None:
        """The values belong to other handles from now on, by their ids; a tensor whose handle is not among them is of
        no use any more."""
        kept = [each for each in self._kept if each.id in handles]
        self._kept = [replace(each, handle=weakref.ref(handles[each.id])) for each in kept]

    def steps(self) -> dict[int, list[Step]]:
        """How to place the kept tensors again, by handle."""
        return {each.id: each.steps for each in self._kept}


class Handles:
    """All handles of a mesh that anything in this process refers to. It has each handle that lives, also where calls
    are interrupted and several threads add handles."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[RemoteTensor]] = {}
        self._look_at = 1024

    def add(self, handles: Sequence[RemoteTensor]) -> None:
        """Handles of a command that is not given yet: one that is interrupted before it is makes none of them."""
        for handle in handles:
            self._known[handle.id] = weakref.ref(handle)

    def forget(self) -> None:
        """Let go of those that are gone, now and then."""
        if len(self._known) > self._look_at:
            for id, known in list(self._known.items()):
                if known() is None:
                    self._known.pop(id, None)
            self._look_at = 1024 + 2 * len(self._known)

    def live(self) -> list[RemoteTensor]:
        return [handle for known in list(self._known.values()) if (handle := known()) is not None]


def find_sources(type: TensorType, place: Place, holders: Set[int]) -> Pairs | None:
    """Which worker gives a value to each worker of its place that lacks it, where only `holders` have it: one with the
    same block. None where no worker has some worker's block."""
    blocks = blocks_by_rank(type, place)
    first: dict[tuple[int, ...], int] = {}
    for rank in sorted(holders):
        if rank in blocks:
            first.setdefault(blocks[rank], rank)
    lacking = [rank for rank in place.ranks if rank not in holders]
    if any(blocks[rank] not in first for rank in lacking):
        return None
    return tuple((first[blocks[rank]], rank) for rank in lacking)


def blocks_by_rank(type: TensorType, place: Place) -> dict[int, tuple[int, ...]]:
    """For each worker of a value's place, which block of it that has: equal for equal blocks."""
    return dict(zip(place.ranks, places_of(type, place.mesh), strict=True))


def copies(
    values: Mapping[int, TensorType], mesh: MeshSpec, pairs: Pairs, kind: int = wire.COPY, snapshot: Sequence[int] = ()
) -> Iterator[bytes]:
    """The commands by which the workers copy values: of a kind, with the number of the snapshot where it takes one."""
    head = [*snapshot, len(pairs), *(rank for pair in pairs for rank in pair)]
    numbers: list[int] = []
    count = size = 0
    for handle, type in values.items():
        shape = type.local_shape(mesh)
        numbers += [handle, wire.DTYPE_CODES[type.dtype], len(shape), *shape]
        count, size = count + 1, size + type.nbytes
        if count >= _COPY_VALUES or size >= _COPY_BYTES:
            yield wire.numbers(kind, *head, *numbers)
            numbers, count, size = [], 0, 0
    if numbers:
        yield wire.numbers(kind, *head, *numbers)


def operands(step: Step, whole: Place) -> dict[int, Located]:
    """The values that a step reads which the workers get again. `whole` is the place of steps that name no other."""
    if step.again is None or step.again.known is None:
        return {}
    known = step.again.known
    owners = known.owners
    places = [step.place or whole] * len(known.dtypes) if owners is None else [owner.place for owner in owners]
    assert isinstance(step.again.record, bytes)
    arguments: Sequence[int] = known.struct.unpack_from(step.again.record)[6:]
    types = known.input_types
    return {arguments[at]: Located(types[at], places[at]) for at, dtype in enumerate(known.dtypes) if dtype is None}
