"""Attention over sequences that are sharded over a mesh dim, against dense attention in plain PyTorch."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import LayoutError, ProgramError
from monarch.stdlib.context import METHODS, all_to_all_attention, context_parallel, ring_attention
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.parallel import tensor_parallel
from tests.language.partitioned import partitioned_mesh

BATCH, HEADS, TIME, WIDTH = 2, 4, 16, 8


def inputs(groups: int = HEADS) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = [HEADS, groups, groups, HEADS]
    return [torch.randn(BATCH, heads, TIME, WIDTH, generator=g, dtype=torch.float64) for heads in sizes]


def ids() -> torch.Tensor:
    """Documents of several lengths: within one worker, over several, and one that another interrupts."""
    return torch.tensor([[0] * 3 + [1] * 6 + [2] + [3] * 6, [7] * 9 + [4] * 2 + [7] * 5])


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, documents: torch.Tensor | None
) -> torch.Tensor:
    mask = torch.ones(TIME, TIME, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def on(
    mesh: Mesh, method: str, *given: torch.Tensor, documents: torch.Tensor | None = None, causal: bool = True
) -> list[torch.Tensor]:
    """Attention of q, k, v over the mesh, and its gradients where the result is weighted by the fourth."""

    @monarch.program(mesh=mesh)
    def step(q: Any, k: Any, v: Any, weight: Any, *documents: Any) -> Any:
        q, k, v = (monarch.layout(x, "[-, -, @context, -]").detach().requires_grad_() for x in (q, k, v))
        ids = documents[0] if documents else None
        y = METHODS[method](q, k, v, "context", is_causal=causal, documents=ids)
        return y, *torch.autograd.grad((y * weight).sum(), [q, k, v])

    return [each.full_tensor() for each in step(*given, *([] if documents is None else [documents]))]


@pytest.mark.sample(8)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_and_its_gradients_are_those_of_dense_attention(
    method: str, packed: bool, causal: bool, groups: int
) -> None:
    q, k, v, weight = inputs(groups)
    documents = ids() if packed else None
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(*plain, causal, documents)
    gradients = torch.autograd.grad((expected * weight).sum(), plain)

    with partitioned_mesh(context=4) as mesh:
        found = on(mesh, method, q, k, v, weight, documents=documents, causal=causal)
    for got, wanted in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-10, atol=1e-10)


def test_scores_beyond_what_exponentials_hold_give_no_nan() -> None:
    """A block that a worker does not see may have scores far above those that it sees."""
    q, k, v, weight = inputs()
    q[:, :, :4], k[:, :, 4:] = 100.0, 100.0
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense(*plain, True, None)
    gradients = torch.autograd.grad((expected * weight).sum(), plain)
    with partitioned_mesh(context=4) as mesh:
        found = on(mesh, "ring", q, k, v, weight)
    for got, wanted in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(got, wanted.detach())


def test_the_ring_sends_keys_once_for_the_heads_that_share_them_and_never_gathers() -> None:
    q, k, v, _ = inputs(groups=2)
    with partitioned_mesh(context=4) as mesh:
        program = monarch.program(lambda q, k, v: ring_attention(q, k, v, "context", is_causal=True), mesh=mesh)
        placed = [monarch.distribute(x, mesh, "[-, -, @context, -]") for x in (q, k, v)]
        text = str(program.trace(*placed).partition().graph)
        block = "f64[2, 2, 4, 8] varying<context>"  # of the 2 heads that keys have
        assert text.count(f": ({block}, {block})") == text.count("= permute(") == 3
        assert not re.search(r"= (all_gather|all_to_all|all_reduce)\(", text)


SIZES: dict[str, Any] = {"vocabulary": 61, "width": 32, "layers": 2, "heads": 4}
MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(**SIZES, sequence=TIME),
    "llama": lambda: Llama(**SIZES, groups=2, inner=48),
}


def within(documents: torch.Tensor) -> torch.Tensor:
    """The mask of causal attention within documents."""
    return torch.ones(TIME, TIME, dtype=torch.bool).tril() & (
        documents[:, None, :, None] == documents[:, None, None, :]
    )


def loss_of(model: nn.Module) -> Any:
    """The loss of each token, as each worker computes it of its block."""

    def losses(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = model(tokens, positions, mask).flatten(0, 1)
        return F.cross_entropy(logits, tokens.flatten(), reduction="none").view_as(tokens)

    return losses


def trained(model: nn.Module, loss: Any, run: Any = lambda step: step) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(tokens, documents)
        found.backward()
        optimizer.step()
        return found

    step = run(step)
    tokens = torch.randint(61, (BATCH, TIME), generator=torch.Generator().manual_seed(1))
    return [step(tokens, ids()).item() for _ in range(3)]


def over(mesh: Mesh) -> Any:
    def run(step: Any) -> Any:
        return monarch.program(lambda *given: step(*(monarch.layout(x, "[@data, @context]") for x in given)), mesh=mesh)

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_trains_on_packed_documents_as_in_plain_pytorch(kind: str, method: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[kind]()
    with partitioned_mesh(data=2, context=2, model=2) as mesh:
        model = copy.deepcopy(plain)
        monarch.module_to_mesh(model, mesh, tensor_parallel(model, mesh, "model"))
        losses = context_parallel(loss_of(model), "context", method=method)
        found = trained(model, lambda tokens, ids: losses(tokens, documents=ids).mean(), over(mesh))
    places, dense_losses = torch.arange(TIME)[None], loss_of(plain)
    wanted = trained(plain, lambda tokens, ids: dense_losses(tokens, places, within(ids)).mean())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_no_worker_has_more_than_its_block_of_time_but_in_attention_by_heads(method: str) -> None:
    """Sizes of what workers hold in a training step, of which 40 is the whole time and 10 a worker's."""
    mesh = Mesh.abstract(data=2, context=4, model=2)
    model = Llama(**SIZES | {"heads": 8}, groups=8, inner=48)
    monarch.module_to_mesh(model, mesh, tensor_parallel(model, mesh, "model"))
    losses = context_parallel(loss_of(model), "context", method=method)

    @monarch.program(mesh=mesh)
    def step(tokens: "i64[4@data, 40@context]"):  # type: ignore[no-untyped-def,syntax]
        loss = losses(tokens).mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    text = str(step.trace(torch.zeros(4, 40, dtype=torch.int64)).partition().graph)
    held = re.findall(r"(?<!of )\b\w+\[([\d, ]+)\]", re.sub(r" of \w+\[[^]]*\]", "", text))
    whole = {each for each in held if "40" in each.split(", ")}
    # By heads a worker has the whole time of 1 of 8 heads: the workers along 'model' keep theirs to themselves.
    assert whole <= (set() if method == "ring" else {"2, 1, 40, 4", "2, 1, 1, 1, 40, 4", "2, 1, 40"}), whole


def test_a_module_gets_the_positions_of_its_block_and_a_function_what_it_takes() -> None:
    torch.manual_seed(0)
    plain = MODELS["llama"]()
    tokens = torch.randint(61, (BATCH, TIME))
    with partitioned_mesh(data=2, context=4) as mesh:
        model = monarch.module_to_mesh(copy.deepcopy(plain), mesh)
        placed = monarch.distribute(tokens, mesh, "[@data, @context]")
        attend = context_parallel(model, "context")
        torch.testing.assert_close(attend(placed).full_tensor(), plain(tokens), rtol=1e-5, atol=1e-5)
        others = torch.arange(TIME).flip(0)[None]
        found = attend(placed, others).full_tensor()
        torch.testing.assert_close(found, plain(tokens, others), rtol=1e-5, atol=1e-5)

        q, *_ = inputs()
        moved = monarch.distribute(q.transpose(1, 2).contiguous(), mesh, "[-, @context, -, -]")

        def heads(x: torch.Tensor, times: int) -> torch.Tensor:
            x = x.transpose(1, 2)
            return times * F.scaled_dot_product_attention(x, x, x).transpose(1, 2)

        total = context_parallel(heads, "context")
        torch.testing.assert_close(total(moved, times=3).full_tensor(), heads(q.transpose(1, 2), 3))


def test_what_it_cannot_attend_to_is_refused() -> None:
    with pytest.raises(ProgramError, match="method='rings'"):
        context_parallel(F.scaled_dot_product_attention, "context", method="rings")
    with pytest.raises(ProgramError, match="the forward pass of Linear takes no positions"):
        context_parallel(nn.Linear(2, 2), "context")
    plain = torch.randn(1, 8, 2, 4)
    with partitioned_mesh(context=4) as mesh:

        def attend(x: torch.Tensor, keys: int = 8, **options: Any) -> torch.Tensor:
            x = x.transpose(1, 2)
            return F.scaled_dot_product_attention(x, x[:, :, :keys], x[:, :, :keys], **options).transpose(1, 2)

        attention = context_parallel(attend, "context")
        x = monarch.distribute(plain, mesh, "[-, @context, -, -]")
        for options, message in [
            ({"attn_mask": torch.ones(1, 8, 2, 2, dtype=torch.bool)}, "with a mask"),
            ({"dropout_p": 0.1}, "with dropout_p=0.1"),
            ({"keys": 1}, r"queries \[1, 2, 2, 4\] and keys \[1, 2, 1, 4\]"),
        ]:
            with pytest.raises(ProgramError, match=message):
                attention(x, **options)
        with pytest.raises(ProgramError, match=r"a result \[1, 1, 2, 4\] of a block of 2 tokens"):
            context_parallel(lambda x: x[:, :-1], "context")(x)
        with pytest.raises(ProgramError, match="of no tensor .* on a mesh"):
            attention(plain)
        q = monarch.distribute(plain.transpose(1, 2).contiguous(), mesh)
        with pytest.raises(LayoutError, match="2 heads, which 4 workers along 'context' do not divide"):
            all_to_all_attention(q, q, q, "context")
        with pytest.raises(LayoutError, match="dim 2 of argument 0 has size 6"):
            ring_attention(*[q[:, :, :6]] * 3, "context")
    with pytest.raises(ProgramError, match="a plain tensor, which is on no mesh"):
        ring_attention(plain, plain, plain, "context")
