"""TCP: everything goes as frames over one stream, under TLS where the endpoint has certificates. See `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch.runtime.transport.interface import Address
from monarch.runtime.transport.plug import Accepted, EndpointContext, Offer, Owned
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.streams import Stream


class TcpTransport:
    name = "tcp"
    streams: tuple[str, ...] = ("tcp",)

    def __init__(self, context: EndpointContext) -> None:
        pass

    def available(self) -> str | None:
        return None

    def register(self, owned: Owned) -> dict[str, Any] | None:
        return None

    def drop(self, owned: Owned) -> None:
        pass

    def offer(self, peer: Address) -> Offer:
        return Offer()

    def accept(self, stream: Stream, details: Mapping[str, Any], files: Sequence[int]) -> Accepted:
        return Accepted(StreamLink(stream, self.name))

    def dial(self, stream: Stream, offer: Offer, details: Mapping[str, Any], files: Sequence[int]) -> StreamLink:
        return StreamLink(stream, self.name)

    def withdraw(self, offer: Offer) -> None:
        pass

    def close(self) -> None:
        pass
