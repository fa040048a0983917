"""Models that count the rows they are given, or flatten them: the numbers of the batch, or an error at the line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from monarch.language.errors import OperatorError
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh


class Mixing(nn.Module):
    """Two layers, with a function of what is between them."""

    def __init__(self, between: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = between
        self.seen: list[Any] = []

    def forward(self, x: Any) -> Any:
        h = self.between(self.first(x))
        self.seen.append(h)
        y = self.second(self.seen.pop())
        self.kept = y.shape
        return y


def trained(
    mesh: Mesh,
    between: Callable[[Any], Any],
    rows: int = 8,
    microbatches: int = 4,
    loss_fn: Callable[[Any, Any], Any] = F.mse_loss,
    **options: Any,
) -> None:
    """Compare a step with that of the model without a pipeline."""
    model = Mixing(between)
    dense = copy.deepcopy(model)
    pipe = pipeline(model, mesh, microbatches=microbatches, split_at=["second"], layouts={}, **options)

    @monarch.program
    def step(x: Any) -> Any:
        return pipe.step(x, target=x, loss_fn=loss_fn)

    x = torch.randn(rows, 6)
    loss = step(x)
    wanted = loss_fn(dense(x), x)
    wanted.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted.detach())
    for ours, theirs in zip(pipe.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with partitioned_mesh(pipe=2) as mesh:
        yield mesh


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("between", "match"),
    [
        (lambda h: h - h.sum(0) / len(h), "div takes 2 for the 2 rows of a microbatch, and 8 for the 8 of the batch"),
        (lambda h: h * torch.tensor(h.shape[0]), "tensor takes 2"),
        (lambda h: h + torch.full((6,), float(len(h))), "full takes 2.0"),
        (lambda h: torch.cat([h[: len(h) // 2] * 2, h[len(h) // 2 :]]), "__getitem__ takes 1"),
        (lambda h: h * 2 if len(h) > 5 else h, "calls mul for the 8 rows"),
        (lambda h: h.view(2, -1).sum(0).view(-1, 6).mean(0) + h, r"view gives \[2, 24\] .* and \[2, 6\]"),
        (lambda h: torch.cat([h, h * 2]).view(2, -1, 6).sum(0), r"view gives \[2, 8, 6\] .* and \[2, 2, 6\]"),
        (lambda h: torch.stack([row * (at + 1) for at, row in enumerate(h)]), "unbind gives 8 tensors"),
        (lambda h: monarch.cond(h.sum() > 0, lambda: h * 2, lambda: h), "whether true_fn of cond mixes"),
    ],
)
def test_a_number_of_rows_is_an_error_at_its_line(mesh: Mesh, between: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(ProgramError, match=match) as raised:
        trained(mesh, between)
    assert raised.value.source is not None
    assert raised.value.source.file.endswith("test_counting.py")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.view(len(h), 2, 3).flatten(1) * torch.ones(len(h), 1),
        lambda h: h.reshape(h.numel()).view(-1, 6),
        lambda h: torch.cat([part * (at + 1) for at, part in enumerate(h.chunk(2))]),
        lambda h: (h[:, None] - h[None]).square().sum(-1).mean(1, keepdim=True) + h,
    ],
)
def test_a_number_of_rows_as_a_size_is_right(mesh: Mesh, between: Callable[[Any], Any]) -> None:
    trained(mesh, between)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (11, 3)])
@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.reshape(-1, 3).cumsum(0).view(-1, 6),
        lambda h: F.batch_norm(h.reshape(-1, 3), None, None, training=True).view(h.shape),
    ],
)
def test_rows_that_are_flattened_with_other_dims_are_merged_as_rows(
    mesh: Mesh, between: Callable[[Any], Any], rows: int, microbatches: int
) -> None:
    trained(mesh, between, rows, microbatches)


def compiled(h: Any) -> Any:
    """What `transformers` does: a branch on values, which it leaves out where it is compiled."""
    return h if torch.compiler.is_compiling() or h.sum() > 0 else -h


def numbers(h: Any) -> Any:
    return torch.arange(len(h))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (11, 3)])
@pytest.mark.parametrize(
    "between",
    [
        lambda h: compiled(h)[numbers(h)[:, None, None], torch.arange(6)[None, None, :]].sum(1),
        lambda h: h[numbers(h), h.detach().argmax(1)][:, None] * h,
        lambda h: h.view(-1, 2, 3)[numbers(h), :, h.detach().argmax(1) % 3].repeat(1, 3),
        lambda h: h.t()[:, numbers(h)].t() * h,
        lambda h: masked(h, torch.arange(6)[None].expand(len(h), -1)) * h,
        lambda h: masked(h, torch.arange(6).repeat(len(h), 1)) * h,
        lambda h: ((torch.ones(len(h), 1) * torch.arange(6)).view(-1) * h.view(-1)).view(-1, 6),
    ],
)
def test_rows_that_are_taken_by_their_numbers_are_those_of_the_batch(
    mesh: Mesh, between: Callable[[Any], Any], rows: int, microbatches: int
) -> None:
    trained(mesh, between, rows, microbatches)


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h.view(-1, 2, 6).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1) + h,
        lambda h: h.view(-1, 12).softmax(1).view(-1, 6) + h,
    ],
)
def test_rows_that_a_view_takes_together_are_those_of_the_batch(mesh: Mesh, between: Callable[[Any], Any]) -> None:
    trained(mesh, between, 8, 2)


def masked(h: Any, documents: Any) -> Any:
    """What `transformers` does without a mask: rows by their numbers, of documents that are for all rows the same."""
    batch, at = numbers(h)[:, None, None], torch.arange(6)
    ids = documents.diff(prepend=documents[:, :1], dim=-1).ne(1).cumsum(-1)
    allowed = ids[batch, at[None, :, None]] == ids[batch, at[None, None, :]]
    return (h[:, None] * allowed).sum(-1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("between", "match"),
    [
        (lambda h: masked(h, torch.ones(len(h), 6).cumsum(0)), "takes the rows of a batch with a count"),
        (lambda h: masked(h, numbers(h)[:, None].expand(-1, 6)), "takes the rows of a batch with a count"),
        (lambda h: masked(h, torch.arange(12).view(-1, 6).repeat(len(h) // 2, 1)), "__getitem__ takes|with a count"),
        (lambda h: ((numbers(h)[:, None] * torch.arange(6)).view(-1) * h.view(-1)).view(-1, 6), "with a count"),
        (lambda h: h * h[torch.arange(2)].sum(), r"__getitem__ gives \[2, 6\]"),
        (lambda h: h[numbers(h), torch.arange(len(h))][:, None] * h, "takes the rows of a batch with a count"),
        (lambda h: h[torch.arange(min(len(h), 5))].sum(1).mean() * h, "takes the rows of a batch with a count"),
        (lambda h: torch.vmap(lambda one, at: one[at], (1, None), 1)(h, numbers(h)), "with a count"),
        (lambda h: h[torch.arange(2 * len(h)) // 2].unflatten(0, (-1, 2)).sum(1), "__getitem__ takes the rows"),
        (lambda h: h[torch.ones(len(h), 3).nonzero()[:, 0]].view(-1, 3, 6).mean(1), "__getitem__ takes the rows"),
    ],
)
def test_numbers_that_may_not_be_those_of_the_rows_are_an_error(
    mesh: Mesh, between: Callable[[Any], Any], match: str
) -> None:
    with pytest.raises(ProgramError, match=match):
        trained(mesh, between)


def with_data(h: Any) -> Any:
    if h.is_meta:
        raise RuntimeError("no data")
    return h


def on_a_mesh(h: Any) -> Any:
    return h.mesh and h


@pytest.mark.parametrize(
    ("between", "match"),
    [
        (lambda h: h * torch.ones(len(h)).sum(), "sum gives one value for the 2 rows .* another for the 8"),
        (lambda h: h + torch.arange(6.0).expand_as(h).T.T.amax(1).sum(), "sum gives one value"),
        (lambda h: h + (h.mean(0) * torch.ones_like(h)).sum(0), "sum gives one value"),
        (lambda h: h * torch.ones(len(h)).cumsum(0)[:, None], "mul takes the rows of a batch with a count"),
        (lambda h: (h[:, None] * torch.ones(len(h), 1)).sum(1), r"mul gives \[2, 2, 6\] .* and \[8, 8, 6\]"),
        (lambda h: with_data(h) * len(h), "mul takes 2 for the 2 rows of a microbatch, and 8"),
    ],
)
def test_what_follows_from_so_many_rows_and_from_none_is_an_error(
    mesh: Mesh, between: Callable[[Any], Any], match: str
) -> None:
    with pytest.raises(ProgramError, match=match) as raised:
        trained(mesh, between)
    assert raised.value.source is not None


def filled(h: Any) -> Any:
    b = torch.empty(len(h), 6)
    b[:, 0], b[:, 1:] = 1.0, 2.0
    c = torch.zeros(len(h), 6)
    c[:] = h
    return b * h + c


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h * torch.ones(len(h)).mean() + torch.zeros(len(h), 6)[0] + torch.ones(len(h), 3).sum(1, True),
        lambda h: with_data(h) * torch.ones(len(h), 6).softmax(1) + torch.arange(6.0).expand_as(h)[0],
        lambda h: filled(h)[numbers(h)],
    ],
)
@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (11, 3)])
def test_what_is_the_same_for_so_many_rows_is_right(
    mesh: Mesh, between: Callable[[Any], Any], rows: int, microbatches: int
) -> None:
    trained(mesh, between, rows, microbatches)


def test_a_model_that_does_not_run_apart_from_its_mesh_warns_at_its_line(mesh: Mesh) -> None:
    pipe = pipeline(Mixing(lambda h: on_a_mesh(h) * 2), mesh, microbatches=2, split_at=["second"], layouts={})

    @monarch.program
    def step(x: Any) -> Any:
        return pipe.step(x, target=x, loss_fn=F.mse_loss)

    with pytest.warns(UserWarning, match=r"with its number of rows: AttributeError: (.|\n)*mixes_rows=True") as found:
        step(torch.randn(8, 6))
    line = on_a_mesh.__code__.co_firstlineno + 1
    assert [(each.filename, each.lineno) for each in found if "could not check" in str(each.message)] == [
        (__file__, line)
    ]


@pytest.mark.parametrize("between", [lambda h: h.topk(3, 0).values, lambda h: (h @ h.T).softmax(-1) @ h])
def test_what_fails_for_the_rows_of_a_microbatch_names_them(mesh: Mesh, between: Callable[[Any], Any]) -> None:
    with pytest.raises(OperatorError, match="for the 2 rows of a microbatch, of 8 of the batch"):
        trained(mesh, between)


def test_what_takes_one_mesh_says_what_to_call_for_stages(mesh: Mesh) -> None:
    pipe = pipeline(GPT(vocabulary=11, width=8, layers=2, heads=2, sequence=8), mesh, microbatches=2, layouts={})
    with pytest.raises(ProgramError, match=r"several meshes(.|\n)*module_to_mesh(.|\n)*monarch.sync"):
        monarch.generate(pipe.model, [[1, 2]], max_new_tokens=2)

    @monarch.program
    def step(x: Any) -> Any:
        loss = pipe.step(x, target=x, loss_fn=lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()))
        nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
        return loss

    with pytest.raises(ProgramError, match=r"pipe.clip_grad_norm_"):
        step(torch.ones(4, 3, dtype=torch.int64))


def test_with_mixes_rows_each_microbatch_counts_its_own(mesh: Mesh) -> None:
    trained(mesh, lambda h: monarch.scan(lambda c, k: (c * k, k), h, torch.ones(2))[0] * 1.0, mixes_rows=True)


LABELS = torch.arange(8)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, x: F.mse_loss(y, x) if len(y) > 5 else F.l1_loss(y, x),
        lambda y, x: (y - x).square().mean(1).topk(3).values.mean(),
        lambda y, x: F.cross_entropy(y @ x.T, LABELS),
        lambda y, x: F.cross_entropy(y, x.argmax(1)) + (y.abs() if len(y) > 5 else y.square()).mean(),
        lambda y, x: F.mse_loss(y, x) * (1.0 if len(y) > 5 else 2.0),
        lambda y, x: (y - x).square().sum() / len(y),
    ],
)
def test_a_loss_of_so_many_rows_alone_is_that_of_the_batch(mesh: Mesh, loss_fn: Callable[[Any, Any], Any]) -> None:
    trained(mesh, torch.tanh, loss_fn=loss_fn)


def test_a_loss_that_fails_for_the_batch_says_so(mesh: Mesh) -> None:
    with pytest.raises(OperatorError, match="out of range"):
        trained(mesh, torch.tanh, loss_fn=lambda y, x: y.topk(9, 0).values.mean())
