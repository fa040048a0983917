"""`monarchc inspect --emit`: the generated kernels' sources."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from monarch.compiler.plan.binaries import kernels_of
from monarch.compiler.plan.file import load_plan, save_plan
from tests.compiler.cli.conftest import Run


@pytest.fixture(autouse=True)
def every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path / "cache"))


def test_triton_with_the_users_lines(folder: Path, monarchc: Run) -> None:
    shown = monarchc("inspect", "mlp.py", "--emit", "triton").out
    assert re.search(r"^# kernel relu: 1 operation, from mlp\.py:13$", shown, re.MULTILINE)
    assert re.search(r"^# relu_0\[1\]\(a0, b0, XBLOCK=\d+, num_warps=\d\)$", shown, re.MULTILINE)
    assert re.search(r"^@triton\.jit\ndef relu_0\(", shown, re.MULTILINE)
    assert re.search(r"tl\.maximum\(.*  # mlp\.py:13$", shown, re.MULTILINE)


def test_cpp_with_the_users_lines(folder: Path, monarchc: Run) -> None:
    shown = monarchc("inspect", "mlp.py", "--emit", "cpp").out
    assert shown.startswith("// kernel relu: 1 operation, from mlp.py:13\n")
    assert re.search(r'^extern "C".*\nrelu_\w+\(', shown, re.MULTILINE)
    assert "// mlp.py:13" in shown


def test_ptx_is_that_of_the_plan_or_is_compiled(folder: Path, monarchc: Run) -> None:
    monarchc("compile", "mlp.py", "--target", "cuda:90", "-o", "mlp.mplan")
    plan = load_plan("mlp.mplan")
    (binary,) = plan.binaries
    (launch,) = binary.launches
    marked = replace(launch, assembly=f"// as it stands in the plan\n{launch.assembly}")
    save_plan(replace(plan, binaries=(replace(binary, launches=(marked,)),)), "marked.mplan")
    save_plan(replace(plan, binaries=()), "without.mplan")
    shown = [monarchc("inspect", name, "--emit", "ptx").out for name in ("mlp.mplan", "marked.mplan", "without.mplan")]
    assert shown[0].startswith("// kernel relu: 1 operation, from mlp.py:13\n") and ".target sm_90a" in shown[0]
    assert shown[0] == shown[2]
    assert "// as it stands in the plan" in shown[1]
    assert "v_max" in monarchc("inspect", "mlp.py", "--target", "gfx942", "--emit", "ptx").out


def test_one_kernel_by_name(folder: Path, monarchc: Run) -> None:
    whole = monarchc("inspect", "train.py:train_step", "--emit", "triton").out
    names = re.findall(r"^# kernel (\w+):", whole, re.MULTILINE)
    assert len(set(names)) > 3
    one = monarchc("inspect", "train.py:train_step", "--emit", "triton", "--kernel", names[0]).out
    assert set(re.findall(r"^# kernel (\w+):", one, re.MULTILINE)) == {names[0]}
    found = json.loads(
        monarchc("inspect", "train.py:train_step", "--emit", "triton", "--kernel", names[0], "--json").out
    )
    assert found["triton"] + "\n" == one


def test_what_cannot_be_shown(folder: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*arguments: str, traced: bool = True) -> str:
        told, _, message = monarchc("inspect", *arguments, code=2).err.partition("monarchc: error: ")
        assert ("mlp.py was imported" in told) == traced  # what is wrong whatever the program is, is told before
        return message

    assert error("mlp.py", "--emit", "fortran", traced=False) == "--emit 'fortran': it is one of cpp, triton, ptx\n"
    assert error("mlp.py", "--emit", "ptx").startswith("mlp is compiled for CPUs, and has no PTX\n")
    assert error("mlp.py", "--emit", "cpp", "--kernel", "relo") == "mlp has no kernel 'relo'\n  did you mean relu?\n"
    assert error("mlp.py", "--kernel", "relu", traced=False).startswith("--kernel selects kernels")
    monkeypatch.setenv("MONARCH_KERNELS", "off")
    assert error("mlp.py", "--emit", "cpp").startswith("mlp has no generated kernels\n")


def test_a_plan_for_a_gpu_carries_machine_code_for_each_kernel(folder: Path, monarchc: Run) -> None:
    done = monarchc("compile", "train.py:train_step", "--target", "cuda:90", "-o", "step.mplan", "--verbose")
    plan = load_plan("step.mplan")
    kernels = kernels_of(plan)
    assert len(kernels) > 5
    assert [binary.kernel for binary in plan.binaries] == list(kernels)
    assert plan.costs["seconds"]["kernels"] > 0
    told = re.findall(r"^kernel (\w+) ", done.err, re.MULTILINE)
    assert told == [kernel.name for kernel in kernels.values()]
    assert re.search(rf"^  machine code +[\d.]+ KiB, of {len(kernels)} kernels$", done.out, re.MULTILINE)


ATTENTION = """\
import torch
import torch.nn.functional as F

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2)
up = monarch.distribute(torch.randn(64, 64), mesh)


@monarch.program
def attend(x: "f32[4@data, 2, 64, 64]"):
    h = F.gelu(x.flatten(0, 2) @ up).view(x.shape)
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)
"""


def test_what_templates_run_is_shown(folder: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "attend.py").write_text(ATTENTION)
    monkeypatch.setenv("MONARCH_TEMPLATES", "all")
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    done = monarchc("compile", "attend.py:attend", "--target", "cuda:90", "-o", "a.mplan", "--verbose")
    assert re.search(r"machine code +[\d.]+ KiB, of 2 kernels in 6 variants$", done.out, re.MULTILINE)
    assert {"mm_gelu", "flash_attention"} <= set(re.findall(r"^kernel (\w+) ", done.err, re.MULTILINE))
    text = monarchc("inspect", "a.mplan", "--emit", "triton").out
    assert "# kernel mm_gelu: " in text and ", from attend.py:13" in text
    assert len(re.findall(r"^# variant \d+x\d+x\d+, \d warps, \d stages: .* estimated", text, re.MULTILINE)) == 3
    assert text.count("which runs\n") == 2
    assert "# template flash_attention: 1 call of aten._scaled_dot_product_flash_attention_for_cpu.default" in text
    assert "us estimated; ATen's op in 3 parts " in text
    assert "def _forward(" in monarchc("inspect", "a.mplan", "--emit", "triton", "--kernel", "flash_attention").out
    assert ".target sm_90a" in monarchc("inspect", "a.mplan", "--emit", "ptx", "--kernel", "flash_attention").out
    rows = json.loads(monarchc("inspect", "a.mplan", "--kernels", "--json").out)["kernels"]
    assert [row["kernel"] for row in rows if row["by"] == "template"] == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default"
    ]
    assert (
        "did you mean flash_attention?"
        in monarchc("inspect", "a.mplan", "--emit", "ptx", "--kernel", "flash_atention", code=2).err
    )
    assert (
        "one kernel of aten.mm and gelu, in tiles of " in monarchc("inspect", "a.mplan", "--why", "mm_gelu_kernel").out
    )


def test_templates_can_be_turned_off(folder: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "attend.py").write_text(ATTENTION)
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    monarchc("compile", "attend.py:attend", "--target", "cuda:90", "-o", "a.mplan")
    binaries = load_plan("a.mplan").binaries
    assert not any(binary.call or binary.variant for binary in binaries)
    monkeypatch.setenv("MONARCH_TEMPLATES", "some")
    assert (
        "MONARCH_TEMPLATES='some': it has to be auto, all or off"
        in monarchc("compile", "attend.py:attend", "--target", "cuda:90", code=2).err
    )


def test_what_generated_kernels_read_and_write(folder: Path, monarchc: Run) -> None:
    rows = json.loads(monarchc("inspect", "mlp.py", "--kernels", "--json").out)["kernels"]
    (relu,) = [row for row in rows if row["by"] == "generated"]
    assert (relu["kernel"], relu["ops"], relu["lines"]) == ("relu", 1, ["mlp.py:13"])
    assert relu["bytes_read"] == relu["bytes_written"] == 4 * 128 * 4  # f32[8@data, 256@model] on 2 by 2
    assert relu["seconds"] > 0
    shown = monarchc("inspect", "mlp.py", "--kernels").out
    assert re.search(r"^  relu +1 +2\.0 KiB +2\.0 KiB +mlp\.py:13$", shown, re.MULTILINE)
