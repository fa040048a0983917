"""Connections that ended before the peer had proved its identity.

gRPC refuses connections without TLS, without a certificate or without HTTP/2, and does not report them. The kernel
reports (sock_diag(7), SKNLGRP_INET_TCP_DESTROY) each TCP connection that ends, with both its addresses. Peers that gRPC
has let through are known here by their addresses, and the others were refused. Costs nothing while no peer connects.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
from collections import Counter

from monarch.runtime.control.loop import log

_NETLINK_SOCK_DIAG = 4
_TCP_DESTROY, _TCP6_DESTROY = 1 << 0, 1 << 2
_SO_ATTACH_FILTER = 26
_SOURCE_PORT, _TARGET_PORT, _TARGET = 20, 22, 40  # in a netlink message with an inet_diag_msg
_LENGTH = _TARGET + 16
_SECONDS = 1.0
_NAMED = 20


class Connections:
    """Those to one port of this machine. Runs in the event loop."""

    def __init__(self, port: int) -> None:
        self._known: set[str] = set()
        self._unknown: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        try:
            self._socket = _listen(port)
        except OSError as error:
            log.info("connections that are refused before their first message are not logged: %s", error)
            return
        self._loop.add_reader(self._socket.fileno(), self._read)

    @property
    def works(self) -> bool:
        """Whether the kernel tells."""
        return self._socket is not None

    def know(self, peer: str) -> None:
        """A peer that talks to us over gRPC, by gRPC's name for it: its errors are logged elsewhere."""
        if self._socket is not None:
            self._known.add(peer)

    def close(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._read()
            self._tell()
            self._socket.close()
            self._socket = None

    def _read(self) -> None:
        assert self._socket is not None
        while True:
            try:
                message = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: more than the kernel could keep for us
                message = b""
            self._ended(message)

    def _ended(self, message: bytes) -> None:
        peer, name = _peer(message)
        if peer in self._known:
            self._known.discard(peer)
        elif name:
            if not self._unknown:
                self._loop.call_later(_SECONDS, self._tell)
            self._unknown[name] += 1

    def _tell(self) -> None:
        """One line for all connections within a second: frequent ones are not to fill the log."""
        if not self._unknown:
            return
        total, named = self._unknown.total(), self._unknown.most_common(_NAMED)
        who = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in named)
        more = f" and {len(self._unknown) - _NAMED} more addresses" if len(self._unknown) > _NAMED else ""
        many = "a connection was" if total == 1 else f"{total:,} connections were"
        log.warning("%s refused, or ended before the first message: from %s%s", many, who, more)
        self._unknown.clear()


def _peer(message: bytes) -> tuple[str, str]:
    """The other end of a connection that has ended, as gRPC names it, and for people."""
    if not message:
        return "", "addresses that were missed"
    if len(message) < _LENGTH:
        return "", ""
    (port,) = struct.unpack_from(">H", message, _TARGET_PORT)
    if not port:  # the listener itself
        return "", ""
    if message[16] == socket.AF_INET:
        host = socket.inet_ntop(socket.AF_INET, message[_TARGET : _TARGET + 4])
        return f"ipv4:{host}:{port}", host
    address = message[_TARGET : _TARGET + 16]
    host = socket.inet_ntop(socket.AF_INET6, address)
    if address.startswith(bytes(10) + b"\xff\xff"):  # IPv4, at a listener for both
        host = socket.inet_ntop(socket.AF_INET, address[12:])
        return f"ipv4:{host}:{port}", host
    return f"ipv6:[{host}]:{port}", host


def _listen(port: int) -> socket.socket:
    """A socket that hears of ended connections to the port; the kernel leaves out all others."""
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_SOCK_DIAG)
    try:
        program = b"".join(
            struct.pack("=HBBI", *each)
            for each in (
                (0x28, 0, 0, _SOURCE_PORT),  # load the half word
                (0x15, 0, 1, port),  # if it is the port, the next; otherwise the one behind it
                (0x06, 0, 0, 0xFFFF),  # take it
                (0x06, 0, 0, 0),  # leave it out
            )
        )
        code = ctypes.create_string_buffer(program)
        made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 4, ctypes.addressof(code)))
        made.bind((0, _TCP_DESTROY | _TCP6_DESTROY))
    except OSError:
        made.close()
        raise
    return made
