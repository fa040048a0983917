"""A plan's machine code as callables on a GPU.

Not yet run on one: its tests stand in for the driver, and launch the kernel's Triton text in the interpreter instead.

Triton's own `CompiledKernel` is built from the saved metadata and machine code, without the source that it was compiled
from; a launch through it costs a few microseconds. Nothing is compiled but Triton's launcher, once for each list of
argument types, which needs a C compiler where Triton's cache does not have it yet.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.kernels.triton.source import ERROR, TRITON_TYPES
from monarch.compiler.loops.interpret import laid_out, moved
from monarch.compiler.loops.ir import Kernel, may_overwrite
from monarch.compiler.plan.binaries import KernelBinary, LaunchBinary, TemplateCall

_ALIGNED = 16
"""Bytes: all loads and stores are compiled for buffers that start at a multiple of these."""


class GpuKernel:
    """A kernel, or the call of a template, with its machine code on one device: call it with the operands, and it gives
    the outputs.

    `over[i]` is the operand whose memory output i takes, or -1 (as in `monarch.compiler.ops.kernel`). A call returns
    before the kernel has run. `check` waits for the kernel and raises for an index out of range.
    """

    def __init__(
        self, kernel: Kernel | TemplateCall, binary: KernelBinary, device: torch.device, over: Sequence[int] = ()
    ) -> None:
        self.kernel, self.binary, self.device = kernel, binary, device
        self.over = tuple(over) or (-1,) * len(kernel.outputs)
        for output, operand in enumerate(self.over):
            if operand >= 0 and not (isinstance(kernel, Kernel) and may_overwrite(kernel, output, operand)):
                raise MonarchError(f"output {output} of kernel {kernel.name} cannot overwrite operand {operand}")
        with _current(device):
            self.launches = [(launch, launcher_of(kernel, binary, launch)) for launch in binary.launches]
        self.scratch = [torch.empty(numel, dtype=dtype, device=device) for dtype, numel in binary.scratch]
        self.error = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        operands = [_aligned(laid_out(t, buffer)) for t, buffer in zip(tensors, self.kernel.inputs, strict=True)]
        outputs = [
            operands[at] if at >= 0 else torch.empty_strided(b.shape, b.strides, dtype=b.dtype, device=self.device)
            for b, at in zip(self.kernel.outputs, self.over, strict=True)
        ]
        memory = {"a": operands, "b": outputs, "s": self.scratch}
        with _current(self.device):
            for launch, run in self.launches:
                found = [self.error if name == ERROR else memory[name[0]][int(name[1:])] for name in launch.arguments]
                run(*found, *(value for _, value in launch.constants))
        return tuple(outputs)

    def check(self) -> None:
        """Raise IndexError if a call since the last check found an index out of range. Waits for the device."""
        number = int(self.error.item())
        if number:
            self.error.zero_()
            raise self.failure(number)

    def failure(self, number: int) -> IndexError:
        """The message for this error number."""
        known = 0 < number <= len(self.binary.gathers)
        return IndexError(self.binary.gathers[number - 1] if known else f"kernel {self.kernel.name} gave {number}")


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, and on its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return moved(tensor, tensor.stride()) if tensor.data_ptr() % _ALIGNED else tensor


def launcher_of(kernel: Kernel | TemplateCall, binary: KernelBinary, launch: LaunchBinary) -> Callable[..., None]:
    """A function that launches with pointers and constants, on the current device and stream."""
    from triton.compiler import CompiledKernel

    types = {name: _pointer_type(name, kernel, binary) for name in launch.arguments}
    types |= {name: "constexpr" for name, _ in launch.constants}
    # All that Triton's launcher reads of the source that a kernel was compiled from.
    source = SimpleNamespace(
        name=launch.function,
        signature=types,
        constants=dict(launch.constants),
        fn=SimpleNamespace(arg_names=list(types), launch_metadata=None),
    )
    extension = "cubin" if launch.metadata["target"]["backend"] == "cuda" else "hsaco"
    with tempfile.TemporaryDirectory() as folder:  # read at once
        files = {
            f"{launch.function}.json": Path(folder, "kernel.json"),
            f"k.{extension}": Path(folder, f"k.{extension}"),
        }
        metadata, code = files.values()
        metadata.write_text(json.dumps(launch.metadata))
        code.write_bytes(launch.binary)
        loaded: Any = CompiledKernel(source, {name: str(path) for name, path in files.items()}, binary.kernel)
    run: Callable[..., None] = loaded[launch.grid]
    return run


def _pointer_type(name: str, kernel: Kernel | TemplateCall, binary: KernelBinary) -> str:
    if name == ERROR:
        return "*i32"
    number = int(name[1:])
    if name[0] == "s":
        return f"*{TRITON_TYPES[binary.scratch[number][0]]}"
    return f"*{TRITON_TYPES[(kernel.inputs if name[0] == 'a' else kernel.outputs)[number].dtype]}"
