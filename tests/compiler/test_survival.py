"""Which losses take all copies of a block, against every loss gone through."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.blocks import block_of
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.survival import Survival
from monarch.compiler.plan import MeshSpec, TensorType
from monarch.compiler.survival import LOSSES, Cluster, Fatal
from monarch.compiler.types import Layout
from tests.runtime.building import Building
from tests.sample import examples


def losses(mesh: MeshSpec, hosts: int | Sequence[int], kind: str) -> list[set[int]]:
    """The workers that each loss of a kind takes that leaves some."""
    everyone = range(mesh.workers)
    on = [rank * hosts // mesh.workers for rank in everyone] if isinstance(hosts, int) else hosts
    blocks = [{rank for rank in everyone if on[rank] == host} for host in dict.fromkeys(on)]
    workers = [{rank} for rank in everyone]
    match kind:
        case "1 worker":
            found = workers
        case "2 workers":
            found = [a | b for a, b in combinations(workers, 2)]
        case "1 host":
            found = blocks
        case "1 host, 1 worker":
            found = [host | worker for host in blocks for worker in workers if not worker & host]
        case _:
            found = [a | b for a, b in combinations(blocks, 2)]
    return [dead for dead in found if len(dead) < mesh.workers]


def takes(type: TensorType, mesh: MeshSpec, dead: set[int]) -> bool:
    """Whether all workers that hold some block are dead: blocks are told apart by what is in them."""
    tensor = torch.arange(type.numel, dtype=torch.int64).view(type.shape)
    blocks = [tuple(block_of(tensor, type, mesh, rank).flatten().tolist()) for rank in range(mesh.workers)]
    return set(blocks) != {block for rank, block in enumerate(blocks) if rank not in dead}


@st.composite
def clusters(draw: st.DrawFn) -> tuple[MeshSpec, int | list[int]]:
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=3))
    mesh = MeshSpec(tuple((name, size) for name, size in zip("abc", sizes, strict=False)))
    divisors = [number for number in range(1, mesh.workers + 1) if mesh.workers % number == 0]
    if draw(st.booleans()):  # a part of a mesh, with more workers on some hosts than on others
        return mesh, draw(st.lists(st.integers(0, 3), min_size=mesh.workers, max_size=mesh.workers))
    return mesh, draw(st.sampled_from(divisors))


@examples(8, 20)
@given(clusters(), st.data())
def test_what_symmetry_says_is_what_going_through_all_losses_says(
    cluster: tuple[MeshSpec, int | list[int]], data: st.DataObject
) -> None:
    mesh, hosts = cluster
    types = []
    for _ in range(2):
        over = data.draw(st.sets(st.sampled_from(mesh.names)))
        shards = tuple((name,) if name in over else () for name in mesh.names)
        types.append(TensorType(torch.int64, tuple(mesh.sizes.values()), Layout(shards)))
    found = Cluster(mesh, hosts)
    for kind, total in found.losses.items():
        every = losses(mesh, hosts, kind)
        assert total == len(every) > 0
        together = Fatal(total)
        for type_ in types:
            fatal = found.fatal(type_)[kind]
            together |= fatal
            assert fatal.count == sum(takes(type_, mesh, dead) for dead in every), (kind, str(type_))
        assert together.count == sum(any(takes(type_, mesh, dead) for type_ in types) for dead in every)


def test_large_clusters_are_not_gone_through() -> None:
    mesh = MeshSpec.of(data=1 << 20, fsdp=64, model=8)
    cluster = Cluster(mesh, mesh.workers // 8)
    weights = TensorType(torch.float32, (512, 512), Layout((("fsdp",), ("model",))))
    assert [fatal.count for fatal in cluster.fatal(weights).values()] == [0] * len(LOSSES)
    slices = TensorType(torch.float32, (1 << 20, 512), Layout((("data",), ("fsdp",))))
    found = cluster.fatal(slices)
    assert str(found["1 worker"]) == "none" and str(found["1 host"]) == "all"


def test_the_table() -> None:
    mesh = MeshSpec.of(data=2, model=2)
    build = Building(mesh, "step")
    for name, shards in {"w": ((), ("model",)), "moment": (("data",), ("model",)), "scale": ((), ())}.items():
        type_ = TensorType(torch.float32, (4, 4), Layout(shards))
        build.output(build.input(type_, "state", name, donate=True), type_, "state", name)
    plan = build.plan()
    assert str(Survival(plan, 2)).splitlines() == [
        "step on mesh<data=2, model=2>: 4 workers on 2 hosts; state: 3 tensors, 112 B a worker",
        "  loss              fatal  takes a block of",
        "  1 worker          all    1 tensor, 16 B a worker",
        "  2 workers         all    2 tensors, 48 B a worker",
        "  1 host            all    1 tensor, 16 B a worker",
        "  1 host, 1 worker  all    2 tensors, 48 B a worker",
        "lost with 2 workers (2 of 6, along data); 1 host, 1 worker (all): 1 tensor, 32 B a worker",
        "  w: f32[4, 4@model], 32 B a worker",
        "lost with 1 worker (all); 2 workers (all); 1 host (all); 1 host, 1 worker (all): 1 tensor, 16 B a worker",
        "  moment: f32[4@data, 4@model], 16 B a worker",
    ]
    assert Survival(plan).data()["losses"]["2 workers"] == {"of": 6, "fatal": 6, "tensors": ["w", "moment"]}
    with pytest.raises(MonarchError, match="cannot be divided evenly over 3 hosts"):
        Survival(plan, 3)
