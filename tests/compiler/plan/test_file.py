"""The .mplan file: what is saved comes back, and what is damaged is refused."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.errors import PlanError, Source
from monarch.compiler.plan import Instruction, MeshSpec, Plan, Slot, ValueSpec
from monarch.compiler.plan.container import MAGIC, VERSION
from monarch.compiler.plan.file import hash_of, load_plan, plan_bytes, plan_from_bytes, save_plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_type
from tests.compiler import strategies
from tests.compiler.text.test_round_trip import plain
from tests.sample import examples

HINT = "\n  compile the program again, or copy the file again from where it was made."


def small_plan() -> Plan:
    x, w = parse_type("f32[8@data, 4]"), parse_type("f32[4, 4] partial<sum: model>")
    return Plan(
        name="step",
        mesh=MeshSpec.of(data=4, model=2),
        inputs=(
            ValueSpec("input", 0, x, 0),
            ValueSpec("state", "fc.weight", w, 1),
            ValueSpec("scalar", "lr", parse_type("f64[]"), 2),
        ),
        outputs=(ValueSpec("return", 0, x, 5), ValueSpec("state", "fc.weight", w, 6)),
        instructions=(
            Instruction("aten.mm.default", (Slot(0), Slot(3)), {}, 5, (0,), 0),
            Instruction("all_reduce", ([Slot(1)], ["data"], "sum"), {}, 4, (1,), 1),
            Instruction("getitem", (Slot(4), 0), {}, 6, (4,)),
            Instruction("commit", (), {}, -1),
        ),
        slots=7,
        donated=(False, True, False),
        constants={"c": torch.arange(16, dtype=torch.float32).view(4, 4)},
        constant_slots={"c": 3},
        sources=(Source("/home/me/train.py", 12, 9, 14), Source("<stdin>", 3)),
        graph="graph @step … {\n}",
        costs={"ops": 4, "seconds": {"emit": 0.25}},
    )


def assert_same(one: Plan, other: Plan) -> None:
    for name in (
        "name",
        "mesh",
        "inputs",
        "outputs",
        "slots",
        "donated",
        "constant_slots",
        "sources",
        "graph",
        "costs",
    ):
        assert getattr(one, name) == getattr(other, name), name
    assert len(one.instructions) == len(other.instructions)
    for a, b in zip(one.instructions, other.instructions, strict=True):
        assert (a.op, a.out, a.free, a.source) == (b.op, b.out, b.free, b.source)
        assert (plain(a.args), plain(a.kwargs)) == (plain(b.args), plain(b.kwargs))
    assert list(one.constants) == list(other.constants)
    for label, tensor in one.constants.items():
        assert tensor.dtype == other.constants[label].dtype
        assert torch.equal(tensor, other.constants[label])


# -- what is saved comes back ----------------------------------------------------------------------------------------


def test_a_saved_plan_loads(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(str(tmp_path / "step.mplan"))
    loaded = Plan.load(str(tmp_path / "step.mplan"))
    assert_same(loaded, plan)
    assert loaded.hash == hash_of(plan)


def test_a_file_is_written_whole_and_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "step.mplan"
    path.write_bytes(b"an older file")
    before = os.umask(0o077)
    try:
        save_plan(small_plan(), path)
    finally:
        os.umask(before)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step.mplan"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "step.mplan"
    (target / "in the way").mkdir(parents=True)
    with pytest.raises(PlanError, match=f"^cannot write {target}: "):
        save_plan(small_plan(), target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step.mplan"]
    with pytest.raises(PlanError, match="No such file or directory"):
        save_plan(small_plan(), tmp_path / "no folder" / "step.mplan")


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert plan_bytes(small_plan()) == plan_bytes(small_plan())
    again = plan_from_bytes(plan_bytes(small_plan()))
    assert plan_bytes(again) == plan_bytes(small_plan())


def test_the_hash_is_of_what_is_run() -> None:
    plan = small_plan()
    same = [replace(plan, graph="other"), replace(plan, costs={}), replace(plan, hash="x")]
    assert {hash_of(each) for each in same} == {hash_of(plan)}
    other = [
        replace(plan, name="stop"),
        replace(plan, options=CompileOptions(collectives="gloo")),
        replace(plan, options=CompileOptions(cuda_graphs=True)),
        replace(plan, options=CompileOptions(dtype="f64")),
        replace(plan, mesh=MeshSpec.of(data=4, model=4)),
        replace(plan, donated=(False, False, False)),
        replace(plan, instructions=plan.instructions[:-1]),
        replace(plan, constants={"c": torch.ones(4, 4)}),
        replace(plan, sources=()),
    ]
    assert len({hash_of(each) for each in [plan, *other]}) == 1 + len(other)


def test_a_default_dtype_comes_back_and_is_one_that_pytorch_has() -> None:
    plan = replace(small_plan(), options=CompileOptions(dtype="bf16"))
    assert plan_from_bytes(plan_bytes(plan)).options.dtype == "bf16"
    with pytest.raises(PlanError, match="its default dtype is 'i64', not one of f32, f64, bf16, f16"):
        plan_from_bytes(plan_bytes(replace(plan, options=CompileOptions(dtype="i64"))))


def test_constants_that_share_memory_or_are_views() -> None:
    base = torch.arange(12.0).view(3, 4)
    constants = {"b": base, "a": base.t(), "row": base[1], "none": torch.zeros(0, 3), "yes": torch.tensor(True)}
    plan = replace(
        small_plan(),
        inputs=(),
        outputs=(),
        instructions=(),
        donated=(),
        slots=5,
        constants=constants,
        constant_slots={label: at for at, label in enumerate(constants)},
    )
    assert_same(plan_from_bytes(plan_bytes(plan)), plan)


def arguments() -> st.SearchStrategy[Any]:
    leaves = strategies.constants.filter(lambda value: not isinstance(value, int) or -(2**63) <= value < 2**64)
    return st.recursive(leaves | st.just(Slot(0)), lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@given(strategies.meshes(), st.data())
@examples(30, 100)
def test_any_plan_comes_back(mesh: MeshSpec, data: st.DataObject) -> None:
    inputs = tuple(
        ValueSpec(
            data.draw(st.sampled_from(["input", "state", "scalar", "seed"])),
            data.draw(st.integers(0, 9) | strategies.texts),
            data.draw(strategies.types(mesh)),
            slot,
        )
        for slot in range(data.draw(st.integers(1, 3)))
    )
    instructions = tuple(
        Instruction(
            data.draw(st.sampled_from(["aten.mm.default", "aten.add.Tensor", "getitem", "prims.mul.default"])),
            tuple(data.draw(st.lists(arguments(), max_size=3))),
            data.draw(st.dictionaries(strategies.texts, arguments(), max_size=2)),
            len(inputs) + at,
        )
        for at in range(data.draw(st.integers(0, 4)))
    )
    plan = Plan(
        name=data.draw(strategies.texts),
        mesh=mesh,
        inputs=inputs,
        outputs=(ValueSpec("return", 0, data.draw(strategies.types(mesh)), 0),),
        instructions=instructions,
        slots=len(inputs) + len(instructions),
        donated=tuple(data.draw(st.booleans()) for _ in inputs),
        sources=tuple(data.draw(st.lists(strategies.sources, max_size=2))),
        graph=data.draw(strategies.texts),
        costs=data.draw(
            st.dictionaries(strategies.texts, st.integers() | st.floats(allow_nan=False, allow_infinity=False))
        ),
    )
    assert_same(plan_from_bytes(plan_bytes(plan)), plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"instructions": (Instruction("aten.neg.default", ({1},), {}, 4),)},
            "an argument of aten.neg.default cannot stand in a plan: {1} (set)\n"
            "  arguments are slots, numbers, bools, strings, None, dtypes, and lists of these.",
        ),
        ({"costs": {"seconds": float("nan")}}, "the costs of plan 'step' are not JSON: "),
        ({"costs": {"seconds": object()}}, "the costs of plan 'step' are not JSON: "),
        (
            {"constants": {"c": torch.ones(1, dtype=torch.uint16)}},
            "constant 'c' is of torch.uint16, which a plan",
        ),
        ({"donated": ()}, "plan 'step' is not a plan that can be run: 'donated' has 0 entries for 3 inputs"),
    ],
)
def test_plans_that_cannot_be_saved(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_bytes(replace(small_plan(), **changes))
    assert str(caught.value).startswith(message)


# -- what is damaged is refused --------------------------------------------------------------------------------------


def refused(data: bytes) -> str:
    with pytest.raises(PlanError) as caught:
        plan_from_bytes(data, "step.mplan")
    return str(caught.value)


def test_other_files() -> None:
    hint = "\n  give a file that plan.save() wrote."
    assert refused(b"") == f"step.mplan is not a plan file: it begins with b''{hint}"
    assert refused(b"PK\3\4 a zip") == f"step.mplan is not a plan file: it begins with b'PK\\x03\\x04 a z'{hint}"
    unix = plan_bytes(small_plan()).replace(b"\r\n", b"\n")
    assert refused(unix) == f"step.mplan is not a plan file: it begins with {unix[:8]!r}{hint}"


def test_other_versions() -> None:
    data = bytearray(plan_bytes(small_plan()))
    data[len(MAGIC)] = VERSION + 1
    assert refused(bytes(data)) == (
        f"step.mplan has plan format {VERSION + 1}, and this version of monarch reads format {VERSION}\n"
        "  compile the program again with this version, or load the file with the version that wrote it."
    )


def test_every_truncation() -> None:
    data = plan_bytes(small_plan())
    for length in range(1, len(data)):
        assert "step.mplan is cut short: " in refused(data[:length])
    assert refused(data[:-7]).endswith(HINT)


def test_bytes_behind_the_end() -> None:
    assert refused(plan_bytes(small_plan()) + b"abc") == "step.mplan has 3 bytes after its end" + HINT


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (b'"name":"step"', b'"name":"stop"', "manifest"),
        (b"aten.mm.default", b"aten.mv.default", "program.jsonl"),
        (b"graph @step", b"graph @stop", "graph.txt"),
        (b"\0\0\x80\x3f", b"\0\0\x80\x4f", "constants.safetensors"),
    ],
)
def test_edits(old: bytes, new: bytes, part: str) -> None:
    data = plan_bytes(small_plan())
    assert old in data
    assert refused(data.replace(old, new, 1)) == (
        f"step.mplan was changed after it was written: its {part} does not have the digest that it should have{HINT}"
    )


def test_an_absurd_length() -> None:
    data = bytearray(plan_bytes(small_plan()))
    data[12:20] = b"\xff" * 8
    assert "step.mplan is cut short: " in refused(bytes(data))


@given(st.integers(0, 10**6), st.integers(1, 255), st.integers(0, 10**6))
@settings(max_examples=200)
def test_a_changed_byte_is_always_found(at: int, bits: int, cut: int) -> None:
    data = bytearray(plan_bytes(small_plan()))
    data[at % len(data)] ^= bits
    refused(bytes(data))
    refused(bytes(data[: cut % len(data)]))


@given(st.binary(), st.booleans())
@settings(max_examples=200)
def test_random_bytes(data: bytes, with_magic: bool) -> None:
    refused((MAGIC + VERSION.to_bytes(4, "little") if with_magic else b"") + data)


def test_what_is_no_file(tmp_path: Path) -> None:
    def message(path: str | Path) -> str:
        with pytest.raises(PlanError) as caught:
            load_plan(path)
        return str(caught.value)

    hint = "\n  give a file that plan.save() wrote."
    assert message(tmp_path / "none") == f"cannot read {tmp_path}/none: No such file or directory{hint}"
    assert message(tmp_path) == f"cannot read {tmp_path}: Is a directory{hint}"
    assert message("/dev/zero") == f"/dev/zero is not a regular file{hint}"
    assert message("a\0b") == f"cannot read a\0b: embedded null byte{hint}"
    os.mkfifo(tmp_path / "pipe")
    assert message(tmp_path / "pipe") == f"{tmp_path}/pipe is not a regular file{hint}"
