"""The tensors of a program whose layouts nobody has said: `layouts="auto"` searches for these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from monarch.compiler.states import StateKey
from monarch.compiler.types import TensorType
from monarch.language.placing.asked import Question
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.tensor import DistributedTensor


def unsaid(
    states: list[tuple[str, Cell]],
    leaves: list[Any],
    types: Mapping[int, TensorType],
    questions: Iterable[Question],
) -> frozenset[str | int]:
    """The states and arguments that are free: what an optimizer keeps for a parameter, and its gradient, are as free as
    the parameter is. A state that actors are given stays as it is: they say what they return for the shards that they
    get, before a search."""
    given = {number for question in questions for number in question.states}
    free: set[str | int] = {label for number, (label, cell) in enumerate(states) if cell.free and number not in given}
    free |= {label for label, _ in states if (key := StateKey.of(label)).role and key.parameter in free}
    return frozenset(free) | {
        number
        for number, type_ in types.items()
        if type_.layout.is_replicated and not isinstance(leaves[number], DistributedTensor)
    }
