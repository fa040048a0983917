"""How two endpoints prove to each other that they know the acceptor's secret, and then agree on a transport.

Without I/O: each side is a generator that yields `Read(size)` (and is sent the bytes) or `Write(bytes)`.

    dialer                                                          acceptor
    HELLO      magic, own process, process wanted, nonce     ──▶
                                                             ◀──    CHALLENGE  magic, nonce
    PROOF      HMAC("dialer", hello, challenge)              ──▶
                                                             ◀──    PROOF      HMAC("acceptor", hello, challenge)
    messages: a length of 4 bytes, then JSON                 ◀─▶

The acceptor says nothing that depends on the secret before the dialer has proved to know it. Both nonces go into both
proofs, so nothing can be replayed; each side's proof has a label of its own, so nothing can be sent back; both
processes' names do, so nothing can be passed on to another endpoint with the same secret. Until then every message has
a fixed size. The proofs say nothing about what follows them: it is TLS that protects a stream on a hostile network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAGIC = b"monarch1"
_NONCE = 32
_PROOF = 32
_HELLO = struct.Struct(f"<8s16s16s{_NONCE}s")
_CHALLENGE = struct.Struct(f"<8s{_NONCE}s")
_LENGTH = struct.Struct(">I")
LARGEST_MESSAGE = 64 << 10
SHORTEST_SECRET = 16


class HandshakeFailed(Exception):
    """The other side is not the expected one; the text says why."""


@dataclass(frozen=True)
class Read:
    size: int


@dataclass(frozen=True)
class Write:
    data: bytes
    files: Sequence[int] = ()


Steps = Generator[Read | Write, bytes, Any]


def prove(secret: bytes, process: str, wanted: str, nonce: Callable[[int], bytes] = secrets.token_bytes) -> Steps:
    """The dialer's side. `wanted` is the acceptor's process. Raises HandshakeFailed."""
    hello = _HELLO.pack(MAGIC, bytes.fromhex(process), bytes.fromhex(wanted), nonce(_NONCE))
    yield Write(hello)
    challenge = yield Read(_CHALLENGE.size)
    if _CHALLENGE.unpack(challenge)[0] != MAGIC:
        raise HandshakeFailed("it is no endpoint of this version")
    yield Write(_proof(secret, b"dialer", hello, challenge))
    proof = yield Read(_PROOF)
    if not hmac.compare_digest(proof, _proof(secret, b"acceptor", hello, challenge)):
        raise HandshakeFailed("it did not prove to know the secret")


def verify(secret: bytes, process: str, nonce: Callable[[int], bytes] = secrets.token_bytes) -> Steps:
    """The acceptor's side; gives the dialer's process. Raises HandshakeFailed."""
    hello = yield Read(_HELLO.size)
    magic, dialer, wanted, _ = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise HandshakeFailed("it did not begin as an endpoint of this version does")
    if wanted != bytes.fromhex(process):
        raise HandshakeFailed(f"it looks for process {wanted.hex()[:8]}, which was at this address before")
    challenge = _CHALLENGE.pack(MAGIC, nonce(_NONCE))
    yield Write(challenge)
    proof = yield Read(_PROOF)
    if not hmac.compare_digest(proof, _proof(secret, b"dialer", hello, challenge)):
        raise HandshakeFailed("it did not prove to know the secret")
    yield Write(_proof(secret, b"acceptor", hello, challenge))
    return dialer.hex()


def write_message(message: Mapping[str, Any], files: Sequence[int] = ()) -> Write:
    text = json.dumps(message).encode()
    if len(text) > LARGEST_MESSAGE:
        raise HandshakeFailed(f"a message of {len(text)} bytes, and {LARGEST_MESSAGE} are the most")
    return Write(_LENGTH.pack(len(text)) + text, files)


def read_message() -> Steps:
    """Gives the message."""
    length = yield Read(_LENGTH.size)
    size = _LENGTH.unpack(length)[0]
    if size > LARGEST_MESSAGE:
        raise HandshakeFailed(f"a message of {size} bytes, and {LARGEST_MESSAGE} are the most")
    text = yield Read(size)
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise HandshakeFailed("a message that is no JSON") from None
    if not isinstance(message, dict):
        raise HandshakeFailed("a message that is no object")
    return message


def _proof(secret: bytes, who: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, b"monarch transport, " + who + b"\0" + hello + challenge, hashlib.sha256)
