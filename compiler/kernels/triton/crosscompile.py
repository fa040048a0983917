"""Triton kernels to machine code for a named target, on a machine without a GPU or its driver."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from monarch.compiler.errors import MonarchError
from monarch.compiler.plan.options import check_target

if TYPE_CHECKING:
    import triton

Constant: TypeAlias = "int | float | bool | str | None | triton.language.dtype | triton.JITFunction"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code for one kernel with its constants fixed, and the facts that a launch needs.

    `binary` is a cubin or an hsaco, `assembly` the PTX or AMDGCN text, `layouts` the TritonGPU IR that shows how
    tensors lie in registers. `metadata` is Triton's own, as JSON has it, less what names this machine: as `{name}.json`
    beside `{name}.cubin` it is what `triton.compiler.CompiledKernel` loads.
    """

    name: str
    target: str
    binary: bytes
    assembly: str
    layouts: str
    shared_bytes: int
    num_warps: int
    metadata: Mapping[str, Any]


def cross_compile(
    fn: triton.JITFunction,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Constant],
    target: str,
    *,
    aligned: Iterable[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    enable_fp_fusion: bool = True,
    line_info: bool = False,
    **options: Any,
) -> Compiled:
    """`fn` compiled for `target` ("cuda:80", "cuda:90", "cuda:100", "gfx942"); takes 0.1 to 0.6 CPU-seconds.

    `signature` gives a Triton type ("*bf16", "i32", "fp32") for every parameter that is not in `constexprs`. `aligned`
    names the pointers, and the integers that strides and sizes come from, that 16 divides: without it no load is
    vectorised. An integer that is always 1 (a contiguous stride) is best given as a constexpr. `enable_fp_fusion` lets
    a multiply and an add become one rounding. `line_info` puts the path and lines of the kernel's source into the
    binary, which then differs from machine to machine. `options` are those of Triton's backend (`maxnreg`,
    `waves_per_eu`…).

    Raises MonarchError for an unknown target, parameter or option (Triton itself ignores the last two silently), and
    where triton is not installed. An error in the kernel raises Triton's CompilationError, with the kernel's line.
    """
    check_target(target)
    compiler = _triton()
    gpu = _gpu_target(target)
    source = compiler.ASTSource(
        fn=fn,
        signature=_whole_signature(fn, signature, constexprs),
        constexprs=dict(constexprs),
        attrs={(_position(fn, name),): [["tt.divisibility", 16]] for name in sorted(set(aligned))},
    )
    backend = compiler.make_backend(gpu)
    chosen = {**options, "num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
    _check_options(backend, target, chosen)
    knobs = compiler.knobs
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = not line_info
        kernel = compiler.compile(source, target=gpu, options=chosen)
    return Compiled(
        name=kernel.metadata.name,
        target=target,
        binary=bytes(kernel.asm[backend.binary_ext]),
        assembly=kernel.asm["ptx" if gpu.backend == "cuda" else "amdgcn"],
        layouts=kernel.asm["ttgir"],
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        metadata=_plain(kernel.metadata._asdict()),
    )


def _triton() -> ModuleType:
    try:
        import triton.compiler.compiler as compiler
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        raise MonarchError(
            "kernels for a GPU are compiled with triton, which is not installed",
            hint="pip install 'monarchc[gpu]'",
        ) from missing
    return compiler


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if target.startswith("cuda:"):
        return GPUTarget("cuda", int(target.removeprefix("cuda:")), 32)
    if target.startswith("gfx"):
        return GPUTarget("hip", target, 64)
    raise MonarchError(f"Triton makes no kernels for the target {target!r}", hint="kernels for CPUs are C++")


def _whole_signature(
    fn: triton.JITFunction, signature: Mapping[str, str], constexprs: Mapping[str, Constant]
) -> dict[str, str]:
    """A type for each parameter, in the order of the kernel's; Triton takes missing and unknown ones without a word."""
    for name in (*signature, *constexprs):
        _position(fn, name)
    if both := sorted(signature.keys() & constexprs.keys()):
        raise MonarchError(f"{_called(fn)} is given {both[0]!r} both as a type and as a constant")
    if missing := [name for name in fn.arg_names if name not in signature and name not in constexprs]:
        raise MonarchError(f"{_called(fn)} is given no type or constant for {', '.join(map(repr, missing))}")
    if typed := [p.name for p in fn.params if p.is_constexpr and p.name in signature]:
        raise MonarchError(f"{typed[0]!r} is a tl.constexpr of {_called(fn)}", hint="give its value in `constexprs`")
    return {name: signature.get(name, "constexpr") for name in fn.arg_names}


def _position(fn: triton.JITFunction, name: str) -> int:
    if name in fn.arg_names:
        return int(fn.arg_names.index(name))
    raise MonarchError(
        f"{_called(fn)} has no parameter {name!r}",
        hint=_close(name, fn.arg_names) or f"it has {', '.join(fn.arg_names)}",
    )


def _called(fn: triton.JITFunction) -> str:
    return f"the kernel {fn.__name__}"


def _check_options(backend: Any, target: str, options: Mapping[str, object]) -> None:
    known = {field.name for field in dataclasses.fields(type(backend.parse_options({})))} - {"arch", "backend_name"}
    for name in options:
        if name not in known:
            raise MonarchError(
                f"Triton's backend for {target} has no option {name!r}",
                hint=_close(name, known) or f"it has {', '.join(sorted(known))}",
            )


def _close(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {found[0]!r}?" if found else ""


MACHINE_SPECIFIC = re.compile(r"hash|extern_libs|TRITON_.*|.*_PATH|LLVM_.*|MLIR_.*|DISABLE_.*|AMDGCN_.*")
"""Metadata that holds paths and environment variables of the machine that compiled, or a hash over them."""


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in sorted(metadata.items()) if not MACHINE_SPECIFIC.fullmatch(key)}
    return dict(json.loads(json.dumps(kept, default=vars)))
