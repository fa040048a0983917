"""Tensor types (`tensor_type`), meshes and layouts (`layout`), and the names of torch's dtypes."""

from __future__ import annotations

import torch

from monarch.compiler.layout import REDUCTIONS, VARYING, Layout, MeshSpec, Placement, is_partial
from monarch.compiler.tensor_type import TensorType, known_as

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "REDUCTIONS",
    "VARYING",
    "Layout",
    "MeshSpec",
    "Placement",
    "TensorType",
    "is_partial",
]

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

known_as(DTYPE_NAMES)
