"""`torch._foreach_*`: many tensors in one call, recorded as one call for each."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.ops.record import enter

aten = torch.ops.aten


def _base(name: str) -> Any:
    """The op that `_foreach_<name>` applies to each tensor."""
    return getattr(torch.Tensor, name)


_SPECIAL = {
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x, source, non_blocking=False: x.copy_(source),
    "max": lambda x: x.max(),
    "minimum": lambda x, y: x.clamp_max(y) if not isinstance(y, torch.Tensor) else x.minimum(y),
    "maximum": lambda x, y: x.clamp_min(y) if not isinstance(y, torch.Tensor) else x.maximum(y),
    "minimum_": lambda x, y: x.clamp_max_(y) if not isinstance(y, torch.Tensor) else x.copy_(x.minimum(y)),
    "maximum_": lambda x, y: x.clamp_min_(y) if not isinstance(y, torch.Tensor) else x.copy_(x.maximum(y)),
    "pow": lambda x, y: torch.pow(x, y),
}
# The last positional number of these is the base op's keyword.
_KEYWORD = {"addcmul": "value", "addcdiv": "value", "addcmul_": "value", "addcdiv_": "value"}


def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.split("::_foreach_")[1]
    apply: Any = _SPECIAL.get(name) or _base(name)
    keyword = _KEYWORD.get(name)
    first = next(entry for entry in args if isinstance(entry, (list, tuple)))
    results = []
    for i in range(len(first)):
        row = [entry[i] if isinstance(entry, (list, tuple)) else entry for entry in args]
        named = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        if keyword and len(row) > 3:
            named[keyword] = row.pop()
        if name == "pow" and not isinstance(row[0], torch.Tensor):
            results.append(torch.pow(row[0], row[1]))
        else:
            results.append(apply(*row, **named))
    return None if func._schema.is_mutable else results


for _name in dir(torch._C._VariableFunctions):
    if _name.startswith("_foreach_"):
        enter((getattr(aten, _name),), record=_handle)
