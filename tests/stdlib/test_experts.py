"""Expert parallelism: the mixture over an expert mesh dim, against the same mixture in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.types import Layout
from monarch.distributed import Mesh
from monarch.exceptions import LayoutError
from monarch.stdlib.experts import load_balancing_loss, router_logits, router_z_loss
from monarch.stdlib.models.moe import Experts, MixtureOfExperts
from monarch.stdlib.parallel import combine, expert_parallel, fully_shard
from tests.language.partitioned import partitioned_mesh
from tests.later import Later

hf = Later("transformers")

EXPERTS, WIDTH, INNER = 4, 8, 12


def mixture(chosen: int = 2, room: float | None = None) -> Experts:
    torch.manual_seed(0)
    layer = Experts(WIDTH, INNER, EXPERTS, chosen, room)
    for parameter in (layer.gate, layer.up, layer.down):
        nn.init.normal_(parameter, std=0.3)
    return layer


def only_to(expert: int, layer: Experts) -> Experts:
    """All tokens whose first feature is positive choose this expert first."""
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[expert, 0] = 50.0
    return layer


def batch(rows: int = 4, time: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, time, WIDTH, generator=g)
    x[..., 0] = x[..., 0].abs()
    return x, torch.randn(rows, time, WIDTH, generator=g)


def results(
    layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, run: Any = lambda step: step
) -> list[torch.Tensor]:
    """The mixture of x, and the gradients of x and of all parameters."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = layer(x)
        return y, *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])

    return [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in run(step)(x, weight)]


def over(mesh: Mesh, layout: str) -> Any:
    def run(step: Any) -> Any:
        return monarch.program(lambda *given: step(*(monarch.layout(x, layout) for x in given)), mesh=mesh)

    return run


def exchanges(layer: nn.Module, mesh: Mesh, layout: str, x: torch.Tensor) -> int:
    """How many all_to_alls the layer's forward pass has."""
    program = monarch.program(lambda x: layer(monarch.layout(x, layout)), mesh=mesh)
    return str(program.trace(x).partition().graph).count("= all_to_all(")


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", ["top-1", "top-2", "all to one"])
@pytest.mark.parametrize(
    "tokens", ["[@expert, -, -]", "[-, @expert, -]", "[@(data,expert), -, -]", "[@data, @expert, -]"]
)
def test_the_mixture_is_that_of_plain_pytorch(case: str, tokens: str) -> None:
    layer = mixture(chosen=1 if case == "top-1" else 2)
    if case == "all to one":
        only_to(2, layer)
    x, weight = batch()
    with partitioned_mesh(data=2, expert=2) as mesh:
        placed = copy.deepcopy(layer)
        monarch.module_to_mesh(placed, mesh, expert_parallel(placed, mesh, "expert", tokens=tokens))
        assert exchanges(placed, mesh, tokens, x) == 2
        found = results(placed, x, weight, over(mesh, tokens))
    for got, wanted in zip(found, results(layer, x, weight), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("room", [0.5, 1.0, 1.5])
def test_with_little_room_each_workers_tokens_are_dropped_as_those_of_a_batch_of_their_own(room: float) -> None:
    layer = only_to(1, mixture(room=room))
    x, weight = batch()
    with partitioned_mesh(expert=2) as mesh:
        placed = copy.deepcopy(layer)
        monarch.module_to_mesh(placed, mesh, expert_parallel(placed, mesh, "expert"))
        found = results(placed, x, weight, over(mesh, "[@expert, -, -]"))
    halves = [results(layer, *each) for each in zip(x.chunk(2), weight.chunk(2), strict=True)]
    assert (halves[0][0] == 0).all(-1).any()  # some were dropped
    for at, (got, *own) in enumerate(zip(found, *halves, strict=True)):
        torch.testing.assert_close(got, torch.cat(own) if at < 2 else own[0] + own[1])


def test_experts_may_be_sharded_over_other_mesh_dims_as_well() -> None:
    layer, (x, weight) = mixture(), batch()
    with partitioned_mesh(data=2, expert=2, model=2) as mesh:
        placed = copy.deepcopy(layer)
        inner = {
            "gate": Layout(((), (), ("model",))),
            "up": Layout(((), (), ("model",))),
            "down": Layout(((), ("model",), ())),
        }
        layouts = combine(expert_parallel(placed, mesh, "expert"), inner, fully_shard(placed, mesh, "data"))
        monarch.module_to_mesh(placed, mesh, layouts)
        assert str(placed.gate.sharding) == "[@(expert,data), -, @model]"
        found = results(placed, x, weight, over(mesh, "[@(expert,data), -, -]"))
    for got, wanted in zip(found, results(layer, x, weight), strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_batch_that_the_workers_do_not_divide_is_computed_without_the_exchange() -> None:
    layer, (x, weight) = mixture(), batch(rows=3)
    with partitioned_mesh(expert=2) as mesh:
        placed = copy.deepcopy(layer)
        monarch.module_to_mesh(placed, mesh, expert_parallel(placed, mesh, "expert"))
        assert exchanges(placed, mesh, "[-, -, -]", x) == 0
        found = results(placed, x, weight, over(mesh, "[-, -, -]"))
    for got, wanted in zip(found, results(layer, x, weight), strict=True):
        torch.testing.assert_close(got, wanted)


SIZES: dict[str, Any] = {"vocabulary": 61, "width": 16, "inner": 24, "layers": 2, "heads": 2}


def test_a_model_trains_with_its_balance_losses_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    plain = MixtureOfExperts(**SIZES, experts=4, chosen=2, room=None)
    tokens = torch.randint(61, (4, 8))

    def losses(model: nn.Module, run: Any = lambda step: step) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with router_logits(model) as logits:
                made = model(tokens)
            assert len(logits) == 2
            loss = nn.functional.cross_entropy(made.flatten(0, 1), tokens.flatten())
            loss = loss + 0.1 * load_balancing_loss(logits, 2) + 0.01 * router_z_loss(logits)
            loss.backward()
            optimizer.step()
            return loss

        step = run(step)
        return [step(tokens).item() for _ in range(3)]

    with partitioned_mesh(data=2, expert=2) as mesh:
        model = copy.deepcopy(plain)
        monarch.module_to_mesh(model, mesh, expert_parallel(model, mesh, "expert"))
        found = losses(model, over(mesh, "[@(expert,data), -]"))
    torch.testing.assert_close(found, losses(plain), rtol=1e-5, atol=1e-5)


def test_the_balance_loss_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(3, 5, 4) for _ in range(2)]
    theirs = hf.models.mixtral.modeling_mixtral.load_balancing_loss_func(
        tuple(each.flatten(0, 1) for each in logits), 4, 2
    )
    torch.testing.assert_close(load_balancing_loss(logits, 2), theirs)
    even = torch.eye(4).reshape(2, 2, 4) * 1e-6  # each expert is chosen by one token of four
    torch.testing.assert_close(load_balancing_loss([even], 1), torch.tensor(1.0))
    torch.testing.assert_close(router_z_loss([torch.zeros(2, 3, 4)]), torch.tensor(4.0).log().square())


def test_what_cannot_be_exchanged_is_refused() -> None:
    mesh = Mesh.abstract(data=2, expert=3)
    with pytest.raises(LayoutError, match="has 4 experts, which 3 workers along 'expert' do not divide"):
        expert_parallel(mixture(), mesh, "expert")
    mesh = Mesh.abstract(data=2, expert=2)
    with pytest.raises(LayoutError, match="do not go to experts over 'expert'"):
        expert_parallel(mixture(), mesh, "expert", tokens="[@data, -, -]")
    with pytest.raises(ValueError, match="Linear has no mixture of experts"):
        expert_parallel(nn.Linear(2, 2), mesh, "expert")
