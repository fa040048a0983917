"""`@monarch.program(layouts="auto")`: the layouts that nobody has said are found, states get them before the first
step, what the user says binds, and the numbers are plain PyTorch's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.errors import DeviceMeshError, MonarchError
from monarch.compiler.types import Layout
from monarch.distributed import Mesh
from monarch.language.placing import replacing
from monarch.stdlib.models.gpt import MLP
from monarch.testing import chaos

MACHINE = """
target = "cpu"
[[links]]
within = "a host"
bandwidth = {bandwidth}
latency = {latency}
"""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    """None of this is about what computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_KERNELS", "off")
        yield


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2) as made:
        yield made


def described(folder: Path, name: str, bandwidth: str, latency: str) -> str:
    """The file of a machine with links of this kind."""
    path = folder / f"{name}.toml"
    path.write_text(MACHINE.format(bandwidth=bandwidth, latency=latency))
    return str(path)


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """One on which to compute takes long, and to send next to nothing: all mesh dims are worth using."""
    return described(tmp_path, "quick-links", "1e12", "1e-9")


def mlps(width: int = 32, count: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MLP(width) for _ in range(count)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def _assert_close(there: Any, plain: Any) -> None:
    torch.testing.assert_close(there.full_tensor(), plain.detach(), rtol=1e-3, atol=1e-4)


MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)
"""What the first step makes for each parameter, in a tenth of AdamW's ops."""
_MOMENTS = ("exp_avg", "momentum_buffer")


class Training:
    """A model in plain PyTorch and the same on a mesh, trained side by side."""

    def __init__(
        self,
        plain: nn.Module,
        mesh: Mesh,
        layouts: Mapping[str, Any] | None = None,
        optimizer: Any = MOMENTUM,
        **options: Any,
    ) -> None:
        self.plain, self.model = plain, monarch.module_to_mesh(copy.deepcopy(plain), mesh, layouts)
        self.optimizers = [optimizer(each.parameters(), lr=0.01) for each in (self.plain, self.model)]

        self.program = monarch.program(_step(self.model, self.optimizers[1]), layouts="auto", mesh=mesh, **options)
        self.step = _step(self.plain, self.optimizers[0])

    def check(self, x: torch.Tensor, steps: int = 3) -> None:
        """Train, and compare losses, gradients and parameters with plain PyTorch's."""
        for _ in range(steps):
            expected = self.step(x)
            _assert_close(self.program(x), expected)
        for plain, there in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            _assert_close(there, plain)
            _assert_close(there.grad, plain.grad)

    @property
    def layouts(self) -> dict[str, str]:
        return {name: str(each.sharding) for name, each in self.model.named_parameters()}

    def moments(self) -> dict[str, str]:
        """The layouts of what the optimizer keeps for the parameters, by their names."""
        state = self.optimizers[1].state
        found = {name: state[each] for name, each in self.model.named_parameters()}
        return {name: str(next(kept[key] for key in _MOMENTS if key in kept).sharding) for name, kept in found.items()}


def test_states_get_what_was_found_and_keep_their_values(mesh: Mesh) -> None:
    training = Training(mlps(), mesh, optimizer=torch.optim.AdamW)
    x = torch.randn(64, 32)
    assert training.layouts == dict.fromkeys(training.layouts, "[@data, -]")  # fully sharded, where nothing is said
    plan = training.program.compile(x)
    found = plan.costs["layouts"]
    assert training.layouts == dict.fromkeys(training.layouts, "[@data, -]")  # asking changes nothing
    assert found["candidates"][0]["name"] == "layouts as written"
    chosen = next(each for each in found["candidates"] if each["name"] == found["chosen"])
    assert chosen["seconds"] == min(each["seconds"] for each in found["candidates"])
    training.check(x)
    assert training.layouts == found["parameters"]
    assert training.moments() == training.layouts
    given = {str(spec.label): str(spec.type.layout) for spec in plan.inputs if spec.kind == "state"}
    assert given == training.layouts


def test_a_second_program_finds_the_states_where_they_are(mesh: Mesh) -> None:
    training = Training(mlps(), mesh)
    x = torch.randn(64, 32)
    training.check(x, 2)
    before = training.layouts

    @monarch.program(layouts="auto", mesh=mesh)
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return training.model(x)

    torch.testing.assert_close(evaluate(x).full_tensor(), training.plain(x).detach())
    found = evaluate.compile(x).costs["layouts"]
    assert found["parameters"] == {} and training.layouts == before
    training.check(x, 1)


def test_what_the_user_says_binds(mesh: Mesh) -> None:
    training = Training(mlps(count=2), mesh, {"0.up.weight": "[-, @data]", "1.down.weight": None})
    x = monarch.distribute(torch.randn(64, 32), mesh, "[@data, -]")
    plan = training.program.compile(x)
    found = plan.costs["layouts"]
    assert found["parameters"].keys() <= {"0.down.weight", "1.up.weight"} and found["inputs"] == {}
    assert {str(spec.type) for spec in plan.inputs if spec.kind == "input"} == {"f32[64@data, 32]"}
    training.program(x)
    assert training.layouts["0.up.weight"] == "[-, @data]" and training.layouts["1.down.weight"] == "[-, -]"


def test_annotations_that_shard_bind_and_others_do_not(mesh: Mesh, machine: str) -> None:
    w = monarch.distribute(torch.randn(64, 64), mesh)

    @monarch.program(layouts="auto", machine=machine)
    def step(x: "f32[256@data, 64]", y: "f32[256, 64]"):  # type: ignore[no-untyped-def, valid-type]
        return (x @ w).sum() + (y @ w).sum()

    x, y = torch.randn(2, 256, 64)
    found = step.compile(x, y).costs["layouts"]
    assert found["inputs"].keys() == {"1"}
    expected = (x @ w.full_tensor()).sum() + (y @ w.full_tensor()).sum()
    torch.testing.assert_close(step(x, y).full_tensor(), expected)


def test_a_limit_has_parameters_sharded(mesh: Mesh, tmp_path: Path) -> None:
    """With little room parameters do not stay whole, and what a worker holds is within the limit."""
    x, slow = torch.randn(4096, 64), described(tmp_path, "slow-links", "2e8", "1e-5")
    options: dict[str, Any] = {"layouts": {}, "optimizer": torch.optim.SGD, "machine": slow}
    free = Training(mlps(64), mesh, **options).program.compile(x).costs["layouts"]
    assert set(free["parameters"].values()) == {"[-, -]"}
    peaks = {each["name"]: each["peak_bytes"] for each in free["candidates"]}
    limit = (peaks[free["chosen"]] + min(peaks.values())) // 2
    training = Training(mlps(64), mesh, **options, memory_limit=limit)
    training.check(x, 2)
    assert "[-, -]" not in training.layouts.values()
    plan = training.program.compile(x)
    assert plan.options.memory_limit == limit and plan.costs["peak_bytes"] <= limit


def test_a_limit_holds_for_the_steps_that_have_moments(mesh: Mesh) -> None:
    """The first step makes them, and holds less than all others: what is found for it has to do for those."""
    x = torch.randn(256, 64)
    first = Training(mlps(64), mesh)
    least = min(each["peak_bytes"] for each in first.program.compile(x).costs["layouts"]["candidates"])
    training = Training(mlps(64), mesh, layouts={}, memory_limit=least)
    training.check(x)
    assert training.program.compile(x).costs["peak_bytes"] <= least and training.moments() == training.layouts


def test_a_batch_of_one_is_tensor_parallel_on_both_dims(machine: str) -> None:
    with Mesh(data=2, model=2) as mesh:
        training = Training(mlps(64), mesh, machine=machine)
        training.check(torch.randn(1, 64))
        assert all(("[@(" if "up" in name else "[-, @(") in each for name, each in training.layouts.items())
        assert training.moments() == training.layouts
        assert training.program.compile(torch.randn(1, 64)).costs["layouts"]["machine"] == "quick-links"


def test_training_goes_on_from_a_checkpoint(mesh: Mesh, tmp_path: Path) -> None:
    """What a checkpoint is read into is laid out anew like all else, moments with their parameters."""
    training = Training(mlps(), mesh, optimizer=torch.optim.AdamW)
    x = torch.randn(64, 32)
    training.check(x, 2)
    monarch.save({"model": training.model, "optimizer": training.optimizers[1]}, tmp_path / "step").result()
    other = Training(mlps(), mesh, optimizer=torch.optim.AdamW)
    other.plain.load_state_dict(training.plain.state_dict())
    other.optimizers[0].load_state_dict(training.optimizers[0].state_dict())
    monarch.load(tmp_path / "step", {"model": other.model, "optimizer": other.optimizers[1]})
    assert set(other.moments().values()) == set(other.layouts.values()) == {"[@data, -]"}
    other.check(x, 2)
    assert other.moments() == other.layouts == training.layouts
    assert other.program.remembered[-1].traces == 1


def test_tied_parameters_and_buffers(mesh: Mesh) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.second.weight = self.first.weight
            self.register_buffer("scale", torch.rand(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) * self.scale)

    training = Training(Tied(), mesh)
    training.check(torch.randn(64, 32))
    assert training.model.first.weight is training.model.second.weight


def test_a_worker_that_dies_while_states_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have moved keep their new layouts, the others the old ones; the call, made again, moves the rest."""
    layouts: list[Layout] = []

    def killing(mesh: Any, handle: Any, layout: Layout) -> Any:
        layouts.append(layout)
        if len(layouts) == 3:
            chaos.kill(mesh, 1, 0)
        return laid_out(mesh, handle, layout)

    laid_out = replacing.laid_out
    monkeypatch.setattr(replacing, "laid_out", killing)
    slow = described(tmp_path, "slow-links", "2e8", "1e-5")
    with Mesh(data=2, model=2) as mesh:
        training = Training(mlps(count=2), mesh, optimizer=torch.optim.SGD, machine=slow)
        x = torch.randn(256, 32)
        with pytest.raises(DeviceMeshError, match="has lost a worker"):
            training.program(x)
        assert sorted(training.layouts.values()) == ["[-, -]"] * 2 + ["[@data, -]"] * 2
        monarch.heal_mesh(mesh)
        training.check(x)
        assert set(training.layouts.values()) == {"[-, -]"} and len(layouts) == 5


def test_one_worker_is_not_searched() -> None:
    with Mesh(data=1) as mesh:
        training = Training(mlps(), mesh)
        x = torch.randn(8, 32)
        training.check(x)
        assert "layouts" not in training.program.compile(x).costs
        assert training.program.remembered[-1].traces == 2  # the first call's, and that of all later ones


def test_a_dim_of_one_worker_is_no_reason_to_trace_again() -> None:
    with Mesh(data=1, model=2) as mesh:
        training = Training(mlps(), mesh)
        training.check(torch.randn(8, 32), 4)
        assert training.program.remembered[-1].traces == 2 and training.layouts["0.up.weight"] == "[@model, -]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": "cheap"}, "layouts='cheap'"),
        ({"layouts": {"0.up.weight": Layout.replicated(2)}}, "layouts="),
        ({"machine": "h100-8"}, "the program searches none"),
        ({"layouts": "auto", "machine": 8}, "machine='8'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MonarchError, match=message):
        monarch.program(lambda x: x, **options)


def test_a_machine_for_another_target_and_an_unknown_one(mesh: Mesh) -> None:
    x = torch.randn(8, 32)
    for machine, message in {
        "h100-8": "is for cuda:90, and the program is compiled for cpu",
        "h100": "no machine",
    }.items():
        with pytest.raises(MonarchError, match=message):
            Training(mlps(), mesh, machine=machine).program(x)


def test_a_graph_that_cannot_be_searched_says_so(mesh: Mesh) -> None:
    w = monarch.distribute(torch.randn(8, 8), mesh)

    @monarch.program(layouts="auto")
    def step(x: torch.Tensor) -> torch.Tensor:
        return monarch.cond(x.sum() > 0, lambda x: x @ w, lambda x: x - w, (x,))

    with pytest.raises(MonarchError, match="which branches or loops on values") as error:
        step(torch.randn(8, 8))
    assert error.value.source is not None and "monarchc sweep --layout" in error.value.hint
    assert Path(error.value.source.file).name == "test_layouts_found.py"
