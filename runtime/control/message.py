"""The messages between the controller and the hosts, above frames, streams and trees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Message:
    """One message between the controller and a host.

    `kind`      a short word of letters. This package carries messages and does not know their kinds.
    `mesh`      which mesh it is about; a host keeps the meshes apart
    `host`      on the way up: the number of the host that says it, which the tree fills in
    `head`      JSON: numbers, strings, booleans, None, lists and dicts of these, below 1 MiB
    `data`      bytes that belong to it, of any length. Sent in parts, not copied where Python allows it.
    `progress`  on the way up: numbers that only grow. Instead of every host's message, the controller gets, under the
                same kind and mesh, the least of them over all hosts, number by number, whenever that has grown. It
                comes after every message of that mesh that a host sent before it.
                All hosts are those to which a message of this mesh was sent; a lost one counts with what it said last.
    """

    kind: str
    mesh: int = 0
    host: int = -1
    head: dict[str, Any] = field(default_factory=dict)
    data: Any = b""
    progress: tuple[int, ...] = ()


class Reply(Protocol):
    """How a host's service answers. Safe to call from any thread; never blocks for long."""

    def __call__(self, message: Message) -> None: ...


class Service(Protocol):
    """A host's service for one attached controller. Calls come one at a time, in the order sent, in a thread of the
    service's own: a long one delays neither the host's relaying nor other controllers."""

    def receive(self, message: Message) -> None:
        """Carry out a message. Its error is logged, and reported to the controller as the loss of this host."""

    def detached(self) -> None:
        """The controller has gone, or is out of reach: end what runs for it. Called once, after the last message; where
        the controller was lost, messages that were not begun are left out."""
