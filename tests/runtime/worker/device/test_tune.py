"""Choosing among a plan's variants by times that a table gives; `on_gpu`, which measures, is not tested."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.kernels.triton.ahead import with_binaries
from monarch.compiler.kernels.triton.calls import calls_of
from monarch.compiler.loops.ir import Buffer, Kernel
from monarch.compiler.plan.binaries import KernelBinary, TemplateCall
from monarch.compiler.plan.file import load_plan, plan_bytes, plan_from_bytes, save_plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Plan
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph
from monarch.runtime.worker.device import load
from monarch.runtime.worker.device.load import GpuKernel
from monarch.runtime.worker.device.tune import example, gpu_for, tuned
from monarch.stdlib.kernels.tuning import fastest
from tests.compiler.cli.conftest import Run, monarchc  # noqa: F401  # a fixture
from tests.compiler.kernels.test_products import joined

GRAPH = """graph @f on mesh<> {
  %x = input 0 : bf16[64, 128]
  %w = input 1 : bf16[128, 128]
  %h = aten.mm(%x, %w) : bf16[64, 128]
  %y = aten.relu(%h) : bf16[64, 128]
  %q = aten.view(%y, [1, 2, 64, 64]) : bf16[1, 2, 64, 64]
  %a = aten._scaled_dot_product_flash_attention_for_cpu(%q, %q, %q) : (bf16[1, 2, 64, 64], f32[1, 2, 64])
  %o = getitem(%a, 0) : bf16[1, 2, 64, 64]
  return %o
}"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    graph = joined(parse_graph(GRAPH))
    bare = emit_plan(graph, CompileOptions(target="cuda:90"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return with_binaries(bare, calls=calls_of(bare, graph))


def test_the_fastest_comes_first_with_its_time(plan: Plan, tmp_path: Path) -> None:
    asked: list[str] = []

    def measure(kernel: Kernel | TemplateCall, binary: KernelBinary) -> float:
        asked.append(kernel.name)
        variants = [each.variant for each in plan.binaries if each.kernel == binary.kernel]
        return [3e-6, math.inf, 1e-6][variants.index(binary.variant)]

    best: list[KernelBinary] = []
    made = tuned(plan, measure, fastest, best.append)
    assert set(asked) == {"mm_relu", "flash_attention"} and len(best) == 2
    assert made.hash != plan.hash
    for kernel in {each.kernel for each in plan.binaries}:
        before = [each for each in plan.binaries if each.kernel == kernel]
        after = [each for each in made.binaries if each.kernel == kernel]
        assert len(before) == 3 and after[0] == replace(before[2], seconds=1e-6, measured=True)
        assert after[1] == replace(before[0], seconds=3e-6, measured=True)
        assert after[2] == replace(before[1], seconds=0.0, measured=False)
    assert plan_from_bytes(plan_bytes(made)) == made
    save_plan(made, tmp_path / "tuned.mplan")
    assert load_plan(tmp_path / "tuned.mplan").hash == made.hash


def test_where_none_runs_that_is_an_error(plan: Plan) -> None:
    with pytest.raises(MonarchError, match="none of the 3 variants of the kernel runs on this device"):
        tuned(plan, lambda kernel, binary: math.inf, fastest)


def test_a_call_of_a_template_gets_its_tensors_and_gives_the_ops_results(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    (binary, *_) = (each for each in plan.binaries if each.call)
    given: list[Any] = []
    monkeypatch.setattr(load, "launcher_of", lambda kernel, binary, launch: lambda *found: given.append(found))
    assert binary.call is not None
    run = GpuKernel(binary.call, binary, torch.device("cpu"))
    q, k, v = (torch.randn(1, 2, 64, 64).bfloat16() for _ in range(3))
    out, lse = run([q, k, v])
    assert (out.shape, out.dtype, out.stride()) == ((1, 2, 64, 64), torch.bfloat16, (8192, 64, 128, 1))
    assert (lse.shape, lse.dtype) == ((1, 2, 64), torch.float32)
    ((*tensors, m, n),) = given
    assert [each.data_ptr() for each in tensors] == [each.data_ptr() for each in (q, k, v, out, lse)]
    assert {"M": m, "N": n} == dict(binary.launches[0].constants)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_said(plan: Plan, tmp_path: Path, monarchc: Run) -> None:  # noqa: F811
    with pytest.raises(MonarchError, match="variants of kernels are measured on a GPU, and torch finds none here"):
        gpu_for("cuda:90")
    path = tmp_path / "f.mplan"
    save_plan(plan, path)
    before = path.read_bytes()
    assert "torch finds none here" in monarchc("tune", str(path), code=2).err
    assert path.read_bytes() == before


def test_a_plan_for_cpus_has_nothing_to_measure(tmp_path: Path, monarchc: Run) -> None:  # noqa: F811
    save_plan(emit_plan(parse_graph(GRAPH), CompileOptions()), tmp_path / "f.mplan")
    assert (
        "compiled for CPUs, whose kernels have no variants" in monarchc("tune", str(tmp_path / "f.mplan"), code=2).err
    )


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(MonarchError, match="the plan is for cuda:90, and the GPU here is cuda:80"):
        gpu_for("cuda:90")


def test_each_kernel_is_measured_with_its_own_variants(plan: Plan) -> None:
    """All equally fast: the order, and so what every worker runs, stays."""

    def first(variants: Sequence[KernelBinary], measure: Any) -> KernelBinary:
        return fastest(variants, measure)

    made = tuned(plan, lambda kernel, binary: 1e-6, first)
    assert [each.variant for each in made.binaries] == [each.variant for each in plan.binaries]


@pytest.mark.parametrize("strides", [(32, 8, 1), (8, 0, 1), (1, 16, 2)])
def test_variants_are_measured_on_tensors_that_lie_as_the_plans(strides: tuple[int, ...]) -> None:
    """Keys that several heads share, too, whose elements share memory."""
    for dtype in (torch.bfloat16, torch.int64):
        made = example(Buffer(dtype, (2, 4, 8), strides), torch.device("cpu"))
        assert (made.dtype, made.shape, made.stride()) == (dtype, (2, 4, 8), strides)
        assert bool(made.any()) == dtype.is_floating_point
