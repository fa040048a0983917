"""Reaching and being reached: the host's identity, listeners, and sockets to peers."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from pathlib import Path

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport.interface import Address, Check

_BACKLOG = 512
_SLICE = struct.pack("@ll", 0, 50_000)  # a timeval: microseconds


def host_identity() -> str:
    """32 hex digits, equal for processes that have one kernel and one network namespace: those reach each other by
    abstract Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:32]


def listen_local(process: str) -> tuple[socket.socket, dict[str, object]]:
    """An abstract Unix socket: it has no file, and is gone with its process."""
    name = f"monarch-{process}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener, {"name": name}


def listen_tcp(bind: str, advertise: str | None) -> tuple[socket.socket, dict[str, object]]:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            bind, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    except OSError as error:
        raise MonarchError(f"cannot listen on {bind!r}: {error.strerror}") from None
    try:
        listener.bind(where)
    except OSError as error:
        listener.close()
        raise MonarchError(
            f"cannot listen on {bind!r}: {error.strerror}", hint="It has to be an address of this machine."
        ) from None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    host, port = listener.getsockname()[:2]
    return listener, {"host": advertise or host, "port": port}


def connect_local(peer: Address, deadline: float, check: Check | None = None) -> socket.socket:
    """Waits while more connections wait there than its kernel keeps, until `deadline` (of time.monotonic). Raises
    MonarchError."""
    name = peer.offers["local"].get("name")
    if not isinstance(name, str) or not 0 < len(name) < 100:
        raise MonarchError("an address's local name has to be a text of at most 100 characters")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # A non-blocking one would be refused at once; this waits in the kernel, for so long at a time.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
    while True:
        if check is not None:
            try:
                check()
            except BaseException:
                sock.close()
                raise
        try:
            sock.connect("\0" + name)
        except BlockingIOError:
            if time.monotonic() < deadline:
                continue
            sock.close()
            raise MonarchError(f"cannot connect to the local socket {name}: too many connections wait there") from None
        except OSError as error:
            sock.close()
            raise MonarchError(f"cannot connect to the local socket {name}: {error.strerror}") from None
        sock.setblocking(False)
        return sock


def begin_tcp(peer: Address) -> socket.socket:
    """Begin to connect; see `greeting.connected`. Raises MonarchError."""
    host, port = peer.offers["tcp"].get("host"), peer.offers["tcp"].get("port")
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise MonarchError("an address's tcp offer has to be a host and a port")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MonarchError(f"there is no host {host!r}: {error.strerror}") from None
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    sock.setblocking(False)
    try:
        sock.connect(where)
    except BlockingIOError:
        pass  # it can be written once it is connected
    except OSError as error:
        sock.close()
        raise MonarchError(f"cannot connect to {host} port {port}: {error.strerror}") from None
    return sock
