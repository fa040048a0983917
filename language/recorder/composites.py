"""Functions of PyTorch's that look at their operands' data or memory, as compositions of ops that do not.

PyTorch takes these apart in C++ before a distributed tensor is asked: recurrent layers go to kernels that want
contiguous memory, bags of embeddings give tensors whose sizes depend on the machine, and `one_hot` compares, rather
than refuse a class that is not there. For distributed tensors the functions here take their place; plain ones go on
to PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from monarch.compiler.ops.record import enter
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("aten", "IMPL")


def _composite(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function runs in place of this overload where a distributed tensor is among its arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_distributed((*args, *kwargs.values())):
                return function(*args, **kwargs)
            return overload._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

        name = overload._schema.name.split("::")[1]
        suffix = overload._schema.overload_name
        _LIBRARY.impl(f"{name}.{suffix}" if suffix else name, call, "AutogradCPU")
        # Under inference mode, which skips autograd, the recorder meets the op itself.
        if overload.overloadpacket not in _OVERLOADS:
            enter((overload.overloadpacket,), record=_handle)
        _OVERLOADS.setdefault(overload.overloadpacket, {})[overload] = function
        return function

    return register


_OVERLOADS: dict[Any, dict[Any, Callable[..., Any]]] = {}


def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _OVERLOADS[func.overloadpacket][func](*args, **kwargs)


def _is_distributed(args: Any) -> bool:
    return any(
        isinstance(arg, DistributedTensor) or (isinstance(arg, (list, tuple)) and _is_distributed(arg)) for arg in args
    )


@_composite(aten.one_hot.default)
def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        num_classes = int(tensor.max().item()) + 1
    zeros = torch.zeros_like(tensor.unsqueeze(-1).expand(*tensor.shape, num_classes))
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


@_composite(aten.narrow.Tensor)
def _narrow(x: torch.Tensor, dim: int, start: torch.Tensor, length: int) -> torch.Tensor:
    """From where a value says; a copy, where PyTorch gives a view."""
    first = torch.where(start < 0, start + x.shape[dim], start)
    return x.index_select(dim, first + torch.arange(length, dtype=start.dtype))


@_composite(aten.tensor_split.tensor_indices_or_sections)
def _tensor_split(x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    """How many parts there are, and how long, has to be known: a place that only workers know is an error."""
    found = places.tolist()
    return x.tensor_split(found, dim)


@_composite(aten.embedding_bag.padding_idx)
def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> tuple[torch.Tensor, ...]:
    """Only the first result, the bags, is a value: the others serve a backward pass that never runs."""
    if include_last_offset:
        offsets = offsets[:-1]
    count, width = offsets.shape[0], weight.shape[1]
    bag = torch.searchsorted(offsets, torch.arange(indices.shape[0], dtype=offsets.dtype), right=True) - 1
    rows = F.embedding(indices, weight, scale_grad_by_freq=scale_grad_by_freq)
    kept = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx is not None:
        kept = (indices != padding_idx % weight.shape[0]).to(weight.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == 2:
        rows = rows.masked_fill((kept == 0).unsqueeze(-1), -torch.inf)
        into = rows.new_full((count, width), -torch.inf)
        most = into.scatter_reduce(0, bag.unsqueeze(-1).expand_as(rows), rows, "amax")
        bags = torch.where(most == -torch.inf, 0, most)
    else:
        bags = rows.new_zeros(count, width).index_add(0, bag, rows * kept.unsqueeze(-1))
        if mode == 1:
            bags = bags / kept.new_zeros(count).index_add(0, bag, kept).clamp(min=1).unsqueeze(-1)
    return bags, bag, offsets, offsets


@_composite(aten.embedding_bag.default)
def _embedding_bag_without_padding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
) -> tuple[torch.Tensor, ...]:
    return _embedding_bag(
        weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, None
    )


def _not_nested(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`nn.TransformerEncoder` takes padding out of its batch, as nested tensors, where the padding stands at the ends:
    this answers that it does not."""
    return False


enter((aten._nested_tensor_from_mask_left_aligned,), record=_not_nested)


# -- recurrent layers --------------------------------------------------------------------------------------------------

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


def _recurrent(
    cell: Cell,
    x: torch.Tensor,
    states: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """All layers and directions: the outputs, and the last states [layers * directions, batch, size] of each kind."""
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    if batch_first:
        x = x.transpose(0, 1)
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            w_in, w_state, *rest = params[number * each : (number + 1) * each]
            b_in, b_state = (rest[0], rest[1]) if has_biases else (None, None)
            projection = rest[-1] if len(rest) % 2 else None
            state = tuple(kind[number] for kind in states)
            gates, steps = F.linear(x, w_in, b_in), []
            order = range(x.shape[0]) if direction == 0 else reversed(range(x.shape[0]))
            for at in order:
                state = cell(gates[at], state, w_state, b_state, projection)
                steps.append(state[0])
            last.append(state)
            outputs.append(torch.stack(steps if direction == 0 else steps[::-1]))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    return (x.transpose(0, 1) if batch_first else x), *(torch.stack(kind) for kind in zip(*last, strict=True))


@_composite(aten.lstm.input)
def _lstm(x: torch.Tensor, hx: list[torch.Tensor], *rest: Any) -> tuple[torch.Tensor, ...]:
    return _recurrent(_lstm_cell, x, hx, *rest)


def _one_state(cell: Cell) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda x, hx, *rest: _recurrent(cell, x, [hx], *rest)


_composite(aten.gru.input)(_one_state(_gru_cell))
_composite(aten.rnn_tanh.input)(_one_state(_simple_cell(torch.tanh)))
_composite(aten.rnn_relu.input)(_one_state(_simple_cell(torch.relu)))
