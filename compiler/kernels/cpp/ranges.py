"""Which exponentials need less than the whole range of `exp_`, by their operands and their readers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch.compiler.loops.ir import Op, Reduce, Statement
from monarch.compiler.loops.nests import operands


def exponentials(body: Sequence[Statement], dtypes: Sequence[torch.dtype]) -> dict[int, str]:
    """Names in vector_math.h for exponentials in float32 of values that are never positive, as in softmax: of a value
    less the greatest such. Where they are only summed the greatest is 1, beside which values below 2^-125 do not count.

    The values have the same bits as those of `exp_`, and the sums too.
    """
    readers: dict[int, list[Statement]] = {}
    for statement in body:
        for operand in operands(statement):
            readers.setdefault(operand, []).append(statement)
    found: dict[int, str] = {}
    for number, statement in enumerate(body):
        if isinstance(statement, Op) and statement.name == "exp" and dtypes[number] == torch.float32:
            if _is_less_its_maximum(body, statement.args[0]):
                summed = all(isinstance(reader, Reduce) and reader.name == "sum" for reader in readers.get(number, ()))
                found[number] = "exp_normal" if summed else "exp_below"
    return found


def _is_less_its_maximum(body: Sequence[Statement], number: int) -> bool:
    match body[number]:
        case Op("sub", (value, greatest)):
            return body[greatest] == Reduce("max", value)
    return False
