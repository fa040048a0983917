"""Packed sequences as PyTorch has them: values, gradients and errors, in programs and in the eager door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh

X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
SORTED, UNSORTED = [3, 2, 2, 1], torch.tensor([1, 3, 1, 2])

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 5, num_layers=2, batch_first=True, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(8, 5, proj_size=3),
    "GRU": lambda: nn.GRU(8, 5, bidirectional=True, bias=False),
    "RNN": lambda: nn.RNN(8, 5, nonlinearity="relu"),
    "RNN, tanh": lambda: nn.RNN(8, 5),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with partitioned_mesh(data=2) as made:
        yield made


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, monarch.DistributedTensor) else value


def step(layer: nn.Module, x: torch.Tensor, lengths: Any, batch_first: bool) -> tuple[torch.Tensor, ...]:
    """The outputs, their lengths, the last states, and gradients of `x` and the parameters."""
    is_sorted = isinstance(lengths, list)
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=is_sorted)
    out, last = layer(packed)
    padded, found = rnn.pad_packed_sequence(out, batch_first, padding_value=-1.0, total_length=4)
    states = last if isinstance(last, tuple) else (last,)
    loss = padded.square().sum() + sum((state * (1 + n)).sum() for n, state in enumerate(states))
    gradients = torch.autograd.grad(loss, (x, *layer.parameters()))
    return (padded.detach(), found, *(state.detach() for state in states), *gradients)


@pytest.mark.sample(2)
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_over_packed_sequences_as_in_pytorch(name: str, lengths: Any, mesh: Mesh) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name]()
    x = X if getattr(layer, "batch_first", False) else X.transpose(0, 1).contiguous()
    first = layer.batch_first
    expected = step(layer, x.clone().requires_grad_(), lengths, first)
    ours = monarch.module_to_mesh(layer, mesh, layouts={"*": None})
    batch = monarch.distribute(x, mesh, ["data", None, None] if first else [None, "data", None]).requires_grad_()
    program = monarch.program(lambda x: step(ours, x, lengths, first))
    for found in (program(batch), *([step(ours, batch, lengths, first)] if lengths is UNSORTED else [])):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(one), other, atol=1e-5, rtol=1e-4)


def test_sequences_are_packed_and_unpacked(mesh: Mesh) -> None:
    def through(x: torch.Tensor) -> list[torch.Tensor]:
        packed = rnn.pack_sequence([x[0, :1], x[1], x[2, :2]], enforce_sorted=False)
        doubled = rnn.PackedSequence(packed.data * 2, packed.batch_sizes, packed.sorted_indices)
        rest = rnn.unpad_sequence(x, torch.tensor(SORTED), batch_first=True)
        return [*rnn.unpack_sequence(doubled), *rest]

    expected, batch = through(X), monarch.distribute(X, mesh, ["data", None, None])
    for found in (monarch.program(through)(batch), through(batch)):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(whole(one), other)


def test_lengths_are_arguments_as_numbers_and_refused_as_tensors(mesh: Mesh) -> None:
    def pack(x: torch.Tensor, lengths: Any) -> torch.Tensor:
        return rnn.pack_padded_sequence(x, lengths, batch_first=True).data

    program, batch = monarch.program(pack), monarch.distribute(X, mesh, ["data", None, None])
    for lengths in (SORTED, [3, 3, 1, 1], SORTED):
        assert torch.equal(program(batch, lengths).full_tensor(), pack(X, lengths))
    with pytest.raises(ProgramError, match=r"(?s)lengths of packed sequences.*step\(x, lengths.tolist\(\)\)"):
        program(batch, torch.tensor(SORTED))
    placed = monarch.distribute(torch.tensor(SORTED), mesh)
    assert torch.equal(whole(pack(batch, placed)), pack(X, torch.tensor(SORTED)))  # outside: waits for the lengths


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_is_read_as_an_argument_and_refused_by_layers(mesh: Mesh, kind: Any) -> None:
    layer = monarch.module_to_mesh(kind(8, 3, batch_first=True), mesh, layouts={"*": None})
    read = lambda packed: packed.data.sum(1) * packed.batch_sizes[0] + packed.sorted_indices.sum()  # noqa: E731
    ours, run = monarch.program(read, mesh=mesh), monarch.program(lambda packed: layer(packed)[0].data, mesh=mesh)
    for lengths in (UNSORTED, UNSORTED.flip(0), UNSORTED):
        packed = rnn.pack_padded_sequence(X, lengths, batch_first=True, enforce_sorted=False)
        torch.testing.assert_close(ours(packed).full_tensor(), read(packed))
        with pytest.raises(ProgramError, match=r"(?s)lengths of packed sequences.*step\(packed\)"):
            run(packed)


@pytest.mark.parametrize("lengths", [[1, 3, 2, 1], [3, 2, 2, 0], [3, 2, 2]], ids=["order", "empty", "number"])
def test_wrong_lengths_are_pytorchs_errors(lengths: list[int], mesh: Mesh) -> None:
    pack = lambda x: rnn.pack_padded_sequence(x, lengths, batch_first=True).data  # noqa: E731
    with pytest.raises(RuntimeError) as theirs:
        pack(X)
    with pytest.raises(RuntimeError) as ours:
        monarch.program(pack)(monarch.distribute(X, mesh))
    assert str(theirs.value) in str(ours.value)
