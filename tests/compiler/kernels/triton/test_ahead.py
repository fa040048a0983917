"""Machine code in plans: compiled ahead of time, found again on disk, and refused where a file says something odd."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.compiler.errors import PlanError
from monarch.compiler.kernels.cache import BuildError
from monarch.compiler.kernels.triton import ahead
from monarch.compiler.kernels.triton.ahead import with_binaries
from monarch.compiler.plan.binaries import kernels_of
from monarch.compiler.plan.container import (
    BINARIES,
    CODE,
    CONSTANTS,
    MEMBERS,
    PROGRAM,
    dump_json,
    hash_members,
    seal,
    unseal,
)
from monarch.compiler.plan.encode import encode_instruction
from monarch.compiler.plan.file import hash_of, plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Instruction, Plan, Slot, ValueSpec
from monarch.compiler.types import Layout, MeshSpec, TensorType

KERNEL = """kernel scale(a0: f32[700], a1: i64[3]) -> (b0: f32[], b1: f32[3])
nest [ | 700] {
  %0 = load a0 [1]
  %1 = reduce max %0  # train.py:3
  %2 = store b0 [0] %1
}
nest [3] {
  %0 = load a1 [1]
  %1 = load a0 [0] gather %0 * 1 of 700  # train.py:4
  %2 = store b1 [1] %1
}
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def plan(target: str = "cuda:90") -> Plan:
    def spec(kind: str, label: int, dtype: torch.dtype, shape: tuple[int, ...], slot: int) -> ValueSpec:
        return ValueSpec(kind, label, TensorType(dtype, shape, Layout(((),) * len(shape), (), ())), slot)

    made = Plan(
        name="step",
        mesh=MeshSpec((("data", 2),)),
        inputs=(spec("input", 0, torch.float32, (700,), 0), spec("input", 1, torch.int64, (3,), 1)),
        outputs=(spec("return", 0, torch.float32, (), 3),),
        instructions=(
            Instruction("kernel", ([Slot(0), Slot(1)], KERNEL, [-1, -1]), {}, 2),
            Instruction("getitem", (Slot(2), 0), {}, 3),
        ),
        slots=4,
        donated=(False, False),
        options=CompileOptions(target=target),
    )
    return replace(made, hash=hash_of(made))


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "gfx942"])
def test_a_plan_with_machine_code_is_the_same_from_its_file(target: str) -> None:
    bare = plan(target)
    whole = with_binaries(bare)
    assert whole.hash != bare.hash
    (binary,) = whole.binaries
    assert [launch.arguments for launch in binary.launches] == [("a0", "b0"), ("a0", "a1", "b1", "error")]
    assert binary.gathers == ("train.py:4: an index is out of range: there are 700 rows",)
    assert plan_from_bytes(plan_bytes(whole)) == whole
    assert plan_from_bytes(plan_bytes(bare)) == bare


def test_a_plan_for_cpus_carries_none() -> None:
    assert with_binaries(plan("cpu")).binaries == ()


def test_what_was_compiled_is_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    first = with_binaries(plan(), lambda name, seconds: told.append(name))
    assert told == ["scale"]

    def refuse(*arguments: object) -> None:
        raise AssertionError("compiled again")

    (file,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "compile_launches", refuse)
        assert with_binaries(plan()) == first
        with pytest.raises(AssertionError, match="compiled again"):
            with_binaries(plan("cuda:80"))
        whole = file.read_bytes()
        for damaged in (b"", whole[:50], whole[:-1], whole[:100] + b"x" + whole[101:]):
            file.write_bytes(damaged)
            with pytest.raises(AssertionError, match="compiled again"):
                with_binaries(plan())
    assert with_binaries(plan()) == first
    assert file.read_bytes() == whole


def test_machine_code_is_the_same_wherever_it_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = with_binaries(plan())
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert with_binaries(plan()) == first


def test_tritons_words_are_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ahead.emit(next(iter(kernels_of(plan()).values())))
    broken = replace(source, text=source.text.replace("tl.load(a0", "tl.lode(a0"))
    monkeypatch.setattr(ahead, "emit", lambda kernel, tiles: broken)
    with pytest.raises(BuildError, match=r"(?s)does not compile kernel scale for cuda:90: .*lode"):
        with_binaries(plan())


def test_what_nobody_asked_for_in_a_month_is_deleted(cache: Path) -> None:
    with_binaries(plan())
    (old,) = cache.iterdir()
    os.utime(old, (0, 0))
    with_binaries(plan())  # asked for again
    assert old.stat().st_mtime > 0
    os.utime(old, (0, 0))
    with_binaries(plan("cuda:80"))
    assert not old.exists() and len([*cache.iterdir()]) == 1


def test_a_folder_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    with pytest.raises(BuildError, match="others than you"):
        with_binaries(plan())


def test_without_triton_the_plan_is_as_it_was_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ahead, "triton_version", lambda: "")
    ahead.say_missing.cache_clear()
    assert with_binaries(plan()) == plan()
    assert with_binaries(plan()) == plan()
    said = "monarch: triton is not installed, so the plan carries no machine code for its kernels.\n"
    assert capsys.readouterr().err == f"{said}  pip install triton==3.6.0\n"


# Files that say something odd ----------------------------------------------------------------------------------------

ODD: dict[str, tuple[Callable[[Any], object], str]] = {
    "another kernel": (lambda kernel: kernel.__setitem__(0, "0" * 64), "which it does not call"),
    "no launches": (lambda kernel: kernel.__setitem__(1, []), "longer than it says"),
    "a name with a path": (lambda kernel: kernel[1][0].__setitem__(0, "../x"), "a name is no identifier"),
    "no programs": (lambda kernel: kernel[1][0].__setitem__(1, [0, 1, 1]), "launches 0 programs"),
    "too many programs": (lambda kernel: kernel[1][0].__setitem__(1, [2**31, 1, 1]), "launches 2147483648 programs"),
    "true programs": (lambda kernel: kernel[1][0].__setitem__(1, [True, 1, 1]), "not a whole number"),
    "an input that there is not": (lambda kernel: kernel[1][0].__setitem__(2, ["a2", "b0"]), "the argument 'a2'"),
    "an output that there is not": (lambda kernel: kernel[1][0].__setitem__(2, ["a0", "b2"]), "the argument 'b2'"),
    "scratch that there is not": (lambda kernel: kernel[1][0].__setitem__(2, ["s0"]), "the argument 's0'"),
    "an argument of digits": (lambda kernel: kernel[1][0].__setitem__(2, ["a٣"]), "which there is not"),
    "a constant that is none": (lambda kernel: kernel[1][0].__setitem__(3, [["RBLOCK", "1"]]), "no whole number"),
    "a constant without a name": (lambda kernel: kernel[1][0].__setitem__(3, [["", 1]]), "no identifier"),
    "three warps": (lambda kernel: kernel[1][0].__setitem__(4, 3), "wants 3 warps"),
    "much shared memory": (lambda kernel: kernel[1][0].__setitem__(5, 2**30), "bytes of shared memory"),
    "deep metadata": (lambda kernel: kernel[1][0].__setitem__(6, {"a": _nested(40)}), "nests more than"),
    "metadata that is none": (lambda kernel: kernel[1][0].__setitem__(6, [1]), "not an object"),
    "lengths": (lambda kernel: kernel[1][0].__setitem__(7, [2**40, 1]), "shorter than it says"),
    "negative lengths": (lambda kernel: kernel[1][0].__setitem__(7, [-5, 1]), "not a whole number"),
    "other bytes": (lambda kernel: kernel[1][0][7].reverse(), "not for cuda:90|not text in UTF-8"),
    "endless scratch": (lambda kernel: kernel.__setitem__(2, [["f32", 2**62]]), "wants scratch"),
    "scratch of no dtype": (lambda kernel: kernel.__setitem__(2, [["f31", 4]]), "no dtype"),
    "a long text": (lambda kernel: kernel.__setitem__(3, ["x" * 2000]), "too long"),
    "a gather that is no text": (lambda kernel: kernel.__setitem__(3, [5]), "not a string"),
    "programs of many dims": (lambda kernel: kernel[1][0].__setitem__(1, [1, 2**16, 1]), "launches 65536 programs"),
    "a time that is none": (lambda kernel: kernel[4].__setitem__(1, -1.0), "its time is none"),
    "a time of another kind": (lambda kernel: kernel[4].__setitem__(1, 1), "no time"),
    "a template of no instruction": (lambda kernel: kernel.__setitem__(5, ["t", [], [], [], ""]), "no instruction"),
    "a template of a kernel": (lambda kernel: kernel.__setitem__(5, ["t", [0], [], [], ""]), "no call of ATen's"),
    "a template of what is not there": (lambda kernel: kernel.__setitem__(5, ["t", [9], [], [], ""]), "no call of"),
    "a template without a name": (lambda kernel: kernel.__setitem__(5, ["", [0], [], [], ""]), "template is none"),
    "a short list": (lambda kernel: kernel.pop(), "not a list of 6"),
}


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else 0


def refused(plan: Plan, change: Callable[[Any], object] = lambda listed: None, code: bytes | None = None) -> str:
    """What loading the plan's file says after a change to what it lists, with digests that fit."""
    manifest, members = unseal(plan_bytes(plan), "", MEMBERS)
    listed = json.loads(members[BINARIES])
    change(listed)
    members[BINARIES] = dump_json(listed).encode()
    members[CODE] = members[CODE] if code is None else code
    manifest["hash"] = hash_members(
        manifest["plan"], members[PROGRAM], members[CONSTANTS], (members[BINARIES], members[CODE])
    )
    with pytest.raises(PlanError) as caught:
        plan_from_bytes(seal(manifest, members), "step.mplan")
    return str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return with_binaries(plan())


@pytest.mark.parametrize(("change", "message"), ODD.values(), ids=ODD.keys())
def test_an_odd_file_is_refused(whole: Plan, change: Callable[[Any], object], message: str) -> None:

    assert re.search(message, refused(whole, lambda listed: change(listed[0])))


def test_machine_code_of_another_gpu_or_none_is_refused(whole: Plan) -> None:
    (binary,) = whole.binaries
    code = b"".join(part for each in binary.launches for part in (each.binary, each.assembly.encode()))
    other = bytearray(code)
    other[18:20] = (224).to_bytes(2, "little")
    assert "it is not for cuda:90" in refused(whole, code=bytes(other))
    assert "it is not for cuda:90" in refused(whole, code=b"x" + code[1:])
    assert "longer than it says" in refused(whole, code=code + b"x")
    assert "shorter than it says" in refused(whole, code=code[:-1])
    assert "already" in refused(
        whole, lambda listed: listed.append([*listed[0][:1], [], [], [], ["", 0.0, False], None])
    )


def test_a_plan_for_cpus_with_machine_code_is_refused(whole: Plan) -> None:
    odd = replace(plan("cpu"), binaries=whole.binaries)
    with pytest.raises(PlanError, match="its target is cpu"):
        plan_bytes(odd)


def test_the_kernels_of_a_plan_are_told_apart_by_what_they_compute() -> None:
    again = Instruction("kernel", ([Slot(0), Slot(1)], KERNEL.replace("train.py:3", "b.py:9"), [-1, -1]), {}, 2)
    twice = replace(plan(), instructions=(*plan().instructions, again))
    assert [kernel.name for kernel in kernels_of(twice).values()] == ["scale"]
    assert encode_instruction(again) != encode_instruction(plan().instructions[0])
