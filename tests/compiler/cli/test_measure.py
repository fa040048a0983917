"""`monarch doctor --measure`: this machine's description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from monarch.compiler.cli.measure import Rates, description, measure
from monarch.compiler.cost.cluster import load_cluster
from monarch.compiler.errors import MonarchError
from monarch.compiler.types import MeshSpec
from tests.runtime.hosts.doctor.facts import LIMITS

RATES = Rates({"f32": 1e11, "f64": 5e10, "bf16": 2e10}, 1e10, 3e-6, 4e9, 2e-5, 0.5)


def test_what_was_measured_can_be_asked_about(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(description(RATES, replace(LIMITS, memory=64 << 30, cores=8, allowed=None), 'Linux "6.1"'))
    found = load_cluster(str(path))
    assert (found.target, found.memory) == ("cpu", 8 << 30)
    assert (found.machine.rate("bf16"), found.machine.memory, found.machine.start) == (2e10, 1e10, 3e-6)
    assert (found.cores, found.machine.attention) == (8, 0.5)
    # Two workers gather 8 MB: half of it comes from the other.
    assert found.seconds_of("all_gather", 8e6, MeshSpec.of(data=2), ("data",)) == pytest.approx(2e-5 + 4e6 / 4e9)


def test_a_control_group_that_allows_less_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(description(RATES, replace(LIMITS, memory=64 << 30, cores=8, allowed=16 << 30), "Linux"))
    assert load_cluster(str(path)).memory == 2 << 30


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.compiler.cli.measure.measure_rates", lambda cores: RATES)
    with pytest.raises(MonarchError, match="cannot write"):
        measure(tmp_path / "nowhere" / "mine.toml")


def test_two_workers_of_this_machine_are_measured(tmp_path: Path) -> None:
    measure(tmp_path / "mine.toml")
    found = load_cluster(str(tmp_path / "mine.toml"))
    assert found.sources[0].startswith("monarch doctor --measure")
    assert found.memory is not None and found.memory > 0
    assert 0 < found.machine.attention <= 1 and found.cores is not None
    assert found.machine.rate("f32") > 0 and found.levels[0].link.latency > 0
