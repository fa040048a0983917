"""`breakpoint()` inside an endpoint: the actor stops in Python's own debugger, and a console sends the commands.

The actor's side is a `Pdb` whose input is a port and whose output goes to the desk, an object in the program's process
that knows which actors have stopped. `monarch debug`, or `debug()` in a notebook, is a console at that desk
(`console`).
"""

from __future__ import annotations

import asyncio
import io
import linecache
import pdb
import sys
from dataclasses import dataclass, replace
from types import FrameType

from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.channel import Channel, Port, PortReceiver
from monarch.runtime.actors.debugging.console import Console, serve_consoles
from monarch.runtime.actors.endpoint import concurrent_endpoint, endpoint
from monarch.runtime.actors.meshes import get_or_spawn_controller
from monarch.runtime.actors.processes import current
from monarch.runtime.future import Future

DESK = "monarch debug"


@dataclass(frozen=True)
class Stopped:
    """An actor that waits at a breakpoint: which one, and where. `rank` is its place in the mesh as spawned."""

    actor: str
    rank: int
    coordinates: dict[str, int]
    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {self.function}"

    def __str__(self) -> str:
        place = ", ".join(f"{dim}={at}" for dim, at in self.coordinates.items())
        source = linecache.getline(self.file, self.line).strip()
        return "  ".join(part for part in (f"{self.actor} {self.rank}", place, self.where, source) if part)


# -- the desk ----------------------------------------------------------------------------------------------------------


class _Visit:
    """One stop of an actor, from the breakpoint to where it goes on."""

    def __init__(self, stopped: Stopped, port: Port[str]) -> None:
        self.stopped = stopped
        self.port = port
        self.said = ""
        self.waits = False
        self.over = False


class Desk(Actor):
    """Knows which actors have stopped, and passes on their output and the console's commands."""

    def __init__(self) -> None:
        self.visits: dict[int, _Visit] = {}
        self.last = 0
        self.changed = asyncio.Condition()
        serve_consoles(lambda: desk().get())

    # -- for actors ----------------------------------------------------------------------------------------------------

    @concurrent_endpoint
    async def arrive(self, stopped: Stopped, port: Port[str]) -> int:
        async with self.changed:
            self.last += 1
            self.visits[self.last] = _Visit(stopped, port)
            self.changed.notify_all()
            return self.last

    @concurrent_endpoint
    async def say(self, visit: int, text: str, stopped: Stopped | None) -> None:
        """The debugger's output, and where the actor waits for a command now; None: it goes on."""
        async with self.changed:
            known = self.visits.get(visit)
            if known is None:
                return
            known.said += text
            if stopped is None:
                known.over = True
                del self.visits[visit]
            else:
                known.stopped, known.waits = stopped, True
            self.changed.notify_all()

    # -- for consoles --------------------------------------------------------------------------------------------------

    @endpoint
    async def list(self) -> list[Stopped]:
        """The actors that wait for a command, by name and rank."""
        self._forget_the_dead()
        waiting = [visit.stopped for visit in self.visits.values() if visit.waits]
        return sorted(waiting, key=lambda stopped: (stopped.actor, stopped.rank))

    @concurrent_endpoint
    async def wait(self, count: int) -> None:
        """Until so many actors wait for a command."""
        async with self.changed:
            await self.changed.wait_for(lambda: sum(visit.waits for visit in self.visits.values()) >= count)

    @concurrent_endpoint
    async def tell(self, actor: str, rank: int, command: str | None) -> tuple[str, bool]:
        """Give an actor's debugger a command (None: none, just look). Its output, up to where it waits again; and
        whether it waits, or has gone on. Raises KeyError where no such actor has stopped."""
        async with self.changed:
            visit = self._visit(actor, rank)
            if command is not None:
                visit.waits, visit.said = False, ""
                visit.port.send(command)
            await self.changed.wait_for(lambda: visit.waits or visit.over)
            said, visit.said = visit.said, ""
            return said, visit.waits

    def _forget_the_dead(self) -> None:
        dead = current.process().dead
        self.visits = {number: visit for number, visit in self.visits.items() if visit.port.address not in dead}

    def _visit(self, actor: str, rank: int) -> _Visit:
        self._forget_the_dead()
        for visit in self.visits.values():
            if visit.waits and (visit.stopped.actor, visit.stopped.rank) == (actor, rank):
                return visit
        raise KeyError(f"no actor '{actor}' of rank {rank} waits at a breakpoint")


def desk() -> Future[Desk]:
    """The desk of this job."""
    return get_or_spawn_controller(DESK, Desk)


def debug() -> None:
    """A console from which to attach to actors that wait at a `breakpoint()`: for notebooks, and programs that wait."""
    console = Console(desk().get())
    while True:
        try:
            answer = console.run(input(console.prompt))
        except EOFError:
            return
        if answer is None:
            return
        print(answer, end="")


# -- the actor's side --------------------------------------------------------------------------------------------------


class _Debugger(pdb.Pdb):
    """Python's debugger, whose commands come from the desk. It blocks its thread, as a breakpoint does."""

    def __init__(self, stopped: Stopped) -> None:
        port, receiver = Channel[str].open()
        self._commands: PortReceiver[str] = receiver
        self._port = port
        self._desk = desk().get()
        self._stopped = stopped
        self._visit: int | None = None  # there is none while the actor runs
        self._printed = io.StringIO()
        super().__init__(stdin=_Input(self), stdout=self._printed, nosigint=True, readrc=False)
        self.use_rawinput = False

    def read(self) -> str:
        """The next command; the actor waits for it."""
        if self.curframe is not None:
            code, line = self.curframe.f_code, self.curframe.f_lineno
            self._stopped = replace(self._stopped, file=code.co_filename, line=line, function=code.co_name)
        if self._visit is None:
            self._visit = self._desk.arrive.call_one(self._stopped, self._port).get()
            sys.stderr.write(f"stopped at {self._stopped.where}: attach with `monarch debug`\n")
        self._say(self._stopped)
        return f"{self._commands.recv().get().rstrip()}\n"

    def set_continue(self) -> None:
        super().set_continue()
        self._say(None)

    def set_quit(self) -> None:
        super().set_quit()
        self._say(None)

    def _say(self, stopped: Stopped | None) -> None:
        """Send the output, and where the actor waits; None: it goes on."""
        text = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        if self._visit is not None:
            self._desk.say.broadcast(self._visit, text, stopped)
        if stopped is None:
            self._visit = None


class _Input(io.StringIO):
    """The debugger's input of commands."""

    def __init__(self, debugger: _Debugger) -> None:
        super().__init__()
        self._debugger = debugger

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]  # _IOBase reads bytes, it is said
        return self._debugger.read()


def stop(frame: FrameType) -> None:
    """Have the running actor stop at a frame of its own."""
    instance = current.context().actor_instance
    code = frame.f_code
    place = instance.name, instance.rank.rank, dict(instance.rank)
    _Debugger(Stopped(*place, code.co_filename, frame.f_lineno, code.co_name)).set_trace(frame)
