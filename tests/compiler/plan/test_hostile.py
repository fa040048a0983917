"""Files made on purpose, with digests that fit: what they say is checked, and nothing is run or imported."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors

from monarch.compiler.errors import PlanError
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.plan.allowed import allow
from monarch.compiler.plan.container import (
    CONSTANTS,
    GRAPH,
    MEMBERS,
    PROGRAM,
    TRACED,
    VERSION,
    hash_members,
    seal,
    unseal,
)
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from tests.compiler.plan.test_file import small_plan

HINT = "\n  plan.save() does not write this: do not use the file, and compile the program again."
LEAD = "step.mplan is not a plan that can be run: "


def parts() -> tuple[dict[str, Any], list[Any], dict[str, bytes]]:
    """A good file's manifest, program, and members."""
    manifest, members = unseal(plan_bytes(small_plan()), "", MEMBERS)
    return manifest, [json.loads(line) for line in members[PROGRAM].splitlines()], members


def sealed(manifest: Any, program: list[Any], members: dict[str, bytes]) -> bytes:
    """A file with digests and hash that fit what it holds."""
    text = "\n".join(json.dumps(line) for line in program).encode()
    members = {**members, PROGRAM: text}
    if isinstance(manifest, dict) and "plan" in manifest:
        manifest["hash"] = hash_members(manifest["plan"], text, members[CONSTANTS])
    return seal(manifest, members)


def refused(data: bytes) -> str:
    with pytest.raises(PlanError) as caught:
        plan_from_bytes(data, "step.mplan")
    return str(caught.value)


def test_an_unchanged_file_is_accepted() -> None:
    assert plan_from_bytes(sealed(*parts())).name == "step"


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("aten.from_file.default", "not allowed in a plan, for it does more than compute on tensors"),
        ("aten.set_.source_Tensor", "not allowed in a plan, for it does more than compute on tensors"),
        ("c10d.barrier.default", "not allowed in a plan, for it does more than compute on tensors"),
        ("profiler._record_function_enter.default", "not allowed in a plan, for it does more than compute on tensors"),
        ("aten.nope.default", f"unknown op in torch {torch.__version__}"),
        ("aten.mm.nope", f"unknown op in torch {torch.__version__}"),
        ("os.system", "unknown op"),
        ("eval", "unknown op"),
        ("__import__", "unknown op"),
        ("aten.mm", "unknown op"),
        ("constrain", "it stands only in graphs that are not partitioned yet"),
        ("aten.mm.default; rm", "that is no op's name"),
        ("", "that is no op's name"),
        ("../x", "that is no op's name"),
        ("a" * 300, "that is no op's name"),
    ],
)
def test_ops(op: str, why: str) -> None:
    manifest, program, members = parts()
    program[0][0] = op
    loaded = set(sys.modules)
    assert refused(sealed(manifest, program, members)) == f"{LEAD}instruction 0, {op[:100]!r}: {why}{HINT}"
    assert set(sys.modules) == loaded


def test_a_plan_may_call_every_op_that_workers_have() -> None:
    for op in LOCAL_OPS:
        allow(op)


def test_an_op_of_the_users_that_is_not_registered_is_named() -> None:
    manifest, program, members = parts()
    program[0][0] = "this.is.mine"
    loaded = set(sys.modules)
    said = refused(sealed(manifest, program, members))
    assert "calls 'this.is.mine', which is not known here" in said
    assert "Import what registers the ops of 'this' first" in said and "--import" in said
    assert set(sys.modules) == loaded


def test_a_users_own_op_is_accepted_once_it_is_registered() -> None:
    manifest, program, members = parts()
    program[0][0] = "plan_file_test.double.default"
    assert "Import what registers the ops of 'plan_file_test' first" in refused(sealed(manifest, program, members))
    library = torch.library.Library("plan_file_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    assert plan_from_bytes(sealed(manifest, program, members)).instructions[0].op == "plan_file_test.double.default"


def set_at(path: str, value: Any) -> Callable[[Any, Any], None]:
    """Sets `path` ("program.0.1", "plan.slots") to `value`."""
    first, *rest = path.split(".")

    def edit(manifest: Any, program: Any) -> None:
        target = program if first == "program" else manifest[first]
        for key in rest[:-1]:
            target = target[int(key) if isinstance(target, list) else key]
        target[int(rest[-1]) if isinstance(target, list) else rest[-1]] = value

    return edit


EDITS = {
    # slots
    ("program.0.1.0", '{"$": 7}'): "instruction 0, 'aten.mm.default': there is no slot 7, only 0 to 6",
    ("program.0.1.0", '{"$": -1}'): "instruction 0, 'aten.mm.default': there is no slot -1, only 0 to 6",
    ("program.0.1.0", '{"$": 6}'): "instruction 0, 'aten.mm.default': it reads slot 6, which is empty there",
    ("program.2.1.0", '[[{"$": 0}]]'): "instruction 2, 'getitem': it reads slot 0, which is empty there",
    ("program.0.3", "7"): "instruction 0, 'aten.mm.default': there is no slot 7 for its result",
    ("program.0.3", "1.0"): "instruction 0, 'aten.mm.default': there is no slot 1.0 for its result",
    ("program.0.3", "true"): "instruction 0, 'aten.mm.default': there is no slot True for its result",
    ("program.0.4", "[99]"): "instruction 0, 'aten.mm.default': there is no slot 99 to free",
    ("program.0.4", '["x"]'): "instruction 0, 'aten.mm.default': there is no slot 'x' to free",
    ("program.0.5", "2"): "instruction 0, 'aten.mm.default': there is no source line 2",
    ("plan.slots", "1000000000"): "it has 1000000000 slots for 8 values",
    ("plan.slots", "1e3"): "the number of slots is 1000.0, not a whole number from 0 to 2147483647",
    ("plan.inputs.0.3", "9"): "the slot of input 0 is 9, not a whole number from 0 to 6",
    ("plan.inputs.0.3", "1"): "two inputs share slot 1",
    ("plan.outputs.0.3", "0"): "output 0 lies in slot 0, which is empty at the end",
    ("plan.constant_slots", '{"d": 3}'): "its constants are not those that it names slots for",
    ("plan.donated", "[true]"): "'donated' has 1 entries for 3 inputs",
    ("plan.donated", "[1, 0, 0]"): "'donated' holds something else than true and false",
    # arguments
    ("program.0.1.0", '{"dtype": "f31"}'): "an argument is a JSON object of 1, which no instruction takes",
    ("program.0.1.0", '{"module": "os"}'): "an argument is a JSON object of 1, which no instruction takes",
    ("program.0.1.0", '{"$": 1, "dtype": "f32"}'): "an argument is a JSON object of 2, which no instruction takes",
    ("program.0.1.0", '{"$": "0"}'): "an argument is a JSON object of 1, which no instruction takes",
    ("program.0.1.0", '{"float": "1.5"}'): "an argument is a JSON object of 1, which no instruction takes",
    ("program.0.1.0", '{"layout": "f32"}'): "an argument is a JSON object of 1, which no instruction takes",
    ("program.0.1.0", '{"device": "gpu0"}'): "'gpu0' is no device",
    ("program.0.1.0", "1" + "0" * 30): "a number is too large",
    ("program.0.1.0", "[" * 40 + "]" * 40): "lists are nested more than 32 deep",
    ("program.0", "[]"): "an instruction is a list of 0, not a list of 7",
    ("program.0", '"aten.mm"'): "an instruction is 'aten.mm', not a list of 7",
    ("program.0.0", "3"): "an instruction's op is 3, not a string",
    ("program.0.2", "[]"): "the arguments of 'aten.mm.default' is a list of 0, not an object",
    # the arena
    ("plan.arena", "-1"): "the size of the arena is -1, not a whole number from 0 to 9223372036854775807",
    ("program.0.6", "[0]"): "a region is 0, not a list of 3",
    ("program.0.6", '[[0, "f31", [8, 4]]]'): "the dtype of a region is 'f31'",
    ("program.0.6", '[[-64, "f32", [8, 4]]]'): (
        "the start of a region is -64, not a whole number from 0 to 9223372036854775807"
    ),
    ("program.0.6", '[[64, "f32", [8, 4]]]'): (
        "instruction 0, 'aten.mm.default': 128 bytes at 64 are no region of an arena of 0 bytes"
    ),
    ("program.0.6", '[[0, "f32", [0]]]'): (
        "instruction 0, 'aten.mm.default': 0 bytes at 0 are no region of an arena of 0 bytes"
    ),
    ("program.1.6", '[[0, "f32", [8, 4]]]'): "instruction 1, 'all_reduce': it cannot write into the arena",
    # ops of ours
    ("program.1.1.1", '["dta"]'): (
        "instruction 1, 'all_reduce': 'dta' is not a dim of mesh<data=4, model=2>, or stands twice"
    ),
    ("program.1.1.1", '["data", "data"]'): (
        "instruction 1, 'all_reduce': 'data' is not a dim of mesh<data=4, model=2>, or stands twice"
    ),
    ("program.1.1.1", '"data"'): "instruction 1, 'all_reduce': its mesh dims are not a list",
    ("program.1.1", "[]"): "instruction 1, 'all_reduce': it takes tensors, mesh_dims, reduction",
    ("program.3.1", "[1]"): "instruction 3, 'commit': it takes nothing",
    # types and the rest
    ("plan.mesh", '[["data", 0]]'): "a mesh dim's size is 0, not a whole number from 1 to 2147483647",
    ("plan.mesh", '[["a", 2], ["a", 2]]'): "mesh dim 'a' stands twice",
    ("plan.mesh", '[["\\u001b[2J", 2]]'): "a mesh dim cannot be named '\\x1b[2J'",
    ("plan.mesh", "{}"): "the mesh is a JSON object of 0, not a list",
    ("plan.inputs.0.0", '"constant"'): "an input or output is 'constant', not one of input, state, scalar, seed",
    ("plan.inputs.0.1", "null"): "the label of an input or output is None",
    ("plan.inputs.0.2.0", '"f31"'): "the dtype of input 0 is 'f31'",
    ("plan.inputs.0.2.0", "[]"): "the dtype of input 0 is a list of 0",
    ("plan.inputs.0.2.1", "[-8, 4]"): "a size of input 0 is -8, not a whole number from 0 to 9223372036854775807",
    ("plan.inputs.0.2.1", "[8]"): "the layout of input 0 has 2 dims, and input 0 has 1",
    ("plan.inputs.0.2.2", '[["dta"], []]'): "unknown mesh dim 'dta' in the layout of input 0",
    ("plan.inputs.0.2.3", '[["model"]]'): "the layout of input 0 is a list of 1, not a list of 2",
    ("plan.inputs.0.2.3", '[["model", "avg"]]'): "unknown reduction 'avg' in the layout of input 0",
    ("plan.sources", '[["x", -1, 0, 0, null]]'): (
        "a source line's number is -1, not a whole number from 0 to 9223372036854775807"
    ),
    (
        "plan.sources",
        '[["x", 1, 0, 0, ["y", 1, 0, 0, ["z", 1, 0, 0, null]]]]',
    ): "a source line has more than one caller",
    ("plan.target", '"cuda:91"'): "its target is 'cuda:91', not one of cpu, cuda:80, cuda:90, cuda:100, gfx942",
    ("plan.target", "null"): "its target is None, not one of cpu, cuda:80, cuda:90, cuda:100, gfx942",
    ("plan.collectives", '"glo"'): "unknown collectives 'glo'",
    ("plan.collectives", "[]"): "its collectives are a list of 0, not one of monarch, gloo, nccl",
    ("plan.collectives", '"nccl"'): "collectives='nccl' does not move tensors of CPUs, and the plan is for cpu",
    ("plan.cuda_graphs", "true"): "its CUDA graphs are True, and it is for cpu",
    ("plan.cuda_graphs", "[]"): "its CUDA graphs are a list of 0, and it is for cpu",
    ("plan.name", "null"): "its name is None, not a string",
    ("plan.name", '["x"]'): "its name is a list of 1, not a string",
    ("costs", "[]"): "'costs' is a list of 0, not an object",
    ("options", "[]"): "'options' is a list of 0, not an object",
    ("options", '{"target": "cpu"}'): "its options have 'target'",
    ("options", '{"memory_limit": true}'): "its memory limit is True, not a whole number from 1 to 9223372036854775807",
    ("options", '{"rounding": "none"}'): "its option 'rounding' is 'none', not one of eager, chain",
    ("options", '{"strict": 1}'): "its option 'strict' is 1",
    ("options", '{"kernels": 1}'): "its option 'kernels' is 1, not a string",
}


@pytest.mark.parametrize(("edit", "message"), EDITS.items(), ids=[f"{path} = {value[:20]}" for path, value in EDITS])
def test_contents(edit: tuple[str, str], message: str) -> None:
    manifest, program, members = parts()
    path, value = edit
    if path in ("costs", "options"):
        manifest[path] = json.loads(value)
    else:
        set_at(path, json.loads(value))(manifest, program)
    assert refused(sealed(manifest, program, members)) == f"{LEAD}{message}{HINT}"


def test_a_plan_with_another_plans_hash() -> None:
    manifest, _, members = parts()
    manifest["hash"] = "0" * 64
    assert refused(seal(manifest, members)) == f"{LEAD}its hash is not that of what it holds{HINT}"


@pytest.mark.parametrize("member", MEMBERS)
def test_members_that_are_missing(member: str) -> None:
    manifest, _, members = parts()
    del members[member]
    listed = "program.jsonl, graph.txt, traced.txt, report.json, constants.safetensors, binaries.json, binaries.bin"
    lead = f"step.mplan does not list its members as {listed}, with lengths and digests"
    assert refused(seal(manifest, members)).startswith(lead)


@pytest.mark.parametrize(
    "listed",
    [
        "null",
        "[]",
        "{}",
        '[["program.jsonl", -5, "x"]]',
        '[["program.jsonl", 1e9, "x"]]',
        '["a", "b", "c"]',
        "[[[], 0, 0]]",
    ],
)
def test_lists_of_members(listed: str) -> None:
    import hashlib
    import struct

    text = json.dumps({"members": json.loads(listed)}).encode()
    header = struct.pack("<8sIQ32s", b"\x93MPLAN\r\n", VERSION, len(text), hashlib.sha256(text).digest())
    assert "does not list its members" in refused(header + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff", "is not JSON: "),
        (b"[" * 100_000, "nests too deep"),
        (b"[1, NaN]", "NaN is not JSON"),
        (b"[1e999]", "is not JSON: the number 1e999 is too large"),
        (b"[9" + b"9" * 5000 + b"]", "is not JSON: Exceeds the limit"),
        (b'["a", [], {}, 0, [], -1', "is not JSON: "),
        (b'{"op": "add", "dim": 0, "op": "mul"}', "is not JSON: the key 'op' is there twice"),
    ],
)
def test_programs_that_are_not_json(text: bytes, message: str) -> None:
    manifest, _, members = parts()
    members[PROGRAM] = text
    manifest["hash"] = hash_members(manifest["plan"], text, members[CONSTANTS])
    refusal = refused(seal(manifest, members))
    assert refusal.startswith("program.jsonl of step.mplan ") and message in refusal


def test_deep_nesting() -> None:
    manifest, program, members = parts()
    manifest["costs"]["deep"] = json.loads("[" * 800 + "]" * 800)
    assert refused(sealed(manifest, program, members)) == f"{LEAD}'costs' nests more than 32 deep{HINT}"
    manifest["plan"] = manifest["costs"]["deep"]
    assert refused(sealed(manifest, program, members)).startswith(f"{LEAD}the plan is a list of 1, not an object with")


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (b"", "the constants of step.mplan cannot be read: "),
        (b"\xff" * 8, "the constants of step.mplan cannot be read: "),
        (b"\x02\0\0\0\0\0\0\0{", "the constants of step.mplan cannot be read: "),
        (
            (header := b'{"c":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}').join(
                [len(header).to_bytes(8, "little"), b"\0\0\0\0"]
            ),
            "the constants of step.mplan cannot be read: ",
        ),
        (save_tensors({"c": torch.ones(1, dtype=torch.uint16)}), f"{LEAD}constant 'c' is of torch.uint16"),
        (save_tensors({"c": torch.ones(1), "d": torch.ones(1)}), f"{LEAD}its constants are not those"),
    ],
)
def test_constants(constants: bytes, message: str) -> None:
    manifest, program, members = parts()
    assert refused(sealed(manifest, program, {**members, CONSTANTS: constants})).startswith(message)


@pytest.mark.parametrize("member", [GRAPH, TRACED])
def test_a_graph_that_is_no_text(member: str) -> None:
    manifest, program, members = parts()
    refusal = refused(sealed(manifest, program, {**members, member: b"\xff"}))
    assert refusal == f"{LEAD}its {member} is not text in UTF-8{HINT}"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "dtype", "device", "float", "x"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, entry in inner for place in places(entry, (*path, key)))]


@given(st.data())
@settings(max_examples=300)
def test_any_well_sealed_file_loads_or_is_refused(data: st.DataObject) -> None:
    manifest, program, members = copy.deepcopy(PARTS)
    whole = {"manifest": manifest, "program": program}
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([place for place in places(whole) if len(place) > 1]))
        target: Any = whole
        for key in path[:-1]:
            target = target[key]
        if isinstance(target, dict) and data.draw(st.booleans()):
            target[data.draw(st.text(max_size=3))] = target.pop(path[-1])
        else:
            target[path[-1]] = data.draw(JSON)
    try:
        plan = plan_from_bytes(sealed(manifest, program, members), "step.mplan")
    except PlanError:
        return
    assert plan_bytes(plan_from_bytes(plan_bytes(plan))) == plan_bytes(plan)


PARTS = parts()
