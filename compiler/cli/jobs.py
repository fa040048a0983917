"""`monarch apply`, `exec`, `shell` and `kill`: a job from a Python file, and commands on its hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from monarch.compiler.cli.load import import_file, users_errors
from monarch.compiler.cli.screen import console, line
from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.meshes import HostMesh
from monarch.stdlib.jobs.commands import execute as execute_on
from monarch.stdlib.jobs.job import JobTrait, job_load
from monarch.stdlib.jobs.shell import shell as shell_on


def apply(job: str, state: Path) -> None:
    """Have a job's hosts serve, and remember it."""
    asked = _named(job)
    before = job_load(state).apply_id if state.exists() else None
    meshes = dict(asked.state(state).meshes())
    _close(meshes)
    for name, hosts in meshes.items():
        line(console(), f"{name}: {len(hosts)} host{'s' * (len(hosts) != 1)}")
    what = "runs already" if asked.apply_id == before else "is applied"
    line(
        console(), f"The job {what}, and {state} remembers it. monarch exec runs commands on it, monarch kill ends it."
    )


def execute(
    command: list[str] | None,
    mesh: str | None,
    every: bool,
    point: str | None,
    per_host: str | None,
    env: list[str] | None,
    workdir: str | None,
    script: str | None,
    kill_after: bool,
    state: Path,
) -> None:
    """Run a command on the hosts of the job, and exit with its status."""
    command = [*_script(script), *(command or [])]
    if not command:
        raise MonarchError("there is no command to run", hint="monarch exec hostname, or --script FILE.")
    if every and mesh is not None:
        raise MonarchError("--all is every mesh, and --mesh is one: give one of them")
    grid, at = _numbers("--per-host", per_host), _numbers("--point", point)
    variables = dict(_variable(text) for text in env or ())
    job, meshes = _attached(state)
    try:
        _known(mesh, meshes)
        first = mesh or next(iter(meshes))
        chosen = meshes if every else {first: meshes[first]}
        if not (every or mesh or point):
            at = dict.fromkeys((*chosen[first].extent, *grid), 0)
        status = execute_on(chosen, command, per_host=grid, point=at, env=variables, folder=workdir)
    finally:
        _close(meshes)
    if kill_after:
        _kill(job, state)
    sys.exit(status)


def shell(mesh: str | None, point: str | None, env: list[str] | None, workdir: str | None, state: Path) -> None:
    """Run a shell on a host of the job, and exit with its status."""
    at = _numbers("--point", point)
    variables = dict(_variable(text) for text in env or ())
    _, meshes = _attached(state)
    try:
        _known(mesh, meshes)
        hosts = meshes[mesh or next(iter(meshes))]
        status = shell_on(hosts.slice(**{**dict.fromkeys(hosts.extent, 0), **at}), env=variables, workdir=workdir)
    finally:
        _close(meshes)
    sys.exit(status)


def kill(state: Path) -> None:
    """End the hosts of the job."""
    _kill(_applied(state), state)
    line(console(), f"The job that {state} remembered is killed.")


def _applied(state: Path) -> JobTrait:
    try:
        return job_load(state)
    except FileNotFoundError:
        raise MonarchError(
            f"no job is applied: there is no {state} in {Path.cwd()}",
            hint="apply one with monarch apply FILE.py:JOB, or go where it was applied, or give its file with --state.",
        ) from None


def _attached(state: Path) -> tuple[JobTrait, dict[str, HostMesh]]:
    """The job that was applied, and its hosts."""
    job = _applied(state)
    if not job.can_run(job):
        raise MonarchError(
            f"the job that {state} remembers has ended", hint="apply it again: monarch apply FILE.py:JOB."
        )
    return job, dict(job.state(None).meshes())


def _known(mesh: str | None, meshes: dict[str, HostMesh]) -> None:
    if mesh is not None and mesh not in meshes:
        raise MonarchError(f"the job has no mesh '{mesh}': it has {', '.join(meshes) or 'none'}")


def _kill(job: JobTrait, state: Path) -> None:
    job.kill()
    state.unlink(missing_ok=True)


def _close(meshes: dict[str, HostMesh]) -> None:
    for hosts in meshes.values():
        hosts.close()


# -- arguments -------------------------------------------------------------------------------------------------------


def _named(spec: str) -> JobTrait:
    """The job that "jobs.py:job" names, or "jobs.py" if there is one in the file."""
    name, colon, path = spec.rpartition(":")
    file = Path(name if colon else spec)
    if file.suffix != ".py":
        raise MonarchError(f"{spec} names no job", hint="write FILE.py:JOB, such as jobs.py:job.")
    if not file.is_file():
        raise MonarchError(f"there is no file {file}")
    module = import_file(file)
    jobs = {key: value for key, value in vars(module).items() if isinstance(value, JobTrait)}
    known = f"its jobs are {', '.join(jobs)}" if jobs else "make one at its top level: job = ProcessJob({'hosts': 2})"
    if not colon:
        if len(jobs) != 1:
            raise MonarchError(f"{file} has {len(jobs) or 'no'} jobs at its top level", hint=f"{known}.")
        (path,) = jobs
    value = getattr(module, path.removesuffix("()"), None)
    if path.endswith("()") and callable(value):
        with users_errors(f"calling {path}"):
            value = value()
    if not isinstance(value, JobTrait):
        what = "is not there" if value is None else f"is no job, but {type(value).__name__}"
        raise MonarchError(f"'{path}' of {file} {what}", hint=f"{known}. A function that makes one: {file}:make_job().")
    return value


def _script(script: str | None) -> list[str]:
    if script is None:
        return []
    try:
        text = sys.stdin.read() if script == "-" else Path(script).read_text()
    except OSError as error:
        raise MonarchError(f"--script {script}: {error.strerror}") from None
    return ["bash", "-c", text, script]


def _numbers(option: str, text: str | None) -> dict[str, int]:
    numbers = {}
    for part in text.split(",") if text else ():
        dim, _, number = part.partition("=")
        if not (dim.strip().isidentifier() and number.strip().isdecimal()):
            raise MonarchError(f"{option} {text}: '{part}' is not DIM=N", hint=f"as in {option} gpus=4.")
        numbers[dim.strip()] = int(number)
    return numbers


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise MonarchError(f"--env {text}: it is not NAME=VALUE")
    return name, value
