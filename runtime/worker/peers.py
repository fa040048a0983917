"""How a worker finds its counterparts on other hosts, before the first command of a session.

    worker → host    {"pid": ..., "address": ..., "region": ...}    its endpoint, and its mapping of the mesh's memory
    host → worker    {"peers": {"1": {"rank": 4, "address": ..., "region": ...}}}        by the number of the host
    worker → host    {"links": {"1": {"transport": "tcp", "reasons": [...]}}}, or {"failed": "why", "hint": "..."}
    worker → host    {"lost": 4, "why": "..."}                      later, when a link has broken

Packets are JSON, on the worker's own socket (`wire.STARTUP`). Nothing of this happens again in the session.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime.collectives.listening import Network
from monarch.runtime.collectives.mirror import Mirror, Peer
from monarch.runtime.control.security import Security
from monarch.runtime.processes.roles import Forked
from monarch.runtime.shared import wire
from monarch.runtime.shared.window import Window
from monarch.runtime.transport.endpoint import Endpoint, Registration
from monarch.runtime.transport.interface import Address, Link, LinkLost, Region
from monarch.runtime.worker import loop
from monarch.runtime.worker.exchange import Actors

_OVER_SECONDS = 0.05


class NotConnected(Exception):
    """There is no way to a counterpart. The host has been told."""


def serve(forked: Forked) -> None:
    """`loop.serve` for a worker of a mesh over several hosts: the role `processes.roles.WORKER_ACROSS_HOSTS`."""
    loop.serve(forked, _connect)


def serve_in_actors(
    actors: Actors, mesh: MeshSpec, rank: int, window: Window, up: socket.socket, across: dict[str, Any]
) -> None:
    """`loop.serve_in_actors` for a worker of a mesh over several hosts: the role
    `processes.roles.WORKER_BESIDE_ACTORS_ACROSS_HOSTS`."""
    loop.serve_in_actors(actors, mesh, rank, window, up, across, _connect)


def _connect(
    mesh: MeshSpec,
    rank: int,
    window: Window,
    up: socket.socket,
    across: dict[str, Any],
    check: Callable[[], None],
    end: ExitStack,
) -> tuple[Mirror, Network]:
    network = Network(across["bind"], across["advertise"], across["tls"] is not None)
    try:
        return Mirror(mesh, rank, window, *connect_peers(window, up, across, check, end)), network
    except NotConnected:
        while True:  # the mesh is ended, or its session
            check()
            time.sleep(_OVER_SECONDS)


def connect_peers(
    window: Window, up: socket.socket, across: dict[str, Any], check: Callable[[], None], end: ExitStack
) -> tuple[dict[int, Peer], Registration | None]:
    """This worker's counterparts by host, whose links `end` closes, and the window as they reach it; `check` raises
    where the session has ended meanwhile. `across` is what the host says to all its workers:

    `secret`      32 bytes, hex: of this mesh, known to its workers only
    `transports`  which to try, in order
    `bind`        the address on which this host listens for workers of others
    `advertise`   the one by which they reach it, or None where that is the same
    `tls`         the folder with this host's certificates, or None
    `timeout`     seconds for each connection
    `hosts`       how many there are; the only one has no endpoints
    """
    if across["hosts"] == 1:
        up.send(pack({"pid": os.getpid(), "address": None, "region": None}))
        _start_packet(up, check)
        up.send(pack({"links": {}}))
        return {}, None
    secret = bytes.fromhex(across["secret"])
    tls = None if across["tls"] is None else Security.tls(across["tls"]).contexts()
    ranks: dict[str, int] = {}  # of the counterparts, by their endpoint

    def lost(link: Link, error: LinkLost) -> None:
        rank = ranks.get(link.peer.process)
        if rank is not None:
            with suppress(OSError):
                up.send(pack({"lost": rank, "why": error.message}))
            window.mark_dead(rank)

    reached = {"bind": across["bind"], "advertise": across["advertise"]}
    endpoint = Endpoint(
        secret, **reached, transports=across["transports"], tls=tls, lost=lost, patience=across["timeout"]
    )
    end.callback(endpoint.close)
    end.callback(ranks.clear)  # first: the others part from this worker too
    own = endpoint.register(window.memory, file=window.file)
    up.send(pack({"pid": os.getpid(), "address": endpoint.address.to_json(), "region": own.region.to_json()}))
    told = unpack(_start_packet(up, check))
    peers: dict[int, Peer] = {}
    for host, peer in told["peers"].items():
        address = Address.from_json(peer["address"])
        ranks[address.process] = peer["rank"]
        try:
            link = endpoint.connect(address, timeout=across["timeout"])
        except MonarchError as error:
            failed = f"no connection to worker {peer['rank']}: {error.message}"
            up.send(pack({"failed": failed, "hint": error.hint, "peer": peer["rank"]}))
            raise NotConnected from error
        peers[int(host)] = Peer(peer["rank"], link, Region.from_json(peer["region"]))
    links = {
        host: {"transport": peer.link.transport, "reasons": list(peer.link.reasons)} for host, peer in peers.items()
    }
    up.send(pack({"links": links}))
    return peers, own


def _start_packet(up: socket.socket, check: Callable[[], None]) -> bytes:
    """The host's message about the start; any other is about a session that is over."""
    poll = select.poll()
    poll.register(up, select.POLLIN)
    while True:
        while not poll.poll(_OVER_SECONDS * 1000):
            check()
        packet = up.recv(wire.PACKET_BYTES)
        if not packet or wire.KIND.unpack_from(packet)[0] == wire.STARTUP:
            return packet


def pack(what: dict[str, Any]) -> bytes:
    return wire.UP_HEAD.pack(wire.STARTUP, 0) + json.dumps(what).encode()


def unpack(packet: bytes) -> dict[str, Any]:
    what: dict[str, Any] = json.loads(packet[wire.UP_HEAD.size :])
    return what
