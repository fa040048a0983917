"""The order in which things are sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch.runtime.control import limits
from monarch.runtime.control.outbox import Outbox
from monarch.runtime.control.records import (
    Assembly,
    Beat,
    Close,
    Forget,
    HostPart,
    Lost,
    Message,
    Progress,
    Record,
    Start,
)

BIG = 10 * limits.PART_BYTES


def start(mesh: int, size: int = 0, kind: str = "x") -> Start:
    return Start(kind, mesh, size=size, data=bytes(size))


def test_a_large_message_lets_others_through() -> None:
    outbox = Outbox()
    outbox.put(start(1, BIG))
    outbox.put(start(2))
    first = outbox.take()
    assert [type(record) for record in first] == [Start, Start, HostPart]
    assert sum(len(record.data) for record in first if isinstance(record, Start | HostPart)) == limits.FRAME_BYTES


def test_two_large_messages_take_turns() -> None:
    outbox = Outbox()
    for mesh in (1, 2):
        outbox.put(start(mesh, BIG))
    meshes = [record.mesh for _ in range(10) for record in outbox.take() if isinstance(record, Start | HostPart)]
    assert meshes == [1, 2] * 10


def test_a_loss_goes_behind_what_the_host_has_said_and_before_the_others_a_close_behind_everything() -> None:
    outbox = Outbox()
    big = bytes(2 * limits.FRAME_BYTES)
    for host in (1, 2):
        outbox.put(Start("x", 1, host, size=len(big), data=big))
    outbox.put(HostPart(2, 1, b"half of something"))
    outbox.put(Close())
    outbox.put(Lost(5, 9, "cut"))
    outbox.put(Lost(1, 2, "cut"))
    sent: list[Record] = []
    while records := outbox.take():
        sent += records
    assert isinstance(sent[0], Lost) and sent[0].start == 5 and isinstance(sent[-1], Close)
    (at,) = [at for at, record in enumerate(sent) if isinstance(record, Lost) and record.start == 1]
    before = [record.host for record in sent[1:at] if isinstance(record, Start | HostPart)]
    after = [record.host for record in sent[at:] if isinstance(record, Start | HostPart)]
    assert before.count(1) == 5 and 1 not in after and 2 in after


def test_a_mesh_is_forgotten_behind_its_messages() -> None:
    outbox = Outbox()
    outbox.put(start(1, 3 * limits.PART_BYTES))
    outbox.put(Forget(1))
    outbox.put(start(1))
    sent = [record for _ in range(3) for record in outbox.take()]
    assert [type(record) for record in sent] == [Start, HostPart, HostPart, Forget, Start]


def test_only_the_latest_progress_is_sent() -> None:
    outbox = Outbox()
    for number in range(100_000):
        outbox.put(Progress("p", 1, (number,)))
    outbox.put(Progress("p", 2, (7,)))
    assert outbox.take() == [Progress("p", 1, (99_999,)), Progress("p", 2, (7,))]
    assert not outbox


def test_progress_overtakes_nothing_of_its_mesh() -> None:
    """Not even where it takes the place of progress that was there first."""
    outbox = Outbox()
    outbox.put(Progress("progress", 1, (5,)))
    outbox.put(Start("report", mesh=1, host=0))
    outbox.put(Start("report", mesh=1, host=3))
    outbox.put(Progress("progress", 1, (7,)))
    outbox.put(Progress("progress", 2, (9,)))
    taken = [record for record in iter(outbox.take, []) for record in record]
    assert [(type(record).__name__, record.mesh) for record in taken] == [
        ("Progress", 2),
        ("Start", 1),
        ("Start", 1),
        ("Progress", 1),
    ]


def test_a_frame_has_room_for_a_beat_besides() -> None:
    outbox = Outbox()
    for _ in range(3 * limits.FRAME_RECORDS):
        outbox.put(start(1))
    sizes = [len(outbox.take()) for _ in range(4)]
    assert sum(sizes) == 3 * limits.FRAME_RECORDS and max(sizes) < limits.FRAME_RECORDS


def test_it_is_full_beyond_its_limit_and_empties_to_nothing() -> None:
    outbox = Outbox(limit=BIG)
    for mesh in range(30):
        outbox.put(start(mesh, BIG // 10))
    assert outbox.full
    while outbox.take():
        pass
    assert not outbox.full and outbox.waiting == 0 and not outbox


MESSAGES = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from([0, 1, limits.PART_BYTES, limits.PART_BYTES + 1, 3 * limits.PART_BYTES])
    ),
    max_size=12,
)


@given(MESSAGES, st.data())
def test_every_message_arrives_whole_and_in_the_order_of_its_mesh(
    messages: list[tuple[int, int]], data: st.DataObject
) -> None:
    outbox, assembly = Outbox(), Assembly()
    arrived: list[Message] = []

    def pass_on(records: list[Record]) -> bool:
        for record in records:
            assert isinstance(record, Start | HostPart)
            message = assembly.take(record)
            if message is not None:
                arrived.append(message)
        return bool(records)

    for at, (mesh, size) in enumerate(messages):
        outbox.put(Start("x", mesh, head=b'{"at":%d}' % at, size=size, data=bytes([at]) * size))
        if data.draw(st.booleans()):
            pass_on(outbox.take())
    while pass_on(outbox.take()):
        pass
    for mesh in range(4):
        expected = [(at, bytes([at]) * size) for at, (of, size) in enumerate(messages) if of == mesh]
        assert [(m.head["at"], bytes(m.data)) for m in arrived if m.mesh == mesh] == expected


def test_a_beat_costs_what_any_record_costs() -> None:
    outbox = Outbox()
    outbox.put(Beat())
    outbox.put(Forget(1))
    assert outbox.waiting == 2 * limits.RECORD_COST
