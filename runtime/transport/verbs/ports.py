"""Which address of which port to use.

A port has a table of addresses (GIDs), which the kernel lists below /sys/class/infiniband. On Ethernet each is an IP
address of the interface in 16 bytes, once for RoCE v1, which stays within one Ethernet, and once for RoCE v2, which
travels as UDP and is routed. On InfiniBand a port's local identifier (LID) reaches all of its subnet.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.runtime.transport.verbs.adapter import INFINIBAND, PortState

_SYSFS = Path("/sys/class/infiniband")
_GAP = 32
FAMILIES = ("RoCE v2 over IPv4", "InfiniBand", "RoCE v2 over IPv6", "RoCE v2, link-local", "RoCE v1")
"""The properties that two ports have to share, best first."""


@dataclass(frozen=True)
class Gid:
    """An entry of a port's table. `kind` is the kernel's name for it: "RoCE v2" or "IB/RoCE v1"."""

    index: int
    raw: bytes
    kind: str


@dataclass(frozen=True)
class Way:
    """A port, and by which of its addresses: `gid` is None where the LID is used."""

    port: PortState
    gid: Gid | None
    family: str

    def __str__(self) -> str:
        address = f"LID {self.port.lid}" if self.gid is None else text(self.gid.raw)
        return f"port {self.port.number}, {self.family}, {address}"


def text(raw: bytes) -> str:
    """A GID as an IP address."""
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def port_numbers(device: str, sysfs: Path = _SYSFS) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in (sysfs / device / "ports").iterdir())
    except FileNotFoundError:
        return [1]  # sysfs is not mounted here; nearly all devices have this port


def gids(device: str, port: int, sysfs: Path = _SYSFS) -> list[Gid]:
    """The entries that are in use. Tables have a thousand places, of which the kernel fills the first that is free:
    after `_GAP` empty ones there are no more."""
    folder = sysfs / device / "ports" / str(port)
    found: list[Gid] = []
    index = last = 0
    while index - last <= _GAP:
        try:
            kind = (folder / "gid_attrs" / "types" / str(index)).read_text().strip()
            raw = bytes.fromhex((folder / "gids" / str(index)).read_text().strip().replace(":", ""))
        except OSError:
            raw = b""  # reading the kind of an entry that is not in use is an error, as it is beyond the last
        if any(raw):
            found.append(Gid(index, raw, kind))
            last = index
        index += 1
    return found


def ways(port: PortState, table: Iterable[Gid]) -> list[Way]:
    """Every way to use a port."""
    if not port.active:
        return []
    if port.link_layer == INFINIBAND:
        return [Way(port, None, "InfiniBand")] if port.lid else []
    return [Way(port, gid, _family(gid)) for gid in table]


def _family(gid: Gid) -> str:
    if gid.kind != "RoCE v2":
        return "RoCE v1"
    address = ipaddress.IPv6Address(gid.raw)
    if address.ipv4_mapped is not None:
        return "RoCE v2 over IPv4"
    return "RoCE v2, link-local" if address.is_link_local else "RoCE v2 over IPv6"


def choose(found: Sequence[Way], local: str | None = None, family: str | None = None) -> Way | None:
    """The best way: of the peer's `family` if there is one; then by the address `local`, by which the peer's host is
    reached without RDMA; then of the best family."""
    own = None
    if local is not None:
        address = ipaddress.ip_address(local.partition("%")[0])
        own = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed

    def rank(way: Way) -> tuple[bool, int]:
        return way.gid is None or way.gid.raw != own, FAMILIES.index(way.family)

    return min((way for way in found if family is None or way.family == family), key=rank, default=None)
