"""Layers and optimizers as PyTorch has them, on a mesh: the same losses, in a program and in the eager door."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from monarch.language.errors import OperatorError
from tests.language.partitioned import partitioned_mesh

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[1, 2, 9], [0, 9, 3], [4, 4, 4], [7, 1, 0]])
CAUSAL = torch.triu(torch.full((6, 6), float("-inf")), 1)
AHEAD = CAUSAL < 0
PADDED = torch.zeros(4, 6, dtype=torch.bool)
PADDED[1, 4:] = True


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with partitioned_mesh(data=2) as made:
        yield made


def losses(
    model: nn.Module,
    forward: Callable[..., torch.Tensor],
    batch: tuple[torch.Tensor, ...],
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    program: bool = False,
) -> list[torch.Tensor]:
    optimizer = make(model.parameters())

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(model, *batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = monarch.program(step) if program else step
    return [run(*batch) for _ in range(steps)]


def check(
    mesh: Mesh,
    make_model: Callable[[], nn.Module],
    forward: Callable[..., torch.Tensor],
    *batch: torch.Tensor,
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    steps: int = 2,
    atol: float = 1e-5,
) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return make_model()

    placed = [monarch.distribute(entry, mesh, ["data", *[None] * (entry.ndim - 1)]) for entry in batch]
    expected = losses(model(), forward, batch, make, steps)
    for program in (True, False):
        ours = monarch.module_to_mesh(model(), mesh, layouts={"*": None})
        found = losses(ours, forward, tuple(placed), make, steps, program)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, atol=atol, rtol=1e-4)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "LSTM": (lambda: nn.LSTM(8, 5, num_layers=2, batch_first=True, bidirectional=True), lambda m, x: m(x)[0]),
    "LSTM, projected": (lambda: nn.LSTM(8, 5, proj_size=3), lambda m, x: m(x.transpose(0, 1))[1][1]),
    "GRU": (lambda: nn.GRU(8, 5, batch_first=True), lambda m, x: m(x)[0]),
    "RNN": (lambda: nn.RNN(8, 5, nonlinearity="relu", bias=False), lambda m, x: m(x.transpose(0, 1))[1]),
    "LSTMCell": (lambda: nn.LSTMCell(8, 5), lambda m, x: m(x[:, 0])[1]),
    "GRUCell": (lambda: nn.GRUCell(8, 5), lambda m, x: m(x[:, 0])),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 4)), lambda m, x: m(x)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 4)), lambda m, x: m(x)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), lambda m, x: m(x)),
    "normalize": (lambda: nn.Linear(8, 8), lambda m, x: F.normalize(m(x), dim=0) + m(x).norm(dim=1, keepdim=True)),
    "std and var": (lambda: nn.Linear(8, 8), lambda m, x: m(x).std(1) + m(x).var(1) + m(x).std()),
    "operands of one dim": (lambda: nn.Linear(8, 8), lambda m, x: (x @ m.weight[0]) @ x[0, :, 0] + m(x[0, 0]).sum()),
    "another dtype": (lambda: nn.Linear(8, 4).double(), lambda m, x: m(x.double())),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_as_in_pytorch(name: str, mesh: Mesh) -> None:
    check(mesh, *LAYERS[name], X)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str, mesh: Mesh) -> None:
    check(mesh, lambda: nn.EmbeddingBag(10, 4, mode=mode, padding_idx=4), lambda m, i: m(i), TOKENS)
    offsets = torch.tensor([0, 3, 3, 5])
    check(mesh, lambda: nn.EmbeddingBag(10, 4, mode=mode), lambda m, i: m(i.flatten(), offsets), TOKENS)


def test_the_largest_of_a_bag_is_the_first_that_is_and_passes_a_nan_by(mesh: Mesh) -> None:
    """As PyTorch has it, and so goes its gradient."""
    nan, inf = torch.nan, torch.inf
    table = torch.tensor([[1.0, nan, -inf], [1.0, 2.0, -inf], [nan, inf, nan], [0.5, 2.0, inf]])

    def run(i: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = table.detach().requires_grad_()
        bags = F.embedding_bag(i, table, torch.tensor([0, 3, 5, 5]), mode="max", padding_idx=3)
        return bags, *torch.autograd.grad(bags, table, torch.arange(1.0, 13).view(4, 3))

    program = monarch.program(run)
    for i in ([1, 0, 2, 2, 1, 3, 3], [0, 1, 2, 3, 3, 1, 0], [3, 1, 3, 0, 2, 1, 1]):
        index, placed = torch.tensor(i), monarch.distribute(table, mesh, "[@data, -]")
        for got, want in zip(program(index, placed), run(index, table), strict=True):
            torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


def test_bags_whose_gradients_go_by_frequency(mesh: Mesh) -> None:
    """PyTorch's gradient on CPUs divides by the counts of other rows: the advice gives one that does not."""
    table = torch.randn(10, 4)
    placed = monarch.distribute(table, mesh, "[-, -]").requires_grad_()
    bags = monarch.program(mesh=mesh)(lambda i: F.embedding_bag(i, placed, scale_grad_by_freq=True, mode="sum").sum())
    with pytest.raises(OperatorError, match=r"another row.*\n(.|\n)*F.embedding\(indices, weight"):
        bags(TOKENS)
    with torch.no_grad():
        assert bags(TOKENS).full_tensor() == pytest.approx(table[TOKENS].sum().item(), abs=1e-4)

    @monarch.program(mesh=mesh)
    def advised(i):  # type: ignore[no-untyped-def]
        rows = F.embedding(i, placed, scale_grad_by_freq=True)
        (gradient,) = torch.autograd.grad(rows.sum(1).square().sum(), placed)
        return gradient

    plain = table.clone().requires_grad_()
    F.embedding(TOKENS, plain, scale_grad_by_freq=True).sum(1).square().sum().backward()
    torch.testing.assert_close(advised(TOKENS).full_tensor(), plain.grad)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"attn_mask": CAUSAL},
        {"attn_mask": AHEAD, "is_causal": True, "need_weights": False},
        {"key_padding_mask": PADDED},
        {"key_padding_mask": PADDED, "attn_mask": AHEAD},
    ],
    ids=lambda masks: "+".join(masks),
)
def test_attention_with_plain_masks(masks: dict[str, Any], mesh: Mesh) -> None:
    check(mesh, lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x, **masks)[0], X)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "masks",
    [{"mask": CAUSAL}, {"mask": AHEAD}, {"src_key_padding_mask": PADDED}, {"mask": CAUSAL, "is_causal": True}],
    ids=lambda masks: "+".join(masks),
)
def test_an_encoder_with_plain_masks(masks: dict[str, Any], mesh: Mesh) -> None:
    def encoder() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)

    check(mesh, encoder, lambda m, x: m(x, **masks), X)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class ByMask(Routed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(1, -1)
        return sum(e(x) * (weights * (chosen == n)).sum(-1, keepdim=True) for n, e in enumerate(self.experts))


class ByIndex(Routed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 8)
        weights, chosen = self.router(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)  # monarch: ignore[M104]
            out[rows] += expert(x[rows]) * weights[rows, place, None]
        return out


def test_mixtures_of_experts(mesh: Mesh) -> None:
    check(mesh, ByMask, lambda m, x: m(x), X)
    torch.manual_seed(1)
    plain = ByIndex()
    ours = monarch.module_to_mesh(copy.deepcopy(plain), mesh, layouts={"*": None})
    torch.testing.assert_close(ours(monarch.distribute(X, mesh)).full_tensor(), plain(X).detach())
    with pytest.raises(RuntimeError, match="shape depends on values") as caught:
        monarch.program(lambda x: ours(x))(monarch.distribute(X, mesh))
    assert "torch.where(mask" in str(caught.value)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.01),
    "Adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_in_pytorch(name: str, mesh: Mesh) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    check(mesh, model, lambda m, x: m(x), X, make=OPTIMIZERS[name], steps=7)


def test_muon_steps_as_in_pytorch(mesh: Mesh) -> None:
    """Its products are in bf16."""
    check(mesh, lambda: nn.Linear(8, 8, bias=False), lambda m, x: m(x), X, make=torch.optim.Muon, steps=3, atol=1e-3)


def test_lbfgs_steps_outside_of_a_program(mesh: Mesh) -> None:
    plain = nn.Linear(8, 4)
    ours = monarch.module_to_mesh(copy.deepcopy(plain), mesh, layouts={"*": None})
    x = monarch.distribute(X, mesh)

    def closure_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def closure(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return closure

    def steps(model: nn.Module, x: torch.Tensor, closure: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        return [float(optimizer.step(lambda: closure(x))) for _ in range(2)]

    found = steps(ours, x, monarch.program(closure_of(ours)))
    assert found == pytest.approx(steps(plain, X, closure_of(plain)), rel=1e-4)
    optimizer = torch.optim.LBFGS(ours.parameters())
    with pytest.raises(ProgramError, match="make the closure a program"):
        monarch.program(lambda x: optimizer.step(lambda: closure_of(ours)(x)))(x)


def test_a_model_is_given_another_dtype_on_the_mesh(mesh: Mesh) -> None:
    plain = nn.Linear(8, 4)
    ours = monarch.module_to_mesh(copy.deepcopy(plain), mesh, layouts={"weight": "[-, @data]"})
    for model in (plain, ours):
        model.to(torch.float64)
    assert ours.weight.dtype == torch.float64 and str(ours.weight.sharding) == "[-, @data]"
    found = monarch.program(lambda x: ours(x.double()))(monarch.distribute(X, mesh))
    torch.testing.assert_close(found.full_tensor(), plain(X.double()).detach())
    assert ours.weight.layout is torch.strided


CTC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "lists": lambda x: F.ctc_loss(x, TARGETS, [6, 5, 6], [4, 3, 2]),
    "tuples": lambda x: F.ctc_loss(x, TARGETS.flatten()[:9], (6, 5, 6), (4, 3, 2), reduction="sum"),
    "tensors that are known": lambda x: F.ctc_loss(x, TARGETS, torch.tensor([6, 5, 6]), torch.tensor([4, 3, 0])),
    "no way to align": lambda x: nn.CTCLoss(zero_infinity=True)(x, TARGETS, (6, 2, 6), (4, 4, 2)),
    "each": lambda x: F.ctc_loss(x, TARGETS, (6, 5, 6), (4, 3, 2), reduction="none", blank=4),
    "one": lambda x: F.ctc_loss(x[:, 0], TARGETS[0], [6], [4]),
}
TARGETS = torch.tensor([[1, 2, 2, 3], [1, 1, 3, 2], [3, 1, 2, 1]])


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["[@data, -, -]", "[-, -, @data]"])
@pytest.mark.parametrize("case", CTC)
@pytest.mark.filterwarnings("ignore:.*runs whole on every worker")
def test_a_loss_over_alignments(case: str, layout: str, mesh: Mesh) -> None:
    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = CTC[case](x)
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    x = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found = monarch.program(gradient, mesh=mesh)(monarch.distribute(x, mesh, layout))
    for ours, theirs in zip(found, gradient(x), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("branches", [False, True])
def test_a_weight_norm_of_what_is_not_contiguous(branches: bool, mesh: Mesh) -> None:
    def gradient(cond: Callable[..., Any], v: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v, g = v.detach().requires_grad_(), g.detach().requires_grad_()
        made = cond(v.sum() > -99, lambda: torch._weight_norm(v, g.t()[:1], 1).square(), lambda: v * 2)
        return torch.autograd.grad(made.sum(), (v, g))

    v, g = torch.randn(4, 6), torch.randn(6, 2)
    cond = monarch.cond if branches else lambda test, then, other: then()
    found = monarch.program(lambda v, g: gradient(cond, v, g), mesh=mesh)(
        *(monarch.distribute(x, mesh) for x in (v, g))
    )
    for ours, theirs in zip(found, gradient(lambda test, then, other: then(), v, g), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", [None, torch.float32], ids=["halves", "floats"])
def test_norms_of_halves_have_pytorchs_numbers(dtype: torch.dtype, of_weight: torch.dtype | None) -> None:
    """Whose statistics are halves on CPUs, and float32 on GPUs."""

    def norms(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = F.layer_norm(x, [4], w, w) + F.batch_norm(x, None, None, w, w, training=True)
        return y, *torch.autograd.grad((y.float() * torch.arange(4).cos()).sum(), [x, w])

    given = torch.linspace(-1, 1, 24).sin().view(6, 4).to(dtype), torch.linspace(0.5, 1, 4).to(of_weight or dtype)
    with partitioned_mesh(data=2) as mesh:
        placed = monarch.distribute(given[0], mesh, "[@data, -]"), monarch.distribute(given[1], mesh)
        for got, want in zip(monarch.program(norms)(*placed), norms(*given), strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=0.02, atol=0.02)


def test_a_batch_norm_of_halves_keeps_its_statistics_in_halves(mesh: Mesh) -> None:
    norm, x = nn.BatchNorm1d(4).bfloat16(), torch.linspace(-1, 1, 24).sin().view(6, 4).bfloat16()
    placed = monarch.module_to_mesh(copy.deepcopy(norm), mesh, {})
    found = monarch.program(lambda x: placed(x), mesh=mesh)(x)
    torch.testing.assert_close(found.full_tensor(), norm(x).detach())
    torch.testing.assert_close(placed.running_var.full_tensor(), norm.running_var)


def test_padded_labels_give_the_ctc_loss_of_those_that_a_mask_selects(mesh: Mesh) -> None:
    labels = torch.tensor([[1, 2, 3, -100], [4, 5, -100, -100], [2, 2, 1, 4], [3, -100, -100, -100]])

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = logits.detach().requires_grad_()
        loss = F.ctc_loss(logits.log_softmax(-1), targets, (6,) * 4, (3, 2, 4, 1), reduction="sum")
        return loss, *torch.autograd.grad(loss, logits)

    logits = X.transpose(0, 1).contiguous()
    given = monarch.distribute(logits, mesh, "[-, @data, -]"), monarch.distribute(labels, mesh, "[@data, -]")
    with pytest.raises(OperatorError, match=r"torch\.where\(mask, labels, 0\)"):
        selected = lambda labels: labels.masked_select(labels >= 0)  # monarch: ignore[M104]  # noqa: E731
        monarch.program(lambda x, labels: loss_of(x, selected(labels)))(*given)
    found = monarch.program(lambda x, labels: loss_of(x, torch.where(labels >= 0, labels, 0)))(*given)
    for got, want in zip(found, loss_of(logits, labels.masked_select(labels >= 0)), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)


def test_group_norm_of_transposed_channels(mesh: Mesh) -> None:
    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        normed = F.group_norm(x.transpose(1, 2), 2)
        return normed.detach(), *torch.autograd.grad(normed.pow(3).sum(), x)

    for ours, theirs in zip(monarch.program(mesh=mesh)(step)(X), step(X), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_gradients_of_activations_in_bfloat16_are_rounded_once(mesh: Mesh, function: Callable[..., Any]) -> None:
    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    x = torch.linspace(-6, 6, 512).view(64, 8).bfloat16()
    placed = monarch.distribute(x, mesh, "[@data, -]")
    for ours in (monarch.program(step, mesh=mesh)(placed), step(placed)):
        assert torch.equal(ours.full_tensor(), step(x))


@pytest.mark.parametrize("groups", [2, 3])
def test_native_channel_shuffle_is_one_op(mesh: Mesh, groups: int) -> None:
    x = torch.randn(3, 6, 5)
    shuffle = monarch.program(lambda x: torch.native_channel_shuffle(x, groups), mesh=mesh)
    for layout in ("[@data, -, -]", "[-, @data, -]", "[-, -, @data]"):
        found = shuffle(monarch.distribute(x, mesh, layout))
        assert torch.equal(found.full_tensor(), torch.native_channel_shuffle(x, groups))
