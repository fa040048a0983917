"""Functions that run in every process of a mesh, and torchrun's scripts there."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import subprocess
from enum import Enum, auto
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
import torch

import monarch
from monarch import builtins
from monarch.actor import Actor, ActorError, Channel, current_rank, endpoint, send, this_host, this_proc
from monarch.spmd import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async
from tests.runtime.actors.conftest import WAIT


@monarch.remote
def place(offset: int, *, name: str = "x") -> tuple[str, int, int]:
    return name, current_rank().rank + offset, os.getpid()


@monarch.remote
async def later(n: int) -> int:
    await asyncio.sleep(0)
    return n + 1


@monarch.remote
def fail() -> None:
    raise KeyError("as told")


class AddrType(Enum):
    """As PyTorch Monarch has it."""

    IPv4 = auto()


def interrupted() -> int:
    """How a command ends that interrupts itself."""
    return subprocess.run(["/bin/sh", "-c", "kill -INT $$"]).returncode


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_a_function_runs_in_every_process() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    with procs.activate():
        first = list(place.call(10, name="y").get(WAIT).values())
        assert [value[:2] for value in first] == [("y", 10), ("y", 11)]
        assert {future.get(WAIT) for future in place.stream(10, name="y")} == set(first)  # in the same processes
        assert place.choose(10, name="y").get(WAIT) in {("y", 10, first[0][2]), ("y", 10, first[1][2])} | set(first)
        assert list(later.call(1).get(WAIT).values()) == [2, 2]
        place.broadcast(1)
        port, receiver = Channel[object].open()
        send(place, (10,), {"name": "z"}, port)
        assert {receiver.recv().get(WAIT) for _ in range(2)} == {("z", 10, first[0][2]), ("z", 11, first[1][2])}
    with procs.slice(gpus=1).activate():
        assert place.call_one(0).get(WAIT) == ("x", 0, first[1][2])


def test_pytorchs_random_numbers_in_every_process() -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}).activate():
        builtins.set_manual_seed_remote.call(3, process_idx=2).get(WAIT)
        states = list(builtins.get_rng_state_remote.call().get(WAIT).values())
        before = torch.get_rng_state()
        torch.manual_seed(3 ^ 2)
        assert all(torch.equal(state, torch.get_rng_state()) for state in states)
        assert len(set(builtins.seed_remote.call().get(WAIT).values())) == 2
        torch.set_rng_state(before)
        builtins.set_rng_state_remote.call(states[0]).get(WAIT)
        assert torch.equal(builtins.get_rng_state_remote.call().get(WAIT).item(gpus=1), states[0])


def test_a_log_from_every_process() -> None:
    found: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(found)  # type: ignore[arg-type]
    log = logging.getLogger("monarch.builtins")
    log.addHandler(handler)
    try:
        with this_host().spawn_procs(per_host={"gpus": 2}).activate():
            builtins.set_logging_level_remote.call(logging.ERROR).get(WAIT)
            builtins.log_remote.call("not %s", "shown").get(WAIT)
            builtins.log_remote.call("shown %d", 7, level=logging.ERROR).get(WAIT)
            assert sorted(found.get(timeout=WAIT).getMessage() for _ in range(2)) == [
                f"[actor=functions[{rank}]] shown 7" for rank in (0, 1)
            ]
    finally:
        log.removeHandler(handler)


def test_what_processes_start_takes_interrupts() -> None:
    """The processes themselves take none: Ctrl-C is the program's."""
    procs = this_host().spawn_procs()
    with procs.activate():
        assert monarch.remote(interrupted).call_one().get(WAIT) == -signal.SIGINT
        assert (
            monarch.remote(os.kill).call_one(monarch.remote(os.getpid).call_one().get(WAIT), signal.SIGINT).get(WAIT)
            is None
        )
        assert place.call_one(0).get(WAIT)[1] == 0


def test_a_function_needs_processes_and_its_arguments() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    with pytest.raises(monarch.MonarchError, match="no processes to run in"):
        place.call(1)
    with procs.activate():
        with pytest.raises(TypeError, match="place.*missing a required argument: 'offset'"):
            place.call()  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="call_one is for one"):
            place.call_one(1)
        with pytest.raises(ActorError, match="KeyError: 'as told'"):
            fail.call().get(WAIT)
        assert len(place.call(0).get(WAIT)) == 2


def test_actors_run_functions_too() -> None:
    class Caller(Actor):
        @endpoint
        def run(self) -> list[int]:
            with this_host().spawn_procs(per_host={"gpus": 2}).activate():
                return list(later.call(5).get(WAIT).values())

    caller = this_host().spawn_procs().spawn("caller", Caller)
    assert caller.run.call_one().get(WAIT) == [6, 6]


SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import beside

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
said = [total.item(), *(os.environ[name] for name in names), *sys.argv[1:], beside.NAME, __name__]
Path(f"{sys.argv[1]}-{dist.get_rank()}").write_text(" ".join(map(str, said)))
dist.destroy_process_group()
sys.exit(int(sys.argv[2]))
"""


def test_a_script_for_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    procs = this_host().spawn_procs(per_host={"hosts": 1, "gpus": 2})
    actors = procs.spawn("spmd", SPMDActor)
    address, port = actors.slice(hosts=0, gpus=0).get_host_port.call_one().get(WAIT)
    out = str(tmp_path / "out")
    assert actors.main.call(address, port, [str(tmp_path / "train.py"), out, "0"]).get(WAIT).values() == [True, True]
    for rank in range(2):
        assert Path(f"{out}-{rank}").read_text() == f"3 {rank} {rank} 2 2 0 {out} 0 beside __main__"
    address, port = actors.slice(hosts=0, gpus=0).get_host_port.call_one().get(WAIT)
    with pytest.raises(ActorError, match="exited with 4"):
        actors.main.call(address, port, [str(tmp_path / "train.py"), out, "4"]).get(WAIT)
    with pytest.raises(ActorError, match="no script or module"):
        actors.main.call(address, port, []).get(WAIT)


def test_processes_meet_by_an_address_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "127.0.0.1")
    first = this_proc().spawn("spmd", SPMDActor)
    for kind in (None, "IPv4", AddrType.IPv4):
        assert first.get_host_port.call_one(kind).get(WAIT)[0] == "127.0.0.1"
    with pytest.raises(ActorError, match="use_ipaddr='IPv6': 127.0.0.1 has no such address"):
        first.get_host_port.call_one("IPv6").get(WAIT)
    with pytest.raises(ActorError, match="use_ipaddr='IPv5': it is 'IPv4' or 'IPv6'"):
        first.get_host_port.call_one("IPv5").get(WAIT)


def test_a_module_for_torchrun(tmp_path: Path) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    actors = procs.spawn("spmd", SPMDActor)
    actors.main.call("127.0.0.1", 1, ["-m", "json.tool", "--help"]).get(WAIT)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_the_environment_alone(how: str) -> None:
    procs = this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2})
    if how == "sync":
        setup_torch_elastic_env(procs)
    else:
        asyncio.run(setup_torch_elastic_env_async(procs, "10.0.0.1", 29500))
    with procs.activate():
        read = monarch.remote(variable)
        seen = {
            name: list(read.call(name).get(WAIT).values())
            for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        }
        ports = set(read.call("MASTER_PORT").get(WAIT).values())
    assert seen == {
        "RANK": ["0", "1", "2", "3"],
        "LOCAL_RANK": ["0", "1", "0", "1"],
        "GROUP_RANK": ["0", "0", "1", "1"],
        "WORLD_SIZE": ["4"] * 4,
        "LOCAL_WORLD_SIZE": ["2"] * 4,
        "GROUP_WORLD_SIZE": ["2"] * 4,
    }
    assert len(ports) == 1 and (how == "sync" or ports == {"29500"})
    with pytest.raises(ValueError, match="give both, or neither"):
        setup_torch_elastic_env(procs, "10.0.0.1")


def test_processes_have_the_environment_of_who_spawns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read = monarch.remote(variable)
    for value in ("one", "two"):  # the second time, the parent that processes are forked from is there already
        monkeypatch.setenv("MONARCH_TEST_VARIABLE", value)
        with this_host().spawn_procs().activate():
            assert read.call_one("MONARCH_TEST_VARIABLE").get(WAIT) == value
    monkeypatch.delenv("MONARCH_TEST_VARIABLE")
    with this_host().spawn_procs().activate():
        assert read.call_one("MONARCH_TEST_VARIABLE").get(WAIT) is None


def shown_settings(*names: str) -> list[Any]:
    return [monarch.config.get_global_config()[name] for name in names]


def nested() -> list[list[Any]]:
    """The settings of a process that this one spawns within a block of its own."""
    with monarch.config.configured(templates="all"), this_host().spawn_procs().activate():
        return monarch.remote(shown_settings).call_one("kernels", "templates").get(WAIT)


def test_processes_have_the_settings_of_who_spawns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read = monarch.remote(shown_settings)
    monkeypatch.setenv("MONARCH_LOG", "plan")
    with monarch.config.configured(kernels="off"):
        procs = this_host().spawn_procs()
    with procs.activate():  # what is set later, or no longer, changes nothing in them
        assert read.call_one("kernels", "templates", "log").get(WAIT) == ["off", "auto", "plan"]
        assert monarch.remote(nested).call_one().get(WAIT) == ["off", "all"]
    with this_host().spawn_procs().activate():
        assert read.call_one("kernels").get(WAIT) == ["auto"]
