from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch

import monarch
from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.types import MeshSpec
from monarch.language import Mesh
from tests.language.dense import DenseExecutor


def test_dims_by_shape_or_by_keyword() -> None:
    first = Mesh(shape=(4, 2), mesh_dim_names=("data_parallel", "model_parallel"))
    second = Mesh(data_parallel=4, model_parallel=2)
    assert first.spec == second.spec
    assert (first.size(), first.ndim, first.shape) == (8, 2, (4, 2))
    assert first.size("data_parallel") == first.size(0) == 4
    assert first.mesh_dim_names == ("data_parallel", "model_parallel")
    assert repr(first) == "Mesh(data_parallel=4, model_parallel=2)"
    assert first.coordinates()[3] == {"data_parallel": 1, "model_parallel": 1}


def test_a_mesh_starts_no_workers() -> None:
    mesh = Mesh(data=10**6)  # would be more than any machine has
    assert mesh.size() == 10**6
    mesh.close()
    with pytest.raises(MonarchError, match="the mesh is closed"):
        mesh.executor  # noqa: B018


def test_slices_name_workers_of_the_whole() -> None:
    mesh = Mesh(data=4, model=2)
    assert repr(mesh.slice(data=1)) == "Mesh(model=2, workers=[2, 3] of 8)"
    assert repr(mesh.slice(data=slice(0, 2), model=1)) == "Mesh(data=2, workers=[1, 3] of 8)"
    assert repr(mesh["data"]) == "Mesh(data=4, workers=[0, 2, 4, 6] of 8)"
    assert repr(mesh["data"].slice(data=-1)) == "Mesh(workers=[6] of 8)"
    assert mesh["data", "model"].spec == mesh.spec
    assert mesh["data"] is mesh.slice(model=0) and mesh["data"] is not mesh["data", "model"]


def test_other_dims_on_the_same_workers() -> None:
    mesh = Mesh(host=4, gpu=2)
    assert mesh.rename(host="data").mesh_dim_names == ("data", "gpu")
    assert mesh.split(host=("dp", "pp"), pp=2).spec == Mesh(dp=2, pp=2, gpu=2).spec
    assert mesh.split(host=("dp", "pp"), dp=4, pp=1).shape == (4, 1, 2)
    assert mesh.flatten("all").spec == Mesh(all=8).spec
    assert mesh.flatten("all").slice(all=3).to_table() == mesh.slice(host=1, gpu=1).to_table()


def test_the_table() -> None:
    assert Mesh(data=2, model=3).to_table().splitlines() == [
        "data  model=0  model=1  model=2",
        "-------------------------------",
        "   0        0        1        2",
        "   1        3        4        5",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(data=0), "mesh dim 'data' has size 0"),
        (lambda: Mesh(shape=(2, 2), mesh_dim_names=("a", "a")), "mesh dim 'a' stands twice"),
        (lambda: Mesh(shape=(2, 2), mesh_dim_names=("a",)), "has 2 dims, and mesh_dim_names has 1"),
        (lambda: Mesh(shape=(2,), mesh_dim_names="ab"), "not 'ab'\n  one name has a comma behind it: mesh_dim_names=("),
        (lambda: Mesh(shape=(2,), mesh_dim_names=("a b",)), "a mesh dim cannot be named 'a b'"),
        (lambda: Mesh(2, 2), "not 2\n  each dim has a name: Mesh(data=4, model=2)"),
        (lambda: Mesh("data"), "shape is a sequence of sizes, not 'data'"),
        (lambda: Mesh({"data": 2}), "shape is a sequence of sizes, not {'data': 2}"),
        (lambda: Mesh(shape=(2,), data=2), "by shape and mesh_dim_names or by keyword, not both"),
        (
            lambda: Mesh(data=2, hosts="a:1"),
            "`hosts` says on which hosts the workers run\n  pass the result of monarch",
        ),
        (lambda: Mesh(data=2)[0], "indexed by the names of dims\n  the parts along a dim: mesh['data']"),
        (lambda: Mesh(data=2)["model"], "unknown mesh dim 'model'"),
        (lambda: Mesh(data=2).slice(dta=0), "unknown mesh dim 'dta'\n  did you mean data? the mesh is"),
        (lambda: Mesh(data=2, device="cuda"), "has size 'cuda'\n  a program names its device: @monarch.program(target"),
        (lambda: Mesh(data=2, procs="all"), "procs=all: `procs` says in which processes the workers run"),
        (lambda: Mesh(data=2, host="a"), "did you mean hosts=? It says where the workers run"),
        (lambda: Mesh(data=2).slice(data=2), "position 2 is outside 'data', which has size 2"),
        (lambda: Mesh(data=2).slice(data=slice(2, 2)), "along 'data', of size 2, holds no place"),
        (lambda: Mesh(data=6).split(data=("a", "b"), a=4), "cannot split 'data', of size 6, into (a, b) with a=4"),
        (lambda: Mesh(data=6).split(data=("a", "b")), "with no sizes"),
        (lambda: Mesh(data=2, model=2).rename(data="model"), "mesh dim 'model' stands twice"),
    ],
)
def test_meshes_that_cannot_be(make: object, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        make()  # type: ignore[operator]
    assert message in str(error.value)


def test_a_function_runs_as_a_program_of_a_mesh() -> None:
    mesh, other = Mesh(data=2), Mesh(data=4)
    batch, factor = torch.arange(4.0), 3
    for _ in range(3):  # a new lambda each time, which is traced once
        assert torch.equal(mesh.execute(lambda x: x * 2, batch).full_tensor(), 2 * batch)
    assert len(mesh._programs) == 1
    placed = monarch.distribute(batch, mesh, "[@data]")
    for factor in (3, 4):
        doubled, told = mesh.execute(lambda x, y: (x * factor + y, "told"), placed, y=batch)  # noqa: B023
        assert torch.equal(doubled.full_tensor(), factor * batch + batch) and told == "told"
    assert other.execute(lambda x: x * 2, batch).mesh is other
    with pytest.raises(MonarchError, match="two meshes that were made apart"):
        other.execute(lambda x: x * 2 + placed, batch)


def test_threads_that_use_a_mesh_first_start_its_workers_once() -> None:
    """The factory waits for a second thread to come while it starts: none does."""
    both = threading.Barrier(2)
    started: list[DenseExecutor] = []

    def start(mesh: MeshSpec) -> DenseExecutor:
        with suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.2)
        started.append(DenseExecutor(mesh))
        return started[-1]

    with executors_by(start), Mesh(data=2) as mesh:
        found: list[object] = []
        threads = [threading.Thread(target=lambda: found.append(mesh.executor)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [started[0]] * 2
