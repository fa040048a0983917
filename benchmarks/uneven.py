"""A training step whose sizes the mesh does not divide, against the same step padded by hand, over two workers.

By hand is what one would write without the compiler's help: a row whose targets are all ignored, words that no token
names. Both sides train the same model on the same rows, and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

import monarch
from benchmarks.measure import Row, interleaved, table
from benchmarks.train_step import make_optimizer
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import data_parallel

SEQUENCE = 128
WORKERS = 2
TARGET = 1.1

Run = Callable[[int], float]


@contextmanager
def training(layout: str, head: str, rows: int, words: int, padded_rows: int) -> Iterator[Run]:
    """Steps that train on `rows` rows of 257 words, with a vocabulary of `words` and `padded_rows` more rows whose
    targets are ignored; `layout` is the batch's, `head` that of the words."""
    with Mesh(data=WORKERS) as mesh:
        torch.manual_seed(0)
        model = GPT(vocabulary=words, sequence=SEQUENCE, layers=2)
        layouts = data_parallel(model) | {"head.weight": head, "embedding.weight": head}
        model = monarch.module_to_mesh(model, mesh, layouts=layouts)
        optimizer = make_optimizer(model)

        @monarch.program
        def step(tokens, targets):  # type: ignore[no-untyped-def]
            tokens, targets = monarch.layout(tokens, layout), monarch.layout(targets, layout)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

        tokens, targets = torch.randint(0, 257, (2, rows, SEQUENCE))
        tokens = F.pad(tokens, (0, 0, 0, padded_rows))
        targets = F.pad(targets, (0, 0, 0, padded_rows), value=-100)

        def run(steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                loss = step(tokens, targets)
            loss.item()
            return (time.perf_counter() - start) / steps

        yield run


def row(name: str, layout: str, head: str, rows: int, words: int, more_rows: int, more_words: int, steps: int) -> Row:
    """One comparison: `rows` and `words` against so many more of them."""
    with (
        training(layout, head, rows, words, 0) as ours,
        training(layout, head, rows, words + more_words, more_rows) as by,
    ):
        mine, other = interleaved(lambda: ours(steps), lambda: by(steps), 10, warm=2)
    return Row(name, mine, other, "padded by hand", TARGET)


def rows() -> list[Row]:
    return [
        row("uneven: 15 rows, data=2", "[@data, -]", "[-, -]", 15, 256 + 1, 1, 0, 3),
        row("uneven: 10,007 words, sharded over 2 workers", "[-, -]", "[@data, -]", 2, 10_007, 0, 1, 5),
    ]


if __name__ == "__main__":
    print(table(rows()))
