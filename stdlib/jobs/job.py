"""Jobs: the hosts that a program asks a scheduler for, which outlive the program, and are found again by a file.

    job.state()    a file remembers a job that can run this one   -> its hosts are attached
                   else job.apply(): `_create`, and the file      -> its hosts are attached
    job.kill()     the hosts end

The file is a pickle of the job, in which each scheduler keeps what it needs to find and to end its hosts. Secrets are
not in it: they lie in a folder that only this user can enter.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import pickle
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.meshes import HostMesh
from monarch.stdlib.live.page import dashboard
from monarch.stdlib.telemetry.session import TelemetryConfig, query
from monarch.stdlib.telemetry.session import start as start_telemetry

if TYPE_CHECKING:
    from typing import Self

DEFAULT_JOB_PATH = ".monarch/job_state.pkl"
"""The default file in which `JobTrait.state` looks for a job, and keeps it."""

_MORE_SECONDS = 2.0
"""How long a host may take to report that a killed process has ended."""

log = logging.getLogger(__name__)


class QueryClient:
    """Asks the program's telemetry: `monarch.telemetry.query` under the name that PyTorch Monarch's jobs give it."""

    def query(self, sql: str) -> dict[str, list[dict[str, Any]]]:
        """`{"rows": [...]}`, a dict for each row. Raises what `monarch.telemetry.query` does."""
        return {"rows": query(sql).to_pylist()}


class JobState:
    """The hosts of a job, each mesh an attribute by its name: `job.state().trainers`.

    `dashboard_url`        where the live page is, if `enable_telemetry` asked for it
    `query_engine_client`  what telemetry is asked by, if it was enabled: `.query(sql)["rows"]`
    """

    def __init__(self, hosts: Mapping[str, HostMesh]) -> None:
        self._hosts = dict(hosts)
        self.dashboard_url: str | None = None
        self.query_engine_client: QueryClient | None = None

    def meshes(self) -> Mapping[str, HostMesh]:
        """All of them by name, in the order in which they were asked for."""
        return self._hosts

    def __getattr__(self, name: str) -> HostMesh:
        hosts: dict[str, HostMesh] = self.__dict__.get("_hosts", {})
        if name not in hosts:
            raise AttributeError(f"the job has no mesh '{name}': it has {', '.join(sorted(hosts)) or 'none'}")
        return hosts[name]

    def __repr__(self) -> str:
        return f"JobState({self._hosts})"


class JobTrait(ABC):
    """Hosts that a program asks for, by the name of each mesh: the base class of schedulers' jobs.

    A subclass has `_create` (ask the scheduler), `_state` (wait for the hosts, and attach them), `can_run` (whether
    this job, which a file remembered, has what another asks for, and still runs) and `_kill`. Its attributes are
    pickled.
    """

    def __init__(self) -> None:
        self._running: JobTrait | None = None
        """This one, or the one that a file remembered, once it is applied."""
        self._apply_id: str | None = None
        self._dumped = False
        self._connected: list[HostMesh] = []
        self._telemetry: TelemetryConfig | None = None
        """With what `state` is to start telemetry."""
        self._watched: tuple[str | None, QueryClient | None] = None, None
        """The telemetry that states have since."""

    def enable_telemetry(self, config: TelemetryConfig | None = None, **options: Any) -> Self:
        """Have the next `state` call `monarch.telemetry.start`, with `config` or `TelemetryConfig(**options)`. It is
        this program's: neither the hosts nor the job's file remember it. Gives this job."""
        self._telemetry = config or TelemetryConfig(**options)
        return self

    def apply(self) -> None:
        """Ask the scheduler for the hosts. Once that was done it does nothing, until `kill`.

        A job that no file remembers (`state(cached_path=None)`, no `dump`) ends with this program.
        """
        if self._running is None:
            self._create(None)
            self._apply_id = str(uuid.uuid4())
            self._running = self
            atexit.register(self._forget, os.getpid())

    @property
    def active(self) -> bool:
        """Whether it was applied, or found in a file."""
        return self._running is not None

    @property
    def apply_id(self) -> str | None:
        """A name of its own for each time that the scheduler was asked."""
        return None if self._running is None else self._running._apply_id

    def state(self, cached_path: str | os.PathLike[str] | None = DEFAULT_JOB_PATH) -> JobState:
        """The hosts, attached. Waits until they serve.

        Where the file `cached_path` remembers a job that can run this one, these are its hosts. Otherwise the job is
        applied, and remembered there; the job that the file remembered before is killed. Raises MonarchError where the
        scheduler refuses, hosts do not come, or the telemetry that `enable_telemetry` asked for cannot start.
        """
        if self._running is None and cached_path is not None:
            self._running = self._remembered(Path(cached_path))
        if self._running is None:
            self.apply()
            if cached_path is not None:
                self.dump(cached_path)
        assert self._running is not None
        state = self._running._state()
        self._connected += state._hosts.values()
        if self._telemetry is not None:
            start_telemetry(self._telemetry)
            self._watched = dashboard().url if self._telemetry.include_dashboard else None, QueryClient()
            self._telemetry = None
        state.dashboard_url, state.query_engine_client = self._watched
        return state

    def kill(self) -> None:
        """Stop what this program runs on the hosts, and end them."""
        running, connected = self._running, self._connected
        try:
            ends = []
            for hosts in connected:
                with suppress(RuntimeError):  # it was stopped, shut down or closed before
                    ends.append(hosts.stop())
            until = time.monotonic() + settings.process_exit_timeout + _MORE_SECONDS
            for end in ends:
                try:
                    end.get(max(0.0, until - time.monotonic()))
                except TimeoutError:
                    log.warning("this program's processes on the job's hosts have not ended in time: ending the hosts")
                except (RuntimeError, MonarchError):  # they are lost
                    pass
        finally:  # also where this is interrupted: nobody else would end the hosts
            if running is not None:
                running._kill()
                running._running = None
            self._running, self._connected = None, []

    def dump(self, filename: str | os.PathLike[str]) -> None:
        """Remember the job in a file, which only this user can read."""
        path = Path(filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}-{os.getpid()}")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(self.dumps())
        new.replace(path)

    def dumps(self) -> bytes:
        """The content of `dump`."""
        running = self._running or self
        running._dumped = True
        running._outlive()
        return pickle.dumps(running)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connected": [], "_telemetry": None, "_watched": (None, None)}

    def _remembered(self, path: Path) -> JobTrait | None:
        try:
            job = job_load(path)
        except FileNotFoundError:
            return None
        if job._running is None:
            return None
        if job.can_run(self):
            return job
        log.warning("the job in %s has ended, or differs: killing it", path)
        job.kill()
        path.unlink(missing_ok=True)
        return None

    def _forget(self, pid: int) -> None:
        if self._running is self and not self._dumped and pid == os.getpid():
            self.kill()

    def _outlive(self) -> None:  # noqa: B027  most schedulers' hosts do
        """A file remembers the job: its hosts are not to end with this program any more."""

    @abstractmethod
    def can_run(self, spec: JobTrait) -> bool:
        """Whether the hosts of this job run, and those that `spec` asks for."""

    @abstractmethod
    def _create(self, client_script: str | None) -> None:
        """Ask the scheduler. `client_script` is None."""

    @abstractmethod
    def _state(self) -> JobState:
        """Attach the hosts, as soon as they serve."""

    @abstractmethod
    def _kill(self) -> None:
        """End the hosts. Idempotent, and without an error where they have ended."""


def job_load(filename: str | os.PathLike[str] = DEFAULT_JOB_PATH) -> JobTrait:
    """The job that `JobTrait.dump` wrote. Raises MonarchError for a file that others can write, for it is unpickled,
    and for one that holds no job."""
    with open(filename, "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise MonarchError(
                f"{os.fspath(filename)} can be written by others"
                f" (mode {about.st_mode & 0o777:o}, owner {about.st_uid})",
                hint="a job's file is run as code: keep it where only you can write.",
            )
        return _job(file.read(), os.fspath(filename))


def job_loads(data: bytes) -> JobTrait:
    """The job that `JobTrait.dumps` gave. Unpickles: give it what you trust alone."""
    return _job(data, "these bytes")


def _job(data: bytes, where: str) -> JobTrait:
    try:
        job = pickle.load(io.BytesIO(data))
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise MonarchError(
            f"{where} cannot be read as a job: {error}",
            hint="first import the module of its class: monarch --import jobs.py exec."
            if isinstance(error, ImportError)
            else "",
        ) from error
    if not isinstance(job, JobTrait):
        raise MonarchError(f"{where}: this is no job, but {type(job).__name__}")
    return job
