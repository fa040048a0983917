"""How the two ends of a stream prove their identities, and how frames are sealed after that. No I/O.

    down  Hello      protocol, release, nonce a       32 random bytes
    up    Challenge  protocol, release, nonce b
    down  Proof      HMAC-SHA256(secret, "monarch controller" | protocol | a | b | session | taken)
    up    Proof      HMAC-SHA256(secret, "monarch host" | protocol | a | b | session | taken | taken)

`secret` is the shared token. With TLS, which has already proved both identities, it is empty, and the nonces, which
only the two ends have seen, are the secret. From it and the nonces come two keys, one for each direction; every later
frame has the next sequence number and a keyed BLAKE2b (RFC 7693) over that number and everything in it. So what was
recorded on another stream, or earlier on this one, or was altered, left out or put in, does not fit.

From the secret and the nonces of a first handshake also come the session's name and its key. A connection over which
the session is to go on begins with a Hello that names it, and `secret` is then the token and the session's key
together. Both ends say how many frames they have `taken` (see `frames`): the controller in its Hello, the host in its
Proof. In a first handshake name and numbers are empty and 0.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
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


class NoSuchSession(Refused):
    """A session is to go on that is over, or never was."""


@dataclass(frozen=True)
class Release:
    """The first message of an end: its protocol, release and nonce."""

    protocol: int
    monarch: str


class Sealer:
    """Frames of one direction, as they are sent."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, head: bytes, data: bytes, taken: int = 0) -> bytes:
        """`taken` is how many of the other end's frames this one has taken."""
        mac = _mac(self._key, self._sequence, taken, head, data)
        small = pb.Sealed(sequence=self._sequence, mac=mac, head=head, taken=taken).SerializeToString()
        self._sequence += 1
        return frame_of(small, data)


class Opener:
    """Frames of one direction, as they come in. Anything but the next frame of this stream raises Malformed."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def open(self, frame: bytes) -> tuple[bytes, bytes, int]:
        """The head and the data, and how many frames the other end has taken."""
        sealed = _read(frame, "sealed")
        head, data = sealed.head, sealed.data
        if sealed.sequence != self._sequence:
            raise Malformed(f"frame {sealed.sequence} came where frame {self._sequence} was due: replayed or lost")
        if not hmac.compare_digest(sealed.mac, _mac(self._key, self._sequence, sealed.taken, head, data)):
            raise Malformed(f"frame {self._sequence} was altered, or sealed with another key")
        self._sequence += 1
        return head, data, sealed.taken


@dataclass(frozen=True)
class Seals:
    sealer: Sealer
    opener: Opener


@dataclass(frozen=True)
class Session:
    """The data that both ends of a session know, and, of the key, nobody else."""

    name: bytes
    key: bytes


_NEW = Session(b"", b"")


@dataclass(frozen=True)
class Agreed:
    """The result of a handshake. `taken` is how many frames of this end's the other one has taken."""

    seals: Seals
    session: Session
    taken: int = 0


class ControllerHandshake:
    """The end that opens a stream. In this order: `hello`, `prove`, `finish`."""

    def __init__(self, secret: bytes, own: Release, session: Session | None = None, taken: int = 0) -> None:
        """Of a `session` that is to go on, with so many frames `taken`, or of a new one."""
        self._session = session or _NEW
        self._taken = taken
        self._secret = secret + self._session.key
        self._own = own
        self._nonce = secrets.token_bytes(limits.NONCE_BYTES)

    def hello(self) -> bytes:
        hello = pb.Hello(
            protocol=self._own.protocol,
            release=self._own.monarch,
            nonce=self._nonce,
            session=self._session.name,
            taken=self._taken,
        )
        return pb.Frame(hello=hello).SerializeToString()

    def prove(self, challenge: bytes) -> bytes:
        said = _read(challenge, "challenge")
        if said.protocol != self._own.protocol:
            raise VersionsDiffer(_versions("the host", said, self._own))
        self._about = self._nonce + _nonce(said.nonce) + _about(self._session.name, self._taken)
        return _proof(self._secret, b"controller", self._own, self._about)

    def finish(self, proof: bytes) -> Agreed:
        taken = _read(proof, "proof").taken
        about = self._about + taken.to_bytes(8)
        if not _proves(proof, _proof(self._secret, b"host", self._own, about)):
            raise Refused("it does not know the token")
        down, up = _keys(self._secret, self._own, about)
        session = _session(self._secret, self._own, about) if self._session is _NEW else self._session
        return Agreed(Seals(Sealer(down), Opener(up)), session, taken)


class HostHandshake:
    """The end that listens. In this order: `challenge`, `check`, `finish`."""

    def __init__(self, secret: bytes, own: Release, find: Callable[[bytes], Session | None] | None = None) -> None:
        """`find` gives the session of a name, if there is one, or raises NoSuchSession."""
        self._secret = secret
        self._own = own
        self._find = find
        self.session: Session = _NEW
        """The one that is to go on; without a name for a new one."""

    def challenge(self, hello: bytes) -> bytes:
        """Raises NoSuchSession where a session is to go on that is not there."""
        said = _read(hello, "hello")
        if said.protocol != self._own.protocol:
            raise VersionsDiffer(_versions("the controller", said, self._own))
        theirs, nonce = _nonce(said.nonce), secrets.token_bytes(limits.NONCE_BYTES)
        if said.session:
            session = None if self._find is None else self._find(said.session)
            if session is None:
                raise NoSuchSession("the session is over")
            self.session = session
            self._secret += session.key
        self._taken = said.taken
        self._about = theirs + nonce + _about(said.session, said.taken)
        challenge = pb.Challenge(protocol=self._own.protocol, release=self._own.monarch, nonce=nonce)
        return pb.Frame(challenge=challenge).SerializeToString()

    def check(self, proof: bytes) -> None:
        """Raises Refused where the other end does not prove its identity."""
        if not _proves(proof, _proof(self._secret, b"controller", self._own, self._about)):
            raise Refused("the token is not this host's")

    def finish(self, taken: int = 0) -> tuple[bytes, Agreed]:
        """The last frame of the handshake, where this end has taken so many frames of the session; and the agreed
        session."""
        about = self._about + taken.to_bytes(8)
        down, up = _keys(self._secret, self._own, about)
        session = _session(self._secret, self._own, about) if self.session is _NEW else self.session
        agreed = Agreed(Seals(Sealer(up), Opener(down)), session, self._taken)
        return _proof(self._secret, b"host", self._own, about, taken), agreed


def frame_of(small: bytes, data: bytes) -> bytes:
    """The bytes of a Frame with a Sealed, of which `small` is all but the data. Protobuf itself would copy the data
    several times, which takes it three times as long as sealing them."""
    end = _field(pb.Sealed.DATA_FIELD_NUMBER, len(data)) if data else b""
    return b"".join((_field(pb.Frame.SEALED_FIELD_NUMBER, len(small) + len(end) + len(data)), small, end, data))


def _field(number: int, length: int) -> bytes:
    """The bytes before a field of so many bytes: its number with wire type 2, and the length, 7 bits a byte."""
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


def _about(session: bytes, taken: int) -> bytes:
    return len(session).to_bytes(2) + session + taken.to_bytes(8)


def _digest(secret: bytes, label: bytes, own: Release, about: bytes) -> bytes:
    return hmac.digest(secret, b"monarch " + label + own.protocol.to_bytes(4) + about, "sha256")


def _proof(secret: bytes, label: bytes, own: Release, about: bytes, taken: int = 0) -> bytes:
    proof = pb.Proof(proof=_digest(secret, label, own, about), taken=taken)
    return pb.Frame(proof=proof).SerializeToString()


def _proves(frame: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(_read(frame, "proof").proof, _read(expected, "proof").proof)


def _keys(secret: bytes, own: Release, about: bytes) -> tuple[bytes, bytes]:
    return _digest(secret, b"key down", own, about), _digest(secret, b"key up", own, about)


def _session(secret: bytes, own: Release, about: bytes) -> Session:
    name = _digest(secret, b"session name", own, about)[: limits.SESSION_BYTES]
    return Session(name, _digest(secret, b"session key", own, about))


def _mac(key: bytes, sequence: int, taken: int, head: bytes, data: bytes) -> bytes:
    numbers = b"".join(number.to_bytes(8) for number in (sequence, taken, len(head)))
    mac = hashlib.blake2b(numbers, digest_size=_MAC_BYTES, key=key)
    mac.update(head)
    mac.update(data)
    return mac.digest()
