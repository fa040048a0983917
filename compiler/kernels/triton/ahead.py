"""A plan's kernels compiled for its GPU, ahead of time, on a machine that may have none.

Machine code is on disk under the hash of all that it depends on: the kernel's Triton text and launches, the target, and
the version of triton. A file that was damaged is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.errors import PlanError
from monarch.compiler.execution.events import say
from monarch.compiler.kernels.cache import BuildError, forget, is_there, private_folder
from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.crosscompile import Compiled
from monarch.compiler.kernels.triton.emit import emit, variants_of
from monarch.compiler.kernels.triton.source import TritonSource
from monarch.compiler.kernels.triton.variants import MOST_VARIANTS, Tiles
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.plan.binaries import (
    KernelBinary,
    LaunchBinary,
    decode_binaries,
    encode_binaries,
    kernel_hash,
    kernels_of,
)
from monarch.compiler.plan.encode import TorchDecoder
from monarch.compiler.plan.file import hash_of, put_file
from monarch.compiler.plan.plan import Plan

if TYPE_CHECKING:
    from monarch.compiler.kernels.triton.calls import TemplateSite

_FORMAT = "2"
"""Of a file of the cache."""

OnCompiled = Callable[[str, float], None]
"""Called after each kernel: its name, and how many seconds it took."""


def with_binaries(plan: Plan, on_compiled: OnCompiled | None = None, calls: Sequence[TemplateSite] = ()) -> Plan:
    """The plan with machine code for each of its kernels, and for the calls that templates run.

    Where triton is not installed, the plan as it is, with one line about it on standard error: the kernels are then
    compiled where the plan is loaded. Raises BuildError for a cache folder that cannot be trusted, and Triton's errors.
    """
    kernels = kernels_of(plan)
    if plan.target == "cpu" or not (kernels or calls):
        return plan
    version = triton_version()
    if not version:
        say_missing()
        return plan
    folder = private_folder()
    made = []
    for kernel in kernels.values():
        start = time.perf_counter()
        made += variants(kernel, plan.target, version, folder)
        if on_compiled is not None:
            on_compiled(kernel.name, time.perf_counter() - start)
    for call in calls:
        start = time.perf_counter()
        made += call.binaries(plan.target, version, folder)
        if on_compiled is not None:
            on_compiled(call.template.name, time.perf_counter() - start)
    plan = replace(plan, binaries=tuple(made))
    return replace(plan, hash=hash_of(plan))


def triton_version() -> str:
    """Of the triton that is installed; "" for none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def say_missing() -> None:
    say(
        "kernels",
        "triton is not installed, so the plan carries no machine code for its kernels.\n  pip install triton==3.6.0",
    )


def variants(kernel: Kernel, target: str, version: str, folder: Path) -> list[KernelBinary]:
    """The machine code of a kernel in the variants that fit the target, the one estimated to be fastest first."""
    fitting: list[KernelBinary] = []
    room, least = MACHINES[target].shared, 0
    for tiles, seconds in variants_of(kernel, target):
        made = kernel_binary(kernel, target, version, folder, tiles)
        taken = max(launch.shared_bytes for launch in made.launches)
        if taken <= room:
            fitting.append(replace(made, variant=str(tiles or ""), seconds=seconds))
        least = min(least or taken, taken)
        if len(fitting) == MOST_VARIANTS:
            break
    if not fitting:
        raise BuildError(
            f"kernel {kernel.name} takes {least:,} bytes of shared memory, and a program on {target} has {room:,}",
            hint="MONARCH_TEMPLATES=off compiles the program without such kernels.",
        )
    return fitting


def kernel_binary(kernel: Kernel, target: str, version: str, folder: Path, tiles: Tiles | None = None) -> KernelBinary:
    """The machine code of a kernel, from the cache in `folder` or freshly compiled."""
    source = emit(kernel, tiles=tiles)
    key = kernel_hash(kernel)
    parts = version, target, key, source.text, repr(source.launches), repr(source.scratch), repr(source.gathers)
    return cached(folder, parts, key, lambda: _compiled(kernel, source, target))


def cached(folder: Path, parts: Sequence[str], kernel: str, compiled: Callable[[], KernelBinary]) -> KernelBinary:
    """The machine code of the kernel with the hash `kernel`, which depends on `parts` alone: from `folder`, or from
    `compiled`."""
    digest = hashlib.sha256()
    for part in (_FORMAT, *parts):
        digest.update(hashlib.sha256(part.encode()).digest())
    path = folder / f"{digest.hexdigest()}.gpu"
    found = _read(path)
    if found is None or found.kernel != kernel:
        forget(folder)
        found = compiled()
        _write(path, found)
    return found


def _compiled(kernel: Kernel, source: TritonSource, target: str) -> KernelBinary:
    with compiling(kernel.name, target):
        made = compile_launches(kernel, source, target)
    launches = [
        launch_binary(compiled, (launch.grid, 1, 1), launch.arguments, launch.constants, launch.function)
        for launch, compiled in zip(source.launches, made, strict=True)
    ]
    scratch = tuple((each.dtype, each.numel) for each in source.scratch)
    return KernelBinary(kernel_hash(kernel), tuple(launches), scratch, source.gathers)


def launch_binary(
    compiled: Compiled,
    grid: tuple[int, int, int],
    arguments: tuple[str, ...],
    constants: tuple[tuple[str, int], ...],
    function: str = "",
) -> LaunchBinary:
    return LaunchBinary(
        function=function or compiled.name,
        grid=grid,
        arguments=arguments,
        constants=constants,
        warps=compiled.num_warps,
        shared_bytes=compiled.shared_bytes,
        metadata=dict(compiled.metadata),
        binary=compiled.binary,
        assembly=compiled.assembly,
    )


@contextmanager
def compiling(name: str, target: str) -> Iterator[None]:
    """Triton's own errors as BuildError."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import TritonError

    try:
        yield
    except (CompilationError, TritonError) as error:
        raise BuildError(
            f"Triton does not compile kernel {name} for {target}: {str(error).strip()[:2000]}",
            hint="MONARCH_KERNELS=off compiles the program without generated kernels.",
        ) from error


def _write(path: Path, binary: KernelBinary) -> None:
    listed, contents = encode_binaries([binary])
    data = struct.pack("<Q", len(listed)) + listed + contents
    put_file(path, hashlib.sha256(data).digest() + data, ".building-")


def _read(path: Path) -> KernelBinary | None:
    """The record that `_write` left; None where there is none, or another file."""
    if not is_there(path):
        return None
    data = path.read_bytes()
    if len(data) < 40 or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    (length,) = struct.unpack_from("<Q", data, 32)
    try:
        (found,) = decode_binaries(data[40 : 40 + length], data[40 + length :], TorchDecoder(path.name))
    except (PlanError, ValueError):  # of another version of this file's format
        return None
    return found
