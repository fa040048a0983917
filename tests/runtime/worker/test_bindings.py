"""Each op that is called by a shorter way gives what `torch.ops` gives: values, types, strides and aliasing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch.compiler.ops.record import recorded
from monarch.compiler.plan import PlanError
from monarch.runtime.worker.bindings import DIRECT, resolve, resolve_into

X = torch.randn(3, 4).abs() + 0.5
Y = torch.randn(3, 4)
SQUARE, BATCH = torch.randn(4, 4), torch.randn(2, 3, 3)
MASK = Y > 0

ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "addmm.default": [(torch.randn(4), X, SQUARE)],
    "bmm.default": [(BATCH, BATCH)],
    "cat.default": [([X, Y],), ([X, Y], 1), ([X, Y], -1)],
    "embedding.default": [(X, torch.tensor([[0, 2]])), (X, torch.tensor([1]), -1, False, False)],
    "expand.default": [(X.unsqueeze(0), [5, 3, 4]), (X.unsqueeze(0), (5, -1, -1))],
    "logical_and.default": [(MASK, ~MASK)],
    "mm.default": [(X, SQUARE), (X, SQUARE.t())],
    "permute.default": [(BATCH, [2, 0, 1]), (BATCH, (1, 0, 2))],
    "pow.Tensor_Scalar": [(X, 2), (X, 0.5)],
    "select.int": [(X, 0, 1), (X, -1, 2)],
    "squeeze.dim": [(X.unsqueeze(1), 1), (X, 0)],
    "t.default": [(X,)],
    "transpose.int": [(BATCH, 0, 1), (BATCH, -1, -2)],
    "unsqueeze.default": [(X, 0), (X, -1)],
    "view.default": [(X, [2, 6]), (X, (-1,)), (X, [])][:2],
    "where.self": [(MASK, X, Y), (MASK, X, torch.tensor(0.0))],
    "addcmul_.default": [(X, Y, Y)],
    "addcdiv_.default": [(X, Y, X)],
    "copy_.default": [(X, Y), (X, torch.ones(4, dtype=torch.int64))],
}
SCALAR = [(X, 2), (X, 0.5), (X.long(), 2)]
BINARY = [(X, Y), (X, torch.tensor(2.0)), (X.long(), Y), (X.long(), torch.tensor(3)), (X, 2), (X, 1.5), (X.long(), 2.5)]


def arguments(name: str) -> list[tuple[Any, ...]]:
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    if name in ("add_.Tensor", "mul_.Tensor"):
        return [(X, Y), (X, 2), (X, 0.5)]
    if name in ("maximum.default", "minimum.default", *(f"{op}.Tensor" for op in "eq ge gt le lt ne".split())):
        return BINARY[:4]
    if name.endswith(".Scalar"):
        return SCALAR
    return BINARY if name.endswith(".Tensor") else [(X,), (X.t(),)]


def fresh(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_strided(value.size(), value.stride()).clone(memory_format=torch.preserve_format)
    return [fresh(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("op", DIRECT)
def test_the_same_as_torch_ops(op: str) -> None:
    full = resolve(op, direct=False)
    for given in arguments(op.removeprefix("aten.")):
        given_too = fresh(list(given))
        given = fresh(list(given))
        with torch.inference_mode():
            got, want = DIRECT[op](*given), full(*given_too)
        assert torch.equal(got, want) and got.dtype == want.dtype and got.stride() == want.stride()
        first, first_too = (value[0] if isinstance(value, list) else value for value in (given[0], given_too[0]))
        assert (got.data_ptr() == first.data_ptr()) == (want.data_ptr() == first_too.data_ptr())


def test_keyword_arguments_of_the_schema_are_taken() -> None:
    assert torch.equal(resolve("aten.add.Tensor")(X, Y, alpha=2), X + 2 * Y)
    assert torch.equal(resolve("aten.clone.default")(X.t(), memory_format=torch.contiguous_format), X.t())
    got = resolve("aten.addmm.default")(X[:, :1], X, SQUARE, beta=2, alpha=3)
    assert torch.equal(got, torch.ops.aten.addmm.default(X[:, :1], X, SQUARE, beta=2, alpha=3))


def test_what_is_no_op_is_refused() -> None:
    for name in ("aten", "aten.mm", "aten.mm.default.x", "torch.load.x", "aten.mm.overloads", "", "a b.c.d"):
        with pytest.raises(PlanError):
            resolve(name)


INTO: dict[str, list[tuple[Any, ...]]] = {
    "baddbmm.default": [(BATCH, BATCH, BATCH)],
    "gelu.default": [(X,), (X,)],
    "matmul.default": [(BATCH, BATCH)],
    "gelu_backward.default": [(X, Y)],
    "silu_backward.default": [(X, Y)],
    "sum.dim_IntList": [(X, [0]), (X, [0, 1], True), (MASK, [1])],
    "mean.dim": [(X, [0]), (X, [-1], True)],
}


@pytest.mark.parametrize("op", recorded("out"))
def test_what_is_written_into_given_memory(op: str) -> None:
    """It has the bits that the op gives, and is the memory that was given, as it lay."""
    name = op.removeprefix("aten.")
    write, argument = resolve_into(op)
    for given in INTO.get(name) or arguments(name):
        expected = resolve(op, direct=False)(*given)
        into = torch.full(expected.shape, 7, dtype=expected.dtype)
        address = into.data_ptr()
        result = write(*given, **{argument: into})
        assert result is into and into.data_ptr() == address and into.is_contiguous()
        assert torch.equal(result, expected)
