"""What streams carry as bytes: exact both ways, and an error for everything else."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarch.runtime.control import codec, limits
from monarch.runtime.control import monarch_pb2 as pb
from monarch.runtime.control.handshake import (
    Agreed,
    ControllerHandshake,
    HostHandshake,
    NoSuchSession,
    Opener,
    Refused,
    Release,
    Sealer,
    Session,
    frame_of,
)
from monarch.runtime.control.message import Message
from monarch.runtime.control.records import (
    Assembly,
    Attach,
    Attached,
    Beat,
    Close,
    Forget,
    HostInfo,
    HostPart,
    Lost,
    Malformed,
    Progress,
    Record,
    Start,
    ranges,
    read_head,
    started,
)

NUMBERS = st.integers(0, limits.HOSTS - 1)
MESHES = st.integers(0, (1 << 64) - 1)
KINDS = st.from_regex(r"[a-z_]{1,64}", fullmatch=True)
TEXTS = st.text(max_size=50).filter(lambda text: text.replace("\n", "").isprintable())
DATA = st.binary(max_size=40)
TARGETS = st.none() | st.lists(NUMBERS, max_size=8).map(ranges)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INFOS = st.builds(
    HostInfo,
    NUMBERS,
    TEXTS,
    TEXTS,
    st.integers(0, 4096),
    st.integers(0, 1 << 50),
    st.integers(1, 1 << 30),
    *[TEXTS] * 6,
)
STARTS = st.builds(
    lambda kind, mesh, host, targets, head, data, more: Start(kind, mesh, host, targets, head, len(data) + more, data),
    KINDS, MESHES, NUMBERS, TARGETS, st.just(b'{"a":1}'), DATA, st.integers(0, 1000),
)  # fmt: skip
FAILURES = st.lists(st.tuples(NUMBERS, TEXTS), max_size=3).map(tuple)
RECORDS = st.one_of(
    st.builds(Beat, st.booleans()),
    STARTS,
    st.builds(HostPart, MESHES, NUMBERS, st.binary(min_size=1, max_size=40)),
    st.builds(Progress, KINDS, MESHES, st.lists(INT64, min_size=1, max_size=limits.NUMBERS).map(tuple)),
    st.builds(Attach, st.integers(0, 99), st.lists(TEXTS, min_size=1, max_size=5).map(tuple),
              st.integers(1, limits.FAN_OUT), st.sampled_from([0.2, 1.0, 10.0, 3600.0])),
    st.builds(Attached, st.lists(INFOS, max_size=3).map(tuple), FAILURES),
    st.builds(lambda start, why: Lost(start, start + 9, why), st.integers(0, 99), TEXTS),
    st.builds(Forget, MESHES),
    st.builds(Close, TEXTS),
)  # fmt: skip


@given(st.lists(RECORDS, max_size=6))
def test_records_come_back_as_they_were(records: list[Record]) -> None:
    assert codec.decode(*codec.encode(records)) == records


@settings(max_examples=300)
@given(st.binary(max_size=200), st.binary(max_size=20))
@example(b"", b"x")
def test_any_bytes_are_records_or_malformed(head: bytes, data: bytes) -> None:
    try:
        codec.decode(head, data)
    except Malformed:
        pass


def test_ten_thousand_random_or_altered_frames_are_refused_or_understood() -> None:
    """What decoding takes in fits the limits; everything else is Malformed, and nothing else is ever raised."""
    randomness = random.Random(7)
    records: list[Record] = [
        Start("x", 1, 2, ((1, 3), (5, 6)), b'{"a":1}', 9, b"12345"),
        Progress("p", 1, (1, -2)),
        Attach(1, ("a:1", "b:2"), 8, 10.0),
        Lost(1, 3, "cut"),
    ]
    head, data = codec.encode(records)
    understood = 0
    for at in range(10_000):
        if at % 2:
            given_head = randomness.randbytes(randomness.randrange(100))
        else:
            altered = bytearray(head)
            for _ in range(randomness.randrange(1, 4)):
                altered[randomness.randrange(len(altered))] = randomness.randrange(256)
            given_head = bytes(altered)
        try:
            assert len(codec.decode(given_head, data)) <= limits.FRAME_RECORDS
            understood += 1
        except Malformed:
            pass
    assert understood < 5_000  # some alterations change a number only


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (pb.Record(), "says nothing"),
        (pb.Record(start=pb.Start(kind="", all=True)), "not a word"),
        (pb.Record(start=pb.Start(kind="a b", all=True)), "not a word"),
        (pb.Record(start=pb.Start(kind="x" * 65, all=True)), "not a word"),
        (pb.Record(start=pb.Start(kind="x", all=True, size=limits.MESSAGE_BYTES + 1)), "at most"),
        (pb.Record(start=pb.Start(kind="x", all=True, head=bytes(limits.HEAD_BYTES + 1))), "a head of"),
        (pb.Record(start=pb.Start(kind="x", all=True, data=1, size=1)), "speak of more"),
        (pb.Record(start=pb.Start(kind="x", all=True, targets=[1, 2])), "for all hosts, and for some"),
        (pb.Record(start=pb.Start(kind="x", targets=[1])), "no rising ranges"),
        (pb.Record(start=pb.Start(kind="x", targets=[3, 1])), "no rising ranges"),
        (pb.Record(start=pb.Start(kind="x", targets=[0, limits.HOSTS + 1])), "no rising ranges"),
        (pb.Record(start=pb.Start(kind="x", all=True, host=limits.HOSTS)), "there are at most"),
        (pb.Record(part=pb.Part()), "is empty"),
        (pb.Record(progress=pb.Progress(kind="x")), "progress of 0 numbers"),
        (pb.Record(progress=pb.Progress(kind="x", numbers=range(65))), "progress of 65 numbers"),
        (pb.Record(attach=pb.Attach(fan_out=1, timeout_ms=1000)), "0 hosts to attach"),
        (pb.Record(attach=pb.Attach(addresses=["a"], timeout_ms=1000)), "fan-out of 0"),
        (pb.Record(attach=pb.Attach(addresses=["a"], fan_out=1, timeout_ms=1)), "timeout of 0.001"),
        (pb.Record(attach=pb.Attach(addresses=["a" * 5000], fan_out=1, timeout_ms=1000)), "a text of 5,000"),
        (pb.Record(attach=pb.Attach(number=limits.HOSTS, addresses=["a"], fan_out=1, timeout_ms=1000)), "at most"),
        (pb.Record(lost=pb.Lost(start=3, stop=3)), "are none"),
        (pb.Record(lost=pb.Lost(start=3, stop=limits.HOSTS + 1)), "are none"),
    ],
)
def test_a_record_that_is_not_allowed_is_refused_and_why_is_said(record: pb.Record, says: str) -> None:
    with pytest.raises(Malformed, match=says):
        codec.decode(pb.Batch(records=[record]).SerializeToString(), b"")


def test_too_many_records_and_data_that_nobody_speaks_of_are_refused() -> None:
    with pytest.raises(Malformed, match="1,001 records"):
        codec.decode(*codec.encode([Beat()] * (limits.FRAME_RECORDS + 1)))
    with pytest.raises(Malformed, match="1 bytes of data"):
        codec.decode(codec.encode([Beat()])[0], b"x")


def test_control_characters_do_not_reach_the_terminal() -> None:
    (record,) = codec.decode(*codec.encode([Close("\x1b[31mred\a")]))
    assert record == Close("\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}")


# -- heads and messages --------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=20), JSON, max_size=5))
def test_heads_come_back_as_they_were(head: dict[str, object]) -> None:
    assert read_head(started(Message("x", head=head)).head) == head


@pytest.mark.parametrize(
    "head",
    [b"", b"{", b"[]", b"3", b'{"a":NaN}', b'{"a":Infinity}', b"\xff", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"],
)
def test_a_head_that_is_no_json_object_is_refused(head: bytes) -> None:
    with pytest.raises(Malformed):
        read_head(head)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_head_or_malformed(head: bytes) -> None:
    try:
        assert isinstance(read_head(head), dict)
    except Malformed:
        pass


def test_what_cannot_be_sent_is_refused_where_it_is_sent() -> None:
    with pytest.raises(ValueError, match="a word"):
        started(Message("two words"))
    with pytest.raises(ValueError, match="at most 1,048,576"):
        started(Message("x", head={"a": "x" * limits.HEAD_BYTES}))
    with pytest.raises(ValueError, match="JSON"):
        started(Message("x", head={"a": float("nan")}))
    with pytest.raises(TypeError):
        started(Message("x", head={"a": object()}))


def test_data_is_not_copied_before_it_is_sent() -> None:
    data = bytearray(b"abc")
    record = started(Message("x", data=memoryview(data)))
    data[0] = ord("z")
    assert bytes(record.data) == b"zbc"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([HostPart(1, 0, b"x")], "belongs to no message"),
        ([Start("x", 1, size=5, data=b"12"), Start("x", 1)], "before the last one's end"),
        ([Start("x", 1, size=5, data=b"12"), HostPart(1, 0, b"3456")], "has parts of 6"),
        ([Start("x", 1, size=5, data=b"12"), HostPart(1, 3, b"345")], "belongs to no message"),
        ([Start("x", 1, head=b"[]")], "a JSON object"),
    ],
)
def test_parts_that_do_not_fit_are_refused(records: list[Start | HostPart], says: str) -> None:
    assembly = Assembly()
    for record in records[:-1]:
        assert assembly.take(record) is None
    with pytest.raises(Malformed, match=says):
        assembly.take(records[-1])


# -- seals ---------------------------------------------------------------------------------------------------------

OWN = Release(1, "0.1.0")
SECRET = b"0123456789abcdef"


def seals(secret: bytes = SECRET) -> tuple[Sealer, Opener]:
    """The controller's sealer and the host's opener of one stream."""
    controller, host = ControllerHandshake(secret, OWN), HostHandshake(secret, OWN)
    mine, theirs = agree(controller, host)
    assert theirs.seals.sealer is not mine.seals.sealer and theirs.session == mine.session
    assert mine.seals.opener.open(theirs.seals.sealer.seal(b"up", b"", 7)) == (b"up", b"", 7)
    return mine.seals.sealer, theirs.seals.opener


def agree(controller: ControllerHandshake, host: HostHandshake, taken: int = 0) -> tuple[Agreed, Agreed]:
    """What both ends know after a handshake."""
    host.check(controller.prove(host.challenge(controller.hello())))
    proof, theirs = host.finish(taken)
    return controller.finish(proof), theirs


def test_frames_are_opened_in_the_order_in_which_they_were_sealed() -> None:
    sealer, opener = seals()
    for at in range(5):
        assert opener.open(sealer.seal(b"%d" % at, b"data")) == (b"%d" % at, b"data", 0)


@given(
    st.binary(max_size=300), st.integers(0, 300) | st.sampled_from([16_383, 16_384, 1 << 20, (1 << 21) - 1, 1 << 21])
)
def test_a_frame_is_written_as_protobuf_writes_it(head: bytes, size: int) -> None:
    small = pb.Sealed(sequence=7, mac=bytes(16), head=head)
    whole = pb.Sealed(sequence=7, mac=bytes(16), head=head, data=bytes(size))
    assert frame_of(small.SerializeToString(), bytes(size)) == pb.Frame(sealed=whole).SerializeToString()


def test_a_replayed_or_reordered_or_missing_frame_is_refused() -> None:
    for order in ([0, 0], [1], [0, 2], [1, 0]):
        sealer, opener = seals()
        frames = [sealer.seal(b"x", b"") for _ in range(3)]
        with pytest.raises(Malformed, match="replayed or lost"):
            for at in order:
                opener.open(frames[at])


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_frame_altered_anywhere_is_refused(at: int, by: int) -> None:
    sealer, opener = seals()
    opener.open(sealer.seal(b"first", b""))
    frame = bytearray(sealer.seal(b"head", b"data of some length"))
    frame[at % len(frame)] ^= by
    with pytest.raises(Malformed):
        opener.open(bytes(frame))


def test_ten_thousand_random_frames_are_opened_by_nobody() -> None:
    randomness = random.Random(9)
    for _ in range(10_000):
        frame = randomness.randbytes(randomness.randrange(300))
        with pytest.raises(Malformed):
            Opener(bytes(32)).open(frame)
        with pytest.raises(Malformed):
            HostHandshake(SECRET, OWN).challenge(frame)


def test_what_was_head_does_not_pass_as_data() -> None:
    sealer, opener = seals()
    frame = pb.Frame.FromString(sealer.seal(b"ab", b"c"))
    frame.sealed.head, frame.sealed.data = b"a", b"bc"
    with pytest.raises(Malformed, match="altered"):
        opener.open(frame.SerializeToString())


def test_a_frame_of_another_stream_or_of_the_other_direction_is_refused() -> None:
    (_, opener), (other, _) = seals(), seals()
    with pytest.raises(Malformed, match="altered, or sealed with another key"):
        opener.open(other.seal(b"x", b""))
    controller, host = ControllerHandshake(SECRET, OWN), HostHandshake(SECRET, OWN)
    theirs = agree(controller, host)[1].seals
    with pytest.raises(Malformed, match="another key"):
        theirs.opener.open(theirs.sealer.seal(b"x", b""))


def test_a_connection_goes_on_with_a_session_and_has_keys_of_its_own() -> None:
    first, _ = agree(ControllerHandshake(SECRET, OWN), HostHandshake(SECRET, OWN))
    known = {first.session.name: first.session}
    mine, theirs = agree(
        ControllerHandshake(SECRET, OWN, first.session, 3), HostHandshake(SECRET, OWN, known.get), taken=5
    )
    assert (mine.taken, theirs.taken) == (5, 3) and mine.session == theirs.session == first.session
    with pytest.raises(Malformed, match="another key"):  # a frame of the first connection
        theirs.seals.opener.open(first.seals.sealer.seal(b"x", b""))
    assert theirs.seals.opener.open(mine.seals.sealer.seal(b"x", b"")) == (b"x", b"", 0)


def test_who_does_not_have_a_session_s_key_does_not_go_on_with_it() -> None:
    first, _ = agree(ControllerHandshake(SECRET, OWN), HostHandshake(SECRET, OWN))
    known = {first.session.name: first.session}
    guess = Session(first.session.name, bytes(32))  # with the token, and the name, which travels in the clear
    with pytest.raises(Refused, match="not this host's"):
        agree(ControllerHandshake(SECRET, OWN, guess), HostHandshake(SECRET, OWN, known.get))
    controller, host = ControllerHandshake(SECRET, OWN, first.session), HostHandshake(SECRET, OWN, lambda _: guess)
    controller.prove(host.challenge(controller.hello()))
    with pytest.raises(Refused, match="does not know"):
        controller.finish(host.finish()[0])
    with pytest.raises(NoSuchSession):
        agree(ControllerHandshake(SECRET, OWN, first.session), HostHandshake(SECRET, OWN))


@pytest.mark.parametrize("whose", ["controller", "host"])
def test_a_count_of_frames_that_was_altered_is_refused(whose: str) -> None:
    first, _ = agree(ControllerHandshake(SECRET, OWN), HostHandshake(SECRET, OWN))
    controller = ControllerHandshake(SECRET, OWN, first.session, 3)
    host = HostHandshake(SECRET, OWN, {first.session.name: first.session}.get)
    hello = pb.Frame.FromString(controller.hello())
    hello.hello.taken += whose == "controller"
    with pytest.raises(Refused):
        host.check(controller.prove(host.challenge(hello.SerializeToString())))
        proof = pb.Frame.FromString(host.finish(5)[0])
        proof.proof.taken += 1
        controller.finish(proof.SerializeToString())


def test_a_nonce_makes_each_stream_its_own() -> None:
    hellos = {ControllerHandshake(SECRET, OWN).hello() for _ in range(50)}
    challenges = {HostHandshake(SECRET, OWN).challenge(next(iter(hellos))) for _ in range(50)}
    assert len(hellos) == len(challenges) == 50


def test_json_keys_stay_in_order() -> None:
    assert list(read_head(json.dumps({"b": 1, "a": 2}).encode())) == ["b", "a"]
