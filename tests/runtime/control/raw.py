"""Clients that do what ours does not: frames by hand, and bytes that a proxy has seen or changed."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from monarch.runtime.control.connect import METHOD
from monarch.runtime.control.handshake import ControllerHandshake, Release, Seals
from monarch.runtime.control.host_info import release
from monarch.runtime.control.loop import control_loop
from monarch.runtime.control.security import Security, split_address
from tests.runtime.control.hosts import SECONDS


class RawStream:
    """A stream to a host, a frame at a time. `read` raises grpc.RpcError once the host has ended it."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.channel = self._channel(address, security)
        self.begin()

    def begin(self) -> None:
        """A new stream over the same connection."""
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self.channel.stream_stream(METHOD)(iter(self._frames.get, None), timeout=SECONDS)

    @staticmethod
    def _channel(address: str, security: Security | None) -> Any:
        control_loop()  # switches gRPC's handlers at a fork off, which has to be done before it is loaded
        import grpc

        credentials = security.channel_credentials() if security else None
        options = (("grpc.enable_http_proxy", 0),)
        if credentials:
            return grpc.secure_channel(address, credentials, options)
        return grpc.insecure_channel(address, options)

    def write(self, frame: bytes) -> None:
        self._frames.put(frame)

    def read(self) -> bytes:
        frame = next(self._call, None)
        assert isinstance(frame, bytes)
        return frame

    def refusal(self) -> tuple[str, str]:
        """The status' name and text with which the host ends the stream, whatever it says before."""
        import grpc

        try:
            for _ in self._call:
                pass
        except grpc.RpcError as error:
            return error.code().name, error.details()  # type: ignore[attr-defined]
        return "OK", ""

    def greet(self, security: Security, own: Release | None = None) -> Seals:
        handshake = ControllerHandshake(security.secret, own or release())
        self.write(handshake.hello())
        self.write(handshake.prove(self.read()))
        agreed = handshake.finish(self.read())
        self.session = agreed.session
        return agreed.seals

    def end(self) -> None:
        self._frames.put(None)
        self._call.cancel()

    def close(self) -> None:
        self.end()
        self.channel.close()


@contextmanager
def raw(address: str, security: Security | None = None) -> Iterator[RawStream]:
    stream = RawStream(address, security)
    try:
        yield stream
    finally:
        stream.close()


class Proxy:
    """Passes bytes on between a client and a host. `sent` is what clients have sent, `change` may alter it."""

    def __init__(self, address: str, change: Callable[[bytes], bytes] = bytes) -> None:
        self._to = split_address(address)
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = bytearray()
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host = socket.create_connection(self._to)
            with self._lock:
                if self._closed:  # meanwhile
                    client.close()
                    host.close()
                    return
                self._ends += [client, host]
            threading.Thread(target=self._pass_on, args=(client, host, True), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(host, client, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if down:
                    self.sent += data
                    data = self._change(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def cut(self) -> None:
        """Both ends find their connection reset."""
        with self._lock:
            self._closed = True
        for end in self._ends:
            with suppress(OSError):  # what ends one connection may have ended the other by now
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """What is connected is closed, and nobody listens any more."""
        with self._lock:
            self._closed = True
        with suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)  # a close does not end an accept that waits
        for end in (self._listener, *self._ends):
            end.close()
