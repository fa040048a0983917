"""Whether the workers that are to hold the same bits do. Each adds up the bits of its blocks, at one place in the order
of commands, and sends the sums, a word for each value, which are compared here. Pure: the executor gives the commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from monarch.compiler.execution.executor import Handle
from monarch.compiler.plan import MeshSpec, ReplicaError
from monarch.compiler.survival import value_line
from monarch.runtime.controller.healing import Located, blocks_by_rank, located
from monarch.runtime.controller.steps import RemoteTensor, Step
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place

_SHOWN = 16

Names = Callable[[], Iterable[tuple[str, Handle]]]
"""The names of values in the user's program, as of now."""


@dataclass(frozen=True)
class _Asked:
    """A command, and the values whose sums the workers are to send, in order."""

    step: Step
    values: Sequence[tuple[str, Located]]


@dataclass(frozen=True)
class Difference:
    """Workers that hold other bits of a block than they should: `wrong` are fewer than half of those that hold it, the
    others are `right`; where no such half agrees, all are `wrong`."""

    name: str
    value: Located
    wrong: tuple[int, ...]
    right: tuple[int, ...]


class Replicas:
    """The checks of one mesh, `every` so many steps that replace state; none by itself, where that is 0."""

    def __init__(self, every: int, names: Names) -> None:
        self._every, self._names = every, names
        self.due = True
        self._commits = 0
        self._asked: tuple[_Asked, ...] = ()

    def ran(self, step: Step) -> None:
        """The workers have got a step."""
        self._commits += step.commits
        self.due = self.due or (self._every > 0 and self._commits >= self._every)

    def ask(self, live: Iterable[RemoteTensor]) -> Iterator[tuple[Step, bytes]]:
        """The commands to give now, behind all that make the `live` handles."""
        names = {handle.id: name for name, handle in self._names() if isinstance(handle, RemoteTensor)}
        values = [
            (handle.id, (names.get(handle.id, "a value"), located(handle)))
            for handle in live
            if handle.step.noted and handle.step.error is None and handle.taken_by is None and _copied(located(handle))
        ]
        self._commits, self.due = 0, False
        steps = []
        for first in range(0, len(values), wire.FREE_AT_ONCE):
            some = values[first : first + wire.FREE_AT_ONCE]
            step = Step("check replicas")
            step.expects = True
            steps.append((step, wire.numbers(wire.SUM, *(id for id, _ in some)), [value for _, value in some]))
        self._asked = tuple(_Asked(step, some) for step, _, some in steps)
        for step, record, _ in steps:
            yield step, record

    def steps(self) -> list[Step]:
        """The commands that are under way."""
        return [asked.step for asked in self._asked]

    def left(self) -> None:
        """The check under way is given up: a call was interrupted, or the mesh has lost workers."""
        self._asked, self.due = (), True

    def compare(self, answers: Mapping[int, Mapping[int, torch.Tensor]]) -> list[Difference]:
        """The workers' sums, by command and worker; the check is over with that."""
        asked, self._asked = self._asked, ()
        return [each for one in asked for each in _differences(one.values, answers[one.step.sequence])]


def error_of(found: Sequence[Difference], mesh: MeshSpec, host_of: Callable[[int], str]) -> ReplicaError:
    """The user's message about differences."""
    everyone = Place.whole(mesh)
    decided = [each for each in found if each.right]
    wrong = tuple(sorted({rank for each in decided or found for rank in each.wrong}))
    names = tuple(dict.fromkeys(each.name for each in found))

    def called(rank: int) -> str:
        host = host_of(rank)
        return f"worker {everyone.name_of(rank)}" + (f" on host {host}" if host else "")

    def line(each: Difference) -> str:
        what = value_line(each.name, each.value.type, each.value.place.mesh)
        ranks = "; ".join(everyone.name_of(rank) for rank in each.wrong)
        if each.right:
            return f"  {what}: {ranks} against {len(each.right)} that agree"
        return f"  {what}: {ranks}"

    lines = [line(each) for each in found[:_SHOWN]] + [f"and {len(found) - _SHOWN} more"] * (len(found) > _SHOWN)
    tensors = f"{len(names)} tensor{'s' * (len(names) != 1)}"
    who = "; ".join(map(called, wrong))
    if decided:
        message = f"{who} of {mesh} hold{'s' * (len(wrong) == 1)} other bits than the replicas of {tensors}"
        advice = (
            "monarch.heal_mesh(mesh) puts new workers in their places, with the values of the others.\n"
            "Results that steps since the last check computed from the wrong values are in all workers' state:\n"
            "a checkpoint from before has none."
        )
    else:
        message = f"the replicas of {tensors} of {mesh} hold different bits: {who}"
        advice = "Which of them are right nobody can say, with so few: start again from the last checkpoint."
    return ReplicaError(message, hint="\n".join([*lines, advice])).knowing(
        worker=wrong[0],
        coordinates=everyone.coordinates_of(wrong[0]),
        host=host_of(wrong[0]),
        workers=wrong,
        decided=bool(decided),
        tensors=names,
    )


def _copied(value: Located) -> bool:
    """Whether several workers hold the same block of it."""
    dims = value.type.layout.mesh_dims
    return any(size > 1 and name not in dims for name, size in value.place.mesh.dims)


def _differences(values: Sequence[tuple[str, Located]], sums: Mapping[int, torch.Tensor]) -> Iterator[Difference]:
    alike: dict[tuple[Place, frozenset[str]], list[int]] = {}
    for at, (_, value) in enumerate(values):
        alike.setdefault((value.place, frozenset(value.type.layout.mesh_dims)), []).append(at)
    for columns in alike.values():
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, block in blocks_by_rank(*values[columns[0]][1]).items():
            holders.setdefault(block, []).append(rank)
        for ranks in holders.values():
            table = torch.stack([sums[rank][columns] for rank in ranks])
            differ = (table != table[0]).any(0) & (table >= 0).all(0)
            for column in differ.nonzero().flatten().tolist():
                name, value = values[columns[column]]
                told = dict(zip(ranks, table[:, column].tolist(), strict=True))
                most, count = Counter(told.values()).most_common(1)[0]
                right = tuple(rank for rank in ranks if told[rank] == most) if 2 * count > len(ranks) else ()
                yield Difference(name, value, tuple(rank for rank in ranks if rank not in right), right)
