"""Parts of a mesh run what meshes run: random programs on random parts, and each way in which users put work there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.compiler.blocks import whole_of
from monarch.compiler.errors import DeviceMeshError, LayoutError, MonarchError, ProgramError
from monarch.compiler.execution.executor import Executor
from monarch.compiler.execution.factories import executor_for
from monarch.compiler.mesh import NDSlice, Shape
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import MeshSpec
from monarch.distributed import Mesh
from tests.compiler.programs import Program, programs
from tests.sample import examples

pytestmark = pytest.mark.sample(1, of="kernels")

WORKERS = 6


@pytest.fixture(scope="module")
def root() -> Iterator[Executor]:
    executor = executor_for(MeshSpec.of(w=WORKERS))
    yield executor
    executor.close()


@st.composite
def parts(draw: st.DrawFn, mesh: MeshSpec) -> Shape:
    """Workers of the root for a mesh, at any strides that fit, in any order of its dims."""
    sizes, strides, reach = [size for _, size in mesh.dims], [1] * len(mesh.dims), 1
    order = draw(st.permutations(range(len(sizes))))
    left = mesh.workers
    for dim in order:
        left //= sizes[dim]
        most = (WORKERS - 1) // max(1, left * (sizes[dim] - 1) or 1)
        strides[dim] = draw(st.integers(reach, max(reach, most // max(1, left)))) if sizes[dim] > 1 else reach
        reach += strides[dim] * (sizes[dim] - 1)
    offset = draw(st.integers(0, max(0, WORKERS - reach)))
    return Shape(mesh.names, NDSlice(offset=offset, sizes=sizes, strides=strides))


@examples(8, 20)
@given(data=st.data())
def test_random_programs_on_random_parts(root: Executor, data: st.DataObject) -> None:
    """Several, all given before any result is read."""
    chosen = data.draw(st.lists(programs(max_ops=8, max_workers=4), min_size=2, max_size=4))
    running: list[tuple[Program, Any, Executor, Any]] = []
    for program in chosen:
        shape = data.draw(parts(program.graph.mesh))
        if max(shape.ranks()) >= WORKERS:
            continue
        part = root.over(shape)
        plan = compile_graph(program.graph)
        arguments = [part.put(program.values[spec.label], spec.type) for spec in plan.inputs]
        running.append((program, plan, part, part.run(plan, arguments)))
    for program, plan, part, outputs in running:
        expected = {("return", i): value for i, value in enumerate(program.returns)}
        dense = {node.name: value for node, value in program.made}
        expected |= {("state", label): dense[node.name] for label, node in program.graph.updates.items()}
        for spec, handle in zip(plan.outputs, outputs, strict=True):
            got = whole_of(part.shards(handle), spec.type, part.mesh)
            torch.testing.assert_close(got, expected[spec.kind, spec.label], equal_nan=True)


# -- as users write it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, model=2) as mesh:
        yield mesh


def of(mesh: Mesh) -> dict[str, Mesh]:
    return {
        "slice": mesh.slice(data=1),
        "along": mesh["data"],
        "one": mesh.slice(data=1, model=1),
        "renamed": mesh.rename(data="dp", model="tp"),
        "flat": mesh.flatten("all"),
        "split": mesh["data"].split(data=("outer", "inner"), outer=2),
    }


KINDS = ["slice", "along", "one", "renamed", "flat", "split"]


def first_sharded(mesh: Mesh, ndim: int) -> list[Any]:
    return [mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None, *[None] * (ndim - 1)]


def trained(place: Any, model: nn.Module) -> list[torch.Tensor]:
    """Losses and parameters of a few steps, on a mesh or (None) dense."""
    torch.manual_seed(1)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    if place is not None:
        monarch.module_to_mesh(model, place, {"0.weight": first_sharded(place, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step if place is None else monarch.program(step, mesh=place)
    losses = [
        run(*(x if place is None else monarch.distribute(x, place, first_sharded(place, 2)) for x in batch))
        for batch in batches
    ]
    values = [*losses, *(parameter.detach() for parameter in model.parameters())]
    return [value if place is None else value.full_tensor() for value in values]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_trains_as_one_process_does(mesh: Mesh, kind: str) -> None:
    for ours, theirs in zip(trained(of(mesh)[kind], model()), trained(None, model()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ops_outside_of_programs_and_per_worker_code(mesh: Mesh, kind: str) -> None:
    part = of(mesh)[kind]
    x = torch.arange(24.0).view(4, 6)
    placed = monarch.distribute(x, part, first_sharded(part, 2))
    y = placed @ placed.T + 1
    assert placed.mesh is part and y.mesh is part
    torch.testing.assert_close(y.full_tensor(), x @ x.T + 1)
    assert float(y.sum()) == float((x @ x.T + 1).sum())
    assert part.execute(lambda x: x.relu().sum(), x - 5).item() == float((x - 5).relu().sum())
    for dim in part.mesh_dim_names:
        with part.activate():
            rank = part.rank(dim) * torch.ones(2)
            mean = monarch.reduce(rank, dim, "avg")
        assert mean.full_tensor().tolist() == [(part.size(dim) - 1) / 2] * 2
        for at in range(part.size(dim)):
            assert monarch.fetch_shard(rank, **{dim: at}).result().tolist() == [at] * 2
    assert str(placed).startswith("DistributedTensor(") or "tensor" in str(placed)


def test_draws_on_a_part_are_those_of_a_mesh_of_its_shape(mesh: Mesh) -> None:
    @monarch.program
    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(4, 6)

    def drawn(part: Mesh) -> list[torch.Tensor]:
        monarch.manual_seed(3)
        x = monarch.distribute(torch.zeros(4, 6), part, "[@model, -]")
        eager = torch.rand_like(x)
        with part.activate():
            own = torch.rand(3)
        return [draw(x).full_tensor(), eager.full_tensor(), *(own.to_local(model=at) for at in range(2))]

    with Mesh(model=2) as apart:
        expected = drawn(apart)
    for part in (mesh.slice(data=1), mesh.rename(model="x", data="model")["model"]):
        assert all(torch.equal(a, b) for a, b in zip(drawn(part), expected, strict=True))


def test_two_halves_train_from_two_threads(mesh: Mesh) -> None:
    expected = trained(None, model())
    found: dict[int, list[torch.Tensor]] = {}
    models = [model(), model()]
    halves = [monarch.module_to_mesh(each, mesh.slice(data=at)) for at, each in enumerate(models)]
    programs: list[Any] = []
    for half in halves:
        optimizer = torch.optim.AdamW(half.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, model: nn.Module = half, optimizer: Any = optimizer) -> torch.Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        programs.append(monarch.program(step))
    torch.manual_seed(1)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    losses = [[program(*batch) for program in programs] for batch in batches[:2]]

    def work(at: int) -> None:
        last = programs[at](*batches[2])
        values = [*(row[at] for row in losses), last, *(each.detach() for each in halves[at].parameters())]
        found[at] = [value.full_tensor() for value in values]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(2):
        for ours, theirs in zip(found[at], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_failure_on_a_part_leaves_the_state_of_others(mesh: Mesh) -> None:
    first, second = mesh.slice(data=0), mesh.slice(data=1)
    totals = [monarch.distribute(torch.zeros(4), part, "[@model]") for part in (first, second)]

    def adding(at: int) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            if not x.isfinite().all():
                raise ValueError("not finite")
            totals[at] = totals[at] + x
            return totals[at].sum()

        return monarch.program(step, mesh=totals[at].mesh)

    steps = [adding(0), adding(1)]
    good, bad = torch.ones(4), torch.full((4,), float("nan"))
    for step in steps:
        step(good)
    with pytest.raises(DeviceMeshError, match="part of mesh<data=2, model=2>"):
        steps[0](bad).item()
    assert steps[1](good).item() == 8 and steps[0](good).item() == 8
    assert [total.full_tensor().tolist() for total in totals] == [[2.0] * 4] * 2


def test_values_of_two_parts_do_not_mix(mesh: Mesh) -> None:
    x, y = (monarch.distribute(torch.ones(4), mesh.slice(data=at)) for at in range(2))
    with pytest.raises((ProgramError, LayoutError), match="mesh"):
        x + y
    moved = monarch.distribute(x, y.mesh, "[@model]")
    assert (moved + y).full_tensor().tolist() == [2.0] * 4


def test_a_part_says_what_it_is_and_is_not_closed(mesh: Mesh) -> None:
    part = mesh.slice(data=1)
    assert repr(part) == "Mesh(model=2, workers=[2, 3] of 4)" and part is mesh.slice(data=1)
    assert mesh["data", "model"] is mesh and part.rename(model="m").rename(m="model") is part
    for end in (part.close, part.__enter__):
        with pytest.raises(MonarchError, match=r"Mesh\(model=2, workers=\[2, 3\] of 4\) cannot be closed"):
            end()
    assert not mesh.is_closed
    with Mesh(w=2).split(w=("a", "b"), a=2) as split:
        assert monarch.distribute(torch.ones(2), split, "[@a]").sum().item() == 2
    assert split.is_closed


def test_profile_and_survival_of_a_part(mesh: Mesh) -> None:
    part = mesh.slice(model=1)
    w = monarch.distribute(torch.zeros(4), part, "[@data]")

    @monarch.program
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal w
        w = w + x
        return w.sum()

    with monarch.profile(mesh=part) as profile:
        assert step(torch.ones(4)).item() == 4
    assert {each.worker for each in profile.trace.steps} == {1, 3}
    assert "step on mesh<data=2>: 2 workers" in str(step.survives(torch.ones(4)))


def test_a_checkpoint_of_a_part_is_read_on_another(mesh: Mesh, tmp_path: Path) -> None:
    value = torch.arange(12.0).view(6, 2)
    source = {"w": monarch.distribute(value, mesh["data"], "[@data, -]")}
    monarch.save(source, tmp_path / "one").result()
    target = {"w": monarch.distribute(torch.zeros(6, 2), mesh.slice(data=1), "[-, @model]")}
    monarch.load(tmp_path / "one", into=target)
    assert torch.equal(target["w"].full_tensor(), value)
    assert target["w"].mesh is mesh.slice(data=1)


def test_parts_of_a_mesh_in_processes_of_actors() -> None:
    procs = this_host().spawn_procs({"host": 2, "gpu": 2})
    with Mesh(procs=procs) as root:
        services = procs.spawn("services", Service)
        part, half = root.slice(host=1), procs.slice(host=1)
        x = monarch.distribute(torch.arange(4.0), part, "[@gpu]")
        assert services.slice(host=1).total.call(x * 2).get().values() == [2.0, 10.0]
        shards = services.slice(host=1).ones.shards()
        ones = part.from_shards(shards, "[@gpu]")
        assert (ones + x).full_tensor().tolist() == [1.0, 2.0, 3.0, 4.0]
        assert half.sizes == {"gpu": 2}
        with pytest.raises(MonarchError, match="are in processes that mesh<gpu=2> does not run on"):
            services.total.call(x)


class Service(Actor):
    @endpoint
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())

    @endpoint
    def ones(self) -> torch.Tensor:
        return torch.ones(2)
