"""The bytes of a `.mplan` file: a header, a manifest, and members, each under its digest.

    8 bytes    magic: 0x93 "MPLAN" CR LF (a transfer in text mode changes it)
    4 bytes    format version, little-endian
    8 bytes    length of the manifest, little-endian
    32 bytes   SHA-256 of the manifest
    manifest   JSON in ASCII; its "members" lists [name, length, SHA-256 in hex] in order
    members    one after the other, to the end of the file

Nothing is compressed, so a file cannot unfold to more than its size. The digests find damage and edits, not malice:
what the members say is checked on its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from monarch.compiler.errors import PlanError

PROGRAM, GRAPH, TRACED, REPORT, CONSTANTS, BINARIES, CODE = MEMBERS = (
    "program.jsonl",
    "graph.txt",
    "traced.txt",
    "report.json",
    "constants.safetensors",
    "binaries.json",
    "binaries.bin",
)
"""What a plan's file holds (see `file`)."""

MAGIC = b"\x93MPLAN\r\n"
VERSION = 9
_HEADER = struct.Struct("<8sIQ32s")

AGAIN = "compile the program again, or copy the file again from where it was made."


def seal(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> bytes:
    """The file's bytes: the same for the same content."""
    listed = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in members.items()]
    text = dump_json({**manifest, "members": listed}).encode("ascii")
    header = _HEADER.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest())
    return b"".join([header, text, *members.values()])


def unseal(data: bytes, name: str, members: Sequence[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and the members, which have to be `members`, in this order.

    `name` is what errors call the file. Raises PlanError."""
    if len(data) < len(MAGIC) or not data.startswith(MAGIC):
        if data and MAGIC.startswith(data):
            _cut_short(name, len(data), _HEADER.size)
        raise PlanError(
            f"{name} is not a plan file: it begins with {data[:8]!r}", hint="give a file that plan.save() wrote."
        )
    if len(data) < 12:
        _cut_short(name, len(data), _HEADER.size)
    (version,) = struct.unpack_from("<I", data, 8)
    if version != VERSION:
        raise PlanError(
            f"{name} has plan format {version}, and this version of monarch reads format {VERSION}",
            hint="compile the program again with this version, or load the file with the version that wrote it.",
        )
    if len(data) < _HEADER.size:
        _cut_short(name, len(data), _HEADER.size)
    _, _, length, digest = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    if length > len(body):
        _cut_short(name, len(data), _HEADER.size + length)
    if hashlib.sha256(body[:length]).digest() != digest:
        _edited(name, "manifest")
    manifest = load_json(bytes(body[:length]), f"the manifest of {name}")
    if not isinstance(manifest, dict):
        raise PlanError(f"the manifest of {name} is not a JSON object", hint=AGAIN)
    contents = _members(manifest.pop("members", None), body[length:], name, members)
    return manifest, contents


def _members(listed: Any, body: memoryview, name: str, expected: Sequence[str]) -> dict[str, bytes]:
    entries = listed if isinstance(listed, list) else []
    well_formed = all(
        isinstance(entry, list) and [type(part) for part in entry] == [str, int, str] for entry in entries
    )
    if not well_formed or [entry[0] for entry in entries] != list(expected) or any(entry[1] < 0 for entry in entries):
        raise PlanError(
            f"{name} does not list its members as {', '.join(expected)}, with lengths and digests", hint=AGAIN
        )
    total = sum(entry[1] for entry in entries)
    if total > len(body):
        _cut_short(name, len(body), total, "of its members ")
    if total < len(body):
        raise PlanError(f"{name} has {len(body) - total} bytes after its end", hint=AGAIN)
    contents: dict[str, bytes] = {}
    at = 0
    for member, length, digest in entries:
        contents[member] = bytes(body[at : at + length])
        if hashlib.sha256(contents[member]).hexdigest() != digest:
            _edited(name, member)
        at += length
    return contents


def _cut_short(name: str, found: int, wanted: int, of: str = "") -> NoReturn:
    raise PlanError(f"{name} is cut short: {found} bytes {of}are there, of {wanted} or more", hint=AGAIN)


def _edited(name: str, part: str) -> NoReturn:
    raise PlanError(
        f"{name} was changed after it was written: its {part} does not have the digest that it should have", hint=AGAIN
    )


def hash_members(
    head: dict[str, Any], program: bytes, constants: bytes, binaries: tuple[bytes, bytes] = (b"[]", b"")
) -> str:
    """The SHA-256, in hex, of what a worker runs or tells of a plan."""
    digest = hashlib.sha256(dump_json(head).encode("ascii"))
    for part in (program, constants, *(binaries if binaries != (b"[]", b"") else ())):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def dump_json(value: Any) -> str:
    """Compact JSON in ASCII. Raises ValueError for infinities and nan, which JSON does not have."""
    return _COMPACT.encode(value)


_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def load_json(text: str | bytes, what: str) -> Any:
    """Strict JSON. Raises PlanError, also where it nests too deep, has numbers out of range or a key twice."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_key_twice)
    except RecursionError:
        raise PlanError(f"{what} nests too deep", hint=AGAIN) from None
    except ValueError as error:
        raise PlanError(f"{what} is not JSON: {error}", hint=AGAIN) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values counts, so what was checked might not be what is run."""
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:40]!r} is there twice")
    return found


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return number
