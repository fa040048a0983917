"""Ports of hosts, reached from here: `monarch.job.PortForwarder` and `monarch.job.forward(host, port)`.

    a program  ⇄  _Listener, on 127.0.0.1     write.call_one(bytes)  →  Connector  ⇄  127.0.0.1:port there
                                              bytes  ←  read.call_one()

All of it goes where calls of actors go. In each direction of a connection one piece is under way, and the next is read
when the other side has taken it: nothing piles up, and a sender that is too fast waits, as on one connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from monarch.compiler.errors import MonarchError
from monarch.compiler.mesh import Point
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.debugging.stacks import quiet_seconds
from monarch.runtime.actors.endpoint import concurrent_endpoint, endpoint
from monarch.runtime.actors.errors import ActorError, SupervisionError
from monarch.runtime.actors.meshes import HostMesh, ProcMesh, this_proc
from monarch.runtime.actors.processes.current import current_rank
from monarch.runtime.actors.values import ValueMesh

_HERE = "127.0.0.1"
_PIECE = 1 << 18


class Connector(Actor):
    """Connects to a port of its own host, once for each connection that was accepted on the other side."""

    def __init__(self, port: int | Callable[[Point], int]) -> None:
        self._asked, self._port = port, 0
        self._open: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    @endpoint
    async def prepare(self) -> int:
        """The port. ValueError where it is none."""
        port = self._asked
        self._port = _checked("dst_port", port(current_rank()) if callable(port) else port)
        return self._port

    @concurrent_endpoint
    async def connect(self, number: int) -> None:
        """Open connection `number`. OSError where nothing accepts it."""
        self._open[number] = await asyncio.open_connection(_HERE, self._port, limit=_PIECE)

    @concurrent_endpoint
    async def read(self, number: int) -> bytes | None:
        """The next bytes; b"" at the end, None where nothing has come for a while."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(self._open[number][0].read(_PIECE), quiet_seconds())
        return None

    @concurrent_endpoint
    async def write(self, number: int, piece: bytes) -> None:
        """Send it, and return when there is room for more; b"" says that no more comes."""
        writer = self._open[number][1]
        if piece:
            writer.write(piece)
            await writer.drain()
        else:
            writer.write_eof()

    @endpoint
    async def close(self, number: int, broken: bool) -> None:
        """Connection `number` is over; if it is `broken`, the connection here is reset."""
        if number in self._open:
            _end(self._open.pop(number)[1], broken)

    async def __cleanup__(self, exc: Exception | None) -> None:
        for _, writer in self._open.values():
            _end(writer, True)


class _Listener(Actor):
    """Accepts connections on an address of its own host, and passes their bytes on."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._running: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @endpoint
    async def listen(self, there: Connector, address: str | Callable[[Point], str]) -> int:
        """Start. Gives the port, also where 0 was asked for. OSError where it is taken, ValueError for an address that
        others reach."""
        at = current_rank()
        self._there: Connector = there.slice(**dict(at))
        host, port = _address(address(at) if callable(address) else address)
        self._server = await asyncio.start_server(self._accept, host, port, limit=_PIECE)
        return self._server.sockets[0].getsockname()[1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._forward(next(self._numbers), reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _forward(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        broken = True
        try:
            await self._there.connect.call_one(number)
            ways = [asyncio.ensure_future(self._out(number, reader)), asyncio.ensure_future(self._back(number, writer))]
            try:
                await asyncio.gather(*ways)
                broken = False
            finally:
                for way in ways:
                    way.cancel()
        except (ActorError, SupervisionError, OSError) as error:
            why = error.exception if isinstance(error, ActorError) else error
            self.logger.warning("a forwarded connection has ended: %s: %s", type(why).__name__, why)
        finally:
            _end(writer, broken)
            with suppress(SupervisionError):  # it has ended, and its connections with it
                self._there.close.broadcast(number, broken)

    async def _out(self, number: int, reader: asyncio.StreamReader) -> None:
        while True:
            piece = await reader.read(_PIECE)
            await self._there.write.call_one(number, piece)
            if not piece:
                return

    async def _back(self, number: int, writer: asyncio.StreamWriter) -> None:
        while (piece := await self._there.read.call_one(number)) != b"":
            if piece is not None:
                writer.write(piece)
                await writer.drain()
        writer.write_eof()

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._server is not None:
            self._server.close()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class PortForwarder(Actor):
    """Forwards ports between processes, until it is stopped:

        forwarder = this_proc().spawn("forwarder", PortForwarder)
        forwarder.forward.call_one(procs, 8265, this_proc(), "127.0.0.1:9000").get()
        ...
        forwarder.stop().get()

    `monarch.job.forward` is the same for one port of a host, as a block.
    """

    @endpoint
    async def forward(
        self,
        dst_proc_mesh: ProcMesh,
        dst_port: int | Callable[[Point], int],
        src_proc_mesh: ProcMesh,
        src_address: str | Callable[[Point], str],
    ) -> ValueMesh[int]:
        """Have each process of one mesh listen, and connections go to the port of the process at the same place of the
        other. Gives the ports on which they listen.

        `dst_port`     a port on 127.0.0.1 of the host of each process, or a function of its place
        `src_address`  "127.0.0.1:9000", or a function of the place; with port 0 the system chooses one. It is an
                       address of the host itself alone: others would reach the port without a certificate

        Connections are forwarded side by side, and each side may end its own direction first. A connection whose other
        side cannot be reached is reset, and the log of the listening process says why. Raises ActorError, of a
        ValueError for meshes of different shapes and what is no such address or port, of an OSError for a port that is
        taken.
        """
        if dst_proc_mesh.extent != src_proc_mesh.extent:
            raise ValueError(
                f"a port is forwarded from each process to the one at the same place, and the meshes are "
                f"{src_proc_mesh.extent} and {dst_proc_mesh.extent}"
            )
        if not callable(src_address):
            _address(src_address)
        there = dst_proc_mesh.spawn("port forwarder, there", Connector, dst_port)
        here = src_proc_mesh.spawn("port forwarder, here", _Listener)
        try:
            await there.prepare.call()
            return await here.listen.call(there, src_address)
        except BaseException:
            for actors in (here, there):
                await actors.stop("it could not be started")
            raise


@contextmanager
def forward(host: HostMesh, port: int, *, local_port: int = 0) -> Iterator[int]:
    """A port of a host, reached from here: the block gets the local port, on 127.0.0.1.

        with monarch.job.forward(hosts.slice(hosts=0), 8265) as here:
            print(f"http://127.0.0.1:{here}")
            input()

    What is sent goes to 127.0.0.1:`port` there, as `PortForwarder` says. With `local_port=0` the system chooses one.
    At the end of the block connections that are open are reset. Raises MonarchError for a mesh of several hosts,
    ActorError where the local port is taken or no port, SupervisionError where the host is lost.
    """
    if len(host) != 1:
        raise MonarchError(
            f"a port is forwarded to one host, and this mesh has {len(host)}",
            hint="take one: hosts.slice(hosts=0). monarch.job.PortForwarder forwards from several.",
        )
    procs = host.spawn_procs(name="port forwarder")
    try:
        there = procs.slice(**dict.fromkeys(procs.extent, 0))
        forwarder = this_proc().spawn("port forwarder", PortForwarder)
        try:
            found = forwarder.forward.call_one(there, port, this_proc(), f"{_HERE}:{local_port}").get()
            yield found.values()[0]
        finally:
            forwarder.stop("its block has ended").get()
    finally:
        procs.stop("its block has ended").get()


def _end(writer: asyncio.StreamWriter, broken: bool) -> None:
    """Close a connection; one that is broken by a reset, so that its end is not taken for the end of the data."""
    if broken:
        with suppress(OSError):  # asyncio has closed it by itself: it was the other side that broke it
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


def _checked(name: str, port: object, least: int = 1) -> int:
    if not isinstance(port, int) or isinstance(port, bool) or not least <= port <= 65535:
        raise ValueError(f"{name}={port!r}: a port is a whole number from {least} to 65535")
    return port


def _address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        inside = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not colon or not port.isdecimal():
        raise ValueError(f"src_address={address!r}: it is an address and a port, '127.0.0.1:9000'")
    if not inside:
        raise ValueError(
            f"src_address={address!r}: only 127.0.0.1, [::1] and localhost can be listened on: a client of "
            "another address would reach the host's port without a certificate"
        )
    return host, _checked("the port of src_address", int(port), 0)


__all__ = ["PortForwarder", "forward"]
