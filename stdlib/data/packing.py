"""Tokenised documents in rows of one length, with the number of the document that each token is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from monarch.stdlib.data.columns import Column, DataError, Ragged, kind, stacked
from monarch.stdlib.data.engines import as_source
from monarch.stdlib.data.order import Order
from monarch.stdlib.data.sources import TOKENS, Block, Cursor, Source

IGNORED = -100
"""The target of a token that has none: `cross_entropy` ignores it."""


class _Row:
    """A row that is being filled."""

    def __init__(self, length: int, pad: int) -> None:
        self.columns = {
            "tokens": torch.full((length,), pad, dtype=torch.int64),
            "targets": torch.full((length,), IGNORED, dtype=torch.int64),
            "documents": torch.zeros(length, dtype=torch.int64),
            "positions": torch.zeros(length, dtype=torch.int64),
        }
        self.length, self.used, self.document = length, 0, 0

    def add(self, tokens: torch.Tensor, start: int) -> int:
        """Fill up with a document from its token `start` on; how many were taken."""
        count = min(self.length - self.used, len(tokens) - start)
        place = slice(self.used, self.used + count)
        self.document += 1
        self.columns["tokens"][place] = tokens[start : start + count]
        followers = tokens[start + 1 : start + 1 + count]
        self.columns["targets"][self.used : self.used + len(followers)] = followers
        self.columns["documents"][place] = self.document
        self.columns["positions"][place] = torch.arange(start, start + count)
        self.used += count
        return count


class Packed(Source):
    """See `pack`."""

    def __init__(
        self, source: Source, length: int, column: str, pad: int, split: bool, tokenize: Callable[..., Any] | None
    ) -> None:
        self.name = f"the packed rows of {source.name}"
        self.repeats = source.repeats
        self.draws = source.draws or tokenize is not None
        self._source, self._length, self._column = source, length, column
        self._pad, self._split, self._tokenize = pad, split, tokenize
        self._drawing = False
        """Whether `tokenize` has drawn random numbers: it gets texts one by one then, each with its row's own."""

    @property
    def doing(self) -> str:
        return self._source.doing

    def read(self, order: Order, cursor: Cursor, size: int) -> Iterator[Block]:
        row, end, offset = _Row(self._length, self._pad), *cursor
        done: list[_Row] = []
        after: list[Cursor] = []

        def block() -> Block:
            names = done[0].columns
            columns: dict[Any, Column] = {name: torch.stack([each.columns[name] for each in done]) for name in names}
            cursors = tuple(after)
            done.clear()
            after.clear()
            return Block(columns, lambda rows: cursors[rows - 1])

        for read in self._source.read(order, (cursor[0], 0), size):
            first = read.after(1)[0] - 1
            with self._source.reading(f"the documents from row {first:,} on"):
                documents = self._documents(read, order, first)
            for here, tokens in enumerate(documents, first):
                whole = not self._split and len(tokens) - offset <= self._length
                if whole and row.used and len(tokens) - offset > self._length - row.used:
                    done.append(row)
                    after.append((here, offset))
                    row = _Row(self._length, self._pad)
                while offset < len(tokens):
                    offset += row.add(tokens, offset)
                    if row.used == self._length:
                        done.append(row)
                        after.append((here, offset) if offset < len(tokens) else (here + 1, 0))
                        row = _Row(self._length, self._pad)
                offset = 0
            end = first + len(documents)
            if done:
                yield block()
        if row.used:
            done.append(row)
            after.append((end, 0))
            yield block()

    def _documents(self, read: Block, order: Order, first: int) -> list[torch.Tensor]:
        columns = read.columns
        if self._column not in columns and list(columns) != [None]:
            raise DataError(
                f"there is no column {self._column!r}",
                hint=f"there are {', '.join(map(repr, columns))}: say which holds the documents: pack(…, column=…).",
            )
        column = columns[self._column if self._column in columns else None]
        if self._tokenize is not None:
            texts = column if isinstance(column, list) else [column[row] for row in range(len(column))]
            column = stacked(self._column, self._tokenized(self._tokenize, texts, order, first))
        if isinstance(column, torch.Tensor) and column.ndim == 2:
            column = Ragged.of(list(column))
        if not isinstance(column, Ragged) or column.values.is_floating_point():
            raise DataError(
                f"column {self._column!r} of {self._source.name} holds {kind(column)}, and documents are lists of ints",
                hint="say how to make tokens of them: pack(…, tokenize=lambda texts: tokenizer(texts)['input_ids']).",
            )
        return [column[row] for row in range(len(column))]

    def _tokenized(self, tokenize: Callable[..., Any], texts: list[Any], order: Order, first: int) -> list[Any]:
        with order.draws(TOKENS, first) as draws:
            if not self._drawing:
                found = list(tokenize(texts))
                self._drawing = draws.drawn
            if self._drawing:
                found = []
                for row, text in enumerate(texts, first):
                    draws.at(TOKENS, row)
                    found += tokenize([text])
        return found


def pack(
    source: Any,
    length: int,
    *,
    column: str = "tokens",
    pad: int = 0,
    split: bool = True,
    tokenize: Callable[[Sequence[Any]], Sequence[Sequence[int]]] | None = None,
) -> Source:
    """A source of rows of `length` tokens, filled with the documents of another source, one behind the other:

        stream(monarch.data.pack("train/*.parquet", 2048, column="tokens"), mesh, "[@data]", batch=16, shuffle=7)

    Its rows have four columns, all i64[length]: `tokens`; `targets`, the token that follows in the same document, and
    -100 where none does; `documents`, the number of the token's document in the row, from 1, and 0 for padding;
    `positions`, the token's place in its document. With `split` documents go on in the next row; without it a document
    that does not fit begins a new row, unless it is longer than a row. What is left of a row gets `pad`.

    `tokenize` makes lists of tokens of a list of what the column holds. A stream's seed orders the documents.
    `monarch.data.document_mask` makes an attention mask of `documents`. Rows fill up at the end of an epoch.
    DataError for a `length` below 1.
    """
    if length < 1:
        raise DataError(f"rows of {length} tokens", hint="give a length from 1.")
    if type(source) is list and source and all(isinstance(row, list) for row in source):
        source = [{column: row} for row in source]  # a list is a document here, and elsewhere a row of several columns
    return Packed(as_source(source, [column]), length, column, pad, split, tokenize)


def document_mask(documents: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Which tokens attend to which, bool[rows, 1, length, length], of the documents' numbers i64[rows, length]: those
    of the same document, and with `causal` only those before and the token itself."""
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        length = documents.shape[-1]
        mask = mask & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return mask
