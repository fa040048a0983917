"""How a process of a mesh begins: its arguments, its binding, and the user's bootstrap before any actor."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import cloudpickle

from monarch.compiler.config import spawned_with
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import ActorError, SupervisionError
from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.network import Across
from monarch.runtime.actors.messages.protocol import LOG, UNFIT
from monarch.runtime.actors.processes import current, logs
from monarch.runtime.actors.processes.binding import bind
from monarch.runtime.actors.processes.current import Context, running
from monarch.runtime.actors.processes.exits import forget_what_is_the_parents
from monarch.runtime.actors.processes.group import ProcMeshSpec
from monarch.runtime.actors.processes.ports import One
from monarch.runtime.actors.processes.process import CAUSE_SECONDS, Process
from monarch.runtime.processes.importing import started
from monarch.runtime.processes.looking import answer_with, stacks
from monarch.runtime.processes.output import renew_streams
from monarch.runtime.processes.roles import Forked
from monarch.runtime.transport.reach import configure


def serve(forked: Forked, fresh: bool = False) -> NoReturn:
    """Be a process of a mesh, from a warm parent's fork on: `processes.roles.ACTORS`. The shared file describes all of
    them; each gets the socket that it listens on, and the pipes for its output. `fresh`: the command of its group has
    started this interpreter."""
    rank, boot = forked.rank, forked.shared
    listening, out, err = forked.files
    listener = socket.socket(fileno=listening)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    gc.freeze()
    gc.enable()
    sys.stdin = open(os.devnull, encoding="utf-8")
    if fresh:
        renew_streams()
    group: ProcMeshSpec
    across: Across | None
    group, across = pickle.loads(os.pread(boot, os.fstat(boot).st_size, 0))
    unfit: MonarchError | None = None
    if fresh:
        sys.path.extend(path for path in group.path if path not in sys.path)
    elif host_of(group.addresses[rank]):  # another host's: the variables here are that host's own
        sys.path.extend(path for path in group.path if path not in sys.path)
    else:
        sys.path[:] = group.path
        if not host_of(group.owner[0]):
            for name in os.environ.keys() - dict(group.environ).keys():  # of when the warm parent started
                os.environ.pop(name)
    if not fresh:
        there = dict(os.environ)
        # Variables that have their value already stay: to write all anew copies pages that are shared with the parent.
        os.environ.update((name, value) for name, value in group.environ if there.get(name) != value)
        try:
            bind(group.binding_of(rank))  # before there are threads
            if command := group.command_of(rank):
                _run(command, forked)
        except MonarchError as error:
            unfit = error
    os.close(boot)
    spawned_with(dict(group.settings))
    group = replace(group, threads=min(group.threads, len(os.sched_getaffinity(0))))
    with suppress(OSError):  # it may have gone since
        os.chdir(group.folder)
    process = Process(group, rank, listener)
    if across is not None:
        process.router.network.across = across if host_of(process.address) else None
        configure(bind=across.bind, advertise=across.advertise, tls=across.contexts)
    current.become(process)
    forget_what_is_the_parents()
    root = group.root
    logs.forward(lambda payload: process.router.send(root, (LOG,), payload), group.place(rank), group.levels)
    if group.recorded is not None:
        process.record(group.recorded)
    process.report_calls_after(group.slow_calls)
    process.watch()
    answer_with(stacks)
    threading.Thread(target=_bootstrap, args=(process, unfit), name="bootstrap", daemon=True).start()
    process.router.serve()
    os._exit(0)


def _run(command: Sequence[str], forked: Forked) -> NoReturn:
    """Have an interpreter that a command starts take the place of this process. Raises MonarchError where there is no
    such command."""
    files = [forked.shared, forked.files[0]]
    for file in files:
        os.set_inheritable(file, True)
    try:
        os.execvp(command[0], [*command, "-P", "-c", _FRESH, str(forked.rank), *map(str, files)])
    except OSError as error:
        raise MonarchError(f"the bootstrap command {command[0]} cannot be run: {error.strerror}") from error


_FRESH = "from monarch.runtime.actors.processes.serving import serve_fresh; serve_fresh()"


def serve_fresh() -> NoReturn:
    """Go on with `serve`, in an interpreter that `_run` has started."""
    rank, shared, listening = map(int, sys.argv[1:])
    sys.argv[1:] = []
    started(1)
    for file in (shared, listening):
        os.set_inheritable(file, False)
    serve(Forked(rank, shared, None, [listening, os.dup(1), os.dup(2)], {}), fresh=True)


async def _awaited(result: Awaitable[None]) -> None:
    await result


def _bootstrap(process: Process, unfit: MonarchError | None) -> None:
    """The user's bootstrap before any actor is made; without it there can be none, nor where the process is unfit."""
    if process.group.bootstrap is not None or unfit is not None:
        running.set(Context(process.client))
        try:
            if unfit is not None:
                raise unfit
            assert process.group.bootstrap is not None
            result = pickle.loads(process.group.bootstrap)()
            if isinstance(result, Awaitable):
                asyncio.run(_awaited(result))
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            _tell_why(process, error)
            os._exit(1)
    process.ready.set()


def _tell_why(process: Process, error: BaseException) -> None:
    """Tell the agent of this host, which tells everybody else, why this process ends; waits until it has heard."""
    group, rank = process.group, process.rank
    agent = group.host_of(rank)
    heard: One[None] = One(agent)
    reply = process.address, process.ports.open(heard), 0
    payload = Payload.of(cloudpickle.dumps(ActorError.of(error, f"the bootstrap of {group.place(rank)}")))
    if process.router.send(agent, (UNFIT, group.id, rank, reply), payload):
        with suppress(TimeoutError, SupervisionError):
            heard.future.get(CAUSE_SECONDS)
