"""Recurrent layers and the packed sequences that they take: PyTorch's kernels for them look at operands' memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from monarch.compiler.ops.record import enter
from monarch.language.errors import lengths_error
from monarch.language.recorder.composites import composite
from monarch.language.recorder.known import known_value
from monarch.language.recorder.recording import current_program, outside_programs
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

Cell = Callable[..., tuple[torch.Tensor, ...]]
"""(the input's part of the gates, state, weight and bias of the state's part, projection) -> the new state."""


def _lstm_cell(
    gates: torch.Tensor, state: tuple[torch.Tensor, ...], weight: Any, bias: Any, projection: Any
) -> tuple[torch.Tensor, ...]:
    hidden, cell = state
    i, f, g, o = (gates + F.linear(hidden, weight, bias)).chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return (hidden if projection is None else hidden @ projection.T), cell


def _gru_cell(
    gates: torch.Tensor, state: tuple[torch.Tensor, ...], weight: Any, bias: Any, projection: Any
) -> tuple[torch.Tensor, ...]:
    (hidden,) = state
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = F.linear(hidden, weight, bias).chunk(3, -1)
    keep = (z + hz).sigmoid()
    fresh = (n + (r + hr).sigmoid() * hn).tanh()
    return ((hidden - fresh) * keep + fresh,)


def _simple_cell(activation: Callable[[torch.Tensor], torch.Tensor]) -> Cell:
    def cell(
        gates: torch.Tensor, state: tuple[torch.Tensor, ...], weight: Any, bias: Any, projection: Any
    ) -> tuple[torch.Tensor, ...]:
        return (activation(gates + F.linear(state[0], weight, bias)),)

    return cell


Run = Callable[..., tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
"""(cell, gates of all steps, first state, whether from the end, the cell's weights) -> all outputs, the last state."""


def _run_padded(
    cell: Cell, gates: torch.Tensor, state: tuple[torch.Tensor, ...], backward: bool, weights: tuple[Any, ...]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """One direction of a layer over gates [time, batch, size]."""
    steps = []
    for at in reversed(range(gates.shape[0])) if backward else range(gates.shape[0]):
        state = cell(gates[at], state, *weights)
        steps.append(state[0])
    return torch.stack(steps[::-1] if backward else steps), state


def _run_packed(sizes: list[int]) -> Run:
    """One direction of a layer over packed gates [sum of sizes, size]: at each time the first sequences, so many as
    `sizes` says, are not over yet."""

    def run(
        cell: Cell, gates: torch.Tensor, first: tuple[torch.Tensor, ...], backward: bool, weights: tuple[Any, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        blocks, steps, over = gates.split(sizes), [], []
        state = tuple(kind[: sizes[-1]] for kind in first) if backward else first
        for at in reversed(range(len(sizes))) if backward else range(len(sizes)):
            size, before = sizes[at], state[0].shape[0]
            if size > before:  # sequences that end here
                state = tuple(torch.cat([now, kind[before:size]]) for now, kind in zip(state, first, strict=True))
            elif size < before:  # sequences that are over
                over.append(tuple(kind[size:] for kind in state))
                state = tuple(kind[:size] for kind in state)
            state = cell(blocks[at], state, *weights)
            steps.append(state[0])
        last = tuple(torch.cat(kind) for kind in zip(state, *over[::-1], strict=True))
        return torch.cat(steps[::-1] if backward else steps), last

    return run


def _recurrent(
    cell: Cell,
    run: Run,
    x: torch.Tensor,
    states: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """All layers and directions: the outputs, and the last states [layers * directions, batch, size] of each kind."""
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            w_in, w_state, *rest = params[number * each : (number + 1) * each]
            b_in, b_state = (rest[0], rest[1]) if has_biases else (None, None)
            projection = rest[-1] if len(rest) % 2 else None
            first = tuple(kind[number] for kind in states)
            output, state = run(cell, F.linear(x, w_in, b_in), first, direction == 1, (w_state, b_state, projection))
            outputs.append(output)
            last.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    return x, *(torch.stack(kind) for kind in zip(*last, strict=True))


def _enter(layer: Any, cell: Cell, several: bool) -> None:
    """Have a kind of layers run by its cell, whose state is of `several` tensors or of one."""

    def padded(x: torch.Tensor, hx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        *options, batch_first = rest
        x = x.transpose(0, 1) if batch_first else x
        out, *last = _recurrent(cell, _run_padded, x, hx if several else [hx], *options)
        return (out.transpose(0, 1) if batch_first else out), *last

    def packed(data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        run = _run_packed(_plain(batch_sizes).tolist())
        return _recurrent(cell, run, data, hx if several else [hx], *rest)

    composite(layer.input)(padded)
    composite(layer.data)(packed)


_enter(aten.lstm, _lstm_cell, several=True)
_enter(aten.gru, _gru_cell, several=False)
_enter(aten.rnn_tanh, _simple_cell(torch.tanh), several=False)
_enter(aten.rnn_relu, _simple_cell(torch.relu), several=False)


# -- packed sequences --------------------------------------------------------------------------------------------------


def _plain(numbers: torch.Tensor) -> torch.Tensor:
    """Lengths of sequences, or sizes that follow from them, which have to be known."""
    if not isinstance(numbers, DistributedTensor):
        return numbers
    recording = current_program()
    if recording is None:
        return numbers.full_tensor()
    found = known_value(recording, numbers)
    if found is None:
        raise lengths_error(user_source())
    return found


def _numbers(plain: torch.Tensor) -> torch.Tensor:
    """A program's known numbers, as of those that it makes itself."""
    recording = current_program()
    return plain if recording is None else recording.constant(plain)


def _pack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a padded batch that are no padding, from time to time, and how many sequences there are at each."""
    x, lengths, batch_first = args
    lengths = _plain(lengths)
    with outside_programs():
        rows = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], 1)
        places, sizes = func(rows, lengths, batch_first)  # checks the lengths too
        places = places.flatten()
    return x.flatten(0, 1).index_select(0, places), _numbers(sizes)


@composite(aten._pack_padded_sequence_backward.default)
def _pack_backward(grad: torch.Tensor, size: list[int], batch_sizes: torch.Tensor, batch_first: bool) -> torch.Tensor:
    time, batch = (1, 0) if batch_first else (0, 1)
    padded, _ = _pad(grad, batch_sizes, batch_first, 0.0, size[time])
    return padded


@composite(aten._pad_packed_sequence.default)
def _pad(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = _plain(batch_sizes)
    with outside_programs():
        rows = torch.arange(1, data.shape[0] + 1)
        places, lengths = aten._pad_packed_sequence(rows, sizes, batch_first, 0, total_length)
        is_padding = (places == 0).view(*places.shape, *[1] * (data.ndim - 1))
        rows = (places - 1).clamp(min=0).flatten()
    padded = data.index_select(0, rows).view(*places.shape, *data.shape[1:])
    return padded.masked_fill(is_padding, padding_value), _numbers(lengths)


enter((aten._pack_padded_sequence,), record=_pack)
