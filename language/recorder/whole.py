"""Ops that make floats of whole numbers, of PyTorch's default dtype, where a program has set another meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.errors import ProgramError
from monarch.language.source import user_source
from monarch.language.tensors.shapes import default_dtype, run_fake
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_KEPT = ("condition", "mask", "index", "indices")
"""The operands that choose."""


def with_own_dtypes(
    dtype: torch.dtype, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fakes: list[Any], named: Any, out: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with which a call gives, under the default `dtype`, the dtypes that it gives now: a plan runs under
    one default. None where it gives these anyway. Raises ProgramError where it has no such arguments."""
    with default_dtype(dtype):
        other = run_fake(func, fakes, named)
    wanted = _dtypes(out)
    if _dtypes(other) == wanted:
        return None
    made = wanted[0]
    schema = func._schema.arguments
    if any(argument.name == "dtype" for argument in schema) and kwargs.get("dtype") is None:
        return args, {**kwargs, "dtype": made}
    values = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    cast = tuple(
        aten._to_copy.default(value, dtype=made) if _is_whole(value) and name not in _KEPT else value
        for name, value in values.items()
    )
    if all(value is given for value, given in zip(cast, args, strict=True)):
        raise ProgramError(
            f"{func.overloadpacket} gives {made} by the default dtype that the program has set",
            hint="set it before the program is called, or say the dtype: x.to(torch.float64).",
            source=user_source(),
        )
    return cast, kwargs


def _is_whole(value: Any) -> bool:
    return isinstance(value, DistributedTensor) and not (value.is_floating_point() or value.is_complex())


def _dtypes(out: Any) -> list[torch.dtype]:
    results = out if isinstance(out, (list, tuple)) else [out]
    return [each.dtype for each in results if isinstance(each, torch.Tensor)]
