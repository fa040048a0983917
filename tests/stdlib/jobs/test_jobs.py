"""Jobs of hosts on this machine, and the file by which they are found again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch
import monarch.telemetry
from monarch.compiler.mesh import Shape
from monarch.job import JobState, JobTrait, LocalJob, ProcessJob, SlurmJob, TelemetryConfig, job_load, job_loads, shell
from monarch.runtime.actors.meshes import HostMesh
from tests import python

WAIT = 60.0

FINDS = """
import sys
from monarch.job import ProcessJob, job_load

path = None if sys.argv[1] == "none" else sys.argv[1]
job = ProcessJob({"trainers": 1, "loaders": 1}, env={"MONARCH_TEST_JOB": "set"})
state = job.state(path)
procs = [hosts.spawn_procs() for hosts in (state.trainers, state.loaders)]
assert all(each.initialized.get(60) for each in procs)
print(job.apply_id, *(pid for pid, _ in job._running._started))
"""


def run(path: str) -> list[str]:
    done = python.run("-c", FINDS, path, capture_output=True, text=True, timeout=2 * WAIT)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout).split()


def variable(name: str) -> str | None:
    return os.environ.get(name)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file of a job, whose hosts end with the test."""
    path = tmp_path / "jobs" / "state.pkl"
    yield path
    if path.exists():
        job_load(path).kill()


def test_a_file_remembers_a_job_and_whoever_asks_for_the_same_gets_its_hosts(path: Path) -> None:
    first, *pids = run(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    again = ProcessJob({"trainers": 1, "loaders": 1}, env={"MONARCH_TEST_JOB": "set"})
    state = again.state(path)
    assert again.active and again.apply_id == first and [str(pid) for pid, _ in job_load(path)._started] == pids
    with state.trainers.spawn_procs().activate():
        assert monarch.remote(variable).call("MONARCH_TEST_JOB").get(WAIT).values() == ["set"]
    for hosts in (state.trainers, state.loaders):
        hosts.stop().get(WAIT)
    other = ProcessJob({"trainers": 1})
    assert other.state(path).trainers.extent == {"hosts": 1}
    assert other.apply_id != first and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    other.kill()
    assert not other.active and not job_load(path).can_run(other)


def test_a_job_that_no_file_remembers_ends_with_its_program() -> None:
    _, *pids = run("none")
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_host_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('no luck today', flush=True)\nos._exit(3)\n")
    job = ProcessJob({"trainers": 1}, env={"PYTHONPATH": str(tmp_path)})
    try:
        with pytest.raises(monarch.MonarchError, match="host 0 of the job has ended") as raised:
            job.state(None)
    finally:
        job.kill()
    assert "no luck today" in str(raised.value)


def test_a_local_job_is_this_machine() -> None:
    job = LocalJob(["trainers", "loaders"])
    state = job.state(None)
    assert state.trainers.addresses == state.loaders.addresses == ("",)
    with pytest.raises(AttributeError, match="the job has no mesh 'others': it has loaders, trainers"):
        _ = state.others
    assert list(state.meshes()) == ["trainers", "loaders"] and dict(state.meshes())["loaders"] is state.loaders
    assert job.can_run(LocalJob(["trainers", "loaders"])) and not job.can_run(LocalJob())


def test_a_shell_is_on_one_host() -> None:
    with pytest.raises(monarch.MonarchError, match="a shell runs on one host, and this mesh has 2"):
        shell(HostMesh(Shape.of({"hosts": 2}), None, None))


def test_a_job_starts_telemetry_with_its_state(tmp_path: Path) -> None:
    job = LocalJob().enable_telemetry(retention_secs=60)
    job.dump(tmp_path / "state")
    with pytest.raises(monarch.MonarchError, match="telemetry is off"):
        monarch.telemetry.query("SELECT 1")
    job_load(tmp_path / "state").state(None)  # another program's own choice
    with pytest.raises(monarch.MonarchError, match="telemetry is off"):
        monarch.telemetry.query("SELECT 1")
    state = job.state(None)
    try:
        assert monarch.telemetry.query("SELECT 1 AS one").to_pylist() == [{"one": 1}]
        for client in (state.query_engine_client, job.state(None).query_engine_client):
            assert client is not None and client.query("SELECT 1 AS one") == {"rows": [{"one": 1}]}
        assert state.dashboard_url is None
    finally:
        monarch.telemetry.stop()
    config = TelemetryConfig(prometheus=str(tmp_path / "no" / "file"))
    with pytest.raises(monarch.MonarchError, match="no/file"):
        LocalJob().enable_telemetry(config).state(None)


class Counted(JobTrait):
    """Counts what is done with it."""

    def __init__(self, size: int, alive: bool = True) -> None:
        super().__init__()
        self.size, self.alive, self.done = size, alive, list[str]()

    def can_run(self, spec: JobTrait) -> bool:
        return self.alive and isinstance(spec, Counted) and spec.size == self.size

    def _create(self, client_script: str | None) -> None:
        self.done.append("create")

    def _state(self) -> JobState:
        self.done.append("state")
        return JobState({})

    def _kill(self) -> None:
        self.done.append("kill")


def test_a_job_is_applied_once_until_it_is_killed(tmp_path: Path) -> None:
    job = Counted(1)
    first = [job.apply(), job.apply_id][1]
    job.apply()
    job.state(tmp_path / "state")
    assert job.done == ["create", "state"] and job.apply_id == first
    assert not (tmp_path / "state").exists()  # it was applied before: its program has it
    job.kill()
    assert job.done[-1] == "kill" and not job.active and job.apply_id is None
    job.state(None)
    assert job.done[-2:] == ["create", "state"] and job.apply_id != first


def test_a_kill_that_is_interrupted_ends_the_hosts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the failure of an actor, while hosts are stopped in order."""

    def interrupted(hosts: HostMesh) -> None:
        raise KeyboardInterrupt

    job = Counted(1)
    job.state(None)
    job._connected.append(HostMesh(Shape.of({"hosts": 1}), None, None))
    monkeypatch.setattr(HostMesh, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.kill()
    assert job.done[-1] == "kill" and not job.active


def test_what_a_file_remembers_that_has_ended_is_made_anew(tmp_path: Path) -> None:
    Counted(1, alive=False).state(tmp_path / "state")
    job = Counted(1)
    job.state(tmp_path / "state")
    assert job.done == ["create", "state"] and job_load(tmp_path / "state").apply_id == job.apply_id
    again = Counted(1)
    again.state(tmp_path / "state")
    assert again.done == [] and again.apply_id == job.apply_id
    assert job_loads(again.dumps()).apply_id == job.apply_id


def test_a_file_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    Counted(1).state(path)
    path.chmod(0o620)
    with pytest.raises(monarch.MonarchError, match="can be written by others"):
        job_load(path)
    path.write_bytes(b"nothing")
    path.chmod(0o600)
    with pytest.raises(monarch.MonarchError, match="cannot be read as a job"):
        Counted(1).state(path)
    with pytest.raises(monarch.MonarchError, match="this is no job, but int"):
        job_loads(b"K\x01.")


@pytest.mark.parametrize("meshes", [{}, ["trainers"], {"trainers": 0}, {"trainers": "2"}, {"trainers": 1.5}])
@pytest.mark.parametrize("kind", [ProcessJob, SlurmJob])
def test_a_job_of_hosts_that_cannot_be_meant(kind: Any, meshes: Any) -> None:
    with pytest.raises(ValueError, match="how many hosts each mesh has|give a whole number from 1"):
        kind(meshes)


def test_a_mesh_is_not_called_as_what_states_have() -> None:
    with pytest.raises(ValueError, match=r"cannot be called 'meshes': job.state\(\).meshes is something else"):
        ProcessJob({"meshes": 1})
