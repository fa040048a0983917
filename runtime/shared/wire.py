"""Commands and messages as bytes.

Down, from the controller to all workers at once (a record of the ring each; numbers are 8 bytes):

    RUN     plan, first output's handle, number of outputs, the place of small results (see `results`), how many
            handles are freed before it runs; for each input a handle, an integer or a float; the freed handles
    PUT     handle, dtype, dims, block's bytes, offset in the staging area or -1 for inline, piece's start and end;
            shape; the block of each worker, -1 for none; the piece of every block, if inline
    LOAD    plan, which comes to each worker as a file over its own socket: a pickled Plan and the path of its kernels'
            object or None, made and read by processes of one program on one host; then, where only some workers run
            it, which (see `place`): the others pass over its RUNs
    UNLOAD  plan
    FREE    handles
    FETCH   handle, then the ranks that are to send it
    COUNT   nothing: every worker sends how many values it holds
    TRACE   size, in words, of a buffer that every worker is to make, send, and measure into from then on (see
            `measured`); 0 to measure no longer
    LEND    a number, how many handles, the handles, for each worker how many messages in its process refer to them
    ADOPT   a number, first handle, how many, which workers if not all: what an actor of the worker's process has made
            becomes values
    COPY    how many pairs, pairs of a rank and the rank that is to get its blocks; then for each tensor its handle,
            dtype, dims, the block's shape
    TAKE    a snapshot's number, or -1 for none: all values as they are now; snapshots below another number are dropped
    SEND    a snapshot's number; then as COPY: each target keeps copies of its source's blocks
    BACK    a snapshot's number: values are as they were in it; none where a worker does not have it
    GIVE    a snapshot's number; then as COPY: each source gives its target the blocks of it that it keeps
    LEAVE   how many numbers name workers (see `place`), these, and handles: the other workers drop their values
    SUM     handles: every worker sends, for each, the sum of the bits that it holds of it, or -1 where it has no value
    WRITE   JSON: the number of a save; values, each with its handle, its type and pieces (see `execution.storage`);
            whether these are the last, with which the workers begin to write; the place of a part with its dims, or
            null
    WRITTEN a save's number, and 1 to write no more of it: every worker sends how far it is, as JSON in a row of bytes
    READ    JSON: handles, each with a type, a name, and the blocks in which the tensor stands in files; as for WRITE
            the place
    FAULT   a rank, what it is to suffer, at which instruction of its next step or -1 for at once, a value (see
            `worker.faults`); sent by tests alone

Up, over a worker's own socket, a packet each: a kind, the command's number, and JSON or a tensor's bytes. Down the same
way come files, and before the first command what a worker with peers on other hosts is told (STARTUP, JSON).

Once a worker of the mesh has died, the others end their session (see `worker.loop`), and go on by packets:

    up    DOUBT    a step: this worker has come to its commit, and cannot see whether the others passed it
          ENDED    how many commands it has finished: it waits for the next session, and answers meanwhile
    down  VERDICT  the step, 1 where others have passed its commit
          ASK      a number for the answer, a handle: its value is to be sent
          TABLE    a number for the answer: the handles that have values are to be sent, as a tensor
          SESSION  the number of the next session's first command
          HOW_FAR  ENDED is to be said once more
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from monarch.compiler.plan import DTYPES, Source

RUN, PUT, LOAD, UNLOAD, FREE, FETCH, COUNT, TRACE, LEND, ADOPT, COPY = range(1, 12)
VERDICT, ASK, TABLE, SESSION, HOW_FAR = range(12, 17)
FAULT = 17
TAKE, SEND, BACK, GIVE = range(18, 22)
WRITE, WRITTEN, READ = range(22, 25)
LEAVE = 25
SUM = 26

INLINE = -1
INLINE_BYTES = 64 << 10

DTYPE_LIST = tuple(DTYPES.values())
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPE_LIST)}

FREE_AT_ONCE = 4096
"""The most values that one command frees."""
PUT_HEAD = struct.Struct("=9q")
PAIR = struct.Struct("=2q")
KIND = struct.Struct("=q")
RUN_HEAD = struct.Struct("=6q")
RECORD = struct.Struct("=q")
"""Before each record that goes to another host: its length."""


def run_struct(dtypes: Sequence[torch.dtype | None]) -> struct.Struct:
    """The record of a RUN without the freed handles: for each input None where it is a handle, or its number's
    dtype."""
    return struct.Struct("=6q" + "".join(map(_letter, dtypes)))


def inputs_struct(dtypes: Sequence[torch.dtype | None], wanted: Sequence[bool]) -> struct.Struct:
    """The inputs in a RUN, behind its head. Those that are not wanted are passed over."""
    return struct.Struct(
        "=" + "".join([_letter(dtype) if want else "8x" for dtype, want in zip(dtypes, wanted, strict=True)])
    )


def _letter(dtype: torch.dtype | None) -> str:
    return "q" if dtype is None or not dtype.is_floating_point else "d"


def numbers(kind: int, *values: int) -> bytes:
    return struct.pack(f"={1 + len(values)}q", kind, *values)


def pack_json(kind: int, told: Any) -> bytes:
    """A record with JSON behind its kind, of a length that 8 divides: those of a ring do not know their own."""
    text = json.dumps(told).encode()
    return KIND.pack(kind) + text + b" " * (-len(text) % 8)


def last_numbers(body: bytes | bytearray, count: int) -> tuple[int, ...]:
    """The numbers at a record's end."""
    return struct.unpack_from(f"={count}q", body, len(body) - KIND.size * count)


def unpack_json(body: bytes | bytearray) -> Any:
    return json.loads(body[KIND.size :])


def unpack_numbers(body: bytes | bytearray) -> tuple[int, ...]:
    return struct.unpack(f"={len(body) // 8}q", body)


# -- up --------------------------------------------------------------------------------------------------------------

REPORT, VALUE, VALUE_FILE, COUNTED, BUFFER_FILE, STARTUP, DOUBT, ENDED = range(1, 9)
UP_HEAD = struct.Struct("=2q")
PACKET_BYTES = 128 << 10
TEXT_LIMIT = 12_000
LOST_FILE = -2
"""In place of a descriptor: the system dropped the file of a packet, for the limit on open files was reached."""


@dataclass
class Report:
    """How a command failed on one worker.

    `kind`       "failed": here; "stopped": it was given up here, for the controller was interrupted; "dependent": a
                 value that it needs is that of command `root`, which failed; "aborted": a peer failed, or died
    `committed`  whether the step had passed its commit, so that the state before it is gone
    `anomaly`    of a step that failed for a NaN: the value that has it, where all workers know that
    `where`      the worker that has it
    `hint`       the way out
    """

    kind: str
    rank: int
    step: int
    error: str = ""
    traceback: str = ""
    op: str = ""
    source: Source | None = None
    operands: tuple[str, ...] = ()
    root: int = -1
    committed: bool = False
    anomaly: str = ""
    where: int = -1
    hint: str = ""

    def encode(self) -> bytes:
        fields = asdict(self)
        for name in ("error", "traceback"):
            text = fields[name]
            if len(text) > TEXT_LIMIT:
                fields[name] = text[: TEXT_LIMIT // 2] + "\n... (cut) ...\n" + text[-TEXT_LIMIT // 2 :]
        return UP_HEAD.pack(REPORT, self.step) + json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")

    @staticmethod
    def decode(body: bytes) -> Report:
        fields: dict[str, Any] = json.loads(body)
        fields["operands"] = tuple(fields["operands"])
        fields["source"] = _source(fields["source"])
        return Report(**fields)


def _source(fields: dict[str, Any] | None) -> Source | None:
    return None if fields is None else Source(**fields | {"caller": _source(fields["caller"])})


def value_head(kind: int, sequence: int, tensor: torch.Tensor) -> bytes:
    return UP_HEAD.pack(kind, sequence) + struct.pack(
        f"={2 + tensor.ndim}q", DTYPE_CODES[tensor.dtype], tensor.ndim, *tensor.shape
    )


def buffer_head(sequence: int, words: int) -> bytes:
    return UP_HEAD.pack(BUFFER_FILE, sequence) + struct.pack("=3q", DTYPE_CODES[torch.int64], 1, words)


def read_value_head(body: bytes | memoryview) -> tuple[torch.dtype, tuple[int, ...], int]:
    """dtype, shape, and where the bytes start."""
    code, ndim = PAIR.unpack_from(body)
    shape = struct.unpack_from(f"={ndim}q", body, PAIR.size)
    return DTYPE_LIST[code], shape, PAIR.size + 8 * ndim


def not_taken_in(body: bytes | memoryview, why: str) -> str:
    """Why the value, of which this is the head, cannot be read."""
    dtype, shape, _ = read_value_head(body)
    return f"a worker's value of {math.prod(shape) * dtype.itemsize:,} bytes cannot be taken in: {why}"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as one row of bytes (a copy where it is not contiguous)."""
    return in_bytes(tensor.resolve_conj().resolve_neg().contiguous())


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's elements as one row of bytes, in its own memory. One with a single element is contiguous
    whatever its strides are, which a view as bytes would refuse."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
