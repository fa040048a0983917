"""The records that wait to be sent on one stream, and their order. No I/O.

Each mesh (on the way up: each host of each mesh) has a lane, in which order is kept. Lanes take turns, a record or a
part of one each, so that a large message holds up nothing but its own lane. The tree's own records go first. Of
progress only the latest is kept, and it goes when nothing else of its mesh waits: so it never overtakes an earlier
record, such as why a command failed. The loss of a host goes behind what it has said, and a close last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from monarch.runtime.control import limits
from monarch.runtime.control.records import (
    Attach,
    Attached,
    Close,
    Forget,
    HostPart,
    Lost,
    Progress,
    Record,
    Start,
)


class Outbox:
    """`waiting` are the bytes in it; it takes more than `limit` (the sender has to look at `full` first)."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limits.QUEUE_BYTES if limit is None else limit
        self._first: deque[Record] = deque()
        self._progress: dict[tuple[int, str], Progress] = {}
        self._lanes: dict[tuple[int, int], deque[Start | HostPart | Forget]] = {}
        self._losses: list[Lost] = []
        self._turns: deque[tuple[int, int]] = deque()
        self._close: list[Record] = []
        self.waiting = 0

    @property
    def full(self) -> bool:
        return self.waiting > self._limit

    def __bool__(self) -> bool:
        return bool(self._first or self._losses or self._progress or self._turns or self._close)

    def put(self, record: Record) -> None:
        if isinstance(record, Progress):
            self._progress[record.mesh, record.kind] = record
            return
        self.waiting += cost(record)
        if isinstance(record, Start | HostPart | Forget):
            key = (record.mesh, 0 if isinstance(record, Forget) else record.host)
            if key not in self._lanes:
                self._lanes[key] = deque()
                self._turns.append(key)
            self._lanes[key].append(record)
        elif isinstance(record, Lost):
            self._losses.append(record)
        elif isinstance(record, Close):
            self._close.append(record)
        else:
            self._first.append(record)

    def take(self) -> list[Record]:
        """The records of the next frame; none when nothing waits."""
        taken: list[Record] = []
        data = head = 0
        while len(taken) < limits.FRAME_RECORDS - 1 and data < limits.FRAME_BYTES and head < limits.FRAME_HEAD_BYTES:
            record: Record | None
            if self._first:
                record = self._first.popleft()
            elif (record := self._loss()) is not None:
                self._losses.remove(record)
            elif (key := self._due_progress()) is not None:
                taken.append(self._progress.pop(key))
                continue
            elif self._turns:
                record = self._turn()
                data += 0 if isinstance(record, Forget) else len(record.data)
            elif self._close:
                record = self._close.pop()
            else:
                break
            self.waiting -= cost(record)
            head += cost(record) - (len(record.data) if isinstance(record, Start | HostPart) else 0)
            taken.append(record)
        return taken

    def _due_progress(self) -> tuple[int, str] | None:
        if not self._progress:
            return None
        busy = {mesh for mesh, _ in self._lanes}
        return next((key for key in self._progress if key[0] not in busy), None)

    def _loss(self) -> Lost | None:
        """A loss of hosts of which nothing more waits."""
        for lost in self._losses:
            if not any(lost.start <= host < lost.stop for _, host in self._lanes):
                return lost
        return None

    def _turn(self) -> Start | HostPart | Forget:
        """One record of the lane whose turn it is; of a long one its first part."""
        key = self._turns.popleft()
        lane = self._lanes[key]
        record = lane.popleft()
        if isinstance(record, Start | HostPart) and len(record.data) > limits.PART_BYTES:
            view = memoryview(record.data)
            lane.appendleft(HostPart(record.mesh, record.host, view[limits.PART_BYTES :]))
            self.waiting += limits.RECORD_COST  # there is one record more than there was
            record = replace(record, data=view[: limits.PART_BYTES])
        if lane:
            self._turns.append(key)
        else:
            del self._lanes[key]
        return record


def cost(record: Record) -> int:
    """The bytes that a record counts in a queue."""
    match record:
        case Start(head=head, data=data, targets=targets):
            return limits.RECORD_COST + len(head) + len(data) + 8 * len(targets or ())
        case HostPart(data=data):
            return limits.RECORD_COST + len(data)
        case Attach(addresses=texts):
            return limits.RECORD_COST + sum(map(len, texts))
        case Attached(hosts=hosts, failures=failures):
            return limits.RECORD_COST + 300 * (len(hosts) + len(failures))
        case _:
            return limits.RECORD_COST
