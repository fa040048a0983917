"""A mesh over several hosts: each host holds the whole of the mesh's shared memory, and workers keep the parts that
they write the same where they are read.

What a worker writes, its area of the windows and its progress word, is read by peers of its own host as ever. For peers
on another host it posts the bytes that are read there, and then its progress word, into that host's copy of the memory:
once a host, not once a peer. It does so over a link to its *counterpart*, the worker with the same place on that host,
whose endpoint writes what arrives; posts over one link arrive in order, so that the word comes after the bytes. So
every collective, every wait and every abort is the same whether peers are near or far.

Of the control words, only the progress of workers elsewhere is mirrored, and as far as a worker waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from monarch.compiler.plan import MeshSpec
from monarch.runtime.shared import signals
from monarch.runtime.shared.window import Window
from monarch.runtime.transport.interface import Link, LinkLost, Region, Signal

if TYPE_CHECKING:
    from monarch.runtime.transport.endpoint import Registration


@dataclass(frozen=True)
class Peer:
    """A counterpart: the link to it, and its mapping of the mesh's memory."""

    rank: int
    link: Link
    region: Region


_Part = tuple[int, int, torch.Tensor | None]
"""Bytes for a host: their place in the memory here and there, and the value to store, or the one here."""


class Mirror:
    """This worker's way to the other hosts' copies of its areas. `peers` are its counterparts, by host, and `own` is
    the memory here as they reach it."""

    def __init__(
        self, mesh: MeshSpec, rank: int, window: Window, peers: dict[int, Peer], own: Registration | None = None
    ) -> None:
        self.per_host = mesh.workers // (len(peers) + 1)
        self.host = rank // self.per_host
        self.here = range(self.host * self.per_host, (self.host + 1) * self.per_host)
        self.others = tuple(sorted(peers))
        self._window = window
        self._peers = peers
        self._own = own
        self._line = signals.line_of(rank)
        self._parts: dict[int, list[_Part]] = {host: [] for host in peers}
        self._owed: set[int] = set()  # hosts that have not been told the newest progress

    def apart(self) -> Mirror:
        """The same way, for another thread: with bytes and words of its own, over the same links."""
        made = copy(self)
        made._parts = {host: [] for host in self._peers}
        made._owed = set()
        return made

    @property
    def messages(self) -> int:
        """Handshakes and other control messages that went over the links so far: a step sends none."""
        return sum(peer.link.messages for peer in self._peers.values())

    @property
    def links(self) -> list[Link]:
        return [peer.link for peer in self._peers.values()]

    def hosts_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The other hosts on which any of `ranks` are."""
        return tuple(sorted({rank // self.per_host for rank in ranks} - {self.host}))

    def by_host(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks of one host after the other; nothing where hosts take turns, or have different numbers of them."""
        blocks = [tuple(block) for _, block in groupby(ranks, lambda rank: rank // self.per_host)]
        even = len({len(block) for block in blocks}) == 1
        hosts = {block[0] // self.per_host for block in blocks}
        return tuple(blocks) if even and len(hosts) == len(blocks) else ()

    def write(self, hosts: Iterable[int], offset: int, size: int) -> None:
        """Bytes of the memory, to be there on `hosts` before the next progress is."""
        for host in hosts:
            parts = self._parts[host]
            if parts and parts[-1][1:] == (offset, None):
                parts[-1] = (parts[-1][0], offset + size, None)
            else:
                parts.append((offset, offset + size, None))

    def takes_values(self, readers: Iterable[int]) -> bool:
        """Whether the tensors of `readers` can go to their hosts from their own memory: none of them reads it here, and
        the links take memory that is not registered, and have read it when they return."""
        hosts = {rank // self.per_host for rank in readers}
        return all(host in self._peers and self._peers[host].link.transport == "tcp" for host in hosts)

    def write_value(self, hosts: Iterable[int], offset: int, value: torch.Tensor) -> None:
        """A value's elements in their order, to be at an offset of the memory on `hosts` before the next progress is.
        Not in the memory here."""
        value = value.contiguous()
        for host in hosts:
            self._parts[host].append((offset, offset + value.nbytes, value))

    def brings(self, rank: int) -> bool:
        """Whether the bytes of a worker come to this host by way of this process."""
        peer = self._peers.get(rank // self.per_host)
        return self._own is not None and peer is not None and peer.rank == rank and peer.link.transport == "tcp"

    def divert(self, offset: int, value: int, target: torch.Tensor) -> None:
        """Receive the bytes that such a worker writes there, and announces with a word of this value, into `target` at
        once; as far as they have not begun to arrive, and have its size."""
        assert self._own is not None
        self._own.divert(offset, value, target)

    def undivert(self, offset: int, value: int) -> bool:
        """Divert no longer; gives whether the bytes are in the target, once the word has been seen."""
        assert self._own is not None
        return self._own.undivert(offset, value)

    def tell(self, hosts: Iterable[int], told: int, word: int = signals.PROGRESS) -> None:
        """Send the bytes for `hosts`, and then a word of this worker's, its progress. Raises LinkLost."""
        memory = self._window.bytes
        for host in hosts:
            peer = self._peers[host]
            signal = Signal(peer.region, 8 * (self._line + word), told)
            parts = self._parts[host]
            if word == signals.PROGRESS:
                self._owed.discard(host)
            if not parts:
                peer.link.post(b"", peer.region, 0, signal)
                continue
            for start, end, value in parts[:-1]:
                peer.link.post(memory[start:end] if value is None else value, peer.region, start)
            start, end, value = parts[-1]
            peer.link.post(memory[start:end] if value is None else value, peer.region, start, signal)
            parts.clear()

    def owe(self, hosts: Iterable[int]) -> None:
        """The progress has gone on, and these hosts are to know it; at the latest when this worker waits."""
        self._owed.update(hosts)

    def announce(self, progress: int) -> None:
        """Tell those that have not been told."""
        if self._owed:
            self.tell(tuple(self._owed), progress)

    def give_up(self, progress: int) -> None:
        """Drop the bytes of a step that has failed, and tell all hosts that can be reached."""
        for parts in self._parts.values():
            parts.clear()
        self._owed.clear()
        for host in self.others:
            with suppress(LinkLost):  # whose end others report
                self.tell((host,), progress)
