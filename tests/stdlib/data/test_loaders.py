"""DataLoaders and their samplers, pandas, Hugging Face; what a stream is asked for, and what `map` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import monarch
from monarch.data import DataError, stream
from tests.later import Later

datasets, pandas, pictures = Later("datasets"), Later("pandas"), Later("PIL.Image")

# -- DataLoader --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_is_taken_as_it_is(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(20), torch.arange(20) * 2), batch_size=6, num_workers=workers)
    with stream(loader, None) as batches:
        assert len(batches) == 4
        for mine, theirs in zip(batches, loader, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_a_shuffling_data_loader_goes_on_where_it_was_if_it_has_a_seed() -> None:
    def made(**options: Any) -> Any:
        loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=8, shuffle=True)
        return stream(loader, None, epochs=2, **options)

    whole = [batch[0].tolist() for batch in made(shuffle=3)]
    assert sorted(sum(whole[:7], [])) == list(range(50)) and whole[:7] != whole[7:]
    first = made(shuffle=3)
    for _ in range(9):
        next(first)
    again = made(shuffle=3)
    again.load_state_dict(first.state_dict())
    first.close()
    assert [batch[0].tolist() for batch in again] == whole[9:]
    other = made()
    next(other)
    state = other.state_dict()
    other.close()
    with pytest.raises(DataError, match="shuffles without a seed"):
        made().load_state_dict(state)


class _Sampler(Sampler[int]):
    """As those of torchdata: it is no RandomSampler, and draws from its generator."""

    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(50, generator=self.generator).tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 50, 50)},
        {"sampler": _Sampler()},
        {"batch_sampler": BatchSampler(RandomSampler(range(50)), 5, drop_last=False)},
    ],
    ids=["weighted", "other", "batches"],
)
def test_whatever_sampler_draws_goes_on_where_it_was_or_says_that_it_needs_a_seed(options: dict[str, Any]) -> None:
    def made(seed: int | None) -> Any:
        return stream(DataLoader(TensorDataset(torch.arange(50)), **options), None, epochs=2, shuffle=seed)

    whole = [batch[0].tolist() for batch in made(3)]
    with made(3) as first:
        for _ in range(7):
            next(first)
        state = first.state_dict()
    again = made(3)
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in again] == whole[7:]
    with made(None) as other:
        next(other)
        state = other.state_dict()
    with pytest.raises(DataError, match="shuffles without a seed"):
        made(None).load_state_dict(state)


def test_a_loader_draws_nothing_while_the_program_does() -> None:
    """Its thread would take numbers of PyTorch's generator that the program draws: runs of one seed would differ."""

    def run() -> tuple[list[list[int]], float]:
        torch.manual_seed(5)
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=20, shuffle=True)
        with stream(loader, None, epochs=3, ahead=3) as batches:
            after = torch.get_rng_state()
            found = [batch[0].tolist() for batch in batches]
            assert torch.equal(torch.get_rng_state(), after)
        return found, float(torch.rand(()))

    first = run()
    assert run() == first and first[0][0] != first[0][1]


def test_a_loader_gives_what_its_rows_are() -> None:
    rows = [(torch.ones(2), "a name"), (torch.ones(2), "another")]
    assert [len(batch) for batch in stream(DataLoader(rows, batch_size=2), None, columns=[0])] == [1]
    with pytest.raises(DataError, match="column 1 holds str values"):
        next(stream(DataLoader(rows, batch_size=2), None))
    assert [batch.item() for batch in stream(DataLoader(torch.arange(2), batch_size=None), None)] == [0, 1]


def test_the_loader_says_the_batch() -> None:
    with pytest.raises(DataError, match="the DataLoader makes the batches"):
        stream(DataLoader(TensorDataset(torch.arange(4))), None, batch=2)
    with pytest.raises(DataError, match="batches of how many rows"):
        stream(np.arange(4), None)


# -- pandas and Hugging Face -------------------------------------------------------------------------------------------


def test_pandas_gives_rows_by_place() -> None:
    frame = pandas.DataFrame({"a": [1, 2, 3, 4], "b": list("wxyz")})[1:]
    assert [batch["a"].tolist() for batch in stream(frame, None, batch=2, columns=["a"])] == [[2, 3], [4]]
    assert [batch.tolist() for batch in stream(pandas.Series([5, 6, 7])[[2, 0]], None, batch=2)] == [[7, 5]]


def test_a_hugging_face_data_set_gives_rows_as_its_features_and_format_say() -> None:
    features = datasets.Features({"pixels": datasets.Array2D((2, 2), "int32"), "picture": datasets.Image()})
    picture = pictures.new("L", (3, 2), color=7)
    data = datasets.Dataset.from_dict({"pixels": [[[1, 2], [3, 4]]] * 3, "picture": [picture] * 3}, features=features)
    (batch,) = stream(data, None, batch=3, columns=["pixels"])
    assert batch["pixels"].tolist() == [[[1, 2], [3, 4]]] * 3
    decoded = stream(data, None, batch=3, map=lambda batch: [np.asarray(each) for each in batch["picture"]])
    assert [tuple(rows.shape) for (rows, *_) in decoded] == [(2, 3)]
    (batch,) = stream(data.with_format("torch", columns=["pixels"]), None, batch=3)
    assert list(batch) == ["pixels"]
    with pytest.raises(DataError, match="a DatasetDict of 'train' is no source") as raised:
        stream(datasets.DatasetDict(train=data), None, batch=1)
    assert "data['train']" in (raised.value.hint or "")


# -- what is asked for, and what `map` gives ---------------------------------------------------------------------------


def test_columns_of_rows_without_names() -> None:
    pair = torch.arange(4), torch.arange(4) * 2
    assert [rows.tolist() for (rows,) in stream(pair, None, batch=4, columns=[1])] == [[0, 2, 4, 6]]
    with pytest.raises(DataError, match="single values, without columns"):
        next(stream(pair[0], None, batch=2, columns=["x"]))
    packed = monarch.data.pack(torch.arange(6).view(2, 3), 4)
    assert [list(batch) for batch in stream(packed, None, batch=2, columns=["tokens"])] == [["tokens"]]
    with pytest.raises(DataError, match="there is no column 'tokens'"):
        next(stream(monarch.data.pack([(1, 2)], 4), None, batch=2))


@pytest.mark.parametrize(
    "given", [{"shuffle": True}, {"shuffle": "x"}, {"columns": "x"}, {"batch": 2.0}, {"batch": True}]
)
def test_options_of_another_type_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(given))):
        stream({"x": np.arange(4)}, None, **{"batch": 2, **given})


def test_map_gives_arrays_and_lists_too_and_what_is_none_is_said() -> None:
    def through(function: Callable[[Any], Any]) -> Any:
        return next(stream(torch.arange(4), None, batch=4, map=function))

    assert through(lambda rows: {"x": rows.numpy() * 2})["x"].tolist() == [0, 2, 4, 6]
    assert through(lambda rows: {"x": rows.tolist()})["x"].tolist() == [0, 1, 2, 3]
    assert through(lambda rows: {"x": rows.sum()})["x"].item() == 6
    for given, what in ((None, "it gives NoneType"), ({}, "no columns"), ({"x": 3}, "it gives int")):
        with pytest.raises(DataError, match=what):
            through(lambda rows, given=given: given)


def test_the_advice_for_rows_of_different_lengths_works() -> None:
    for rows in ([np.zeros(2), np.zeros(3)], [(1, [1, 2]), (1, [3])], [{"a": [1, 2]}, {"a": [3]}]):
        with pytest.raises(DataError, match="elements, and a tensor's rows") as raised:
            next(stream(rows, None, batch=2))
        advice = (raised.value.hint or "").partition("map=")[2].removesuffix(".")
        batch = next(stream(rows, None, batch=2, map=eval(advice, {"length": 4})))
        assert batch["a"].shape == (2, 4) if isinstance(batch, dict) else batch[-1].shape[-1] == 4


def test_a_file_of_another_format_says_how_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(DataError, match="cannot open the Parquet file") as raised:
        stream(path, None, batch=2)
    source = (raised.value.hint or "").partition("stream(")[2].rpartition(", mesh")[0]
    assert next(stream(eval(source, {"monarch": monarch}), None, batch=2))["b"].tolist() == [2, 4]
