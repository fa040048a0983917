"""A plan runs on what it was compiled for. A GPU's plans run here with a stand-in for the device, which is the CPU, and
for its driver, which interprets the kernels: what commands do with such plans, not what a GPU does."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch import DeviceMeshError, MonarchError
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import MeshSpec, PlanError
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph
from monarch.distributed import Mesh
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.processes import parent as processes
from monarch.runtime.processes import workers
from monarch.runtime.worker.device import gpu
from tests.compiler.kernels.triton.standin import stand_in

TEXT = """graph @double on mesh<data=2> {
  %x = input 0 : f32[4@data]
  %y = aten.add.Tensor(%x, %x) : f32[4]
  return %y
}"""


def test_a_plan_for_a_gpu_where_there_is_none() -> None:
    graph = parse_graph(TEXT)
    with MeshExecutor(MeshSpec.of(data=2)) as executor:
        (handle,) = executor.run(compile_graph(graph, CompileOptions(target="gfx942")), [torch.ones(4)])
        with pytest.raises(
            DeviceMeshError, match="'double' is compiled for gfx942, and torch finds no GPU here"
        ) as found:
            executor.shards(handle)
        assert "compile it for CPUs" in str(found.value) and "raceback" not in str(found.value)
        (handle,) = executor.run(compile_graph(graph, report=True), [torch.ones(4)])
        assert torch.equal(executor.shards(handle)[0], torch.full((2,), 2.0))


def test_a_plan_for_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_graph(parse_graph(TEXT), CompileOptions(target="cuda:90", kernels="off"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0) if number == 1 else (8, 0))
    assert [gpu.device_for(plan, worker) for worker in (1, 3)] == [torch.device("cuda", 1)] * 2
    with pytest.raises(PlanError, match="'double' is compiled for cuda:90, and GPU 0 here is cuda:80"):
        gpu.device_for(plan, 4)


def test_an_unknown_target() -> None:
    with pytest.raises(MonarchError, match="unknown target 'cuda:91'"):
        monarch.program(lambda x: x, target="cuda:91")
    with pytest.raises(MonarchError, match="unknown target '90'"):
        monarch.program(lambda x: x, target=90)  # type: ignore[call-overload]
    with pytest.raises(MonarchError, match="unknown collectives 'True'"):
        monarch.program(lambda x: x, collectives=True)  # type: ignore[call-overload]


def test_with_a_gpus_driver_loaded_workers_are_not_forked(tmp_path: Path) -> None:
    assert processes.can_fork()
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        assert not processes.can_fork()
    assert processes.can_fork()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False")
def test_training_on_a_gpu() -> None:
    target = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    with Mesh(data=2) as mesh:
        losses = train(target, mesh)
        torch.testing.assert_close(losses, train("cpu", mesh), rtol=1e-3, atol=1e-4)


# -- with a stand-in ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Workers, forked within the test, that take the CPU for a GPU."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    stand_in(monkeypatch)
    monkeypatch.setattr(gpu, "device_for", lambda plan, worker: torch.device("cpu"))
    warm = processes.WarmParent()
    monkeypatch.setattr(workers, "warm_parent", lambda: warm)
    yield
    warm.close()


def train(target: str, mesh: Mesh) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    model = monarch.module_to_mesh(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    @monarch.program(target=target)
    def step(x: "f32[8@data, 8]", labels: "i64[8@data]"):  # type: ignore[no-untyped-def]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
    return [step(x, labels).item() for _ in range(4)]


@pytest.mark.full
def test_training_with_generated_kernels_and_collectives(gpus: None) -> None:
    with Mesh(data=2) as mesh:
        losses = train("cuda:90", mesh)
    with Mesh(data=2) as mesh:
        torch.testing.assert_close(losses, train("cpu", mesh), rtol=1e-4, atol=1e-5)
    assert losses[-1] < losses[0]


def test_an_index_out_of_range_fails_the_step_and_no_other(gpus: None) -> None:
    with Mesh(data=2) as mesh:
        table = monarch.distribute(torch.arange(12.0).view(6, 2), mesh)

        @monarch.program(target="cuda:90")
        def look_up(rows: "i64[4@data]"):  # type: ignore[no-untyped-def]
            return F.embedding(rows, table) * 2

        with pytest.raises(DeviceMeshError, match="an index is out of range: there are 6 rows"):
            look_up(torch.tensor([0, 1, 2, 6])).full_tensor()
        assert look_up(torch.tensor([0, 1, 2, 5])).full_tensor()[3].tolist() == [20.0, 22.0]


def test_what_was_to_be_replaced_stays_where_the_step_fails(gpus: None) -> None:
    with Mesh(data=2) as mesh:
        total = monarch.distribute(torch.zeros(2), mesh)
        table = monarch.distribute(torch.ones(6, 2), mesh)

        @monarch.program(target="cuda:90")
        def add(rows: "i64[2@data]"):  # type: ignore[no-untyped-def]
            total.add_((F.embedding(rows, table) * 3).sum(0))

        add(torch.tensor([0, 1]))
        with pytest.raises(DeviceMeshError, match="out of range"):
            add(torch.tensor([0, 7])), total.full_tensor()
        assert total.full_tensor().tolist() == [6.0, 6.0]


def test_a_plan_for_nccl_where_there_is_no_gpu() -> None:
    graph = parse_graph(TEXT)
    with MeshExecutor(MeshSpec.of(data=2)) as executor:
        (handle,) = executor.run(
            compile_graph(graph, CompileOptions(target="gfx942", collectives="nccl")), [torch.ones(4)]
        )
        with pytest.raises(DeviceMeshError, match="'double' is compiled for gfx942, and torch finds no GPU here"):
            executor.shards(handle)
