"""The GPU benchmark's own side, small, with a stand-in for the driver: that it computes what torch does. Times are a
GPU's to give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu as bench
from benchmarks.kernels import Case, by_torch
from monarch.compiler.errors import MonarchError
from tests.compiler.kernels.triton.standin import stand_in

CPU = torch.device("cpu")
SMALL = bench.Shapes(rows=32, width=64, classes=48, inner=32, attention=(2, 2, 32, 16), parameters=2)


@pytest.fixture(autouse=True)
def without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    stand_in(monkeypatch)


def cases() -> list[Case]:
    return [*bench.kernel_cases(SMALL, CPU), *bench.matmul_cases(SMALL, CPU)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(cases())), ids=[case.name.split(" ")[0] for case in cases()])
def test_a_case_is_torchs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_TEMPLATES", "all")
    case = cases()[number]
    ours = bench.by_plan(case, "cuda:90", CPU)()
    theirs = by_torch(case, case.function, [tensor.clone() for tensor in case.state])
    bench.check(case, ours, theirs)
    assert bench.moved(case, ours) >= 2 * case.tensors[0].nbytes


@pytest.mark.parametrize("number", [0, 1], ids=["forward", "backward"])
def test_attention_is_torchs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    case = bench.attention_cases(SMALL, CPU)[number]
    bench.check(case, bench.by_plan(case, "cuda:90", CPU)(), by_torch(case, case.function))


def test_results_that_differ_are_not_timed() -> None:
    case = bench.attention_cases(SMALL, CPU)[0]
    with pytest.raises(RuntimeError, match="causal attention 2x2x32x16: results are .* apart"):
        bench.check(case, torch.ones(3), torch.tensor([1.0, 1.0, 2.0]))


@pytest.mark.full
def test_the_gpts_steps_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    with bench.gpt_sizes((32, 1, 2, 16, 64, 4)) as (batch, sequence, vocabulary):
        tokens, targets = torch.randint(vocabulary, (2, batch, sequence))
        ours = bench.step_by_plan("cuda:90", CPU, tokens, targets)
        theirs = bench.step_by_torch(CPU, tokens, targets, compiled=False)
        for _ in range(3):
            torch.testing.assert_close(ours(), theirs(), rtol=1e-2, atol=1e-2)


def test_without_a_gpu_no_figure_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MonarchError, match="torch finds no GPU here"):
        bench.gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(MonarchError, match="the GPU here is cuda:75"):
        bench.gpu()
