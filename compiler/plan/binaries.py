"""Machine code of a plan's kernels for a GPU, and how it is launched.

A plan for a GPU may carry, for each of its generated kernels, what was compiled for it ahead of time, so that loading
the plan compiles nothing; and for calls of ATen's ops kernels of a template that run in their place. A kernel can be
there in several variants, of which the first is the one that runs: the one estimated to be fastest, until they have
been measured (`monarchc tune`). In a file this is two members: `binaries.json`, one list of variants, and
`binaries.bin`, the bytes of each launch's machine code and assembly, one after the other in the same order.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from monarch.compiler.loading import load
from monarch.compiler.loops.ir import Buffer, Kernel
from monarch.compiler.plan.container import dump_json, load_json
from monarch.compiler.plan.plan import Plan, Slot
from monarch.compiler.tensor_type import name_of

if TYPE_CHECKING:
    import torch

    from monarch.compiler.plan.decode import Decoder


@dataclass(frozen=True)
class LaunchBinary:
    """One launch: a grid of programs of `warps` warps runs the entry point `function` of `binary`, a cubin or an hsaco.

    `arguments` are the pointers that it takes: "a0", "b1" (the kernel's inputs and outputs), "s0" (scratch) and "error"
    (the error word); `constants` are the values that its constants were compiled with. `assembly` is the PTX or AMDGCN
    text, for people; `metadata` what Triton's own loader wants to know.
    """

    function: str
    grid: tuple[int, int, int]
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    warps: int
    shared_bytes: int
    metadata: dict[str, Any]
    binary: bytes
    assembly: str


@dataclass(frozen=True)
class TemplateCall:
    """Instructions that kernels of the template `name` run in place of ATen's op, all on tensors that lie alike: their
    tensor arguments in order, and their results. `why` says why these were chosen."""

    name: str
    instructions: tuple[int, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    why: str = ""


@dataclass(frozen=True)
class KernelBinary:
    """One variant of a kernel: the launches, in order, that run the kernel with the SHA-256 `kernel` (`kernel_hash`),
    or the calls of a template, of which `kernel` is then any hash of their own.

    `scratch` is the device memory that they share: dtype and number of elements. `gathers` has a text for each number
    that a launch may leave in the error word. `variant` tells variants apart, and `seconds` is what a call takes:
    estimated, or `measured`.
    """

    kernel: str
    launches: tuple[LaunchBinary, ...]
    scratch: tuple[tuple[torch.dtype, int], ...] = ()
    gathers: tuple[str, ...] = ()
    variant: str = ""
    seconds: float = 0.0
    measured: bool = False
    call: TemplateCall | None = None


def kernel_hash(kernel: Kernel) -> str:
    """The SHA-256, in hex, of a kernel's text without the user's lines."""
    text: str = load("monarch.compiler.loops.text:print_kernel")(kernel, lines=False)
    return hashlib.sha256(text.encode()).hexdigest()


def kernels_of(plan: Plan) -> dict[str, Kernel]:
    """The generated kernels that a plan calls, by hash, in the order of their first calls."""
    found: dict[str, Kernel] = {}
    calls = [each for each in plan.instructions if each.op == "kernel"]
    parse_kernel = load("monarch.compiler.loops.text:parse_kernel")
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
    seen: set[tuple[str, str]] = set()
    taken: dict[int, str] = {}
    for binary in plan.binaries:
        kernel: Kernel | TemplateCall | None = binary.call or kernels.get(binary.kernel)
        if kernel is None or (binary.kernel, binary.variant) in seen:
            fail(f"it carries machine code for kernel {binary.kernel[:80]!a}, which it does not call, or has already")
        seen.add((binary.kernel, binary.variant))
        try:
            if isinstance(kernel, TemplateCall):
                _check_call(kernel, plan)
                if any(taken.setdefault(at, binary.kernel) != binary.kernel for at in kernel.instructions):
                    raise _Malformed("another template runs one of its instructions")
            _check(binary, kernel, plan.target)
        except _Malformed as wrong:
            fail(f"the machine code of kernel {kernel.name} cannot be used: {wrong}")


class _Malformed(Exception):
    pass


def _check_call(call: TemplateCall, plan: Plan) -> None:
    if not _NAME.fullmatch(call.name) or len(call.why) > _MOST_TEXT:
        raise _Malformed("the name or reason of a template is none")
    if not call.instructions:
        raise _Malformed("it runs no instruction")
    for at in call.instructions:
        if not _whole(at, 0, len(plan.instructions) - 1) or not plan.instructions[at].op.startswith("aten."):
            raise _Malformed(f"instruction {at!a:.40} is no call of ATen's")
        instruction = plan.instructions[at]
        given = [each for each in (*instruction.args, *instruction.kwargs.values()) if isinstance(each, Slot)]
        if len(given) != len(call.inputs):
            raise _Malformed(f"instruction {at} takes {len(given)} tensors")
    for buffer in (*call.inputs, *call.outputs):
        if len(buffer.shape) != len(buffer.strides) or buffer.extent > _MOST_SCRATCH or buffer.numel > _MOST_SCRATCH:
            raise _Malformed("a tensor of it is none, or too large")


def _check(binary: KernelBinary, kernel: Kernel | TemplateCall, target: str) -> None:
    if not binary.launches:
        raise _Malformed("it has no launches")
    if len(binary.variant) > _MOST_TEXT or not 0 <= binary.seconds < math.inf:
        raise _Malformed("its variant or its time is none")
    known = load("monarch.compiler.types:DTYPE_NAMES")
    for dtype, numel in binary.scratch:
        if dtype not in known or not _whole(numel, 1, _MOST_SCRATCH):
            raise _Malformed(f"it wants scratch for {numel!a:.40} elements")
    if any(not isinstance(text, str) or len(text) > _MOST_TEXT for text in binary.gathers):
        raise _Malformed("the text of a gather is no text, or too long")
    sizes = {"a": len(kernel.inputs), "b": len(kernel.outputs), "s": len(binary.scratch)}
    for launch in binary.launches:
        names = [launch.function, *(name for name, _ in launch.constants)]
        if any(not isinstance(name, str) or not _NAME.fullmatch(name) for name in names):
            raise _Malformed("a name is no identifier")
        if any(type(value) is not int for _, value in launch.constants):
            raise _Malformed("a constant is no whole number")
        for programs, most in zip(launch.grid, (2**31 - 1, 65535, 65535), strict=True):
            if not _whole(programs, 1, most):
                raise _Malformed(f"it launches {programs!a:.40} programs")
        if launch.warps not in (1, 2, 4, 8, 16, 32) or not _whole(launch.shared_bytes, 0, _MOST_SHARED):
            raise _Malformed(
                f"it wants {launch.warps!a:.40} warps and {launch.shared_bytes!a:.40} bytes of shared memory"
            )
        for argument in launch.arguments:
            match = _ARGUMENT.fullmatch(argument) if isinstance(argument, str) else None
            known = argument == "error" or (match is not None and int(match[2]) < sizes[match[1]])
            if not known:
                raise _Malformed(f"it takes the argument {argument!a:.40}, which there is not")
        if _machine(launch.binary) != next(code for name, code in _MACHINES.items() if target.startswith(name)):
            raise _Malformed(f"it is not for {target}")


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
                    list(launch.grid),
                    list(launch.arguments),
                    [list(pair) for pair in launch.constants],
                    launch.warps,
                    launch.shared_bytes,
                    launch.metadata,
                    [len(part) for part in parts],
                ]
            )
        scratch = [[name_of(dtype), numel] for dtype, numel in each.scratch]
        call = None if each.call is None else _encoded(each.call)
        how = [each.variant, each.seconds, each.measured]
        listed.append([each.kernel, launches, scratch, list(each.gathers), how, call])
    return dump_json(listed).encode("ascii"), b"".join(contents)


def _encoded(call: TemplateCall) -> list[Any]:
    def buffers(of: Sequence[Buffer]) -> list[Any]:
        return [[name_of(each.dtype), list(each.shape), list(each.strides)] for each in of]

    return [call.name, list(call.instructions), buffers(call.inputs), buffers(call.outputs), call.why]


def decode_binaries(listed: bytes, contents: bytes, decoder: Decoder) -> tuple[KernelBinary, ...]:
    """What `encode_binaries` wrote. Raises PlanError; `check_binaries` looks at what it says."""
    entries = decoder.items(load_json(listed, f"the binaries of {decoder.name}"), "the list of binaries")
    reader = _Reader(contents, decoder)
    found = []
    for entry in entries:
        kernel, launches, scratch, gathers, how, call = decoder.items(entry, "a kernel's machine code", 6)
        variant, seconds, measured = decoder.items(how, "a kernel's variant", 3)
        if type(seconds) is not float or type(measured) is not bool:
            decoder.fail("the time of a kernel is no time")
        found.append(
            KernelBinary(
                decoder.string(kernel, "a kernel's hash"),
                tuple([reader.launch(each) for each in decoder.items(launches, "a kernel's launches")]),
                tuple([reader.scratch(each) for each in decoder.items(scratch, "a kernel's scratch")]),
                decoder.strings(gathers, "a kernel's gathers"),
                decoder.string(variant, "a kernel's variant"),
                seconds,
                measured,
                None if call is None else reader.call(call),
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
        if not isinstance(dtype, str) or dtype not in self.decoder.dtypes:
            self.decoder.fail("a kernel's scratch has no dtype")
        return self.decoder.dtypes[dtype], self.decoder.integer(numel, "the size of a kernel's scratch")

    def call(self, value: Any) -> TemplateCall:
        decoder = self.decoder
        name, instructions, inputs, outputs, why = decoder.items(value, "the call of a template", 5)
        return TemplateCall(
            decoder.string(name, "a template's name"),
            tuple([decoder.integer(at, "an instruction") for at in decoder.items(instructions, "its instructions")]),
            tuple([self.buffer(each) for each in decoder.items(inputs, "a template's inputs")]),
            tuple([self.buffer(each) for each in decoder.items(outputs, "a template's outputs")]),
            decoder.string(why, "why a template was chosen"),
        )

    def buffer(self, value: Any) -> Buffer:
        dtype, *sizes = self.decoder.items(value, "a template's tensor", 3)
        if not isinstance(dtype, str) or dtype not in self.decoder.dtypes:
            self.decoder.fail("a template's tensor has no dtype")
        shape, strides = (
            tuple([self.decoder.integer(n, "a size of a tensor") for n in self.decoder.items(each, "a tensor's sizes")])
            for each in sizes
        )
        return Buffer(self.decoder.dtypes[dtype], shape, strides)

    def launch(self, value: Any) -> LaunchBinary:
        decoder = self.decoder
        function, grid, arguments, constants, warps, shared, metadata, lengths = decoder.items(value, "a launch", 8)
        x, y, z = decoder.items(grid, "a launch's grid", 3)
        code, text = decoder.items(lengths, "the lengths of machine code", 2)
        pairs = [decoder.items(pair, "a constant", 2) for pair in decoder.items(constants, "a launch's constants")]
        decoder.costs(metadata)
        binary, assembly = self.take(code), self.take(text)
        try:
            return LaunchBinary(
                decoder.string(function, "a launch's function"),
                (decoder.integer(x, "a grid"), decoder.integer(y, "a grid"), decoder.integer(z, "a grid")),
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
