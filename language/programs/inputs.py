"""What stands for the arguments of a call while its program is traced."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from monarch.compiler.symbols import has_names
from monarch.compiler.types import TensorType
from monarch.language.programs.call import ProgramCall
from monarch.language.programs.own import Belongings
from monarch.language.programs.signature import repeats_of
from monarch.language.programs.stand_ins import StandIns
from monarch.language.recorder.recording import Recording
from monarch.language.tensors.history import end_of, ended
from monarch.language.tensors.shapes import like, make_fake
from monarch.language.tensors.tensor import DistributedTensor


def symbolic_arguments(
    recording: Recording,
    call: ProgramCall,
    leaves: list[Any],
    types: dict[int, TensorType],
    stand_ins: StandIns,
    symbolic: Container[type],
) -> tuple[list[Any], dict[str, int]]:
    """Symbolic arguments: tensors become inputs, floats Scalars, and ints that change ScalarInts. Numbers of other
    than the `symbolic` types stay what they are, and guards expect their values."""
    made: list[Any] = []
    arguments: dict[str, int] = {}
    repeats = {} if call.examples else dict(repeats_of(leaves))
    given = call.given
    for number, leaf in enumerate(leaves):
        if call.written and isinstance(leaf, DistributedTensor):
            made.append(leaf)
            continue
        if number in repeats:  # one tensor is one input: code may ask, and differentiate by it
            made.append(made[repeats[number]])
            continue
        if isinstance(leaf, torch.Tensor):
            symbol: Any = recording.input(
                _fake(recording, given[number], types[number]),
                number,
                types[number],
                call.names.get(number),
                leaf.mesh if isinstance(leaf, DistributedTensor) else call.meshes.get(number),
            )
            end = end_of(given[number])
            symbol = (
                symbol.requires_grad_(leaf.requires_grad) if end is None else ended((end, ()), lambda made=symbol: made)
            )
            if isinstance(leaf, DistributedTensor) and leaf.is_leaf:
                symbol.grad = leaf.grad
            own = Belongings.of(given[number])
            if own.attributes:
                symbol._own = number, frozenset(own.attributes)
            if own.parameter:
                symbol._is_param = True
        elif type(leaf) is float or number in call.moving_ints:
            label = f"argument{number}"
            arguments[label] = number
            is_int = type(leaf) is int
            symbol = stand_ins.argument(label, number, leaf) if is_int else recording.scalar(label, leaf)
            if type(leaf) not in symbolic:  # asked for its value, the trace depends on that
                symbol = int(symbol) if is_int else float(symbol)
        else:
            symbol = leaf
        made.append(symbol)
    return made, arguments


def _fake(recording: Recording, leaf: torch.Tensor, type: TensorType) -> torch.Tensor:
    """An argument without data, with its caller's strides, or torch's symbols for its named sizes."""
    if not has_names(type.shape):
        return like(leaf)
    return make_fake(recording.symbols.torch_shape(type.shape), leaf.dtype)
