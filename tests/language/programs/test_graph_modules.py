"""Models that `torch.fx` and `torch.export` have made: their code is a class's, one for each graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch.language import Mesh, distribute, module_to_mesh, program


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(self.first(x))
        return self.second(hidden)


def exported(model: nn.Module) -> Any:
    return torch.export.export(model, (torch.ones(2, 4),)).module()


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("make", [exported, torch.fx.symbolic_trace], ids=["exported", "traced"])
def test_a_graph_s_model_trains_without_being_traced_again(
    mesh: Mesh, traces: list[str], make: Callable[[nn.Module], Any]
) -> None:
    def losses(place: Callable[[Any], Any], wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = place(make(Model()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = wrap(step)
        return [run(torch.full((2, 4), float(i))).item() for i in range(5)]

    ours = losses(lambda model: module_to_mesh(model, mesh, {}), program(mesh=mesh))
    assert ours == pytest.approx(losses(lambda model: model, lambda step: step))
    assert len(traces) == 2  # the second finds gradients


def by_hand(model: Any, x: torch.Tensor) -> Any:
    found: dict[Any, Any] = {}
    for node in model.graph.nodes:
        if node.op == "output":
            return found[node.args[0]]
        run = getattr(model, node.target) if node.op == "call_module" else node.target
        found[node] = x if node.op == "placeholder" else run(*(found[each] for each in node.args))
    return None


def called(model: Any, x: torch.Tensor) -> Any:
    return model(x)


@pytest.mark.parametrize(
    "how",
    [called, lambda model, x: torch.fx.Interpreter(model).run(x), by_hand],
    ids=["called", "interpreted", "by hand"],
)
def test_what_changes_of_a_graph_s_model_is_noticed(mesh: Mesh, how: Callable[[Any, torch.Tensor], Any]) -> None:
    def outputs(make: Callable[[torch.Tensor], Any], wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = torch.fx.symbolic_trace(Model())
        for part in (model.first, model.second):
            part.weight, part.bias = nn.Parameter(make(part.weight.detach())), nn.Parameter(make(part.bias.detach()))
        run = wrap(lambda x: how(model, x))
        found = []
        for call in range(6):
            found.append(run(torch.ones(2, 4)).detach())
            if call == 1:
                model.first.weight = nn.Parameter(make(torch.ones(4, 4)))
            if call == 3:
                for node in model.graph.nodes:
                    node.target = torch.sin if node.target is torch.tanh else node.target
                if how is called:
                    model.recompile()
        return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]

    ours = outputs(lambda tensor: distribute(tensor, mesh), program(mesh=mesh))
    torch.testing.assert_close(ours, outputs(lambda tensor: tensor, lambda step: step))
