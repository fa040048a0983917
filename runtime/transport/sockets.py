"""Reaching and being reached: the host's identity, listeners, and sockets to peers."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport.interface import Address

_BACKLOG = 512


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


def begin_local(peer: Address) -> socket.socket:
    name = peer.offers["local"].get("name")
    if not isinstance(name, str) or not 0 < len(name) < 100:
        raise MonarchError("an address's local name has to be a text of at most 100 characters")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    return _connect(sock, "\0" + name, f"the local socket {name}")


def begin_tcp(peer: Address) -> socket.socket:
    host, port = peer.offers["tcp"].get("host"), peer.offers["tcp"].get("port")
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise MonarchError("an address's tcp offer has to be a host and a port")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MonarchError(f"there is no host {host!r}: {error.strerror}") from None
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    sock.setblocking(False)
    return _connect(sock, where, f"{host} port {port}")


def _connect(sock: socket.socket, where: object, name: str) -> socket.socket:
    """Begin to connect; a TCP socket can be written once that is done."""
    try:
        sock.connect(where)  # type: ignore[arg-type]
    except BlockingIOError:
        if sock.family == socket.AF_UNIX:
            sock.close()
            raise MonarchError(f"cannot connect to {name}: too many connections wait there") from None
    except OSError as error:
        sock.close()
        raise MonarchError(f"cannot connect to {name}: {error.strerror}") from None
    return sock
