"""Random numbers that are drawn in the thread that reads: by seed and place, and from no generator of the program's."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from monarch.data import DataError, pack, stream
from monarch.stdlib.data.stream import Stream


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> torch.Tensor:
        return row + torch.nn.functional.dropout(torch.rand(2)) + torch.randint_like(torch.ones(2), 9)


class Iterated(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(6):
            yield row + torch.distributions.Gamma(1.0, 1.0).sample() + torch.empty(2).normal_()


_SOURCES: dict[str, Callable[[int | None], Any]] = {
    "map-style": lambda seed: stream(Rows(), None, batch=2, shuffle=seed, epochs=2),
    "iterable": lambda seed: stream(Iterated(), None, batch=2, shuffle=seed, epochs=2),
    "DataLoader": lambda seed: stream(DataLoader(Rows(), batch_size=2), None, shuffle=seed, epochs=2),
    "map": lambda seed: stream(torch.arange(6.0), None, batch=2, shuffle=seed, epochs=2, map=_noisy),
    "packed": lambda seed: stream(
        pack(
            [{"tokens": each} for each in "abc"], 2, tokenize=lambda texts: [torch.randperm(8).tolist() for _ in texts]
        ),
        None,
        batch=1,
        shuffle=seed,
        epochs=2,
        map=lambda row: row["tokens"],
    ),
}


def _noisy(values: torch.Tensor) -> torch.Tensor:
    return values + torch.rand(len(values))


@pytest.mark.parametrize("kind", _SOURCES)
@pytest.mark.parametrize("seed", [None, 7])
def test_they_are_those_of_the_seed_whatever_the_program_draws_meanwhile(kind: str, seed: int | None) -> None:
    def run(busy: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        with _SOURCES[kind](seed) as batches:
            found = []
            for batch in batches:
                found.append(batch)
                torch.rand(busy)
            return torch.stack(found), torch.get_rng_state()

    (quiet, after), (busy, _) = run(0), run(8)
    assert torch.equal(quiet, busy)
    assert not torch.equal(quiet[: len(quiet) // 2], quiet[len(quiet) // 2 :])  # another epoch has others
    torch.manual_seed(3)
    if seed is None:
        torch.randint(2**63 - 1, ())  # what the stream takes, in the program's thread
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("kind", _SOURCES)
def test_another_stream_goes_on_with_the_same_numbers(kind: str) -> None:
    with _SOURCES[kind](None) as batches:
        next(batches)
        state, expected = batches.state_dict(), next(batches)
    with _SOURCES[kind](None) as others:
        others.load_state_dict(state)
        assert torch.equal(next(others), expected)


@pytest.mark.parametrize("rows", [Rows(), Subset(Rows(), list(range(6)))], ids=["one by one", "__getitems__"])
def test_a_row_of_a_data_set_has_its_numbers_in_batches_of_any_size(rows: Dataset[torch.Tensor]) -> None:
    by_two, by_three = (torch.cat(list(stream(rows, None, batch=size, shuffle=1))) for size in (2, 3))
    assert torch.equal(by_two, by_three)


def _drawn(texts: Sequence[str]) -> list[list[int]]:
    return [torch.randint(99, (ord(text) - ord("a") + 1,)).tolist() for text in texts]


def test_a_text_is_tokenised_alike_in_batches_of_any_size_and_where_a_stream_goes_on() -> None:
    def read(batch: int) -> Stream:
        return stream(pack([{"tokens": text} for text in "cadbec"], 4, tokenize=_drawn), None, batch=batch, shuffle=1)

    whole = [torch.cat([each["tokens"] for each in read(batch)]) for batch in (1, 2, 3)]
    assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2])
    for taken in 1, 2, 3:
        with read(1) as first:
            for _ in range(taken):
                next(first)
            state = first.state_dict()
        with read(3) as others:
            others.load_state_dict(state)
            assert torch.equal(torch.cat([each["tokens"] for each in others]), whole[0][taken:])


def test_a_tokenizer_that_draws_nothing_gets_texts_together() -> None:
    calls: list[int] = []

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        calls.append(len(texts))
        return [[1, 2]] * len(texts)

    list(stream(pack([{"tokens": text} for text in "abcd"], 4, tokenize=tokenize), None, batch=4))
    assert calls == [4]


def test_workers_of_a_loader_draw_as_they_do_without_a_stream() -> None:
    loader = DataLoader(Rows(), batch_size=1, num_workers=2)
    found = torch.cat(list(stream(loader, None, shuffle=1))) % 1
    drawn = found[found != 0]  # without what dropout took
    assert len(drawn.unique()) == len(drawn) > 2  # two workers that had one state would draw each number twice


def test_an_op_that_takes_no_generator_is_refused() -> None:
    class Refused(Rows):
        def __getitem__(self, row: int) -> torch.Tensor:
            return torch.ops.aten.native_dropout(torch.ones(2), 0.5, True)[0]

    with pytest.raises(DataError, match=r"native_dropout\.default takes no generator(.|\n)*num_workers=1"):
        list(stream(Refused(), None, batch=2))
