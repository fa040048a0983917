"""What holds for hosts that were launched, whoever launched them."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import monarch
from monarch import DeviceMeshError, HostMesh, MonarchError
from monarch.compiler.cli.load import import_file
from monarch.distributed import Mesh
from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.processes import current
from monarch.runtime.hosts.launch.agent import AgentProcess
from monarch.runtime.hosts.launch.launcher import Credentials, LaunchedHosts
from tests.runtime.hosts.launch.conftest import Launch


def launched(hosts: HostMesh) -> LaunchedHosts:
    assert isinstance(hosts._attached, LaunchedHosts)
    return hosts._attached


def pids(hosts: HostMesh) -> list[int]:
    """The agents' processes."""
    return [info.pid for info in launched(hosts).attached.tree.hosts]


@contextmanager
def watched(pids: list[int]) -> Iterator[list[int]]:
    """Descriptors that are readable once these processes have ended."""
    opened = [os.pidfd_open(pid) for pid in pids]
    try:
        yield opened
    finally:
        for each in opened:
            os.close(each)


def has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], 60)[0])


@pytest.mark.full
@pytest.mark.parametrize("trusted_network", [False, True], ids=["TLS", "token"])
def test_programs_run_on_launched_hosts_and_these_end_with_their_block(launch: Launch, trusted_network: bool) -> None:
    x = torch.arange(32.0).view(8, 4)
    with launch(2, trusted_network=trusted_network) as hosts:
        assert len(hosts) == len(set(pids(hosts))) == 2
        with watched(pids(hosts)) as agents, Mesh(data=2, hosts=hosts) as mesh:
            there = monarch.distribute(x, mesh, "[@data, -]")
            assert torch.equal((there.T @ there).full_tensor(), x.T @ x)
            mesh.close()
            hosts.close()
            assert all(map(has_ended, agents))


OWN_OPS = """\
import torch

import monarch
from monarch.config import get_global_config as config

library = torch.library.Library("launchtest", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
library.impl("twice", torch.empty_like, "Meta")
monarch.sharding_rule("launchtest.twice", "... -> ...")


@torch.library.custom_op("launchtest::kernels_are", mutates_args=())
def kernels_are(x: torch.Tensor) -> torch.Tensor:
    return x + {"auto": 0, "all": 1, "off": 2}[config()["kernels"]]


kernels_are.register_fake(torch.empty_like)
monarch.sharding_rule("launchtest.kernels_are", "... -> ...")
"""


@pytest.fixture(scope="module")
def own_ops(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that registers an op of the user's own, which this process has imported."""
    path = tmp_path_factory.mktemp("own") / "launch_test_ops.py"
    path.write_text(OWN_OPS)
    import_file(path)
    return str(path)


def host() -> str:
    """The tag of the host that this process runs on."""
    return host_of(current.process().address)


def test_hosts_know_the_ops_of_what_they_import_run_actors_and_have_the_programs_settings(
    launch: Launch, own_ops: str
) -> None:
    """Settings are those of when the workers were started, on hosts as on this machine."""
    with launch(2, imports=[own_ops]) as hosts, watched(pids(hosts)) as agents:
        with hosts.spawn_procs().activate():
            first, second = monarch.remote(host).call().get(60).values()
            assert first and second and first != second
        for kernels, number, where in (("off", 2, None), ("all", 1, hosts)):
            with Mesh(data=2, hosts=where) as mesh:
                with monarch.config.configured(kernels=kernels):
                    there = monarch.distribute(torch.zeros(4), mesh, "[@data]")
                    assert there.sum().item() == 0
                assert torch.ops.launchtest.kernels_are(there).full_tensor().tolist() == [number] * 4
                if where is not None:
                    assert torch.ops.launchtest.twice(there + 1).full_tensor().tolist() == [2] * 4
        hosts.close()
        assert all(map(has_ended, agents))


def test_hosts_that_do_not_know_an_op_say_so_and_one_that_ends_is_noticed(launch: Launch, own_ops: str) -> None:
    """By who uses a mesh on it, and by who wants another one."""
    with launch(2) as hosts, Mesh(data=2, hosts=hosts) as mesh:
        there = monarch.distribute(torch.ones(4), mesh, "[@data]")
        with pytest.raises(DeviceMeshError, match="'launchtest.twice.default', which is not known here") as unknown:
            torch.ops.launchtest.twice(there).full_tensor()
        assert "--import" in str(unknown.value)
        assert there.sum().item() == 4
        with watched(pids(hosts)) as agents:
            os.kill(pids(hosts)[1], signal.SIGKILL)
            assert has_ended(agents[1])
        with pytest.raises(DeviceMeshError):
            while True:
                there.sum().item()
        while not launched(hosts).launcher.ended():
            os.sched_yield()  # the launcher hears of it a moment later
        with pytest.raises(MonarchError, match="its agent ended with signal 9") as error:
            launched(hosts).start(mesh.spec)
        assert error.value.message.startswith(f"host 1 ({hosts.addresses[1]}) is gone: ")
        assert error.value.hint == "lost hosts stay lost: launch them again."


def test_agents_that_do_not_start_say_why(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def rubbish(folder: object, machines: list[str]) -> list[Credentials]:
        return [Credentials({"cert.pem": b"rubbish"})] * len(machines)

    monkeypatch.setattr("monarch.runtime.hosts.launch.launcher.certificates", rubbish)
    with pytest.raises(MonarchError, match=r"host 0.* did not start: its agent ended with status 2\n(?s:.*)ca.pem"):
        launch(1)


def test_there_has_to_be_a_host(launch: Launch) -> None:
    with pytest.raises(MonarchError, match="0 .* one at least"):
        launch(0)


def test_an_agents_secrets_are_its_own_and_go_with_it() -> None:
    agent = AgentProcess("127.0.0.1", Credentials(token="0123456789abcdef" * 4))
    try:
        assert agent.serving(60).startswith("127.0.0.1:")
        assert agent.folder.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in agent.folder.iterdir()} == {0o600}
        process = agent.process()
        assert process is not None and "0123" not in " ".join(map(str, process.args))  # type: ignore[arg-type]
    finally:
        agent.end()
    assert not agent.folder.exists()
    assert agent.ended().startswith("its agent ended with status 0\n")
    assert "0123" not in repr(Credentials(token="0123"))
