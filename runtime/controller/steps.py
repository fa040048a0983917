"""The controller's records of what its workers have: values, steps, and plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from monarch.compiler.execution.executor import TakeBack
from monarch.compiler.plan import MonarchError, Plan, TensorType
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.results import Small, small_results


class Owner(Protocol):
    """The executor that takes a handle."""

    @property
    def place(self) -> Place: ...


class RemoteTensor:
    """A tensor on the workers: what `Executor.put` and `run` give. Dropping it frees the tensor there."""

    __slots__ = ("__weakref__", "_freed", "copied", "id", "owner", "step", "taken_by", "type")
    taken_by: Step | None
    """The step to which it was donated."""
    copied: tuple[int, Small] | None
    """Where workers copy it to (see `shared.results`)."""

    def __init__(self, id: int, type: TensorType, step: Step, owner: Owner, freed: deque[int]) -> None:
        self.id, self._freed, self.taken_by = id, freed, None  # for `__del__`, which runs wherever this ends
        self.copied = None
        self.type = type
        self.step = step  # that makes it
        self.owner = owner

    def __del__(self) -> None:
        # May run at any point of any thread: an append is all that is safe. A step frees the values that it takes. An
        # interrupt may have come before there was an id.
        try:
            if self.taken_by is None:
                self._freed.append(self.id)
        except AttributeError:
            pass

    def __repr__(self) -> str:
        return f"<handle {self.id}: {self.type}>"


class Step:
    """A command. `sequence` is its number once the workers have got it, and -1 before."""

    __slots__ = (
        *("again", "at", "bind", "commits", "donated", "dropped", "ended", "error", "expects", "lost"),
        *("name", "noted", "place", "placed", "previous", "receivers", "sequence", "staged", "undo"),
    )

    # How to find what a state was before the step: the plan, the first output's handle, and the arguments.
    Previous = tuple["PlanRecord", int, Sequence[object]]

    def __init__(self, name: str, donated: tuple[RemoteTensor, ...] = (), place: Place | None = None) -> None:
        self.sequence = -1
        self.name = name
        self.place = place  # the workers that it concerns, where these are not all
        self.receivers: tuple[int, ...] = ()  # who changes by it, where the others only send, and go on meanwhile
        self.ended = False  # these have finished it, and what follows from it is known, though others have not
        self.donated = donated  # kept until it is known that the step worked
        self.bind: Callable[[], TakeBack | None] | None = None  # to be done once the workers have it; may be done twice
        self.undo: TakeBack | None = None  # what `bind` gave, until it is known that the step worked
        self.expects = False  # whether the workers answer it
        self.previous: Step.Previous | None = None
        self.error: MonarchError | None = None
        self.lost = False  # it failed after its commit
        self.dropped = False  # when the mesh was healed
        self.at = (0, 0)  # where its record is in the ring, and how long it is
        self.staged: tuple[int, int] | None = None  # likewise, what it has in the staging area
        self.noted = False  # whether all that follows from its being given has been noted
        self.commits = False  # whether it replaces state
        self.again: Replay | None = None  # how to give it once more, until it is known that the step worked
        self.placed = False  # `again` is kept for longer: what it places may be on one worker only


@dataclass(eq=False, slots=True)
class Replay:
    """A command as the workers got it: its record, the buffers that it had in the staging area, the values that it
    makes, if it runs no plan, and the plan that it runs."""

    record: bytes | Callable[[int], bytes]
    parts: Sequence[Any] = ()
    puts: Sequence[int] = ()
    plan: Plan | None = None
    known: PlanRecord | None = None

    @property
    def makes(self) -> Sequence[int]:
        """The values that it makes."""
        if self.known is None:
            return self.puts
        assert isinstance(self.record, bytes)
        _, _, base, count, _, _ = wire.RUN_HEAD.unpack_from(self.record)
        return range(base, base + count)


class PlanRecord:
    """A plan that the workers have, with the parts that `run` needs laid out for speed."""

    def __init__(
        self, number: int, plan: Plan, types: dict[TensorType, TensorType], place: Place | None = None
    ) -> None:
        self.number = number
        self.place = place  # the workers that run it, where these are not all
        self.name = plan.name
        self.users = 0
        self.loaded = True  # the workers have it
        self.inputs = plan.inputs
        self.dtypes: list[torch.dtype | None] = [
            spec.type.dtype if spec.kind in ("scalar", "seed") else None for spec in plan.inputs
        ]
        # One object a type, so that a handle's type is nearly always compared by identity.
        self.input_types = [types.setdefault(spec.type, spec.type) for spec in plan.inputs]
        self.handle_types = [
            None if dtype is not None else type_ for dtype, type_ in zip(self.dtypes, self.input_types, strict=True)
        ]
        """Those of the inputs that are handles."""
        self.output_types = [types.setdefault(spec.type, spec.type) for spec in plan.outputs]
        self.struct = wire.run_struct(self.dtypes)
        self.donated = [at for at, donated in enumerate(plan.donated) if donated and self.dtypes[at] is None]
        self.owners: list[Owner] | None = None
        """Of a plan of several parts: for each input, the place that takes its handle, in order."""
        self.givers: list[Owner] = []
        """Likewise for each output; empty for a plan without parts."""
        receiving = [each for at, each in enumerate(plan.parts) if plan.senders and at not in plan.senders]
        self.receivers = tuple(rank for part in receiving for rank in part.place.ndslice)
        """Of a plan of which some parts only send, the workers of the others."""
        self.small = [(small.output, small) for small in small_results(plan)]
        """The results that are copied, by output."""
        for number, part in enumerate(plan.parts):
            outputs = [at for at, spec in enumerate(plan.outputs) if spec.part == number]
            self.small += [(outputs[small.output], small) for small in small_results(part.plan)]
        self.room = max((small.end for _, small in self.small), default=0)
        before = {spec.label: at for at, spec in enumerate(plan.inputs) if spec.kind == "state"}
        self.state_pairs = [
            (out, before[spec.label])
            for out, spec in enumerate(plan.outputs)
            if spec.kind == "state" and spec.label in before
        ]
