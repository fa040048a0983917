"""A training step of named sizes against the one that is compiled for its sizes, over two workers; and steps of a new
length each against compiling each.

Both sides train the same model on the same rows, and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import torch.nn.functional as F

import monarch
from benchmarks.measure import Row, interleaved, table
from benchmarks.train_step import make_optimizer
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.parallel import data_parallel

ROWS, SEQUENCE, WORDS = 16, 128, 257
WORKERS = 2
TARGET = 1.05

Named = Annotated[torch.Tensor, "i64[b@data, t]"]

Run = Callable[[list[int]], float]


@contextmanager
def training(named: bool, make: Callable[[], torch.nn.Module]) -> Iterator[Run]:
    """A model's steps on rows of these lengths, with names for the sizes or without: seconds a step."""
    with Mesh(data=WORKERS) as mesh:
        torch.manual_seed(0)
        model = make()
        model = monarch.module_to_mesh(model, mesh, layouts=data_parallel(model))
        optimizer = make_optimizer(model)

        def train(tokens, targets):  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

        @monarch.program
        def of_names(tokens: Named, targets: Named):  # type: ignore[no-untyped-def]
            return train(tokens, targets)

        @monarch.program
        def of_numbers(tokens, targets):  # type: ignore[no-untyped-def]
            return train(monarch.layout(tokens, "[@data, -]"), monarch.layout(targets, "[@data, -]"))

        step = of_names if named else of_numbers

        def run(lengths: list[int]) -> float:
            batches = [torch.randint(0, WORDS, (2, ROWS, length)) for length in lengths]
            start = time.perf_counter()
            for tokens, targets in batches:
                loss = step(tokens, targets)
            loss.item()
            return (time.perf_counter() - start) / len(lengths)

        yield run


def gpt() -> torch.nn.Module:
    return GPT(vocabulary=WORDS, sequence=2 * SEQUENCE, layers=2)


def llama() -> torch.nn.Module:
    return Llama(vocabulary=WORDS, layers=2)


def rows() -> list[Row]:
    same = [SEQUENCE] * 3
    with training(True, llama) as ours, training(False, llama) as by:
        mine, other = interleaved(lambda: ours(same), lambda: by(same), 10, warm=3)
        found = [Row("named sizes: a Llama's step of known lengths", mine, other, "compiled for them", TARGET)]
    with training(True, gpt) as ours, training(False, gpt) as by:
        mine, other = interleaved(lambda: ours(same), lambda: by(same), 10, warm=3)
        found.append(Row("named sizes: a step of known lengths", mine, other, "compiled for them", TARGET))
        first, second = (iter(range(SEQUENCE // 2, SEQUENCE)) for _ in range(2))
        mine, other = interleaved(lambda: ours([next(first)]), lambda: by([next(second)]), 4, warm=1)
        found.append(Row("named sizes: a step of a new length", mine, other, "compiled for it"))
    return found


if __name__ == "__main__":
    print(table(rows()))
