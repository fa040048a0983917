"""Process groups beside the mesh's own collectives: who is connected, and what happens when somebody is not there any
more. What they compute is in `test_collectives` and `test_failures`, over every way there is."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError, TensorType
from monarch.compiler.plan.options import CompileOptions
from monarch.runtime.collectives import gloo, listening
from monarch.runtime.collectives.gloo import GlooMembership
from monarch.runtime.collectives.listening import Network
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.shared.signals import DEAD, LINE, STEP_BITS, Aborted
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import executor_on
from tests.runtime.controller.test_failures import MESH, fail_where, healthy

pytestmark = pytest.mark.sample(1, of="executor")

SYN_SENT, ESTABLISHED = 2, 1


@pytest.fixture(scope="module", params=["local gloo", "hosts gloo"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


# -- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [[4], [0], [1, 2]], ids=str)
def test_who_waits_in_gloo_is_told(executor: MeshExecutor, failing: list[int]) -> None:
    """The process group has been used in the step before somebody fails: the others wait in it, and not in memory."""
    build = Building(MESH, "bad")
    x = build.input(whole((6, 6)))
    first = build.call("getitem", build.call("all_reduce", [x], ["a", "b"], "sum"), 0)
    y = build.call("aten.add.Tensor", first, fail_where(build, x, failing))
    build.output(build.call("getitem", build.call("all_reduce", [y], ["a", "b"], "sum"), 0), whole((6, 6)))
    for _ in range(2):
        (handle,) = executor.run(build.plan(), [torch.randn(6, 6)])
        with pytest.raises(DeviceMeshError) as info:
            executor.wait(handle)
        a, b = MESH.point(failing[0])
        assert str(info.value).startswith(f"train.py:12: error: worker a={a}, b={b} failed in aten.index_select")
        healthy(executor)


def test_state_is_that_of_the_last_step_that_committed(executor: MeshExecutor) -> None:
    """Where somebody fails between two sums, nobody overwrites anything, and the next step goes on from there."""
    build, kind = Building(MESH, "update"), whole((6, 6))
    state = build.input(kind, "state", "w", donate=True)
    table = build.input(whole((2, 6)))
    total = build.call("getitem", build.call("all_reduce", [state], ["a", "b"], "sum"), 0)
    index = build.call("aten.unsqueeze.default", build.call("axis_index", "a"), 0)
    row = build.call("aten.index_select.default", table, 0, index)  # where the table has one row, half of them fail
    grown = build.call("aten.add.Tensor", total, row)
    more = build.call("getitem", build.call("all_reduce", [grown], ["b"], "sum"), 0)
    build.call("commit")
    build.output(build.call("aten.copy_.default", state, more), kind, "state", "w")
    good = build.plan()
    bad = replace(good, inputs=(good.inputs[0], replace(good.inputs[1], type=whole((1, 6)))), name="short")
    value = torch.randn(6, 6).round(decimals=2)
    rows = torch.randn(2, 6).round(decimals=2)
    handle = executor.put(value, kind)
    (handle,) = executor.run(good, [handle, rows])
    before = executor.shards(handle)
    (lost,) = executor.run(bad, [handle, rows[:1]])
    with pytest.raises(DeviceMeshError, match="worker a=1, b=0 failed in aten.index_select"):
        executor.wait(lost)
    kept = executor.recover(lost)
    for got, want in zip(executor.shards(kept), before, strict=True):
        assert torch.equal(got, want)
    (after,) = executor.run(good, [kept, rows])
    assert len(executor.shards(after)) == 6


@pytest.mark.parametrize("where", ["local gloo", "hosts gloo"])
def test_a_worker_that_is_killed_ends_every_wait(where: str) -> None:
    with executor_on(where, MESH) as executor:
        build = Building(MESH, "long")
        x = build.input(whole((1 << 20,)))
        for _ in range(200):
            x = build.call("getitem", build.call("all_reduce", [x], ["a", "b"], "max"), 0)
        build.output(x, whole((1 << 20,)))
        pids = executor.worker_pids()
        healthy(executor)
        (handle,) = executor.run(build.plan(), [torch.zeros(1 << 20)])
        os.kill(pids[4], signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match=r"worker a=1, b=1 .*SIGKILL"):
            executor.wait(handle)


def test_what_a_failed_step_used_is_put_away() -> None:
    """Sockets and Gloo's threads are as many after many failures as after the first."""
    with executor_on("local gloo", MESH) as executor:
        build = Building(MESH, "bad")
        x = build.input(whole((6, 6)))
        first = build.call("getitem", build.call("all_reduce", [x], ["a", "b"], "sum"), 0)
        y = build.call("aten.add.Tensor", first, fail_where(build, x, [4]))
        build.output(build.call("getitem", build.call("all_reduce", [y], ["a", "b"], "sum"), 0), whole((6, 6)))
        plan, pids = build.plan(), executor.worker_pids()

        def fail() -> list[tuple[int, int]]:
            (handle,) = executor.run(plan, [torch.randn(6, 6)])
            with pytest.raises(DeviceMeshError):
                executor.wait(handle)
            healthy(executor)
            return [tuple(len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task")) for pid in pids]

        once = fail()
        assert [fail() for _ in range(4)] == [once] * 4


def test_a_failure_while_workers_find_each_other_is_told_as_it_is() -> None:
    """And not as what Gloo makes of it."""

    class Failing(Between):
        said = 0

        def all_gather(self, mesh_dims: Any, dims: Any) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
            def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
                self.said += 1
                if self.said > 1:  # the first tells who has which process group
                    raise Aborted(1, died=False)
                return [torch.cat((tensors[0], tensors[0]))]

            return run

    member = GlooMembership(Failing(None, 0), ["w"], "127.0.0.1")  # type: ignore[arg-type]
    with pytest.raises(Aborted, match="worker 1 failed"):
        member.gathered(torch.ones(1))


# -- who is connected ------------------------------------------------------------------------------------------------


def test_a_connection_is_known_by_its_two_ends() -> None:
    first, second, third, stranger = (("127.0.0.1", port) for port in (1, 2, 3, 66))
    good = [[(first, second), (first, third)], [(second, first), (second, third)], [(third, first), (third, second)]]
    assert listening.stranger_among(good) is None
    instead = [[(first, stranger), (first, third)], good[1], good[2]]
    assert listening.stranger_among(instead) == (
        "a connection between 127.0.0.1:1 and 127.0.0.1:66 has no other end among the workers"
    )
    more = [[*good[0], (first, stranger)], good[1], good[2]]
    assert listening.stranger_among(more) is not None
    less = [[(first, third)], [(second, third)], good[2]]
    assert listening.stranger_among(less) == "two workers that are to have one connection have 0"
    itself = [[(first, first), *good[0]], good[1], good[2]]
    assert listening.stranger_among(itself) is not None


class Between:
    """What a membership needs of a mesh of two workers, over a pipe between two processes."""

    def __init__(self, pipe: Any, rank: int, words: Any = (0,) * 64) -> None:
        self.step = 1
        self.signals = SimpleNamespace(words=words)
        self._pipe = pipe
        self._rank = rank

    @property
    def at(self) -> Any:
        return self

    def name_of(self, rank: int) -> str:
        return str(rank)

    def group(self, mesh_dims: Any) -> Any:
        return SimpleNamespace(size=2, me=self._rank, peers=(1 - self._rank,))

    def announce(self) -> None: ...

    def skip_rounds(self, count: int) -> None: ...

    def all_gather(self, mesh_dims: Any, dims: Any) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            self._pipe.send(tensors[0].tolist())
            other = tensors[0].new_tensor(self._pipe.recv())
            return [torch.cat((tensors[0], other) if self._rank == 0 else (other, tensors[0]))]

        return run


def join(rank: int, pipe: Any, up: Any, where: str) -> None:
    """Be one of two workers: say where Gloo listens, wait to go on, and tell how it went."""
    listen = gloo.listen

    def told(address: str) -> Any:
        device, listener = listen(address)
        up.send(listener.getsockname())
        up.recv()
        return device, listener

    gloo.listen = told
    member = GlooMembership(Between(pipe, rank), ["w"], where)  # type: ignore[arg-type]
    try:
        up.send(member.gathered(torch.tensor([float(rank)])).tolist())
    except MonarchError as error:
        up.send(str(error))
    up.recv()
    os._exit(0)


@pytest.mark.parametrize("stranger", [False, True], ids=["alone", "a stranger comes first"])
@pytest.mark.parametrize("where", ["127.0.0.1", "::1"])
def test_nothing_is_sent_where_a_stranger_has_connected(where: str, stranger: bool) -> None:
    if where == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    forked = multiprocessing.get_context("fork")
    between = forked.Pipe()
    ups = [forked.Pipe() for _ in range(2)]
    workers = [forked.Process(target=join, args=(rank, between[rank], ups[rank][1], where)) for rank in range(2)]
    with ExitStack() as stack:
        for worker in workers:
            worker.start()
            stack.callback(worker.join)
            stack.callback(worker.kill)
        addresses = [ours.recv() for ours, _ in ups]
        if stranger:
            for address in addresses:
                connection = stack.enter_context(closing(socket.create_connection(address[:2])))
                connection.sendall(bytes(8))
        for ours, _ in ups:
            ours.send("go on")
        results = [ours.recv() for ours, _ in ups]
        if not stranger:
            assert results == [[[0.0], [1.0]]] * 2
            for address in addresses:  # nobody is heard any more
                assert state_of_a_connection_to(address) == SYN_SENT
            return
        for result in results:
            assert f"the process group over w was not used: a connection between {where}:" in result
            assert "has no other end among the workers" in result


def quiet(pipe: Any, up: Any, met: int, deaf: bool) -> None:
    """The second of two workers: comes to so many rounds, and then neither comes nor goes."""
    listen = gloo.listen

    def unheard(address: str) -> Any:
        device, listener = listen(address)
        if deaf:  # what the first asks of it gets no answer, as if the network were cut
            listening.hear_nobody(listener)
        return device, listener

    gloo.listen = unheard
    between = Between(pipe, 1)
    gather = between.all_gather

    def all_gather(mesh_dims: Any, dims: Any) -> Any:
        say, rounds = gather(mesh_dims, dims), iter(range(met))

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            told = say(tensors)
            if next(rounds) == met - 1:
                up.send("met")
                up.recv()
            return told

        return run

    between.all_gather = all_gather  # type: ignore[method-assign]
    GlooMembership(between, ["w"], "127.0.0.1").gathered(torch.ones(1))  # type: ignore[arg-type]


def waiting(words: Any, pipe: Any, up: Any) -> None:
    """The first: waits for the other, and tells what it hears."""
    member = GlooMembership(Between(pipe, 0, words), ["w"], "127.0.0.1")  # type: ignore[arg-type]
    try:
        member.gathered(torch.ones(1))
    except (Aborted, MonarchError) as error:
        up.send(str(error))
    up.recv()
    os._exit(0)


@pytest.mark.parametrize("connecting", [True, False], ids=["connects", "sends"])
@pytest.mark.parametrize("word", [DEAD, 2 * LINE], ids=["the mesh is lost", "the peer fails"])
def test_who_waits_in_gloo_hears_of_what_breaks_no_connection(connecting: bool, word: int) -> None:
    """While it connects, and while it waits for bytes: as when a network is cut, or a worker ended by half."""
    met = 3 if connecting else 5  # process groups' numbers, listeners (two rounds), connections (two)
    forked = multiprocessing.get_context("fork")
    words = memoryview(mmap.mmap(-1, 4096)).cast("q")
    ours, theirs = forked.Pipe()
    pipes = forked.Pipe(), forked.Pipe()
    workers = [
        forked.Process(target=waiting, args=(words, ours, pipes[0][1])),
        forked.Process(target=quiet, args=(theirs, pipes[1][1], met, connecting)),
    ]
    with ExitStack() as stack:
        for worker in workers:
            worker.start()
            stack.callback(worker.join)
            stack.callback(worker.kill)
        assert pipes[1][0].recv() == "met"
        words[word] = 2 if word == DEAD else 1 << STEP_BITS | 1
        assert pipes[0][0].recv() == ("worker 1 died" if word == DEAD else "worker 1 failed")


def state_of_a_connection_to(address: tuple[str, int]) -> int:
    """As TCP has it, once another connection over loopback, made later, stands."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as tried, socket.create_server(("127.0.0.1", 0)) as other:
        tried.setblocking(False)
        with pytest.raises(BlockingIOError):
            tried.connect(address)
        with socket.create_connection(other.getsockname()) as made:
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        return tried.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def test_looking_for_sockets_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what was a socket is something else by then, for other threads close and open files."""
    with socket.create_server(("127.0.0.1", 0)) as listener, open(__file__) as other:
        monkeypatch.setattr(os, "readlink", lambda path: "socket:[1]")
        before = len(os.listdir("/proc/self/fd"))
        found = listening.listeners()
        assert os.fstat(listener.fileno()).st_ino in found
        assert os.fstat(other.fileno()).st_ino not in found
        for each in found.values():
            each.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_listener_hears_until_it_is_told_not_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert state_of_a_connection_to(listener.getsockname()) == ESTABLISHED
        listening.hear_nobody(listener)
        assert state_of_a_connection_to(listener.getsockname()) == SYN_SENT


def test_gloo_has_one_listener_where_it_is_told_to() -> None:
    device, listener = gloo.listen("127.0.0.1")
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert isinstance(device, ProcessGroupGloo.Device)


def test_gloo_listens_for_other_hosts_only_where_the_network_is_trusted() -> None:
    assert (
        Network("10.0.0.1", None, tls=False).address("Gloo") == "10.0.0.1"
    )  # such a host starts on trusted networks only
    assert Network("127.0.0.1", None, tls=True).address("Gloo") == "127.0.0.1"
    with pytest.raises(MonarchError, match="Gloo does not encrypt, and the hosts have TLS") as info:
        Network("10.0.0.1", None, tls=True).address("Gloo")
    assert info.value.hint is not None and "trusted_network=True" in info.value.hint
    with pytest.raises(MonarchError, match="other hosts reach this one as node1"):
        Network("10.0.0.1", "node1", tls=False).address("Gloo")


# -- what a plan says ------------------------------------------------------------------------------------------------


def test_a_plan_for_nccl_says_what_it_needs() -> None:
    mesh = MeshSpec.of(w=2)
    build = Building(mesh, "sum")
    x = build.input(each(mesh, (2,)))
    build.output(build.call("getitem", build.call("all_reduce", [x], ["w"], "sum"), 0), TensorType(torch.float32, (1,)))
    plan = replace(build.plan(), options=CompileOptions(collectives="nccl"))
    with MeshExecutor(mesh) as executor:
        with pytest.raises(MonarchError, match="'nccl' does not move tensors of CPUs"):
            executor.run(plan, [torch.ones(2)])
        with pytest.raises(MonarchError, match="instruction 1 of plan 'sum': .* nobody has waited for"):
            executor.run(replace(plan, options=CompileOptions(target="cuda:90", collectives="nccl")), [torch.ones(2)])
