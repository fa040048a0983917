"""Commands on the hosts of a job: `monarch exec`. Each runs beside an actor, and ends with it.

    this process    read.call_one()  →  the actor on each rank
                    (1, b"out") (2, b"err") … status  ←  the command's pipes

A rank sends what its command writes only when it is asked, so that no output piles up on the way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from monarch.compiler.errors import MonarchError
from monarch.compiler.mesh import Extent, Point
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.debugging.stacks import quiet_seconds
from monarch.runtime.actors.endpoint import concurrent_endpoint, endpoint
from monarch.runtime.actors.meshes import HostMesh
from monarch.runtime.actors.processes.current import context

_CHUNK = 1 << 16
_CHUNKS = 16
"""How many are kept of a command whose output nobody asks for."""
_END_SECONDS = 2.0


class Command(Actor):
    """A command, in a session of its own, with the rank's coordinates in its environment."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: str | None) -> None:
        self._command, self._folder = list(command), folder
        rank = context().actor_instance.rank
        self._env = {
            **os.environ,
            **{f"MONARCH_RANK_{dim}": str(at) for dim, at in rank.items()},
            **{f"MONARCH_SIZE_{dim}": str(size) for dim, size in rank.extent.items()},
            **env,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._said: asyncio.Queue[tuple[int, bytes] | int] = asyncio.Queue(_CHUNKS)

    @endpoint
    async def start(self) -> str:
        """Start it. Gives why it cannot be started, or ""."""
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                env=self._env,
                cwd=self._folder,
                start_new_session=True,
            )
        except OSError as error:
            return str(error)
        self._reading = asyncio.create_task(self._read(self._process))
        return ""

    @concurrent_endpoint  # which is cancelled when the actor is stopped
    async def read(self, within: float) -> tuple[int, bytes] | int | None:
        """Its next output, and where to, None where it writes nothing for so many seconds; at the end its status, as a
        shell has it."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._said.get(), within)
        return None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        async def forward(file: int, stream: asyncio.StreamReader) -> None:
            while chunk := await stream.read(_CHUNK):
                await self._said.put((file, chunk))

        assert process.stdout is not None and process.stderr is not None
        await asyncio.gather(forward(1, process.stdout), forward(2, process.stderr))
        status = await process.wait()
        await self._said.put(status if status >= 0 else 128 - status)

    async def __cleanup__(self, exc: Exception | None) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._reading.cancel()
        for end in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
                return


def execute(
    meshes: Mapping[str, HostMesh],
    command: Sequence[str],
    *,
    per_host: Mapping[str, int] | None = None,
    point: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> int:
    """Run a command on hosts, and print its output as it comes: of one rank as it is, of several by line, each behind
    its mesh and rank. Gives the largest status of all, 128 and the signal's number for one that was killed.

    `per_host`  starts it so often on each host, as `HostMesh.spawn_procs` does
    `point`     runs it on these coordinates only
    `env`       is added to the environment on the hosts, as are MONARCH_RANK_<dim> and MONARCH_SIZE_<dim>
    `folder`    where it runs there; this one's, where the host has that

    Raises MonarchError where the command cannot be started, or a mesh has no such coordinates; SupervisionError where a
    host is lost. Then, and on ^C, the command is ended everywhere.
    """
    return _run(_execute(meshes, command, per_host or {}, point or {}, env or {}, folder))


def _run(work: Coroutine[Any, Any, int]) -> int:
    """`asyncio.run`, also where this thread runs a loop already, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def noted() -> int:
        running.append((asyncio.get_running_loop(), asyncio.ensure_future(work)))
        return await running[0][1]

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(asyncio.run, noted())
        try:
            return found.result()
        except KeyboardInterrupt:
            for loop, task in running:
                loop.call_soon_threadsafe(task.cancel)
            raise


async def _execute(
    meshes: Mapping[str, HostMesh],
    command: Sequence[str],
    per_host: Mapping[str, int],
    point: Mapping[str, int],
    env: Mapping[str, str],
    folder: str | None,
) -> int:
    spawned = []
    try:
        ranks: list[tuple[str, Command]] = []
        for name, hosts in meshes.items():
            procs = hosts.spawn_procs(dict(per_host), name="exec")
            spawned.append(procs)
            chosen = procs.spawn("command", Command, command, env, folder).slice(**point)
            for rank in range(len(chosen)):
                at = dict(Point(rank, chosen.extent))
                ranks.append((_label(name, {**point, **at}, procs.extent), chosen.slice(**at)))
        await asyncio.gather(*(_start(label, each, command) for label, each in ranks))
        alone = len(ranks) == 1
        return max(await asyncio.gather(*(_follow(each, "" if alone else f"[{label}] ") for label, each in ranks)))
    finally:
        for procs in spawned:
            await procs.stop("its command has ended")


def _label(mesh: str, at: Mapping[str, int], extent: Extent) -> str:
    return " ".join((mesh, *(f"{dim}={at[dim]}" for dim in extent)))


async def _start(label: str, rank: Command, command: Sequence[str]) -> None:
    if why := await rank.start.call_one():
        raise MonarchError(f"{command[0]} cannot be started on {label}: {why}")


async def _follow(rank: Command, prefix: str) -> int:
    """Print a command's output until it ends: as it is, or by line behind a prefix. Gives its status."""
    to = {1: sys.stdout.buffer, 2: sys.stderr.buffer}
    begun = {1: b"", 2: b""}
    while not isinstance(said := await rank.read.call_one(quiet_seconds()), int):
        if said is None:
            continue
        file, text = said
        if prefix:
            *lines, begun[file] = (begun[file] + text).split(b"\n")
            text = b"".join(prefix.encode() + line + b"\n" for line in lines)
        to[file].write(text)
        to[file].flush()
    for file, text in begun.items():
        if text:
            to[file].write(prefix.encode() + text + b"\n")
            to[file].flush()
    return said
