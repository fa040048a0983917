"""Connections that a library makes, and the processes at their other ends.

Gloo listens on a port and takes the first that connects for the worker that it waits for. So its workers look at its
connections before they send anything: a connection is good if its two addresses, the other way round, are those of a
connection of the worker that it is to. They tell each other over the mesh's own memory, or over the authenticated links
between hosts. On one machine, only the two processes that hold its ends have a connection with these two addresses, so
nobody can pass for a worker; between machines that is as true as nobody else is on the network, and elsewhere no
process group is made. Once all connections are there, the listener hears nobody any more.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from monarch.compiler.plan import MonarchError
from monarch.runtime.control.security import is_loopback

Address = tuple[str, int]
Ends = tuple[Address, Address]
"""A connection as one process sees it: its own address, and the other end's."""

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)  # a BPF program: return 0 bytes of every packet
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Network:
    """The network between this host's workers and those of other hosts: `bind` is its address there, `advertise` the
    one by which others reach it, if that is another; `tls` whether its traffic has to be encrypted."""

    bind: str
    advertise: str | None
    tls: bool

    def address(self, library: str) -> str:
        """Where a library that does not encrypt may listen for other hosts. Raises MonarchError: nowhere."""
        instead = f'leave out collectives="{library.lower()}"'
        if self.tls and not is_loopback(self.bind):
            raise MonarchError(
                f"{library} does not encrypt, and the hosts have TLS: anyone on the network of {self.bind} could "
                "listen",
                hint=f"{instead}; or, if nobody else is on the network, let hosts listen with\n"
                "--token-file and --trusted-network, and attach them with token= and trusted_network=True.",
            )
        if self.advertise is not None and self.advertise != self.bind:
            raise MonarchError(
                f"{library} would listen on {self.bind}, and other hosts reach this one as {self.advertise}",
                hint=f"{instead}, or start hosts on addresses by which others reach them.",
            )
        return self.bind


def sockets() -> dict[int, socket.socket]:
    """Each TCP socket of this process by inode, under a file descriptor of its own, which the caller closes."""
    found: dict[int, socket.socket] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.stat(f"/proc/self/fd/{name}").st_ino
            if inode in found or not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            file = os.dup(int(name))
        except OSError:  # another thread has closed it
            continue
        try:
            made = socket.socket(fileno=file)
        except OSError:  # and opened something else
            os.close(file)
            continue
        if made.family in _FAMILIES and made.type == socket.SOCK_STREAM:
            found[os.fstat(made.fileno()).st_ino] = made
        else:
            made.close()
    return found


def listeners() -> dict[int, socket.socket]:
    """Those that listen."""
    return _those(lambda each: bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))


def connections(own: Address, others: Sequence[Address]) -> list[socket.socket]:
    """Those that came to the listener at `own`, and those that were made to `others`."""

    def concerned(each: socket.socket) -> bool:
        ends = ends_of(each)
        return ends is not None and (ends[0] == own or ends[1] in others)

    return list(_those(concerned).values())


def _those(wanted: Callable[[socket.socket], bool]) -> dict[int, socket.socket]:
    found = sockets()
    for inode, each in list(found.items()):
        if not wanted(each):
            found.pop(inode).close()
    return found


def ends_of(connection: socket.socket) -> Ends | None:
    try:
        local, remote = connection.getsockname(), connection.getpeername()
    except OSError:  # not connected
        return None
    return (local[0], local[1]), (remote[0], remote[1])


def stranger_among(told: Sequence[Sequence[Ends]]) -> str | None:
    """What is wrong with the connections of a group's workers, if anything: between any two of them there has to be
    one, and no other."""
    holders = {ends: worker for worker, held in enumerate(told) for ends in held}
    between: dict[frozenset[int], int] = {}
    for worker, held in enumerate(told):
        for local, remote in held:
            other = holders.get((remote, local))
            if other is None or other == worker:
                return f"a connection between {_text(local)} and {_text(remote)} has no other end among the workers"
            pair = frozenset((worker, other))
            between[pair] = between.get(pair, 0) + 1
    for first, second in combinations(range(len(told)), 2):
        if (count := between.get(frozenset((first, second)), 0)) != 2:  # each of the two has told of it
            return f"two workers that are to have one connection have {count // 2}"
    return None


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def hear_nobody(listener: socket.socket) -> None:
    """Let it drop whatever comes to it from now on. The connections that it has made stay."""
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def cut(connection: socket.socket) -> None:
    """End a connection in all processes that have it: threads that wait for it, at either end, wake up."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was quicker
        pass
    connection.close()
