"""`monarch.sync`: state that two meshes share by name, on real workers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, ProgramError
from monarch.stdlib import syncing
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.parallel import fully_shard, tensor_parallel
from monarch.stdlib.pipeline import pipeline
from monarch.testing import chaos
from tests.runtime.stopping import stopped

SIZES: dict[str, Any] = {"vocabulary": 32, "width": 16, "inner": 24, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def root() -> Iterator[Mesh]:
    with Mesh(role=2, each=2) as mesh:
        yield mesh


@pytest.fixture
def trainers(root: Mesh) -> Mesh:
    return root.slice(role=0).rename(each="data")


@pytest.fixture
def generators(root: Mesh) -> Mesh:
    return root.slice(role=1).rename(each="model")


def model(mesh: Mesh, seed: int, dtype: torch.dtype = torch.float32) -> Llama:
    torch.manual_seed(seed)
    made = Llama(**SIZES).to(dtype)
    layouts = fully_shard(made, mesh, "data") if "data" in mesh.mesh_dim_names else tensor_parallel(made, mesh, "model")
    return monarch.module_to_mesh(made, mesh, layouts)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor() for name, each in module.state_dict().items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_target_gets_the_sources_values_in_its_own_layouts_and_dtype(
    trainers: Mesh, generators: Mesh, dtype: torch.dtype
) -> None:
    source, target = model(trainers, 0), model(generators, 1, dtype)
    layouts = {name: each.sharding for name, each in target.named_parameters()}  # type: ignore[attr-defined]
    assert monarch.version(target) == 0
    assert [monarch.sync(source, target), monarch.sync(source, target, version=17)] == [1, 17]
    assert monarch.version(target) == 17
    for name, value in values(source).items():
        found = target.get_parameter(name)
        assert torch.equal(found.full_tensor(), value.to(dtype))  # type: ignore[attr-defined]
        assert found.sharding == layouts[name] and found.requires_grad  # type: ignore[attr-defined]


def test_buffers_ties_and_mappings(trainers: Mesh, generators: Mesh) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.ModuleDict({"a": nn.Embedding(6, 4), "b": nn.Linear(4, 6, bias=False), "c": nn.BatchNorm1d(4)})
        module["b"].weight = module["a"].weight
        module["c"].num_batches_tracked += seed
        return module

    source, target = monarch.module_to_mesh(made(3), trainers), monarch.module_to_mesh(made(4), generators)
    monarch.sync(source, target)
    assert target["b"].weight is target["a"].weight
    for name, value in values(source).items():
        assert torch.equal(values(target)[name], value)
    flags = {"on": monarch.distribute(torch.tensor([True, False, True]), trainers)}
    others = {"on": monarch.distribute(torch.zeros(3, dtype=torch.bool), generators)}
    monarch.sync(flags, others, version=5)
    assert others["on"].full_tensor().tolist() == [True, False, True] and monarch.version(others) == 5


def test_calls_before_a_sync_see_the_old_state_and_those_behind_it_the_new(trainers: Mesh, generators: Mesh) -> None:
    source, target = model(trainers, 0), model(generators, 1)
    plain = copy.deepcopy(Llama(**SIZES))
    optimizer = torch.optim.SGD(source.parameters(), lr=1.0)
    tokens = torch.arange(8).reshape(2, 4)

    @monarch.program(mesh=trainers)
    def train(tokens: "i64[2, 4]") -> Any:  # type: ignore[syntax]
        optimizer.zero_grad()
        loss = source(tokens).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    logits = monarch.program(lambda tokens: target(tokens), mesh=generators)
    seen, wanted = [], []
    for _ in range(3):  # nothing is read meanwhile
        train(tokens)
        monarch.sync(source, target)
        seen.append(logits(tokens))
        wanted.append({name: each.detach().clone() for name, each in source.state_dict().items()})
    for found, state in zip(seen, wanted, strict=True):
        plain.load_state_dict({name: each.full_tensor() for name, each in state.items()})
        torch.testing.assert_close(found.full_tensor(), plain(tokens), rtol=1e-5, atol=1e-5)
    assert monarch.version(target) == 3


@pytest.mark.parametrize(
    "rows", [8, 1_500_000]
)  # of which a worker sends a few bytes, or more pieces than it has slots
def test_the_source_goes_on_while_the_target_is_busy(trainers: Mesh, generators: Mesh, rows: int) -> None:
    source = {
        "w": monarch.distribute(torch.zeros(rows, 6), trainers, "[@data, -]"),
        "half": monarch.distribute(torch.zeros(4, 4), trainers),
    }
    target = {
        "w": monarch.distribute(torch.zeros(rows, 6), generators, "[-, @model]"),
        "half": monarch.distribute(torch.zeros(4, 4, dtype=torch.bfloat16), generators, "[@model, -]"),
    }

    @monarch.program(mesh=trainers)
    def step() -> Any:
        for value in source.values():
            value.add_(1.0)
        return source["half"].sum()

    def check(version: int, value: float) -> None:
        assert monarch.version(target) == version
        for each in target.values():
            found = each.full_tensor()
            assert found.eq(value).all(), (found.min(), found.max())

    step()
    monarch.sync(source, target, version=5)
    check(5, 1)
    with stopped(*generators.executor.worker_pids()):  # type: ignore[attr-defined]
        assert step().item() == 2 * 16
        monarch.sync(source, target, version=10)
        for at in range(3, 6):  # these write over what was not sent yet
            assert step().item() == at * 16
    check(10, 2)
    monarch.sync(source, target)
    check(11, 5)


def test_each_byte_moves_once_to_each_worker_that_needs_it(trainers: Mesh, generators: Mesh) -> None:
    source = {"w": monarch.distribute(torch.randn(64, 64), trainers, "[@data, -]")}
    target = {"w": monarch.distribute(torch.zeros(64, 64, dtype=torch.bfloat16), generators, "[-, @model]")}
    monarch.sync(source, target)
    [(_, program)] = target["w"]._monarch_synced.programs  # type: ignore[attr-defined]
    [moved] = program.compile(torch.tensor(0)).costs["transfers"].values()
    assert moved["bytes"] == 64 * 64 * 2 + 2 * 4  # bfloat16, and its sum to both


def test_a_sync_that_fails_leaves_the_target_as_it_was(root: Mesh, trainers: Mesh, generators: Mesh) -> None:
    source, target = model(trainers, 0), model(generators, 1)
    monarch.sync(source, target, version=1)
    before = values(target)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    values(source)
    for part in (trainers, generators):
        chaos.fail(part, 1)
        monarch.sync(source, target, version=2)
        with pytest.raises(DeviceMeshError, match="InjectedError"):
            monarch.version(target)
        assert monarch.version(target) == 1
        assert all(torch.equal(found, before[name]) for name, found in values(target).items())
    monarch.sync(source, target, version=3)
    assert monarch.version(target) == 3
    assert all(torch.equal(found, values(source)[name]) for name, found in values(target).items())


def test_what_arrives_otherwise_than_it_was_sent_is_not_used(
    trainers: Mesh, generators: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = syncing.bit_sum
    monkeypatch.setattr(syncing, "bit_sum", lambda x: of(x) + (1 if x.mesh is trainers else 0))
    source = {"w": monarch.distribute(torch.ones(64, 6), trainers, "[@data, -]")}
    target = {"w": monarch.distribute(torch.zeros(64, 6), generators, "[-, @model]")}
    monarch.sync(source, target)
    with pytest.raises(DeviceMeshError, match="the received bytes differ from those sent"):
        monarch.version(target)
    assert monarch.version(target) == 0 and target["w"].full_tensor().eq(0).all()


def test_what_does_not_fit_is_refused_with_names_and_shapes(root: Mesh, trainers: Mesh, generators: Mesh) -> None:
    source = {name: monarch.distribute(torch.zeros(2, 3), trainers) for name in ("a", "b", "c")}
    target = {name: monarch.distribute(torch.zeros(size), generators) for name, size in (("a", (2, 4)), ("d", (1,)))}
    with pytest.raises(ProgramError) as raised:
        monarch.sync(source, target)
    for line in [
        "'d' is in the target, and not in the source",
        "'b' is in the source, and not in the target",
        "'a' is [2, 3] in the source, and [2, 4] in the target",
    ]:
        assert line in str(raised.value)
    tied = dict.fromkeys(("a", "b"), monarch.distribute(torch.zeros(2, 3), generators))
    with pytest.raises(ProgramError, match="'a' and 'b' are one tensor in the target, and two in the source"):
        monarch.sync({name: source[name] for name in tied}, tied)
    with pytest.raises(ProgramError, match="'weight' of the source of monarch.sync is on no mesh"):
        monarch.sync(nn.Linear(2, 2, bias=False), target)
    with pytest.raises(ProgramError, match="from Mesh.* to itself"):
        monarch.sync(source, dict(source))
    with pytest.raises(ProgramError, match="share workers"):
        monarch.sync(source, {name: monarch.distribute(torch.zeros(2, 3), root) for name in source})
    with pytest.raises(ProgramError, match=r"sync\(\) inside a program"):
        monarch.program(lambda x: monarch.sync(source, source), mesh=trainers)(torch.zeros(1))


def test_the_stages_of_a_pipeline_and_a_model_on_one_mesh_sync_both_ways(root: Mesh) -> None:
    stages, whole = root.slice(role=0).rename(each="pipe"), root.slice(role=1).rename(each="model")
    torch.manual_seed(0)
    source = Llama(**SIZES)
    pipe = pipeline(source, stages, microbatches=2, layouts={})
    target = model(whole, 1, torch.bfloat16)
    assert monarch.sync(pipe.model, target) == monarch.version(target) == 1
    wanted = values(source)
    assert all(torch.equal(value, wanted[name].to(torch.bfloat16)) for name, value in values(target).items())
    with torch.no_grad():
        target.head.weight.mul_(2)
    assert monarch.sync(target, pipe.model, version=7) == monarch.version(pipe.model) == 7
    wanted = values(target)
    assert all(torch.equal(value, wanted[name].to(torch.float32)) for name, value in values(source).items())
