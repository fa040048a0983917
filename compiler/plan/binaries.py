"""Machine code of a plan's kernels for a GPU, and how it is launched.

A plan for a GPU may carry, for each of its generated kernels, what was compiled for it ahead of time, so that loading
the plan compiles nothing. In a file it is two members: `binaries.json`, one list of kernels, and `binaries.bin`, the
bytes of each launch's machine code and assembly, one after the other in the same order.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from monarch.compiler.kernels.ir import Kernel
from monarch.compiler.kernels.text import parse_kernel, print_kernel
from monarch.compiler.plan.container import dump_json, load_json
from monarch.compiler.types import DTYPE_NAMES, DTYPES

if TYPE_CHECKING:
    from monarch.compiler.plan.encode import Decoder
    from monarch.compiler.plan.plan import Plan


@dataclass(frozen=True)
class LaunchBinary:
    """One launch: `grid` programs of `warps` warps run the entry point `function` of `binary`, a cubin or an hsaco.

    `arguments` are the pointers that it takes: "a0", "b1" (the kernel's inputs and outputs), "s0" (scratch) and "error"
    (the error word); `constants` are the values that its constants were compiled with. `assembly` is the PTX or AMDGCN
    text, for people; `metadata` what Triton's own loader wants to know.
    """

    function: str
    grid: int
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    warps: int
    shared_bytes: int
    metadata: dict[str, Any]
    binary: bytes
    assembly: str


@dataclass(frozen=True)
class KernelBinary:
    """The launches, in order, that run the kernel with the SHA-256 `kernel` (see `kernel_hash`).

    `scratch` is the device memory that they share: dtype and number of elements. `gathers` has a text for each number
    that a launch may leave in the error word.
    """

    kernel: str
    launches: tuple[LaunchBinary, ...]
    scratch: tuple[tuple[torch.dtype, int], ...] = ()
    gathers: tuple[str, ...] = ()


def kernel_hash(kernel: Kernel) -> str:
    """The SHA-256, in hex, of a kernel's text without the user's lines."""
    return hashlib.sha256(print_kernel(kernel, lines=False).encode()).hexdigest()


def kernels_of(plan: Plan) -> dict[str, Kernel]:
    """The generated kernels that a plan calls, by hash, in the order of their first calls."""
    found: dict[str, Kernel] = {}
    calls = [each for each in plan.instructions if each.op == "kernel"]
    for text in dict.fromkeys(each.kwargs["text"] if "text" in each.kwargs else each.args[1] for each in calls):
        kernel = parse_kernel(text)
        found.setdefault(kernel_hash(kernel), kernel)
    return found


# Checked -------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z_]\w{0,119}", re.ASCII)
_ARGUMENT = re.compile(r"([abs])(0|[1-9]\d{0,5})", re.ASCII)
_MOST_SCRATCH, _MOST_SHARED, _MOST_TEXT = 2**40, 2**20, 1000
_MACHINES = {"cuda": 190, "gfx": 224}
"""What an ELF file says that it is for: EM_CUDA and EM_AMDGPU."""


def check_binaries(plan: Plan, fail: Callable[[str], NoReturn]) -> None:
    """Call `fail` with what is wrong with a plan's binaries, if anything is. What they do on a GPU is not looked at."""
    if not plan.binaries:
        return
    if plan.target == "cpu":
        fail("it carries machine code for a GPU, and its target is cpu")
    kernels = kernels_of(plan)
    seen: set[str] = set()
    for binary in plan.binaries:
        if binary.kernel not in kernels or binary.kernel in seen:
            fail(f"it carries machine code for kernel {binary.kernel[:80]!a}, which it does not call, or has already")
        seen.add(binary.kernel)
        kernel = kernels[binary.kernel]
        try:
            _check(binary, kernel, plan.target)
        except _Wrong as wrong:
            fail(f"the machine code of kernel {kernel.name} cannot be used: {wrong}")


class _Wrong(Exception):
    pass


def _check(binary: KernelBinary, kernel: Kernel, target: str) -> None:
    if not binary.launches:
        raise _Wrong("it has no launches")
    for dtype, numel in binary.scratch:
        if dtype not in DTYPE_NAMES or not _whole(numel, 1, _MOST_SCRATCH):
            raise _Wrong(f"it wants scratch for {numel!a:.40} elements")
    if any(not isinstance(text, str) or len(text) > _MOST_TEXT for text in binary.gathers):
        raise _Wrong("the text of a gather is no text, or too long")
    sizes = {"a": len(kernel.inputs), "b": len(kernel.outputs), "s": len(binary.scratch)}
    for launch in binary.launches:
        names = [launch.function, *(name for name, _ in launch.constants)]
        if any(not isinstance(name, str) or not _NAME.fullmatch(name) for name in names):
            raise _Wrong("a name is no identifier")
        if any(type(value) is not int for _, value in launch.constants):
            raise _Wrong("a constant is no whole number")
        if not _whole(launch.grid, 1, 2**31 - 1):
            raise _Wrong(f"it launches {launch.grid!a:.40} programs")
        if launch.warps not in (1, 2, 4, 8, 16, 32) or not _whole(launch.shared_bytes, 0, _MOST_SHARED):
            raise _Wrong(f"it wants {launch.warps!a:.40} warps and {launch.shared_bytes!a:.40} bytes of shared memory")
        for argument in launch.arguments:
            match = _ARGUMENT.fullmatch(argument) if isinstance(argument, str) else None
            known = argument == "error" or (match is not None and int(match[2]) < sizes[match[1]])
            if not known:
                raise _Wrong(f"it takes the argument {argument!a:.40}, which there is not")
        if _machine(launch.binary) != next(code for name, code in _MACHINES.items() if target.startswith(name)):
            raise _Wrong(f"it is not for {target}")


def _whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _machine(binary: bytes) -> int:
    """What a 64-bit little-endian ELF file is for; 0 for anything else."""
    if len(binary) < 64 or binary[:6] != b"\x7fELF\x02\x01":
        return 0
    (machine,) = struct.unpack_from("<H", binary, 18)
    return int(machine)


# As bytes ------------------------------------------------------------------------------------------------------------


def encode_binaries(binaries: Sequence[KernelBinary]) -> tuple[bytes, bytes]:
    """The two members of a file."""
    listed = []
    contents: list[bytes] = []
    for each in binaries:
        launches = []
        for launch in each.launches:
            parts = launch.binary, launch.assembly.encode()
            contents.extend(parts)
            launches.append(
                [
                    launch.function,
                    launch.grid,
                    list(launch.arguments),
                    [list(pair) for pair in launch.constants],
                    launch.warps,
                    launch.shared_bytes,
                    launch.metadata,
                    [len(part) for part in parts],
                ]
            )
        scratch = [[DTYPE_NAMES[dtype], numel] for dtype, numel in each.scratch]
        listed.append([each.kernel, launches, scratch, list(each.gathers)])
    return dump_json(listed).encode("ascii"), b"".join(contents)


def decode_binaries(listed: bytes, contents: bytes, decoder: Decoder) -> tuple[KernelBinary, ...]:
    """What `encode_binaries` wrote. Raises PlanError; `check_binaries` looks at what it says."""
    entries = decoder.items(load_json(listed, f"the binaries of {decoder.name}"), "the list of binaries")
    reader = _Reader(contents, decoder)
    found = []
    for entry in entries:
        kernel, launches, scratch, gathers = decoder.items(entry, "a kernel's machine code", 4)
        found.append(
            KernelBinary(
                decoder.string(kernel, "a kernel's hash"),
                tuple([reader.launch(each) for each in decoder.items(launches, "a kernel's launches")]),
                tuple([reader.scratch(each) for each in decoder.items(scratch, "a kernel's scratch")]),
                decoder.strings(gathers, "a kernel's gathers"),
            )
        )
    reader.finish()
    return tuple(found)


class _Reader:
    def __init__(self, contents: bytes, decoder: Decoder) -> None:
        self.contents, self.decoder, self.at = contents, decoder, 0

    def take(self, length: Any) -> bytes:
        end = self.at + self.decoder.integer(length, "the length of machine code")
        if end > len(self.contents):
            self.decoder.fail("its machine code is shorter than it says")
        self.at, start = end, self.at
        return self.contents[start:end]

    def finish(self) -> None:
        if self.at != len(self.contents):
            self.decoder.fail("its machine code is longer than it says")

    def scratch(self, value: Any) -> tuple[torch.dtype, int]:
        dtype, numel = self.decoder.items(value, "a kernel's scratch", 2)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.decoder.fail("a kernel's scratch has no dtype")
        return DTYPES[dtype], self.decoder.integer(numel, "the size of a kernel's scratch")

    def launch(self, value: Any) -> LaunchBinary:
        decoder = self.decoder
        function, grid, arguments, constants, warps, shared, metadata, lengths = decoder.items(value, "a launch", 8)
        code, text = decoder.items(lengths, "the lengths of machine code", 2)
        pairs = [decoder.items(pair, "a constant", 2) for pair in decoder.items(constants, "a launch's constants")]
        decoder.costs(metadata)
        binary, assembly = self.take(code), self.take(text)
        try:
            return LaunchBinary(
                decoder.string(function, "a launch's function"),
                decoder.integer(grid, "a launch's grid"),
                decoder.strings(arguments, "a launch's arguments"),
                tuple((decoder.string(name, "a constant"), value) for name, value in pairs),
                decoder.integer(warps, "a launch's warps"),
                decoder.integer(shared, "a launch's shared memory"),
                metadata,
                binary,
                assembly.decode(),
            )
        except UnicodeDecodeError:
            decoder.fail("the assembly of a kernel is not text in UTF-8")
