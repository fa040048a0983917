"""Triton kernels run on CPU tensors, with the defects of Triton's interpreter mended and memory errors caught.

    with interpreting():
        y = rms_norm(x, weight)            # every kernel that is launched in here runs in the interpreter

Triton's own switch, TRITON_INTERPRET, must be set before triton is first imported and then holds for the whole process,
where the same kernel cannot be compiled any more. Here a kernel stays the `JITFunction` it is: only its launch, and
calls of other jitted functions while one runs, are led into the interpreter.

Mended, each tested in `test_interpreter.py`: arithmetic, reductions and `tl.dot` on bf16 and fp8 (numpy has neither,
and Triton computes on their bits as integers), casts to them (Triton truncates; a GPU rounds to nearest even, and to
fp8 saturates), and `libdevice` (all functions return None).

Added: a load or store outside of the tensors that were passed, or in a gap between the elements of a strided one,
raises `MemoryFault`; so does an element that one program writes and another reads or writes in the same launch, which
on a GPU is a race. (Atomics are exempt. Tensors that a kernel finds in a table of addresses are named:
`interpreting(tensor)`.) Nothing is said about races inside a program, shared memory, registers, or tf32: `tl.dot` of
float32 is exact here.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from tests.compiler.kernels.triton.memory import Memory

LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "waves_per_eu"})


@contextlib.contextmanager
def interpreting(*reachable: torch.Tensor) -> Iterator[None]:
    """Launch kernels in the interpreter. `reachable`: tensors that kernels find without being passed them."""

    def run(kernel: JITFunction, *args: object, grid: Any, warmup: bool, **kwargs: object) -> None:
        assert not warmup
        _launch(kernel, args, kwargs, grid, reachable)

    def call(function: JITFunction, *args: object, **kwargs: object) -> object:
        kwargs = {key: value for key, value in kwargs.items() if key not in ("_semantic", "_generator")}
        return _rewritten(function)(*args, **kwargs)

    saved = JITFunction.run, JITFunction.__call__
    JITFunction.run, JITFunction.__call__ = run, call
    try:
        yield
    finally:
        JITFunction.run, JITFunction.__call__ = saved


def _launch(
    kernel: JITFunction,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    grid: Any,
    reachable: tuple[torch.Tensor, ...],
) -> None:
    unknown = kwargs.keys() - set(kernel.arg_names) - LAUNCH_OPTIONS
    assert not unknown, f"{kernel.__name__} takes no {unknown}"
    bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in kernel.arg_names})
    bound.apply_defaults()
    grid = grid(bound.arguments) if callable(grid) else grid
    grid = (*grid, 1, 1)[:3]
    constant = {param.name for param in kernel.params if param.is_constexpr}
    values = {name: arg if name in constant else _argument(arg) for name, arg in bound.arguments.items()}
    tensors = {name: arg for name, arg in bound.arguments.items() if isinstance(arg, torch.Tensor)}
    tensors |= {f"reachable {i}": tensor for i, tensor in enumerate(reachable)}
    BUILDER.memory = Memory(kernel.__name__, tensors)
    BUILDER.set_grid_dim(*grid)
    program = _rewritten(kernel)
    with _patched_language(), np.errstate(all="ignore"):
        for index in np.ndindex(*grid):
            BUILDER.set_grid_idx(*index)
            BUILDER.memory.program = int(np.ravel_multi_index(index, grid)), index
            program(**values)


def _argument(value: object) -> object:
    """A launch argument as the kernel sees it: pointers, integers and float32 scalars are tensors."""
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu", f"the interpreter runs on CPU tensors, not on {value.device}"
        kind = tl.str_to_ty(triton.runtime.jit.mangle_type(value), None)
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), kind), kind)
    if isinstance(value, bool):
        return tl.tensor(TensorHandle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, float):
        return tl.tensor(TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    return upstream._implicit_cvt(value)


# Language -------------------------------------------------------------------------------------------------------------


# By the plain function: a jitted one hashes its source, and all that it calls.
_REWRITTEN: dict[Callable[..., object], Callable[..., object]] = {}


def _rewritten(function: JITFunction) -> Callable[..., object]:
    """The Python function under `function`; constants that it assigns become tensors, as the compiler makes them."""
    if function.fn not in _REWRITTEN:
        tree = upstream.FunctionRewriter.ast_transformer.visit(function.parse())
        ast.fix_missing_locations(tree)
        definition = next(i for i, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
        ast.increment_lineno(tree, function.starting_line_number + definition - 1)
        tree.body[0].decorator_list = []
        names = {**function.get_capture_scope(), "interpreter_semantic": SEMANTIC}
        exec(compile(tree, inspect.getsourcefile(function.fn) or "<kernel>", "exec"), names)
        _REWRITTEN[function.fn] = names[function.fn.__name__]
    return _REWRITTEN[function.fn]


@contextlib.contextmanager
def _patched_language() -> Iterator[None]:
    """`triton.language` computes on numpy arrays inside, and is as it was afterwards, so that kernels compile."""
    scope = upstream._LangPatchScope()
    for module in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        upstream._patch_builtin(module, BUILDER, scope)
    upstream._patch_lang_tensor(tl.tensor, scope)
    for module in (tl, tl.core):
        upstream._patch_lang_core(module, scope)
    scope.set_attr(tl.dtype, "to_ir", _knowing_fnuz(tl.dtype.to_ir))
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    for name in ("reduce", "associative_scan"):
        for module in (tl, tl.core):
            scope.set_attr(module, name, _in_float32(getattr(module, name)))
    for name, function in inspect.getmembers(libdevice, inspect.isfunction):
        scope.set_attr(libdevice, name, _libdevice(name) if name in LIBDEVICE else _missing(function))
    try:
        yield
    finally:
        scope.restore()


def _knowing_fnuz(to_ir: Callable[..., Any]) -> Callable[..., Any]:
    """AMD's fp8 types, which Triton's interpreter forgot."""

    def wrapper(self: tl.dtype, builder: InterpreterBuilder) -> Any:
        own = {"fp8e4b8": builder.get_fp8e4b8_ty, "fp8e5b16": builder.get_fp8e5b16_ty}
        return own[self.name]() if self.name in own else to_ir(self, builder)

    return wrapper


def _in_float32(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans of what numpy cannot compute with."""

    def wrapper(input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, tl.tensor) and _coded(input.dtype):
            return reduce(input.to(tl.float32), *args, **kwargs).to(input.dtype)
        return reduce(input, *args, **kwargs)

    return wrapper


LIBDEVICE: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(np, name)
        for name in ("exp", "exp2", "expm1", "log1p", "tanh", "sqrt", "floor", "ceil", "rint", "trunc")
    },
    **{
        name: getattr(np, name)
        for name in ("sin", "cos", "tan", "sinh", "cosh", "log", "log2", "log10", "fmod", "isnan", "isinf")
    },
    "abs": np.abs,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "copysign": np.copysign,
    "div_rn": np.divide,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "erfc": np.vectorize(math.erfc, otypes=[np.float64]),
    "fast_expf": np.exp,
    "fast_dividef": np.divide,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(z.dtype),
    "nearbyint": np.rint,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "signbit": np.signbit,
}


def _libdevice(name: str) -> Callable[..., tl.tensor]:
    def function(*args: Any, **_: object) -> tl.tensor:
        tensors = [SEMANTIC.to_tensor(arg) for arg in args]
        kind = tensors[0].dtype
        assert all(t.dtype == kind and kind in (tl.float32, tl.float64) for t in tensors), (
            f"libdevice.{name} of {tensors}"
        )
        data = LIBDEVICE[name](*(t.handle.data for t in tensors))
        kind = tl.int32 if data.dtype == bool else kind
        handle = TensorHandle(data.astype(upstream._get_np_dtype(kind)), kind)
        shape = next((t.shape for t in tensors if t.type.is_block()), None)
        return tl.tensor(handle, tl.block_type(kind, list(np.shape(data))) if shape else kind)

    return function


def _missing(function: Callable[..., object]) -> Callable[..., object]:
    def raise_missing(*_: object, **__: object) -> object:
        raise NotImplementedError(f"libdevice.{function.__name__} is not in the table LIBDEVICE in {__file__}")

    return raise_missing


# Numbers -------------------------------------------------------------------------------------------------------------


CODES = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}
"""Types that numpy lacks: a handle holds their bits as unsigned integers."""


def _coded(kind: tl.dtype) -> bool:
    return kind.scalar in CODES


def decode(data: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """Numbers that numpy can compute with; exact."""
    if not _coded(kind):
        return data
    bits = torch.from_numpy(np.array(data, order="C").view(np.int16 if data.itemsize == 2 else np.uint8))
    return bits.view(CODES[kind.scalar]).float().numpy()


def encode(data: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """`data` as the type `kind` holds it, rounded to nearest even; beyond the range of fp8, its largest value."""
    if not _coded(kind):
        return data.astype(upstream._get_np_dtype(kind))
    code = CODES[kind.scalar]
    values = torch.from_numpy(np.array(data, dtype=np.float32, order="C"))
    if code.itemsize == 1:
        values = values.clamp(torch.finfo(code).min, torch.finfo(code).max)
    return (
        values.to(code)
        .view(torch.int16 if code.itemsize == 2 else torch.uint8)
        .numpy()
        .view(upstream._get_np_dtype(kind))
    )


class Builder(InterpreterBuilder):
    """Triton's interpreter with bf16 and fp8 computed in float32 and rounded once for each operation."""

    memory: Memory

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        return TensorHandle(encode(decode(src.data, src.dtype), dst_type.scalar), dst_type.scalar)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: Any) -> TensorHandle:
        if rounding_mode == upstream._ir.ROUNDING_MODE.RTZ:
            raise NotImplementedError("casts that round toward zero")
        return self.cast_impl(src, dst_type)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(encode(np.array([value]), tl.bfloat16), tl.bfloat16)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        bitwise = op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
        if not _coded(lhs.dtype) or bitwise:
            result = super().binary_op(lhs, rhs, op)
            # Triton's comparison has its operands' type, which a scalar's would show where it is made a block.
            return TensorHandle(result.data, tl.int1) if result.data.dtype == bool else result
        return self._coded_result(op(decode(lhs.data, lhs.dtype), decode(rhs.data, rhs.dtype)), lhs.dtype)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        return self._coded_result(op(decode(arg.data, arg.dtype)), arg.dtype)

    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        data, low, high = (decode(h.data, h.dtype) for h in (arg, lo, hi))
        return self._coded_result(np.clip(data, low, high), arg.dtype)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        wide = [decode(h.data, h.dtype).astype(np.float64) for h in (x, y, z)]
        return TensorHandle(encode(wide[0] * wide[1] + wide[2], z.dtype.scalar), z.dtype.scalar)

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, lambda x: (1 / np.sqrt(x)).astype(x.dtype))

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise: Any
    ) -> TensorHandle:
        wide = d.data.dtype if d.data.dtype in (np.float64, np.int32) else np.float32
        # torch's product, for its threads are bounded, and numpy's spin while others work on the machine.
        factors = [torch.from_numpy(decode(x.data, x.dtype).astype(wide)) for x in (a, b)]
        product = torch.matmul(*factors).numpy()
        return TensorHandle(encode(product + decode(d.data, d.dtype), d.dtype.scalar), d.dtype.scalar)

    def _coded_result(self, data: np.ndarray, kind: tl.dtype) -> TensorHandle:
        if data.dtype == bool:
            return TensorHandle(data, tl.int1)
        return TensorHandle(encode(data, kind), kind.scalar)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: Any, cache: Any, eviction: Any, is_volatile: Any
    ) -> TensorHandle:
        self.memory.load(ptrs.data, mask.data)
        return super().create_masked_load(ptrs, mask, other, cache, eviction, is_volatile)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, cache: Any, eviction: Any
    ) -> None:
        self.memory.store(ptrs.data, mask.data)
        super().create_masked_store(ptrs, value, mask, cache, eviction)

    def create_atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        if _coded(val.dtype):
            raise NotImplementedError(f"atomics on {val.dtype}")
        self.memory.check(ptr.data, mask.data, "an atomic on")
        return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)


BUILDER = Builder()
SEMANTIC = TritonSemantic(BUILDER)
