"""Triton functions from emitted text, and their machine code for a target."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch.compiler.kernels.triton.crosscompile import Compiled, cross_compile
from monarch.compiler.kernels.triton.source import ERROR, TRITON_TYPES, Launch, Scratch, TritonSource
from monarch.compiler.loops.ir import Buffer, Kernel

if TYPE_CHECKING:
    import triton


def functions(source: TritonSource) -> dict[str, triton.JITFunction]:
    """The jitted functions of a source, by name. Nothing is compiled for a GPU yet."""
    name = f"<triton {source.name} {source.sha256[:16]}>"
    # Triton reads a function's text by its file's name and line.
    linecache.cache[name] = (len(source.text), None, source.text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": f"monarch.kernels.{source.name}"}
    exec(compile(source.text, name, "exec"), names)
    return {launch.function: names[launch.function] for launch in source.launches}


def pointer_types(kernel: Kernel, source: TritonSource, launch: Launch) -> dict[str, str]:
    """Triton's type of each pointer that a launch takes."""
    numbered: dict[str, Sequence[Buffer | Scratch]] = {"a": kernel.inputs, "b": kernel.outputs, "s": source.scratch}
    found = {}
    for name in launch.arguments:
        dtype = None if name == ERROR else numbered[name[0]][int(name[1:])].dtype
        found[name] = "*i32" if dtype is None else f"*{TRITON_TYPES[dtype]}"
    return found


def compile_launches(kernel: Kernel, source: TritonSource, target: str) -> list[Compiled]:
    """Machine code for each launch. Raises MonarchError where triton is not installed.

    Warps are planned for 32 threads; those of AMD have 64, so there are half as many.
    """
    narrower = 2 if target.startswith("gfx") else 1
    made = functions(source)
    return [
        cross_compile(
            made[launch.function],
            pointer_types(kernel, source, launch),
            dict(launch.constants),
            target,
            aligned=launch.arguments,
            num_warps=max(1, launch.warps // narrower),
            num_stages=launch.stages,
            enable_fp_fusion=False,
        )
        for launch in source.launches
    ]
