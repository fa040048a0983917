"""The transport `verbs`: one device for the process, memory registered with it, and connections made."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport.interface import Address
from monarch.runtime.transport.plug import Accepted, EndpointContext, Offer, Owned, Unsuitable
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.streams import Stream
from monarch.runtime.transport.verbs import adapter, ports
from monarch.runtime.transport.verbs.adapter import Device, Library, NoVerbs, VerbsFailed
from monarch.runtime.transport.verbs.link import PATIENCE, Connection, VerbsLink
from monarch.runtime.transport.verbs.memory import Memories
from monarch.runtime.transport.verbs.ports import Way

_log = logging.getLogger("monarch.transport")


class VerbsTransport:
    name = "verbs"
    streams: tuple[str, ...] = ("local", "tcp")

    def __init__(self, context: EndpointContext) -> None:
        self._loop = context.loop
        self._library: Library | None = None
        self._device: Device | None = None
        self._memories: Memories | None = None
        self._ways: list[Way] = []
        self.links: set[VerbsLink] = set()

    # -- the device ------------------------------------------------------------------------------------------------

    def available(self) -> str | None:
        try:
            self._library = adapter.library()
            self._device, self._ways = _open(self._library)
        except (NoVerbs, VerbsFailed) as error:
            return str(error)
        self._memories = Memories(self._device)
        _opened.add(self)
        return None

    @property
    def device_name(self) -> str:
        return self._opened_device().name

    @property
    def library_name(self) -> str:
        assert self._library is not None
        return self._library.name

    def _opened_device(self) -> Device:
        assert self._device is not None, "asked for before it was available"
        return self._device

    # -- memory ----------------------------------------------------------------------------------------------------

    @property
    def memories(self) -> Memories:
        assert self._memories is not None, "asked for before it was available"
        return self._memories

    def register(self, owned: Owned) -> dict[str, Any] | None:
        """Peers learn address and key when they open the region (`link`), so the region itself carries nothing, but for
        memory of a GPU that the device reaches: that it does."""
        if owned.size:
            self.memories.add(owned)
        return {} if owned.view is None and self.memories.find(owned.number) is not None else None

    def drop(self, owned: Owned) -> None:
        registered = self.memories.remove(owned.number)
        if registered is None:
            return
        links = list(self.links)
        asked = self._loop.run(lambda: [link.call_back(owned.number) for link in links]) if links else []
        leaving = [left for left in asked if left is not None]
        if self._loop.here() and leaving:
            # The answers come on this thread: works under way there end first, as they do for other links.
            for left in leaving:
                left.then(lambda: registered.release() if all(one.done() for one in leaving) else None)
            return
        for left in leaving:
            _await(left)
        registered.release()

    # -- connections -----------------------------------------------------------------------------------------------

    def offer(self, peer: Address) -> Offer:
        way = ports.choose(self._ways, _local_address(peer))
        if way is None:
            raise Unsuitable(f"{self.device_name} has no address any more")
        connection = self._connection(way)
        return Offer(connection.details(), state=connection)

    def accept(self, stream: Stream, details: Mapping[str, Any], files: Sequence[int]) -> Accepted:
        for file in files:
            os.close(file)
        family = str(details.get("family"))
        way = ports.choose(self._ways, _stream_address(stream), family)
        if way is None:
            raise Unsuitable(f"{self.device_name} is not reached by {family[:32]}")
        connection = self._connection(way)
        try:
            connection.connect(details)
        except (VerbsFailed, ValueError) as error:
            connection.close()
            raise Unsuitable(str(error)) from error
        return Accepted(VerbsLink(stream, (), self, connection, dialer=False), connection.details())

    def dial(self, stream: Stream, offer: Offer, details: Mapping[str, Any], files: Sequence[int]) -> StreamLink:
        for file in files:
            os.close(file)
        connection: Connection = offer.state
        try:
            connection.connect(details)
        except (VerbsFailed, ValueError) as error:
            connection.close()
            raise Unsuitable(str(error)) from error
        return VerbsLink(stream, (), self, connection, dialer=True)

    def withdraw(self, offer: Offer) -> None:
        offer.state.close()

    def _connection(self, way: Way) -> Connection:
        try:
            return Connection(self._opened_device(), way)
        except VerbsFailed as error:
            raise Unsuitable(str(error)) from error

    def close(self) -> None:
        _opened.discard(self)
        if self._memories is not None:
            self._memories.close()
        if self._device is not None:
            self._device.close()
            self._device = None


def _open(library: Library) -> tuple[Device, list[Way]]:
    """The device with the best way out, and all its ways."""
    closed = []
    best: tuple[int, Device, list[Way]] | None = None
    for name in library.devices():
        device = library.open(name)
        found = [
            way
            for number in ports.port_numbers(name)
            for way in ports.ways(device.port(number), ports.gids(name, number))
        ]
        way = ports.choose(found)
        rank = len(ports.FAMILIES) if way is None else ports.FAMILIES.index(way.family)
        if way is None or (best is not None and best[0] <= rank):
            device.close()
            closed.append(name)
            continue
        if best is not None:
            best[1].close()
        best = rank, device, found
    if best is None:
        raise NoVerbs(f"no port of {', '.join(closed)} is active and has an address")
    return best[1], best[2]


def _await(left: Any) -> None:
    try:
        left.wait(PATIENCE)
    except MonarchError:
        pass  # the link has ended, and with it all that was under way
    except TimeoutError:
        _log.warning("a peer does not leave a region that is dropped; what it does there now loses its link")


def _local_address(peer: Address) -> str | None:
    """The address of this host by which the peer's is reached."""
    where = peer.offers.get("tcp")
    if where is None:
        return None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            where["host"], where["port"], type=socket.SOCK_DGRAM
        ):
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # sends nothing
                return str(sock.getsockname()[0])
    except OSError:
        pass
    return None


def _stream_address(stream: Stream) -> str | None:
    if stream.kind == "local":
        return None
    try:
        return str(stream.socket.getsockname()[0])
    except OSError:
        return None


# -- forks -------------------------------------------------------------------------------------------------------------

_opened: weakref.WeakSet[VerbsTransport] = weakref.WeakSet()
_inherited: list[Any] = []


def _after_fork() -> None:
    """A child shares its parent's connection to the device: an object that it destroys is destroyed for the parent. So
    the child closes the files, under the same numbers, and nothing else."""
    if not _opened:
        return
    _inherited.extend(_opened)
    _opened.clear()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("/dev/infiniband/") or target == "anon_inode:[infinibandevent]":
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_after_fork)
