"""Kernels of a plan as callables on a CPU: built once, where the plan is loaded, and bound by each worker.

Where there is no C++ compiler, or it does not take a kernel, the same kernels are run by torch's ops, one after the
other: slower, and right.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from monarch.compiler.errors import PlanError
from monarch.compiler.kernels.cpp.build import load
from monarch.compiler.kernels.cpp.emit import sized, symbol
from monarch.compiler.loops.interpret import interpret, laid_out
from monarch.compiler.loops.ir import Kernel, Load, may_overwrite
from monarch.compiler.loops.text import parse_kernel

Placed = Sequence[torch.Tensor | None]
"""For each output of a kernel the tensor that is to be written, None where the call finds the memory."""


class Bound(Protocol):
    def __call__(self, tensors: list[torch.Tensor], into: Placed | None = None, /) -> tuple[torch.Tensor, ...]: ...


_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_stride = torch.Tensor.stride
_address = torch.Tensor.data_ptr


def bind(path: Path | None, text: str, over: Sequence[int], threads: int) -> Bound:
    """The callable of one `kernel` instruction, from an object that `build_kernels` gave for its text among others.

    It takes the operands in order, and if need be for each output the tensor that is to be it, of the type and strides
    that the kernel declares. Any other output i takes the memory of operand `over[i]`, which is then the result, or
    fresh memory where that is -1. Not to be called by several threads at once. It raises IndexError, with the user's
    line, where a gather's index is out of range.
    """
    kernel = parse_kernel(text)
    if len(over) != len(kernel.outputs):
        raise PlanError(f"kernel {kernel.name} has {len(kernel.outputs)} outputs, and {len(over)} places for them")
    for output, operand in enumerate(over):
        if operand != -1 and not (
            0 <= operand < len(kernel.inputs)
            and list(over).count(operand) == 1
            and may_overwrite(kernel, output, operand)
        ):
            raise PlanError(f"output {output} of kernel {kernel.name} cannot overwrite operand {operand}")
    return _interpreted(kernel, over) if path is None else _native(kernel, path, over, threads)


def _interpreted(kernel: Kernel, over: Sequence[int]) -> Bound:
    nowhere = [None] * len(over)

    def call(tensors: list[torch.Tensor], into: Placed | None = None, /) -> tuple[torch.Tensor, ...]:
        results = interpret(kernel, tensors)
        homes = [tensors[at] if at >= 0 else own for at, own in zip(over, into or nowhere, strict=True)]
        return tuple(
            result if home is None else home.copy_(result) for home, result in zip(homes, results, strict=True)
        )

    return call


def _native(kernel: Kernel, path: Path, over: Sequence[int], threads: int) -> Bound:
    function = load(path)[symbol(kernel)]
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    function.restype = ctypes.c_int64
    given = sized(kernel).numbers if kernel.sized else ()
    numbers = (ctypes.c_int64 * len(given))(*given)
    count = len(kernel.inputs) + len(kernel.outputs)
    addresses = (ctypes.c_void_p * count)()
    head = ctypes.addressof(addresses)
    write = struct.Struct(f"={count}q").pack_into
    shapes = [torch.Size(buffer.shape) for buffer in kernel.inputs]
    strides = [buffer.strides for buffer in kernel.inputs]
    dtypes = [buffer.dtype for buffer in kernel.inputs]
    made = [(at, each.shape, each.strides, each.dtype) for at, each in zip(over, kernel.outputs, strict=True)]
    empty = torch.empty_strided
    nowhere = [None] * len(made)

    def call(tensors: list[torch.Tensor], into: Placed | None = None, /) -> tuple[torch.Tensor, ...]:
        if (
            [*map(_stride, tensors)] != strides
            or [*map(_shape, tensors)] != shapes
            or [*map(_dtype, tensors)] != dtypes
        ):
            tensors = [laid_out(tensor, buffer) for tensor, buffer in zip(tensors, kernel.inputs, strict=True)]
        results = tuple(
            [
                own if own is not None else tensors[at] if at >= 0 else empty(size, step, dtype=dtype)
                for own, (at, size, step, dtype) in zip(into or nowhere, made, strict=True)
            ]
        )
        write(addresses, 0, *map(_address, tensors), *map(_address, results))
        if failed := function(head, threads, numbers):
            raise _failure(kernel, failed, tensors)
        return results

    return call


def _failure(kernel: Kernel, failed: int, tensors: Sequence[torch.Tensor]) -> IndexError:
    what = ""
    try:  # once more, slowly, for the index
        interpret(kernel, tensors)
    except IndexError as error:
        what = str(error).partition(": ")[2].partition("there")[0]
    number = failed - 1
    for nest in kernel.nests:
        if number < len(nest.body):
            statement = nest.body[number]
            assert isinstance(statement, Load)
            where = f" ({nest.lines[number]})" if nest.lines and nest.lines[number] else ""
            return IndexError(f"index out of range in {kernel.name}: {what}there are {statement.size} rows{where}")
        number -= len(nest.body)
    raise AssertionError(f"kernel {kernel.name} gave {failed}")
