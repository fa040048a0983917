"""A kernel as Triton: Python text, and the launches that run it, as plain data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

from monarch.compiler.loops.signatures import BOOL, DTYPES
from monarch.compiler.types import DTYPE_NAMES

ERROR = "error"
"""The argument that names the error word: one i32 in device memory, 0 before the first launch. A gather that finds an
index out of range loads nothing, and leaves its number there, 1 for the first of `TritonSource.gathers`; of several,
the greatest stays. The launcher reads it when it waits for the outputs, so that nothing waits on the way."""

TRITON_TYPES = {dtype: "i1" if dtype == BOOL else DTYPE_NAMES[dtype] for dtype in DTYPES} | {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class Scratch:
    """Device memory that one launch writes and a later one of the same kernel reads."""

    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Launch:
    """One call of a Triton function.

    `grid` programs run, numbered along one dim. `arguments` are the pointers that it takes, in the order of its
    parameters: "a0", "b1" (the kernel's inputs and outputs), "s0" (its scratch) and ERROR. `constants` follow them, its
    `tl.constexpr` parameters by name.
    """

    function: str
    grid: int
    arguments: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class TritonSource:
    """The result of `emit`. To run it: allocate the outputs and `scratch`, and do the launches in order.

    All buffers must start at multiples of 16 bytes, as torch allocates them; a launcher copies one that does not.
    `gathers` has a text for each number that the error word may hold; where it is empty, no launch takes ERROR.
    """

    name: str
    text: str
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...] = ()
    gathers: tuple[str, ...] = ()

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()
