"""Jobs of Slurm, by its command line: `sbatch`, `squeue`, `scontrol` and `scancel`."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.hosts import hosts as attach_hosts
from monarch.runtime.actors.meshes import HostMesh
from monarch.runtime.control.certificates import CONTROLLER
from monarch.stdlib.jobs.arguments import meshes_of, port_of, seconds_of
from monarch.stdlib.jobs.job import JobState, JobTrait
from monarch.stdlib.jobs.local import COMMAND

LOOK_SECONDS = 2.0
"""Between two questions for the queue: squeue asks the cluster's one controller."""
QUEUE_SECONDS = 60.0
"""How long squeue may fail: it does while the cluster's controller is busy, or starts again."""
_TRY_SECONDS = 0.5
log = logging.getLogger(__name__)
_WAITS = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
_RUNS = frozenset(("RUNNING", "RESIZING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"))


class SlurmJob(JobTrait):
    """Nodes of a Slurm cluster, one host each, as one job of so many for each mesh.

        job = SlurmJob({"trainers": 4}, partition="gpu", gpus_per_node=8, time_limit="02:00:00")
        procs = job.state().trainers.spawn_procs(per_host={"gpus": 8})

    `meshes`             the number of nodes of each mesh
    `python_exe`         a Python there that has Monarch, in the same version
    `slurm_args`         more options of `sbatch`: ["--constraint=h100"]
    `monarch_port`       where the hosts listen, each on its node's name
    `log_dir`            where Slurm writes what they print; in a folder there, which only you can enter, the hosts'
                         certificates are. All nodes and this program have to see it. The current folder without it
    `job_start_timeout`  seconds in the queue after which `state` gives up and cancels the job; without it there is none
    `exclusive`, `job_name`, `time_limit`, `partition`, `account`, `qos`, `gpus_per_node`, `cpus_per_task`, `mem`
                         as `sbatch` has them

    The job makes an authority and certificates for its own nodes as it starts, and throws the authority's key away.
    Raises ValueError for numbers that cannot be meant, and for an option of several lines.
    """

    def __init__(
        self,
        meshes: Mapping[str, int],
        python_exe: str = "python",
        slurm_args: Sequence[str] = (),
        monarch_port: int = 22222,
        job_name: str = "monarch_job",
        time_limit: str | None = None,
        partition: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        exclusive: bool = True,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem: str | None = None,
        job_start_timeout: float | None = None,
        account: str | None = None,
        qos: str | None = None,
    ) -> None:
        super().__init__()
        self._meshes = meshes_of("SlurmJob", meshes)
        self._python = python_exe
        self._port = port_of("SlurmJob", monarch_port)
        self._timeout = seconds_of("job_start_timeout", job_start_timeout)
        self._logs = str(Path(log_dir or ".").resolve())
        options = {
            "job-name": job_name,
            "nodes": sum(self._meshes.values()),
            "ntasks-per-node": 1,
            "time": time_limit,
            "partition": partition,
            "account": account,
            "qos": qos,
            "gpus-per-node": gpus_per_node,
            "cpus-per-task": cpus_per_task,
            "mem": mem,
        }
        if isinstance(slurm_args, str):
            raise ValueError(f"slurm_args={slurm_args!r}: give a list of options, [{slurm_args!r}]")
        self._options = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
        self._options += ["--exclusive"] * exclusive + list(slurm_args)
        if wrong := [option for option in (*self._options, self._logs) if "\n" in option]:
            raise ValueError(f"{wrong[0]!r} is an option of sbatch, and those have one line")
        self._id = ""
        self._folder = ""

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, SlurmJob) and spec._asked() == self._asked() and self._queued()[0] in _WAITS | _RUNS

    def _asked(self) -> tuple[object, ...]:
        return self._meshes, self._python, self._port, self._logs, self._options

    def script(self) -> str:
        """The job's script, once it is applied: the standard input of `sbatch`."""
        folder, python = shlex.quote(self._folder), shlex.quote(self._python)
        output = shlex.quote(f"{self._logs.replace('%', '%%')}/monarch-%j.out")
        monarch = f"{python} -c {shlex.quote(COMMAND)}"
        serve = f'exec {monarch} host --listen "$SLURMD_NODENAME:{self._port}" --tls {folder}/"$SLURMD_NODENAME"'
        return "\n".join(
            (
                "#!/bin/bash",
                *(f"#SBATCH {option}" for option in self._options),
                f"#SBATCH --output={output}",
                "set -e",
                "umask 077",
                'names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
                f"{monarch} ca {folder} $(printf -- '--host %s ' $names)",
                f"rm {folder}/ca-key.pem",
                f"srun --ntasks-per-node=1 bash -c {shlex.quote(serve)}",
                "",
            )
        )

    def _create(self, client_script: str | None) -> None:
        folder = Path(self._logs) / f".monarch-{token_hex(8)}"
        folder.mkdir(mode=0o700, parents=True)
        self._folder = str(folder)
        try:
            said = _slurm("sbatch", "--parsable", given=self.script())
        except MonarchError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._id = said.strip().partition(";")[0]  # behind a semicolon is the cluster's name

    def _queued(self) -> tuple[str, str, str]:
        """The job's state, "" where Slurm knows none, its nodes, and why it waits."""
        until = 0.0
        while True:
            try:
                said = _slurm("squeue", "--noheader", f"--jobs={self._id}", "--format=%T|%N|%r")
                break
            except _Failed as error:
                if "Invalid job id" in error.message:  # it has ended a while ago
                    return "", "", ""
                if not until:
                    until = time.monotonic() + QUEUE_SECONDS
                    log.warning("Slurm's job %s: %s; squeue is asked again", self._id, error.message)
                elif time.monotonic() >= until:
                    raise
            time.sleep(LOOK_SECONDS)
        state, nodes, why = (*said.strip().split("|", 2), "", "")[:3]
        return state, nodes, why

    def _state(self) -> JobState:
        nodes = _slurm("scontrol", "show", "hostnames", self._placed()).split()
        if len(nodes) != sum(self._meshes.values()):
            raise MonarchError(f"Slurm's job {self._id} has {len(nodes)} nodes, and {self._meshes} were asked for")
        meshes = {}
        for name, count in self._meshes.items():
            mine, nodes = nodes[:count], nodes[count:]
            meshes[name] = self._attach([f"{node}:{self._port}" for node in mine])
        return JobState(meshes)

    def _placed(self) -> str:
        """The nodes that the job has, as Slurm writes them, once it has some."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            state, nodes, why = self._queued()
            if state in _RUNS:
                return nodes
            if state not in _WAITS:
                raise self._ended(state)
            if deadline is not None and time.monotonic() >= deadline:
                late = MonarchError(
                    f"Slurm's job {self._id} did not start within {self._timeout:g} s: it is cancelled",
                    hint=f"it waited: {', '.join(filter(None, (state, why)))}",
                )
                self.kill()
                raise late
            time.sleep(LOOK_SECONDS)

    def _ended(self, state: str) -> MonarchError:
        return MonarchError(
            f"Slurm's job {self._id} has ended ({state or 'it is in no queue any more'})",
            hint=f"its output is in {self._logs}/monarch-{self._id}.out",
        )

    def _attach(self, addresses: list[str]) -> HostMesh:
        """Hosts that have just been started, as soon as all of them serve."""
        deadline = time.monotonic() + settings.host_spawn_ready_timeout
        while True:
            try:
                return attach_hosts(addresses, tls=Path(self._folder) / CONTROLLER)
            except MonarchError:
                state, _, _ = self._queued()
                if state not in _RUNS:
                    raise self._ended(state) from None
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_TRY_SECONDS)

    def _kill(self) -> None:
        if self._id and self._queued()[0]:
            _slurm("scancel", self._id)
        self._id = ""
        shutil.rmtree(self._folder, ignore_errors=True)


class _Failed(MonarchError):
    """A command of Slurm's ran, and failed."""


def _slurm(*command: str, given: str | None = None) -> str:
    """The output of a command of Slurm's. Raises MonarchError with its message."""
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MonarchError(f"there is no {command[0]} here", hint="run this where Slurm's commands are.") from None
    if done.returncode:
        raise _Failed(f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
