"""Kernels of the loop IR, as Triton, on CPU tensors: emitted, launched in the interpreter, and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter as upstream

from monarch.compiler.kernels.triton.build import functions
from monarch.compiler.kernels.triton.emit import emit
from monarch.compiler.kernels.triton.source import ERROR, TritonSource
from monarch.compiler.kernels.triton.variants import Tiles
from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import print_kernel
from tests.compiler.kernels.triton.interpreter import interpreting

COMBINERS = {"larger": np.max, "smaller": np.min, "product": np.prod}


@contextlib.contextmanager
def fast_reductions() -> Iterator[None]:
    """Triton's interpreter takes an element at a time in reductions that it does not know; these do the same at
    once."""
    saved = upstream.ReduceOps.generic_reduce

    def reduce(self: Any, operands: Any) -> Any:
        combine = COMBINERS.get(self.combine_fn.__name__)
        if combine is None:
            return saved(self, operands)
        data = operands[0].handle.data
        return [
            self.to_tensor(combine(data, axis=self.axis, keepdims=self.keep_dims).astype(data.dtype), operands[0].dtype)
        ]

    upstream.ReduceOps.generic_reduce = reduce
    try:
        yield
    finally:
        upstream.ReduceOps.generic_reduce = saved


@lru_cache(maxsize=256)
def built(text: str, source: TritonSource) -> dict[str, triton.JITFunction]:
    return functions(source)


def launch_all(
    kernel: Kernel, inputs: Sequence[torch.Tensor], over: Sequence[int] = (), tiles: Tiles | None = None
) -> tuple[list[torch.Tensor], int]:
    """The outputs, and the error word. `over` names, for each output, the input whose memory it takes, or -1."""
    source = emit(kernel, tiles=tiles)
    operands = [
        torch.empty_strided(b.shape, b.strides, dtype=b.dtype).copy_(tensor)
        for tensor, b in zip(inputs, kernel.inputs, strict=True)
    ]
    shared = {output: operand for output, operand in enumerate(over) if operand >= 0}
    outputs = [
        operands[shared[at]] if at in shared else _rubbish(torch.empty_strided(b.shape, b.strides, dtype=b.dtype))
        for at, b in enumerate(kernel.outputs)
    ]
    memory = {f"a{at}": tensor for at, tensor in enumerate(operands)}
    memory |= {f"b{at}": tensor for at, tensor in enumerate(outputs)}
    memory |= {f"s{at}": _rubbish(torch.empty(s.numel, dtype=s.dtype)) for at, s in enumerate(source.scratch)}
    memory[ERROR] = torch.zeros(1, dtype=torch.int32)
    made = built(print_kernel(kernel, lines=False), source)
    with interpreting(), fast_reductions():
        for launch in source.launches:
            arguments = [memory[name] for name in launch.arguments]
            made[launch.function][(launch.grid,)](*arguments, **dict(launch.constants), num_warps=launch.warps)
    return outputs, int(memory[ERROR])


def _rubbish(tensor: torch.Tensor) -> torch.Tensor:
    """Memory as it is found: what is not stored must not look right."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 99)


def check(
    kernel: Kernel,
    inputs: Sequence[torch.Tensor],
    over: Sequence[int] = (),
    *,
    atol: float | None = None,
    tiles: Tiles | None = None,
) -> None:
    """The kernel's outputs are those of `interpret`; `atol` allows for sums in another order."""
    expected = interpret(kernel, inputs)
    outputs, error = launch_all(kernel, inputs, over, tiles)
    assert error == 0
    for at, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        exact = not wanted.is_floating_point()
        rtol = 0.0 if exact else 1.6e-2 if wanted.itemsize == 2 else 2e-6 if wanted.itemsize == 4 else 1e-12
        torch.testing.assert_close(
            found,
            wanted,
            rtol=rtol,
            atol=0.0 if exact else atol or 1e-6,
            equal_nan=True,
            msg=lambda text, at=at: f"{kernel.name}, output {at}: {text}",
        )
