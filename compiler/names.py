"""Ops, dtypes and other constants by their names in the text."""

from __future__ import annotations

import difflib
import operator
from functools import cache
from typing import Any

import torch

from monarch.compiler.errors import did_you_mean
from monarch.compiler.ops import OPS, MonarchOp
from monarch.compiler.types import DTYPE_NAMES, DTYPES


@cache
def op_name(op: Any) -> str | None:
    """An op's name in the text, or None where it has none.

    `aten.mm` for a default overload, `aten.add.Tensor` for another; ops of ours and `getitem` by bare name.
    """
    if isinstance(op, torch._ops.OpOverload):
        namespace, name = op.namespace, op._schema.name.split("::", 1)[1]
        return f"{namespace}.{name}" if op._overloadname == "default" else f"{namespace}.{name}.{op._overloadname}"
    if isinstance(op, MonarchOp):
        return op.name
    return "getitem" if op is operator.getitem else None


class UnknownOp(LookupError):
    """There is no op of a name; the first argument says so, the second what there is instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint


@cache
def find_op(name: str) -> Any:
    """The op of a name: `aten.mm`, `aten.mm.default`, `aten.add.Tensor`, `all_reduce`, `getitem`.

    Only ops that are registered already are found; nothing is imported or run. Raises UnknownOp.
    """
    namespace, *rest = name.split(".")
    if not rest:
        if namespace == "getitem":
            return operator.getitem
        if namespace in OPS:
            return OPS[namespace]
        hint = did_you_mean(namespace, ["getitem", *OPS], "") or f"the ops without a dot are {', '.join(OPS)}."
        raise UnknownOp(f"unknown op '{name}'", hint)
    overload = ".".join(rest[1:])
    overload = "" if overload == "default" else overload
    try:
        torch._C._dispatch_find_schema_or_throw(f"{namespace}::{rest[0]}", overload)
    except RuntimeError:
        raise _unknown(name, namespace, rest[0], overload) from None
    return getattr(getattr(getattr(torch.ops, namespace), rest[0]), overload or "default")


def _unknown(text: str, namespace: str, name: str, overload: str) -> UnknownOp:
    registered = [entry.partition("::") for entry in torch._C._dispatch_get_all_op_names()]
    here = {rest for space, _, rest in registered if space == namespace}
    if not here:
        return UnknownOp(
            f"unknown op '{text}'",
            f"no op is registered in the namespace '{namespace}': import the module that registers its ops first.",
        )
    overloads = sorted(f"{namespace}.{entry}" for entry in here if entry.partition(".")[0] == name)
    if overloads:
        wanted = f"overload '{overload}'" if overload else "default overload"
        return UnknownOp(f"{namespace}.{name} has no {wanted}", f"its overloads are {', '.join(overloads)}.")
    close = difflib.get_close_matches(name, {entry.partition(".")[0] for entry in here}, n=1)
    hint = f"did you mean {namespace}.{close[0]}?" if close else ""
    return UnknownOp(f"unknown op '{text}'", hint or f"torch has no op '{name}' in the namespace '{namespace}'.")


def _constants() -> dict[str, Any]:
    """Names that stand for themselves among arguments, first name of a value preferred."""
    named: dict[str, Any] = {"none": None, "true": True, "false": False, "inf": float("inf"), "nan": float("nan")}
    named.update(DTYPES)
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype) and value not in DTYPE_NAMES and str(value) == f"torch.{name}":
            named[name] = value
        elif isinstance(value, torch.memory_format | torch.layout) and str(value) == f"torch.{name}":
            named[name] = value
    return named


CONSTANTS: dict[str, Any] = _constants()
CONSTANT_NAMES: dict[torch.dtype | torch.memory_format | torch.layout, str] = {
    value: name
    for name, value in CONSTANTS.items()
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout)
}
