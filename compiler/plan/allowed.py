"""Which ops a plan may call: a plan comes from a file, and a file may come from anyone.

An op of a plan computes on the tensors that it is given. Allowed are the ops of `monarch.compiler.ops` that a worker
runs, `getitem`, the ATen and prims overloads that touch nothing but memory of theirs, and ops of the user's own
namespaces, if they are registered already: no module is imported for a plan.

This keeps a plan from files, processes and imports. It is no sandbox: ATen trusts its arguments here and there, so a
plan is run with the trust that a program is run with.
"""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from monarch.compiler.ops import OPS

REFUSED = frozenset(
    "from_file _print set set_ set_data record_stream retain_grad requires_grad_ _backward "
    "_cufft_clear_plan_cache _cufft_set_plan_cache_max_size _resize_output_".split()
)
"""ATen ops that open files, print, swap a tensor's storage, or change state of the process."""

TORCH_NAMESPACES = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test c10d cuda debug_mode_ops debugprims "
    "export inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn prim prims_internal profiler quantization "
    "quantized rngprims sparse static_runtime streams symm_mem xnnpack".split()
)
"""Namespaces of torch itself whose ops a plan has no use for: raw memory, process groups, profiling."""

PARAMETERS: dict[str, tuple[str, ...]] = {
    name: tuple(part.strip() for part in op.signature.strip("()").split(",") if part.strip())
    for name, op in OPS.items()
    if name not in ("constrain", "transfer")
}
PARAMETERS["fill_padding_"] = PARAMETERS["fill_padding"]
"""The parameters of each of our ops that a worker runs."""


_OP = re.compile(r"\w{1,100}(\.\w{1,200}){0,2}", re.ASCII)


class RefusedOp(Exception):
    """A plan may not call an op, and why."""


class UnregisteredOp(Exception):
    """An op of the user's own, which may be called once it is registered."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.namespace = namespace


@lru_cache(maxsize=4096)
def allow(op: str) -> None:
    """Raise RefusedOp unless a plan may call `op`, such as "aten.mm.default", or UnregisteredOp if it could."""
    if op == "getitem" or op in PARAMETERS:
        return
    if not _OP.fullmatch(op):
        raise RefusedOp("that is no op's name")
    if op in OPS:
        raise RefusedOp("it stands only in graphs that are not partitioned yet")
    parts = op.split(".")
    if len(parts) != 3:
        raise RefusedOp("unknown op")
    namespace, name, overload = parts
    if namespace in TORCH_NAMESPACES or (namespace in ("aten", "prims") and name in REFUSED):
        raise RefusedOp("not allowed in a plan, for it does more than compute on tensors")
    try:
        torch._C._dispatch_find_schema_or_throw(f"{namespace}::{name}", "" if overload == "default" else overload)
    except RuntimeError:
        if namespace in ("aten", "prims"):
            raise RefusedOp(f"unknown op in torch {torch.__version__}") from None
        raise UnregisteredOp(namespace) from None
