"""Every collective on real workers against plain torch on the blocks that they hold."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.compiler.blocks import REDUCE
from monarch.compiler.execution.executor import Executor
from monarch.compiler.plan import DTYPES, MeshSpec
from tests.runtime.building import op_on_each
from tests.runtime.collectives.loopback import WAYS, executor_on
from tests.sample import is_full

pytestmark = pytest.mark.sample(1, of="start")

MESHES = {
    "1": MeshSpec.of(w=1),
    "2": MeshSpec.of(w=2),
    "3": MeshSpec.of(w=3),
    "2x2": MeshSpec.of(a=2, b=2),
    "2x3": MeshSpec.of(a=2, b=3),
    "8": MeshSpec.of(w=8),
    "2x2x2": MeshSpec.of(a=2, b=2, c=2),
}
SMALL, LARGE = (5, 6), (700, 1031)  # below and above what goes through a window at once


@pytest.fixture(scope="module", params=WAYS)
def start(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Gives the executor of a mesh, one for all tests of this module."""
    started: dict[str, Executor] = {}
    with ExitStack() as stack:

        def get(name: str) -> Executor:
            if name not in started:
                started[name] = stack.enter_context(executor_on(request.param, MESHES[name]))
            return started[name]

        yield get


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 7, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def blocks(
    mesh: MeshSpec, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[list[torch.Tensor]]:
    return [[values(shape, dtype, 1000 * i + rank) for rank in range(mesh.workers)] for i, shape in enumerate(shapes)]


def expected(mesh: MeshSpec, op: str, tensors: list[list[torch.Tensor]], dims: list[str], *args: Any) -> Any:
    """For each tensor what each worker should hold, from the definition of the collective."""
    outs: list[list[torch.Tensor]] = []
    for i, per_worker in enumerate(tensors):
        out = []
        for rank in range(mesh.workers):
            ranks = mesh.group(rank, dims)
            me = ranks.index(rank)
            group = [per_worker[peer] for peer in ranks]
            if op == "all_reduce":
                out.append(functools.reduce(REDUCE[args[0]], group))
            elif op == "all_gather":
                out.append(torch.cat(group, args[0][i]))
            elif op == "reduce_scatter":
                total = functools.reduce(REDUCE[args[1]], group)
                out.append(total.chunk(len(ranks), args[0][i])[me])
            elif op == "all_to_all":
                source, target = args[0][i], args[1][i]
                out.append(torch.cat([block.chunk(len(ranks), target)[me] for block in group], source))
            elif op == "broadcast":
                out.append(group[args[0]])
            else:
                sources = [source for source, target in args[0] if target == me]
                out.append(group[sources[0]] if sources else torch.zeros_like(group[me]))
        outs.append(out)
    return outs


def run_and_compare(
    executor: Executor, op: str, tensors: list[list[torch.Tensor]], dims: list[str], *args: Any
) -> None:
    mesh = executor.mesh
    plan, inputs = op_on_each(mesh, op, tensors, dims, *args)
    handles = executor.run(plan, inputs)
    want = expected(mesh, op, tensors, dims, *args)
    for i, handle in enumerate(handles):
        for rank, got in enumerate(executor.shards(handle)):
            assert got.dtype == want[i][rank].dtype
            assert torch.equal(got, want[i][rank]), f"{op} {dims}: tensor {i} on worker {rank}"


def groups_of(mesh: MeshSpec) -> list[list[str]]:
    """All lists of mesh dims, in every order."""
    return [list(dims) for count in range(1, len(mesh.names) + 1) for dims in itertools.permutations(mesh.names, count)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_all_collectives_over_all_groups(start: Any, name: str, shape: tuple[int, int]) -> None:
    executor = start(name)
    mesh = executor.mesh
    groups = groups_of(mesh)
    if shape == LARGE and len(groups) > 3:
        groups = [groups[0], groups[-1]]
    for dims in groups:
        size = len(mesh.group(0, dims))
        rows, columns = shape
        divisible = (rows * size if shape == SMALL else rows // size * size, columns)
        tensors = blocks(mesh, [shape])
        run_and_compare(executor, "all_reduce", tensors, dims, "sum")
        run_and_compare(executor, "all_gather", tensors, dims, [1])
        run_and_compare(executor, "broadcast", tensors, dims, size - 1)
        ring = [(j, (j + 1) % size) for j in range(size)]
        run_and_compare(executor, "permute", tensors, dims, ring)
        run_and_compare(executor, "permute", tensors, dims, ring[:-1])
        run_and_compare(executor, "reduce_scatter", blocks(mesh, [divisible]), dims, [0], "sum")
        run_and_compare(executor, "all_to_all", blocks(mesh, [divisible]), dims, [1], [0])


REDUCTIONS = {
    f"{reduction}-{name}": (dtype, reduction)
    for reduction in REDUCE
    for name, dtype in DTYPES.items()
    if not dtype.is_complex or reduction in ("sum", "prod")  # complex numbers have no order
}


@pytest.mark.sample()
@pytest.mark.parametrize(("dtype", "reduction"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions_in_every_dtype(start: Any, dtype: torch.dtype, reduction: str) -> None:
    for name in ("2", "2x3"):
        executor = start(name)
        for shape in ((3, 4), (1, 60_000)):
            tensors = blocks(executor.mesh, [shape], dtype)
            run_and_compare(executor, "all_reduce", tensors, list(executor.mesh.names), reduction)


def test_a_list_goes_as_one_whatever_is_in_it(start: Any) -> None:
    for name in ("2", "2x2", "8"):
        executor = start(name)
        mesh = executor.mesh
        dims = list(mesh.names)
        k = mesh.workers
        shapes = [(3,), (), (0, 4), (k, 700, 300), (1, 1), (k * 2, 3)]
        mixed = [
            [values(shape, dtype, 10 * i + rank) for rank in range(k)]
            for i, (shape, dtype) in enumerate(zip(shapes, [*DTYPES.values()][:6], strict=False))
        ]
        run_and_compare(executor, "all_reduce", mixed, dims, "max")
        run_and_compare(executor, "broadcast", mixed, dims, 1)
        run_and_compare(executor, "permute", mixed, dims, [(0, 1), (1, 0)])
        shaped = [mixed[0], mixed[2], mixed[3], mixed[4]]
        run_and_compare(executor, "all_gather", shaped, dims, [0, 1, 2, 0])
        even = [mixed[3], mixed[5], blocks(mesh, [(0, k)])[0]]
        run_and_compare(executor, "reduce_scatter", even, dims, [0, 0, 1], "sum")
        run_and_compare(executor, "all_to_all", even, dims, [1, 1, 0], [0, 0, 1])


@settings(max_examples=25 if is_full() else 5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_dtype_and_dims(start: Any, data: st.DataObject) -> None:
    executor = start(data.draw(st.sampled_from(["2", "3", "2x2", "2x3"])))
    mesh = executor.mesh
    dims = data.draw(st.sampled_from(groups_of(mesh)))
    size = len(mesh.group(0, dims))
    op = data.draw(
        st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"])
    )
    reduction = data.draw(st.sampled_from([*REDUCE])) if op == "all_reduce" else "sum"
    tensors, first, second = [], [], []
    for i in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=4))
        along, across = data.draw(st.permutations(range(len(shape))))[:2]
        first.append(along)
        second.append(across)
        if op in ("reduce_scatter", "all_to_all"):
            shape[along] *= size
        if data.draw(st.booleans()):  # now and then more than a window takes
            shape[across] *= 800
        dtype = data.draw(st.sampled_from([dtype for dtype, each in REDUCTIONS.values() if each == reduction]))
        tensors.append([values(tuple(shape), dtype, 7 * i + rank) for rank in range(mesh.workers)])
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": (reduction,),
        "all_gather": (first,),
        "reduce_scatter": (first, "sum"),
        "all_to_all": (second, first),
        "broadcast": (data.draw(st.integers(0, size - 1)),),
        "permute": ([*enumerate(data.draw(st.permutations(range(size))))],),
    }
    run_and_compare(executor, op, tensors, dims, *arguments[op])


def test_inputs_need_not_be_contiguous(start: Any) -> None:
    from tests.runtime.building import Building, each, stacked, whole

    executor = start("2")
    mesh = executor.mesh
    for shape in ((8, 6), (900, 1200)):
        for op, args in (
            ("all_reduce", ("sum",)),
            ("all_gather", ([0],)),
            ("reduce_scatter", ([0], "sum")),
            ("all_to_all", ([1], [0])),
            ("broadcast", (1,)),
            ("permute", ([(0, 1), (1, 0)],)),
        ):
            tensors = blocks(mesh, [shape])
            build = Building(mesh)
            slot = build.input(each(mesh, (2, *shape)))
            local = build.call("aten.t.default", build.call("aten.select.int", slot, 0, 0))
            build.output(build.call("getitem", build.call(op, [local], ["w"], *args), 0), whole(()))
            (handle,) = executor.run(build.plan(), [stacked(tensors[0])])
            want = expected(mesh, op, [[tensor.t() for tensor in tensors[0]]], ["w"], *args)
            for rank, got in enumerate(executor.shards(handle)):
                assert torch.equal(got, want[0][rank]), op


def test_the_same_bits_on_every_worker_and_every_time(start: Any) -> None:
    executor = start("8")
    mesh = executor.mesh
    tensors = blocks(mesh, [(123_457,)])
    plan, inputs = op_on_each(mesh, "all_reduce", tensors, ["w"], "sum")
    runs = [executor.shards(executor.run(plan, inputs)[0]) for _ in range(5)]
    for shards in runs:
        for shard in shards:
            assert torch.equal(shard, runs[0][0])


def test_groups_that_take_turns_do_not_overwrite_what_others_read(start: Any) -> None:
    """Collectives over one dim, then the other, then both, without a pause: areas are used again as soon as can be."""
    from tests.runtime.building import Building, each, whole

    executor = start("2x3")
    mesh = executor.mesh
    build = Building(mesh)
    x = build.input(each(mesh, (6, 50_000)))
    for at in range(60):
        dims = [["a"], ["b"], ["b", "a"]][at % 3]
        scale = 1 / len(mesh.group(0, dims))
        if at % 4 == 3:
            moved = build.call("getitem", build.call("permute", [x], dims, [(0, 1), (1, 0)]), 0)
            x = build.call("aten.add.Tensor", x, moved)
        total = build.call("getitem", build.call("all_reduce", [x], dims, "sum"), 0)
        x = build.call("aten.mul.Tensor", total, scale)
    build.output(x, whole(()))
    start_value = torch.randn(6, 50_000)
    (handle,) = executor.run(build.plan(), [start_value])
    state = [start_value[rank : rank + 1] for rank in range(6)]
    for at in range(60):
        dims = [["a"], ["b"], ["b", "a"]][at % 3]
        scale = 1 / len(mesh.group(0, dims))
        if at % 4 == 3:
            (moved,) = expected(mesh, "permute", [state], dims, [(0, 1), (1, 0)])
            state = [mine + other for mine, other in zip(state, moved, strict=True)]
        (total,) = expected(mesh, "all_reduce", [state], dims, "sum")
        state = [value * scale for value in total]
    for got, want in zip(executor.shards(handle), state, strict=True):
        assert torch.equal(got, want)


def test_a_dim_without_equal_blocks_is_refused(start: Any) -> None:
    from monarch.compiler.plan import DeviceMeshError

    executor = start("2")
    plan, inputs = op_on_each(executor.mesh, "reduce_scatter", blocks(executor.mesh, [(3, 2)]), ["w"], [0], "sum")
    (handle,) = executor.run(plan, inputs)
    with pytest.raises(DeviceMeshError, match=r"dim 0 of a tensor of shape \[3, 2\] has no 2 equal blocks"):
        executor.wait(handle)
