"""Machines to ask about: their files, how collectives spread over their links, and what that takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.cost.cluster import Cluster, Level, cluster_of, load_cluster, shipped
from monarch.compiler.cost.link import Link
from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.errors import MonarchError
from monarch.compiler.types import MeshSpec

TWO = """
target = "cuda:90"
memory = "80GB"
[[links]]
within = "a host"
workers = 8
bandwidth = 100e9
latency = 1e-6
[[links]]
within = "the cluster"
bandwidth = 10e9
latency = 5e-6
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> Cluster:
    return load_cluster(written(tmp_path, TWO))


def test_those_that_ship_have_sources_and_links() -> None:
    assert len(shipped()) >= 12
    for name in shipped():
        cluster = load_cluster(name)
        assert cluster.sources and cluster.description and cluster.target in MACHINES
        assert cluster.target == "cpu" or cluster.memory
        inner = [level.link.bandwidth for level in cluster.levels]
        assert inner == sorted(inner, reverse=True) and cluster.levels[-1].workers is None


@pytest.mark.parametrize(
    ("dims", "over", "fans"),
    [
        ({"data": 16, "model": 8}, ("model",), (8, 1)),
        ({"data": 16, "model": 8}, ("data",), (1, 16)),
        ({"data": 16, "model": 8}, ("data", "model"), (8, 16)),
        ({"data": 4, "model": 4}, ("data",), (2, 2)),
        ({"data": 2, "model": 16}, ("model",), (8, 2)),
        ({"data": 2}, ("data",), (2, 1)),
    ],
)
def test_how_a_collective_spreads(
    two: Cluster, dims: dict[str, int], over: tuple[str, ...], fans: tuple[int, ...]
) -> None:
    assert two.fans(MeshSpec.of(**dims), over) == fans


def test_what_collectives_take_is_the_sum_over_the_levels(two: Cluster) -> None:
    bytes_ = 8e9
    assert two.collective_seconds("all_reduce", bytes_, (8, 1)) == pytest.approx(1e-6 + 2 * bytes_ * 7 / 8 / 100e9)
    assert two.collective_seconds("all_reduce", bytes_, (8, 4)) == pytest.approx(
        6e-6 + 2 * bytes_ * 7 / 8 / 100e9 + 2 * (bytes_ / 8) * 3 / 4 / 10e9
    )
    assert two.collective_seconds("all_gather", bytes_, (1, 4)) == pytest.approx(5e-6 + bytes_ * 3 / 4 / 10e9)
    assert two.collective_seconds("permute", bytes_, (8, 4)) == pytest.approx(5e-6 + bytes_ / 10e9)
    # Of 32 workers 24 are on other hosts; that is what takes longest.
    assert two.collective_seconds("all_to_all", bytes_, (8, 4)) == pytest.approx(5e-6 + bytes_ * 24 / 32 / 10e9)


def test_workers_that_outnumber_the_cores_share_them(tmp_path: Path) -> None:
    cores = load_cluster(written(tmp_path, TWO.replace('memory = "80GB"', 'memory = "80GB"\ncores = 2')))
    own, shared = cores.shared(2), cores.shared(6)
    assert own == replace(cores, cores=None)  # each has its own
    assert (own.memory, shared.memory) == (80_000_000_000, 80_000_000_000 // 3)
    for seconds in (
        lambda cluster: cluster.machine.op_seconds("f32", 1e12, 1e3),  # bound by its arithmetic
        lambda cluster: cluster.machine.op_seconds("f32", 0.0, 1e9),  # by memory
        lambda cluster: cluster.collective_seconds("all_reduce", 1e6, (6, 1)),  # within a host
    ):
        assert seconds(shared) == pytest.approx(3 * seconds(own))
    # The network is not the cores'; of 32 workers 8 are on a host.
    assert cores.shared(32).levels[1] == cores.levels[1]
    assert cores.shared(32).machine == cores.shared(8).machine
    assert shared.shared(6) == shared  # who shares already shares no more


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.sampled_from(["all_reduce", "all_gather", "all_to_all"])
)
def test_fans_multiply_to_the_workers_and_more_bytes_take_longer(data: int, model: int, hosts: int, op: str) -> None:
    level = Level("a host", hosts, Link(100e9, 1e-6))
    cluster = Cluster("c", "", (), "cpu", MACHINES["cpu"], None, (level, Level("all", None, Link(10e9, 5e-6))))
    mesh = MeshSpec.of(data=data, model=model)
    for over in (("data",), ("model",), ("data", "model")):
        fans = cluster.fans(mesh, over)
        workers = math.prod(mesh.sizes[name] for name in over)
        assert workers <= math.prod(fans) < 2 * workers + hosts  # not more than what rounding up adds
        if workers > 1:
            few, many = (cluster.collective_seconds(op, sent, fans) for sent in (1e3, 1e6))
            assert 0 < few < many


def test_one_level_is_the_targets_own_link() -> None:
    cluster = cluster_of("cpu")
    link = MACHINES["cpu"].link
    for workers in (2, 3, 8):
        expected = link.latency + 2 * (workers - 1) / workers * 1e6 / link.bandwidth
        assert cluster.collective_seconds("all_reduce", 1e6, (workers,)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "is no TOML"),
        ("target = 'cuda:91'", "which is none of cpu"),
        ("target = 'cpu'", "no [[links]]"),
        ("target = 'cpu'\ncores = 0\n[[links]]\nbandwidth = 1\nlatency = 1", "cores = 0, which is not a number"),
        ("target = 'cpu'\nattention = 0", "attention = 0, which is not a number above 0"),
        ("target = 'cpu'\nflop = 3", "unknown key 'flop': did you mean flops?"),
        ("target = 'cpu'\n[[links]]\nbandwith = 1e9", "unknown key 'bandwith' of a link: did you mean bandwidth?"),
        ("target = 'cpu'\n[[links]]\nbandwidth = 1\nlatency = 0", "latency = 0, which is not a number above 0"),
        ("target = 'cpu'\n[[links]]\nworkers = 8\nbandwidth = 1\nlatency = 1", "the last connects all"),
        ("target = 'cpu'\n[[links]]\nbandwidth = true\nlatency = 1", "bandwidth = True"),
        (TWO.replace("memory = ", "memory = 8 #"), "80GB"),
    ],
)
def test_a_file_that_is_none_says_why(tmp_path: Path, text: str, message: str) -> None:
    if message == "80GB":
        assert load_cluster(written(tmp_path, text)).memory == 8
        return
    with pytest.raises(MonarchError) as error:
        load_cluster(written(tmp_path, text))
    assert message in str(error.value) and "mine.toml" in str(error.value)


def test_an_unknown_name_is_told_near_ones(tmp_path: Path) -> None:
    with pytest.raises(MonarchError, match="did you mean h100-8"):
        load_cluster("h100")
    with pytest.raises(MonarchError, match="cannot read"):
        load_cluster(str(tmp_path / "none.toml"))


def test_a_file_has_rates_of_its_own(tmp_path: Path) -> None:
    of_its_own = TWO.replace('memory = "80GB"', 'memory = "80GB"\nflops = { bf16 = 5e14 }\nstart = 9e-6')
    machine, usual = load_cluster(written(tmp_path, of_its_own)).machine, MACHINES["cuda:90"]
    assert (machine.rate("bf16"), machine.start) == (5e14, 9e-6)
    assert machine.rate("f32") == usual.rate("f32")


@pytest.mark.parametrize("flops", ["3", "{ f33 = 1e9 }", "{ f32 = 0 }", '{ f32 = "fast" }'])
def test_rates_that_are_none_are_refused(tmp_path: Path, flops: str) -> None:
    with pytest.raises(MonarchError, match="flops|f32"):
        load_cluster(written(tmp_path, TWO.replace("[[links]]", f"flops = {flops}\n[[links]]", 1)))
