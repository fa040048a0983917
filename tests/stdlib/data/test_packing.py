"""Documents in rows of one length: no token is lost, none comes twice, and a mask keeps documents apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyarrow
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from monarch.data import DataError, document_mask, pack, stream

documents = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


def whole(source: Any, **options: Any) -> dict[str, torch.Tensor]:
    batches = list(stream(source, None, batch=3, **options))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def numbered(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Documents whose tokens are all different."""
    starts = [1 + 100 * number for number in range(len(lengths))]
    return [{"tokens": list(range(start, start + length))} for start, length in zip(starts, lengths, strict=True)]


@given(documents, st.integers(1, 7), st.booleans(), st.sampled_from([None, 5]))
def test_each_token_comes_once_with_its_document_and_position(
    lengths: list[int], length: int, split: bool, seed: int | None
) -> None:
    found = whole(pack(numbered(lengths), length, split=split), shuffle=seed)
    tokens, filled = found["tokens"], found["documents"] > 0
    written = tokens[filled].tolist()
    expected = [token for document in numbered(lengths) for token in document["tokens"]]
    assert sorted(written) == sorted(expected)
    assert seed is not None or written == expected
    assert (tokens[~filled] == 0).all() and (found["targets"][~filled] == -100).all()
    assert torch.equal(found["positions"][filled], (tokens[filled] - 1) % 100)
    last = {document["tokens"][-1] for document in numbered(lengths) if document["tokens"]}
    for token, target in zip(written, found["targets"][filled].tolist(), strict=True):
        assert target == (-100 if token in last else token + 1)
    for row, ids in zip(tokens.tolist(), found["documents"].tolist(), strict=True):
        for (one, first), (other, second) in pairwise(zip(row, ids, strict=True)):
            assert second == 0 or second - first == (one // 100 != other // 100)
    if split:
        assert filled[:-1].all()


@given(documents, st.integers(1, 7), st.booleans())
def test_documents_that_fit_stay_whole_without_split(lengths: list[int], length: int, _: bool) -> None:
    found = whole(pack(numbered(lengths), length, split=False))
    rows: dict[int, set[int]] = {}
    for number, row in enumerate(found["tokens"].tolist()):
        for token in filter(None, row):
            rows.setdefault(token // 100, set()).add(number)
    for document, where in rows.items():
        assert lengths[document] > length or len(where) == 1


@given(documents, st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_packed_rows_go_on_in_the_middle_of_a_document(
    lengths: list[int], length: int, split: bool, taken: int
) -> None:
    source = pack(numbered(lengths), length, split=split)
    rows = whole(source, shuffle=3)["tokens"]
    first = stream(source, None, batch=2, shuffle=3)
    given = [batch["tokens"] for _, batch in zip(range(taken), first, strict=False)]
    state = first.state_dict()
    first.close()
    rest = stream(source, None, batch=5, shuffle=3)
    rest.load_state_dict(state)
    if state["epoch"] == 0:
        given += [batch["tokens"] for batch in rest]
    assert torch.equal(torch.cat(given), rows)


def test_the_mask_makes_packed_attention_that_of_each_document_alone() -> None:
    torch.manual_seed(0)
    found = whole(pack(numbered([3, 4, 2]), 10))
    q, k, v = torch.randn(3, 1, 1, 10, 8)
    mask = document_mask(found["documents"])
    together = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for start, stop in ((0, 3), (3, 7), (7, 9)):
        part = slice(start, stop)
        alone = F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True)
        torch.testing.assert_close(together[:, :, part], alone)
    assert not together.isnan().any()
    assert document_mask(found["documents"], causal=False)[0, 0, 0, 2]


def test_texts_are_tokenised() -> None:
    table = pyarrow.table({"text": ["ab", "", "cde"]})
    source = pack(table, 4, column="text", tokenize=lambda texts: [[ord(each) for each in text] for text in texts])
    assert bytes(whole(source)["tokens"].flatten().tolist()) == b"abcde\0\0\0"
    with pytest.raises(DataError, match="holds str, and documents are lists of ints"):
        whole(pack(table, 4, column="text"))
    with pytest.raises(DataError, match="no column 'tokens'"):
        whole(pack([{"ids": [1]}], 4))


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [[1], [2, 3, 4]]])
def test_a_list_of_lists_is_one_of_documents(rows: list[list[int]]) -> None:
    assert whole(pack(rows, 4))["tokens"].tolist() == [[1, 2, 3, 4]]
    with pytest.raises(DataError, match=r"dicts?: \{'(tokens|x)': row\}"):
        whole(pack(iter(rows), 4))


def test_a_list_that_contains_itself_is_no_tensor() -> None:
    rows: list[object] = []
    rows.append(rows)
    with pytest.raises(DataError, match="which are no tensors"):
        whole(rows)


@pytest.mark.parametrize("source", [lambda: iter([[1, 2], [3]]), lambda: ([1, 2], [3])], ids=["iterable", "sequence"])
def test_rows_that_are_lists_are_to_have_the_column_that_is_packed(source: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match=r"goes into a dict: \{'text': row\}"):
        list(stream(pack(source(), 4, column="text"), None, batch=2))
    assert list(stream(pack([{"text": row} for row in ([1, 2], [3])], 4, column="text"), None, batch=1))
