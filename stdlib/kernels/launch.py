"""Launching a template's kernels, or recording the launches to compile them ahead of time.

y, lse = attention(q, k, v)                                          # on a GPU: compiles at the first call
_, launches = recorded(attention, q, k, v)                           # nothing runs; q may be on torch's meta device
kernels = [launch.compile("cuda:90") for launch in launches]         # no GPU needed
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.compiler.kernels.triton.crosscompile import Compiled, cross_compile
from monarch.compiler.kernels.triton.source import TRITON_TYPES

Result = TypeVar("Result")

TYPES = TRITON_TYPES | {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
}


@dataclass(frozen=True)
class Variant:
    """One way to build a kernel: its tile sizes, by the names of the kernel's constants, and its warps and stages."""

    tiles: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3

    def __str__(self) -> str:
        tiles = " ".join(f"{name}={size}" for name, size in self.tiles.items())
        return f"{tiles} warps={self.num_warps} stages={self.num_stages}".lstrip()


@dataclass(frozen=True)
class Launch:
    """A kernel on a grid of programs. `arguments` are all but the variant's tiles, by the kernel's names for them."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    variant: Variant
    arguments: Mapping[str, Any]

    def run(self) -> None:
        """Launch the kernel on its tensors, which are on a GPU, or in Triton's interpreter."""
        self.kernel[self.grid](
            **self.arguments,
            **self.variant.tiles,
            num_warps=self.variant.num_warps,
            num_stages=self.variant.num_stages,
        )

    @property
    def tiles(self) -> Mapping[str, int]:
        """The variant's tile sizes, by the names of the kernel's constants."""
        return self.variant.tiles

    @property
    def programs(self) -> tuple[int, int, int]:
        """The grid, of three dims."""
        x, y, z = (*self.grid, 1, 1)[:3]
        return x, y, z

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, in the order in which the kernel takes them."""
        names = [name for name in self.kernel.arg_names if isinstance(self.arguments.get(name), torch.Tensor)]
        return {name: self.arguments[name] for name in names}

    def source(self) -> str:
        """The kernel's Python source."""
        return inspect.getsource(self.kernel.fn)

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the kernel, its grid, variant and arguments; of tensors among these, of their dtypes alone."""
        tensors = self.tensors
        given = {name: value for name, value in self.arguments.items() if name not in tensors}
        known = (self.kernel.cache_key, self.grid, str(self.variant), given, {n: t.dtype for n, t in tensors.items()})
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def compile_fixed(self, target: str, **options: Any) -> Compiled:
        """The kernel for these arguments and no others, but for tensors' addresses: it takes those alone."""
        tensors = self.tensors
        constexprs = {name: value for name, value in self.arguments.items() if name not in tensors}
        return self._compile(
            target, {name: "*" + TYPES[tensor.dtype] for name, tensor in tensors.items()}, constexprs, tensors, options
        )

    def compile(self, target: str, **options: Any) -> Compiled:
        """The kernel for arguments like these: an integer that is 1, or that 16 divides, is so in every launch."""
        constant = {parameter.name for parameter in self.kernel.params if parameter.is_constexpr}
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        aligned = []
        for name, value in self.arguments.items():
            if name in constant or value is None or isinstance(value, bool) or (isinstance(value, int) and value == 1):
                constexprs[name] = value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                if value.is_meta or value.data_ptr() % 16 == 0:
                    aligned.append(name)
            elif isinstance(value, int):
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    aligned.append(name)
            else:
                signature[name] = "fp32"
        return self._compile(target, signature, constexprs, aligned, options)

    def _compile(
        self,
        target: str,
        signature: Mapping[str, str],
        constexprs: Mapping[str, Any],
        aligned: Iterable[str],
        options: Mapping[str, Any],
    ) -> Compiled:
        return cross_compile(
            self.kernel,
            signature,
            {**constexprs, **self.variant.tiles},
            target,
            aligned=aligned,
            num_warps=self.variant.num_warps,
            num_stages=self.variant.num_stages,
            **options,
        )


_RECORD: ContextVar[list[Launch] | None] = ContextVar("record", default=None)


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], variant: Variant, **arguments: Any) -> None:
    """Run `kernel` on the current device and stream; inside `recorded`, note it instead. An empty grid is no launch."""
    if 0 in grid:
        return
    one = Launch(kernel, grid, variant, arguments)
    record = _RECORD.get()
    if record is None:
        one.run()
    else:
        record.append(one)


def recorded(fn: Callable[..., Result], *args: Any, **kwargs: Any) -> tuple[Result, list[Launch]]:
    """The result of `fn`, with no kernel run, and the launches that it would have made."""
    record: list[Launch] = []
    token = _RECORD.set(record)
    try:
        return fn(*args, **kwargs), record
    finally:
        _RECORD.reset(token)


def check_alike(**tensors: Tensor | None) -> None:
    """Raises MonarchError unless all have the shape of the first: on a GPU another would be read out of bounds."""
    (first, like), *others = ((name, x) for name, x in tensors.items() if x is not None)
    for name, x in others:
        if x.shape != like.shape:
            raise MonarchError(f"{first} is {list(like.shape)} and {name} {list(x.shape)}; they must be alike")


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least `number`, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    """The least whole number of `by` that holds `number`."""
    return -(-number // by)
