"""What compiled kernels must look like: wide loads and stores, tensor cores, nothing spilled from registers."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

from monarch.compiler.kernels.triton.crosscompile import Compiled

MATRIX_OPS = {
    "cuda:80": r"\bmma\.sync\.",
    "cuda:90": r"\bwgmma\.mma_async\.",
    "cuda:100": r"\btcgen05\.mma\.",
    "gfx942": r"\bv_mfma_",
}


def access_bits(kernel: Compiled, kind: str) -> list[int]:
    """The widths of the accesses to global memory in the text of `kernel`, in bits for each thread.

    `kind` is "load" or "store". A copy from global to shared memory (cp.async) counts as a load.
    """
    if kernel.target.startswith("gfx"):
        short = re.findall(rf"\b(?:global|buffer)_{kind}_(dwordx\d|dword|[us]?short|[us]?byte)", kernel.assembly)
        return [_amd_bits(name) for name in short]
    op = {"load": "ld", "store": "st"}[kind]
    found = re.findall(rf"\b{op}\.global(?:\.[a-zA-Z_0-9:]+?)*?(?:\.v(\d))?\.[bfus](\d+)\b", kernel.assembly)
    copies = re.findall(r"\bcp\.async\.c[ag]\.shared\.global(?:\.\S+)? .*?, (0x[0-9a-f]+|\d+)[,;]", kernel.assembly)
    bits = [int(count or 1) * int(width) for count, width in found]
    return bits + ([8 * int(size, 0) for size in copies] if kind == "load" else [])


def _amd_bits(name: str) -> int:
    if name.startswith("dword"):
        return 32 * int(name.removeprefix("dwordx").removeprefix("dword") or 1)
    return 16 if name.endswith("short") else 8


def assert_wide(kernel: Compiled, bits: int = 128, kinds: tuple[str, ...] = ("load", "store")) -> None:
    for kind in kinds:
        found = access_bits(kernel, kind)
        assert found and max(found) >= bits, (
            f"{kernel.name} on {kernel.target}: {kind}s of {sorted(set(found))} bits only"
        )


def assert_tensor_cores(kernel: Compiled) -> None:
    op = MATRIX_OPS[kernel.target]
    assert re.search(op, kernel.assembly), f"{kernel.name} on {kernel.target}: no {op}"


def spilled_bytes(kernel: Compiled) -> int:
    """Bytes of memory for each thread that stand in for registers, or hold a stack."""
    if kernel.target.startswith("gfx"):
        return sum(map(int, re.findall(r"\.private_segment_fixed_size:\s+(\d+)", kernel.assembly)))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.binary)
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage)
    assert found, usage
    return sum(map(int, found))


def assert_no_spills(kernel: Compiled) -> None:
    assert spilled_bytes(kernel) == 0, f"{kernel.name} on {kernel.target} spills {spilled_bytes(kernel)} bytes a thread"
    assert ".local" not in kernel.assembly
