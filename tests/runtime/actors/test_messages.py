"""Actors in real processes: calls and their replies, order, references, arguments, errors."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch

import monarch.actor
from monarch import LayoutError, MonarchError
from monarch.actor import (
    Accumulator,
    Actor,
    ActorError,
    Channel,
    Endpoint,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    as_endpoint,
    concurrent_endpoint,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
    this_proc,
)
from tests.runtime.actors.conftest import WAIT


class Log(Actor):
    """Keeps what it is told."""

    def __init__(self, *entries: object) -> None:
        self.entries = list(entries)
        self.size = 3  # an actor's attributes are its own, whatever a mesh of them has

    @endpoint
    def add(self, entry: object) -> None:
        self.entries.append(entry)

    def make(self, what: str) -> object:
        if what == "end":
            os._exit(3)
        return threading.Lock() if what == "lock" else Unreadable()

    @endpoint
    def all(self) -> list[object]:
        return self.entries

    @endpoint
    def where(self) -> tuple[dict[str, int], int, dict[str, int], str, int]:
        instance = context().actor_instance
        return dict(current_rank()), current_rank().rank, current_size(), current_actor_name(), instance.rank.rank

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, what: str) -> None:
        raise KeyError(what)

    @endpoint
    def many(self, to: "Log", count: int) -> None:
        for number in range(count):
            to.add.broadcast((current_rank().rank, number))
        to.all.call_one().get(WAIT)  # which comes back after all of these

    @endpoint
    def ask(self, other: "Log") -> list[object]:
        return other.all.call_one().get()

    def unmarked(self, n: int) -> int:
        return n + len(self.entries)


class Loop(Actor):
    """Endpoints on an event loop."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.gate = asyncio.Event()

    @endpoint
    async def alone(self) -> int:
        self.running += 1
        await asyncio.sleep(0)
        self.most = max(self.most, self.running)
        self.running -= 1
        return self.most

    @endpoint
    async def ask(self, other: Log) -> list[object]:
        return await other.all.call_one()

    @concurrent_endpoint
    async def wait(self) -> str:
        await self.gate.wait()
        return current_actor_name()

    @endpoint
    async def open(self) -> None:
        self.gate.set()


def spawn(gpus: int = 2) -> ProcMesh:
    return this_host().spawn_procs(per_host={"gpus": gpus})


def test_each_adverb() -> None:
    logs = spawn(3).spawn("logs", Log, "start")
    assert logs.extent == {"gpus": 3}
    assert list(logs.all.call().get(WAIT).values()) == [["start"]] * 3
    assert logs.slice(gpus=1).all.call_one().get(WAIT) == ["start"]
    assert logs.all.choose().get(WAIT) == ["start"]
    logs.add.broadcast(1)
    assert [future.get(WAIT) for future in logs.all.stream()] == [["start", 1]] * 3
    assert Accumulator(logs.all, 0, lambda so_far, entries: so_far + len(entries)).accumulate().get(WAIT) == 6
    port, receiver = Channel[Any].open()
    send(logs.all, (), {}, port, "choose")
    assert receiver.recv().get(WAIT) == ["start", 1]
    send(logs.all, (), {}, port)
    assert [receiver.recv().get(WAIT) for _ in range(3)] == [["start", 1]] * 3
    assert as_endpoint(logs.unmarked).call(5).get(WAIT).get(2) == 7
    pids = list(logs.pid.call().get(WAIT).values())
    assert len({*pids, os.getpid()}) == 4


def test_arguments_are_checked_before_anything_is_sent() -> None:
    logs = spawn(2).spawn("logs", Log)
    with pytest.raises(TypeError, match=r"logs\.add.*missing a required argument: 'entry'"):
        logs.add.call()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="call_one is for one actor"):
        logs.all.call_one()
    with pytest.raises(RuntimeError, match="as_endpoint"):
        logs.unmarked(3)
    with pytest.raises(AttributeError, match="no method 'nothing'"):
        _ = logs.nothing  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="missing a required argument: 'need'"):
        spawn(1).spawn("x", _Needy)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lock"):
        logs.add.call(threading.Lock())


class _Needy(Actor):
    def __init__(self, need: int) -> None:
        pass


def test_where_an_actor_is() -> None:
    logs = this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}).spawn("logs", Log)
    assert logs.where.call().get(WAIT).item(hosts=1, gpus=0) == (
        {"hosts": 1, "gpus": 0}, 2, {"hosts": 2, "gpus": 2}, "logs[2]", 2,
    )  # fmt: skip
    part = logs.slice(hosts=1)
    assert part.where.call().get(WAIT).item(gpus=1) == ({"gpus": 1}, 1, {"gpus": 2}, "logs[3]", 3)
    assert part.slice(gpus=1).where.call_one().get(WAIT) == ({}, 0, {}, "logs[3]", 3)
    assert logs.flatten("all").where.call().get(WAIT).get(3)[2] == {"all": 4}


def test_messages_of_one_sender_come_in_the_order_sent() -> None:
    procs = spawn(2)
    senders = procs.spawn("senders", Log)
    log = procs.slice(gpus=0).spawn("log", Log)
    many = [senders.many.call(log, 500) for _ in range(2)]
    for number in range(500):
        log.add.broadcast(("main", number))
    for future in many:
        future.get(WAIT)
    entries = log.all.call_one().get(WAIT)
    assert len(entries) == 2500
    for sender in (0, 1):
        assert [number for who, number in entries if who == sender] == [*range(500), *range(500)]
    assert [number for who, number in entries if who == "main"] == list(range(500))


def test_references_are_used_where_they_arrive() -> None:
    procs = spawn(2)
    first = procs.slice(gpus=0).spawn("first", Log, "secret")
    second = procs.slice(gpus=1).spawn("second", Log, first)
    assert second.ask.call_one(first).get(WAIT) == ["secret"]
    (back,) = second.all.call_one().get(WAIT)
    assert back == first
    assert back.all.call_one().get(WAIT) == ["secret"]
    port, receiver = Channel[str].open()
    first.add.call_one(port).get(WAIT)
    held = first.all.call_one().get(WAIT)[1]
    assert isinstance(held, Port)
    held.send("through it")
    assert receiver.recv().get(WAIT) == "through it"
    loop = procs.slice(gpus=1).spawn("loop", Loop)
    assert loop.ask.call_one(first).get(WAIT)[0] == "secret"


def test_what_was_sent_is_the_receivers_own() -> None:
    log = spawn(2).spawn("log", Log)
    large, small = torch.arange(1 << 18, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)
    sent = {
        "large": large,
        "small": small,
        "column": large.reshape(512, 512)[:, 3],
        "parameter": torch.nn.Parameter(small.float()),
        "numpy": np.arange(1 << 16),
        "bytes": b"x" * (1 << 20),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "complex": torch.ones(4, dtype=torch.complex64).conj(),
    }
    log.add.call(sent).get(WAIT)
    large.zero_()
    one, two = (entries[0] for entries in log.all.call().get(WAIT).values())
    assert torch.equal(one["large"], torch.arange(1 << 18, dtype=torch.float32))
    assert torch.equal(one["column"], torch.arange(3, 1 << 18, 512, dtype=torch.float32))
    assert isinstance(one["parameter"], torch.nn.Parameter) and one["parameter"].requires_grad
    assert one["small"].dtype is torch.bfloat16 and one["empty"].shape == (0, 4) and one["scalar"].shape == ()
    assert np.array_equal(one["numpy"], np.arange(1 << 16)) and one["bytes"] == sent["bytes"]
    assert torch.equal(one["complex"], torch.ones(4, dtype=torch.complex64))
    one["large"].add_(1)
    assert two["large"][5] == 5
    assert log.all.call().get(WAIT).get(0)[0]["large"][5] == 5


def test_an_exception_is_raised_at_the_caller_and_the_actor_lives() -> None:
    log = spawn(2).spawn("log", Log)
    with pytest.raises(ActorError, match=r"log\[1\]\.fail raised KeyError: 'gone'\n  at {'gpus': [01]/[12]}") as caught:
        log.slice(gpus=1).fail.call_one("gone").get(WAIT)
    assert isinstance(caught.value.exception, KeyError)
    assert "Remote traceback" in str(caught.value) and "raise KeyError(what)" in str(caught.value)
    with pytest.raises(ActorError):
        log.fail.call("x").get(WAIT)
    assert [type(future.exception(WAIT)) for future in log.fail.stream("x")] == [ActorError, ActorError]
    assert len(log.all.call().get(WAIT)) == 2


def test_a_value_that_cannot_be_sent_is_an_error_at_the_caller() -> None:
    class Holder(Actor):
        @endpoint
        def lock(self) -> Any:
            return threading.Lock()

    holder = spawn(1).slice(gpus=0).spawn("holder", Holder)
    with pytest.raises(ActorError, match="lock"):
        holder.lock.call_one().get(WAIT)


def test_async_endpoints_run_one_at_a_time_and_concurrent_ones_beside_them() -> None:
    loops = spawn(1).slice(gpus=0).spawn("loops", Loop)
    assert [future.get(WAIT) for future in [loops.alone.call_one() for _ in range(20)]] == [1] * 20
    waiting = [loops.wait.call_one() for _ in range(3)]
    assert not waiting[0].done()
    loops.open.call_one().get(WAIT)
    assert [future.get(WAIT) for future in waiting] == ["loops"] * 3


def test_concurrent_calls_that_still_run_when_the_actor_stops_are_refused() -> None:
    loops = spawn(1).slice(gpus=0).spawn("loops", Loop)
    waiting = loops.wait.call_one()
    loops.stop("closing time").get(WAIT)
    with pytest.raises(SupervisionError, match="closing time"):
        waiting.get(WAIT)


def test_futures_can_be_awaited() -> None:
    log = spawn(1).slice(gpus=0).spawn("log", Log, 1)

    async def main() -> list[object]:
        await log.add.call_one(2)
        return (await asyncio.gather(*(log.all.call_one().as_asyncio() for _ in range(3))))[2]

    assert asyncio.run(main()) == [1, 2]


def test_a_message_above_the_bound_is_not_sent() -> None:
    with monarch.config.configured(codec_max_frame_length="1 MiB"):
        log = spawn(1).slice(gpus=0).spawn("log", Log, bytes(1 << 18))
        with pytest.raises(MonarchError, match="a message of 1,0[0-9,]* bytes: at most 1,048,576"):
            log.add.call_one(b"x" * (1 << 20))
        with pytest.raises(MonarchError, match="at most 1,048,576"):
            log.add.broadcast(np.zeros(1 << 20, dtype=np.uint8))
        for _ in range(3):
            log.add.call_one(bytes(1 << 18)).get(WAIT)
        with pytest.raises(ActorError, match="sending what log.all gave raised .*MessageSizeError"):
            log.all.call_one().get(WAIT)
    with pytest.raises(ActorError, match="MessageSizeError"):  # the actors have the bound with which they were spawned
        log.all.call_one().get(WAIT)


class Later(Actor):
    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[str], word: str) -> None:
        self.held = getattr(self, "held", [])
        self.held.append((port, word))

    @endpoint
    def release(self) -> None:
        def answer() -> None:
            for port, word in reversed(self.held):
                if word == "bad":
                    port.exception(ValueError(word))
                else:
                    port.send(word.upper())

        threading.Thread(target=answer).start()


def test_replies_through_a_port_come_later_and_from_any_thread() -> None:
    later = spawn(1).slice(gpus=0).spawn("later", Later)
    one, two, bad = (later.answer.call_one(word) for word in ("one", "two", "bad"))
    later.release.call_one().get(WAIT)
    assert (two.get(WAIT), one.get(WAIT)) == ("TWO", "ONE")
    with pytest.raises(ActorError, match="^later.answer raised ValueError: bad"):
        bad.get(WAIT)


def test_channels() -> None:
    port, receiver = Channel[int].open()
    first = receiver.recv()
    for number in range(3):
        port.send(number)
    assert [first.get(WAIT), receiver.recv().get(WAIT), receiver.recv().get(WAIT)] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        receiver.recv().get(timeout=0)
    once, receiver = Channel[int].open(once=True)
    once.send(1)
    once.send(2)
    assert receiver.recv().get(WAIT) == 1
    port.exception(ValueError("through a port"))


def test_bootstrap_runs_before_any_actor() -> None:
    def bootstrap() -> None:
        os.environ["MONARCH_TEST_BOOTSTRAP"] = "done"

    class Reader(Actor):
        def __init__(self) -> None:
            self.seen = os.environ.get("MONARCH_TEST_BOOTSTRAP")

        @endpoint
        def read(self) -> str | None:
            return self.seen

    procs = this_host().spawn_procs(per_host={"gpus": 2}, bootstrap=bootstrap, name="boot")
    assert list(procs.spawn("reader", Reader).read.call().get(WAIT).values()) == ["done", "done"]
    assert procs.initialized.get(WAIT) is True


class Adder(Actor):
    @endpoint
    def add(self, n: int) -> int:
        return n + 1


def test_bootstrap_may_use_actors_of_its_own_process() -> None:
    def bootstrap() -> None:
        procs = this_proc()
        assert procs.initialized.get(WAIT)
        adder = procs.spawn("adder", Adder)
        os.environ["MONARCH_TEST_BOOTSTRAP"] = str(adder.add.call_one(1).get(WAIT))

    procs = this_host().spawn_procs(bootstrap=bootstrap)
    with procs.activate():
        assert monarch.remote(os.getenv).call_one("MONARCH_TEST_BOOTSTRAP").get(WAIT) == "2"


class Nest(Actor):
    """Spawns processes and actors of its own."""

    def __init__(self) -> None:
        self.mine = this_host().spawn_procs(per_host={"gpus": 2}, name="nested").spawn("logs", Log, "nested")
        self.beside = this_proc().spawn("beside", Log, "beside")

    @endpoint
    def read(self) -> tuple[list[object], list[object]]:
        return self.mine.all.call().get(WAIT).get(1), self.beside.all.call_one().get(WAIT)

    @endpoint
    def give(self) -> Log:
        return self.mine


def test_actors_spawn_processes_and_actors() -> None:
    nest = spawn(1).slice(gpus=0).spawn("nest", Nest)
    assert nest.read.call_one().get(WAIT) == (["nested"], ["beside"])
    assert nest.give.call_one().get(WAIT).all.call().get(WAIT).get(0) == ["nested"]
    beside = this_proc().spawn("here", Log, "in this process")
    assert beside.pid.call_one().get(WAIT) == os.getpid() and beside.extent == {}


def test_there_is_one_controller_by_a_name() -> None:
    class Asker(Actor):
        @endpoint
        def ask(self) -> list[object]:
            log = get_or_spawn_controller("shared", Log, "from a worker").get(WAIT)
            log.add.call_one(current_rank().rank).get(WAIT)
            return log.all.call_one().get(WAIT)

    spawn(4).spawn("asker", Asker).ask.call().get(WAIT)
    log = get_or_spawn_controller("shared", Log, "from here").get(WAIT)
    entries = log.all.call_one().get(WAIT)
    assert entries[0] == "from a worker" and sorted(entries[1:]) == [0, 1, 2, 3]


def test_a_thousand_actors_answer_a_broadcast() -> None:
    procs = spawn(8)
    meshes = [procs.spawn(f"log{at}", Log, at) for at in range(125)]
    port, receiver = Channel[list[int]].open()
    for mesh in meshes:
        send(mesh.all, (), {}, port)
    assert sorted(receiver.recv().get(WAIT)[0] for _ in range(1000)) == sorted([*range(125)] * 8)


def test_the_same_name_twice() -> None:
    procs = spawn(1)
    one, two = (procs.spawn("log", Log, at).slice(gpus=0) for at in (1, 2))
    assert (one.all.call_one().get(WAIT), two.all.call_one().get(WAIT)) == ([1], [2])
    assert monarch.actor.ActorMesh is type(one)


def test_a_constructor_knows_its_place() -> None:
    class Placed(Actor):
        def __init__(self) -> None:
            self.place = dict(current_rank()), current_rank().rank, current_actor_name()

        @endpoint
        def placed(self) -> tuple[dict[str, int], int, str]:
            return self.place

    places = spawn(2).spawn("placed", Placed).placed.call().get(WAIT)
    assert list(places.values()) == [({"gpus": 0}, 0, "placed[0]"), ({"gpus": 1}, 1, "placed[1]")]


def test_endpoints_can_be_sent() -> None:
    class Caller(Actor):
        @endpoint
        def call(self, marked: Endpoint[[], list[object]], unmarked: Endpoint[[int], int]) -> tuple[object, int]:
            return marked.call_one().get(WAIT), unmarked.call_one(3).get(WAIT)

    procs = spawn(2)
    log = procs.slice(gpus=0).spawn("log", Log, "there")
    caller = procs.slice(gpus=1).spawn("caller", Caller)
    assert caller.call.call_one(log.all, as_endpoint(log.unmarked)).get(WAIT) == (["there"], 4)


class Unreadable:
    """Can be sent, and not read."""

    def __reduce__(self) -> tuple[object, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise KeyError("no such version")


def test_what_cannot_be_sent_or_read_names_the_endpoint() -> None:
    crew = this_host().spawn_procs({"gpus": 2}, name="crew")
    logs = crew.spawn("logs", Log)
    with pytest.raises(TypeError, match="cannot pickle") as error:
        logs.add.call(threading.Lock())
    assert "in the arguments of logs.add" in error.value.__notes__[0]
    with pytest.raises(ActorError, match=r"sending what logs\[1\].make gave raised TypeError: cannot pickle"):
        as_endpoint(logs.slice(gpus=1).make).call_one("lock").get(WAIT)
    for read in (
        as_endpoint(logs.make).call("unreadable"),
        as_endpoint(logs.slice(gpus=0).make).call_one("unreadable"),
        next(as_endpoint(logs.make).stream("unreadable")),
    ):
        with pytest.raises(ActorError, match="reading here what logs.make gave raised KeyError") as unread:
            read.get(WAIT)
        assert isinstance(unread.value.exception, KeyError)
    assert logs.all.call().get(WAIT).values() == [[], []]


def test_a_call_that_has_no_answer_names_endpoint_and_rank(faults: queue.SimpleQueue[MeshFailure]) -> None:
    crew = this_host().spawn_procs({"gpus": 2}, name="crew")
    logs = crew.spawn("logs", Log)
    one, both = as_endpoint(logs.slice(gpus=1).make).call_one("end"), as_endpoint(logs.make).call("end")
    with pytest.raises(SupervisionError, match=r"no answer from logs\[1\].make: its process crew\[1\] exited"):
        one.get(WAIT)
    with pytest.raises(SupervisionError, match=r"no answer from logs\[(.)\].make: its process crew\[\1\] exited"):
        both.get(WAIT)
    assert {faults.get(timeout=WAIT).rank, faults.get(timeout=WAIT).rank} == {0, 1}


def test_sizes_of_processes_that_cannot_be_meant() -> None:
    for size in (0, -1, "2", 1.5):
        with pytest.raises(LayoutError, match=f"the dim 'gpus' has size {size!r}: a size is a whole number from 1"):
            this_host().spawn_procs({"gpus": size})  # type: ignore[dict-item]
    assert this_host().initialized.get(WAIT) is True
