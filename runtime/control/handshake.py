"""How the two ends of a stream show each other who they are, and how frames are sealed after that. No I/O.

    down  Hello      protocol, release, nonce a       32 random bytes
    up    Challenge  protocol, release, nonce b
    down  Proof      HMAC-SHA256(secret, "monarch controller" | protocol | a | b)
    up    Proof      HMAC-SHA256(secret, "monarch host" | protocol | a | b)

`secret` is the shared token. With TLS, which has already shown who both are, it is empty, and the nonces, which nobody
but the two has seen, are the secret. From it and the nonces come two keys, one for each direction; every later frame
has the next sequence number and a keyed BLAKE2b (RFC 7693) over that number and everything in it. So what was recorded
on another stream, or earlier on this one, or was altered, left out or put in, does not fit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from monarch.runtime.control import limits
from monarch.runtime.control import monarch_pb2 as pb
from monarch.runtime.control.records import Malformed

_MAC_BYTES = 16


class Refused(Exception):
    """One end does not accept the other."""


class VersionsDiffer(Refused):
    """The two ends speak different versions of the protocol."""


@dataclass(frozen=True)
class Release:
    """What an end says of itself before anything else."""

    protocol: int
    monarch: str


class Sealer:
    """Frames of one direction, as they are sent."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, head: bytes, data: bytes) -> bytes:
        mac = _mac(self._key, self._sequence, head, data)
        small = pb.Sealed(sequence=self._sequence, mac=mac, head=head).SerializeToString()
        self._sequence += 1
        return frame_of(small, data)


class Opener:
    """Frames of one direction, as they come in. What is not the next frame of this stream raises Malformed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def open(self, frame: bytes) -> tuple[bytes, bytes]:
        sealed = _read(frame, "sealed")
        head, data = sealed.head, sealed.data
        if sealed.sequence != self._sequence:
            raise Malformed(f"frame {sealed.sequence} came where frame {self._sequence} was due: replayed or lost")
        if not hmac.compare_digest(sealed.mac, _mac(self._key, self._sequence, head, data)):
            raise Malformed(f"frame {self._sequence} was altered, or sealed with another key")
        self._sequence += 1
        return head, data


@dataclass(frozen=True)
class Seals:
    sealer: Sealer
    opener: Opener


class ControllerHandshake:
    """The end that opens a stream. In this order: `hello`, `prove`, `finish`."""

    def __init__(self, secret: bytes, own: Release) -> None:
        self._secret = secret
        self._own = own
        self._nonce = secrets.token_bytes(limits.NONCE_BYTES)

    def hello(self) -> bytes:
        hello = pb.Hello(protocol=self._own.protocol, release=self._own.monarch, nonce=self._nonce)
        return pb.Frame(hello=hello).SerializeToString()

    def prove(self, challenge: bytes) -> bytes:
        said = _read(challenge, "challenge")
        if said.protocol != self._own.protocol:
            raise VersionsDiffer(_versions("the host", said, self._own))
        self._nonces = self._nonce + _nonce(said.nonce)
        return _proof(self._secret, b"controller", self._own, self._nonces)

    def finish(self, proof: bytes) -> Seals:
        if not _proves(proof, _proof(self._secret, b"host", self._own, self._nonces)):
            raise Refused("it does not know the token")
        down, up = _keys(self._secret, self._own, self._nonces)
        return Seals(Sealer(down), Opener(up))


class HostHandshake:
    """The end that listens. In this order: `challenge`, `finish`."""

    def __init__(self, secret: bytes, own: Release) -> None:
        self._secret = secret
        self._own = own

    def challenge(self, hello: bytes) -> bytes:
        said = _read(hello, "hello")
        if said.protocol != self._own.protocol:
            raise VersionsDiffer(_versions("the controller", said, self._own))
        nonce = secrets.token_bytes(limits.NONCE_BYTES)
        self._nonces = _nonce(said.nonce) + nonce
        challenge = pb.Challenge(protocol=self._own.protocol, release=self._own.monarch, nonce=nonce)
        return pb.Frame(challenge=challenge).SerializeToString()

    def finish(self, proof: bytes) -> tuple[bytes, Seals]:
        """The last frame of the handshake, and the seals."""
        if not _proves(proof, _proof(self._secret, b"controller", self._own, self._nonces)):
            raise Refused("the token is not this host's")
        down, up = _keys(self._secret, self._own, self._nonces)
        return _proof(self._secret, b"host", self._own, self._nonces), Seals(Sealer(up), Opener(down))


def frame_of(small: bytes, data: bytes) -> bytes:
    """The bytes of a Frame with a Sealed, of which `small` is all but the data. Protobuf itself would copy the data
    several times, which takes it three times as long as sealing them."""
    end = _field(pb.Sealed.DATA_FIELD_NUMBER, len(data)) if data else b""
    return b"".join((_field(pb.Frame.SEALED_FIELD_NUMBER, len(small) + len(end) + len(data)), small, end, data))


def _field(number: int, length: int) -> bytes:
    """What stands before a field of so many bytes: its number with wire type 2, and the length, 7 bits a byte."""
    written = bytearray([number << 3 | 2])
    while length > 0x7F:
        written.append(length & 0x7F | 0x80)
        length >>= 7
    written.append(length)
    return bytes(written)


def _read(frame: bytes, expected: str) -> Any:
    try:
        read = pb.Frame.FromString(frame)
    except DecodeError as error:
        raise Malformed(f"a frame cannot be read: {error}") from None
    what = read.WhichOneof("what")
    if what != expected:
        raise Malformed(f"a frame is '{what}' where '{expected}' is due")
    return getattr(read, expected)


def _versions(who: str, said: Any, own: Release) -> str:
    release = "".join(letter for letter in said.release[:40] if letter.isprintable())
    return (
        f"{who} speaks version {said.protocol} of the protocol (Monarch {release}), "
        f"and this end version {own.protocol} (Monarch {own.monarch})"
    )


def _nonce(nonce: bytes) -> bytes:
    if len(nonce) != limits.NONCE_BYTES:
        raise Malformed(f"a nonce of {len(nonce)} bytes: it has to have {limits.NONCE_BYTES}")
    return nonce


def _digest(secret: bytes, label: bytes, own: Release, nonces: bytes) -> bytes:
    return hmac.digest(secret, b"monarch " + label + own.protocol.to_bytes(4) + nonces, "sha256")


def _proof(secret: bytes, label: bytes, own: Release, nonces: bytes) -> bytes:
    return pb.Frame(proof=pb.Proof(proof=_digest(secret, label, own, nonces))).SerializeToString()


def _proves(frame: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(_read(frame, "proof").proof, _read(expected, "proof").proof)


def _keys(secret: bytes, own: Release, nonces: bytes) -> tuple[bytes, bytes]:
    return _digest(secret, b"key down", own, nonces), _digest(secret, b"key up", own, nonces)


def _mac(key: bytes, sequence: int, head: bytes, data: bytes) -> bytes:
    mac = hashlib.blake2b(sequence.to_bytes(8) + len(head).to_bytes(8), digest_size=_MAC_BYTES, key=key)
    mac.update(head)
    mac.update(data)
    return mac.digest()
