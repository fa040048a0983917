"""Plans of several parts: routes against dense tensors, files, and what the checker finds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.blocks import block_of, own_part, whole_of
from monarch.compiler.errors import PlanError, Source
from monarch.compiler.mesh import NDSlice, Shape
from monarch.compiler.plan import Instruction, Part, Plan, Slot, Transfer, ValueSpec, file
from monarch.compiler.plan.file import hash_of, plan_bytes, plan_from_bytes
from monarch.compiler.plan.transfers import moved_bytes, routes
from monarch.compiler.text import parse_type
from monarch.compiler.types import Layout, MeshSpec, TensorType

A, B = MeshSpec.of(data=2), MeshSpec.of(model=2)


@st.composite
def layouts(draw: st.DrawFn, ndim: int, mesh: MeshSpec) -> Layout:
    """Any layout without pending reductions, dims of the mesh nested in any order."""
    layout = Layout.replicated(ndim)
    for name in draw(st.permutations(mesh.names)):
        where = draw(st.none() | st.integers(0, ndim - 1)) if ndim else None
        layout = layout.place(name, where)
    return layout


@st.composite
def transfers(draw: st.DrawFn) -> tuple[TensorType, MeshSpec, TensorType, MeshSpec]:
    meshes = [
        MeshSpec(tuple((name, draw(st.integers(1, 3))) for name in names[: draw(st.integers(0, 2))]))
        for names in (("x", "y"), ("y", "z"))
    ]
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    sent, received = (TensorType(torch.float32, shape, draw(layouts(len(shape), mesh))) for mesh in meshes)
    return sent, meshes[0], received, meshes[1]


@given(transfers())
def test_routes_bring_each_element_once_and_from_where_it_is(
    case: tuple[TensorType, MeshSpec, TensorType, MeshSpec],
) -> None:
    sent, source, received, target = case
    dense = torch.arange(1, sent.numel + 1, dtype=torch.float32).reshape(sent.shape)
    have = [block_of(dense, sent, source, rank).contiguous() for rank in range(source.workers)]
    got = [torch.zeros(received.local_shape(target)) for _ in range(target.workers)]
    times = [torch.zeros_like(block) for block in got]
    found = routes(sent, source, received, target)
    areas: dict[tuple[int, int], torch.Tensor] = {}
    for route in found:
        block = have[route.source][tuple(slice(a, a + n) for a, n in zip(route.start, route.shape, strict=True))]
        into = tuple(slice(a, a + n) for a, n in zip(route.into, route.shape, strict=True))
        got[route.target][into] = block
        times[route.target][into] += 1
        known = areas.setdefault((route.source, route.at), block)
        assert torch.equal(known, block), "one place holds two blocks"
    for rank, block in enumerate(got):
        assert torch.equal(
            own_part(block, received, target, rank),
            own_part(block_of(dense, received, target, rank), received, target, rank),
        )
        assert torch.equal(
            own_part(times[rank], received, target, rank), torch.ones_like(own_part(block, received, target, rank))
        ), "an element is brought twice, or not at all"
    assert torch.equal(whole_of(got, received, target), dense)
    ends = sorted((source_, at, at + block.numel() * 4) for (source_, at), block in areas.items())
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(ends, ends[1:], strict=False)), "two blocks overlap"
    assert moved_bytes(found, 4) == 4 * sum(int(each.sum()) for each in times)


def test_replicas_share_the_load() -> None:
    sent, received = parse_type("f32[8, 4]"), parse_type("f32[8@data, 4]")
    found = routes(sent, MeshSpec.of(replica=2), received, MeshSpec.of(data=4))
    assert [(route.source, route.target) for route in found] == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_a_block_that_several_read_is_put_there_once() -> None:
    sent = received = parse_type("f32[8, 4]")
    found = routes(sent, MeshSpec.of(data=1), received, MeshSpec.of(data=4))
    assert [route.at for route in found] == [0, 0, 0, 0]
    assert moved_bytes(found, 4) == 512


def two_parts() -> Plan:
    """`a` doubles its input and sends it; `b` adds what it receives to its state."""
    x, w = parse_type("f32[8@data, 4]"), parse_type("f32[8, 4@model]")
    first = Plan(
        name="step.a",
        mesh=A,
        inputs=(ValueSpec("input", 0, x, 0),),
        outputs=(ValueSpec("return", 0, x, 1),),
        instructions=(
            Instruction("aten.mul.Tensor", (Slot(0), 2.0), {}, 1),
            Instruction("send", (Slot(1), 0), {}, 2),
            Instruction("commit", (), {}, -1),
        ),
        slots=3,
        donated=(False,),
    )
    second = Plan(
        name="step.b",
        mesh=B,
        inputs=(ValueSpec("state", "w", w, 0, 1),),
        outputs=(ValueSpec("state", "w", w, 2, 1),),
        instructions=(
            Instruction("recv", (0, [8, 2], torch.float32), {}, 1),
            Instruction("commit", (), {}, -1),
            Instruction("aten.add_.Tensor", (Slot(0), Slot(1)), {}, 2),
        ),
        slots=3,
        donated=(True,),
    )
    whole = Plan(
        name="step",
        mesh=MeshSpec.of(stage=2, data=2),
        inputs=(*second.inputs, *first.inputs),
        outputs=(*first.outputs, *second.outputs),
        instructions=(),
        slots=0,
        donated=(True, False),
        parts=(Part("a", Shape.of(A.sizes), first), Part("b", _at(2, B), second)),
        transfers=(Transfer(0, 1, x, w, "h", Source("train.py", 9, 1, 20)),),
    )
    return replace(whole, hash=hash_of(whole))


def _at(offset: int, mesh: MeshSpec) -> Shape:
    row_major = NDSlice.new_row_major([size for _, size in mesh.dims])
    return Shape(mesh.names, NDSlice(offset=offset, sizes=row_major.sizes, strides=row_major.strides))


def test_a_plan_of_parts_is_the_same_after_its_file() -> None:
    plan = two_parts()
    again = plan_from_bytes(plan_bytes(plan))
    assert again == plan
    assert plan_bytes(again) == plan_bytes(plan)
    assert str(plan).endswith("6 instructions in 2 parts, 1 transfers")


def test_the_hash_is_of_the_parts_too() -> None:
    plan = two_parts()
    a, b = plan.parts
    less = replace(b, plan=replace(b.plan, instructions=b.plan.instructions[:1]))
    assert hash_of(replace(plan, parts=(a, less))) != plan.hash
    assert hash_of(replace(plan, transfers=(replace(plan.transfers[0], name="other"),))) != plan.hash


def _with(plan: Plan, number: int, *instructions: Instruction) -> Plan:
    parts = list(plan.parts)
    parts[number] = replace(parts[number], plan=replace(parts[number].plan, instructions=instructions))
    return replace(plan, parts=tuple(parts))


def _wrong_plans() -> dict[str, tuple[Plan, str]]:
    plan = two_parts()
    (mul, send, commit), (recv, _, add) = (part.plan.instructions for part in plan.parts)
    back = Transfer(1, 0, plan.transfers[0].received, plan.transfers[0].sent)
    circle = replace(plan, transfers=(*plan.transfers, back))
    reply, answer = Instruction("send", (Slot(0), 1), {}, 2), Instruction("recv", (1, [4, 4], torch.float32), {}, 2)
    again = replace(plan, transfers=(plan.transfers[0], plan.transfers[0]))
    first, second = Instruction("send", (Slot(1), 1), {}, 2), Instruction("recv", (1, [8, 2], torch.float32), {}, 1)
    return {
        "no recv": (_with(plan, 1, commit, add), "0 recv instructions"),
        "two sends": (_with(plan, 0, mul, send, send, commit), "2 send instructions"),
        "a send of no transfer": (_with(plan, 0, mul, replace(send, args=(Slot(1), 7))), "send of transfer 7"),
        "a recv in the wrong part": (_with(plan, 0, replace(recv, out=1), send, commit), "which is another part's"),
        "another block": (_with(plan, 1, replace(recv, args=(0, [8, 4], torch.float32)), commit, add), "another block"),
        "one commits": (_with(plan, 0, mul, send), "commit 0, 1 times"),
        "a send behind the commit": (_with(plan, 0, mul, commit, send), "wait for one another"),
        "a circle": (
            _with(_with(circle, 0, answer, mul, send, commit), 1, recv, reply, commit, add),
            "transfer 0 behind",
        ),
        "not in the order of the numbers": (
            _with(_with(again, 0, mul, send, first, commit), 1, second, recv, commit, add),
            "part 'b' has transfer 0 behind transfer 1",
        ),
        "workers in common": (
            replace(plan, parts=(plan.parts[0], replace(plan.parts[1], place=_at(1, B)))),
            "both have worker 1",
        ),
        "a worker that there is not": (
            replace(plan, parts=(plan.parts[0], replace(plan.parts[1], place=_at(3, B)))),
            "has worker 4",
        ),
        "another mesh": (replace(plan, parts=(plan.parts[0], replace(plan.parts[1], place=_at(2, A)))), "its place is"),
        "a pending sum": (
            replace(plan, transfers=(replace(plan.transfers[0], sent=parse_type("f32[8, 4] partial<sum: data>")),)),
            "of summands",
        ),
        "another shape": (
            replace(plan, transfers=(replace(plan.transfers[0], sent=parse_type("f32[8, 2]")),)),
            "is received",
        ),
        "other inputs": (replace(plan, inputs=plan.inputs[:1]), "its inputs are not those of part 'a'"),
        "a send without parts": (replace(plan.parts[0].plan, name="alone"), "has no parts"),
    }


@pytest.mark.parametrize("case", sorted(_wrong_plans()))
def test_a_wrong_plan_says_what_is_wrong(case: str) -> None:
    plan, message = _wrong_plans()[case]
    with pytest.raises(PlanError, match="is not a plan that can be run") as error:
        plan_bytes(plan)
    assert message in error.value.message


def test_areas_may_be_shared_where_the_first_is_received_before_the_second_is_sent() -> None:
    plan = two_parts()
    (mul, send, commit), (recv, _, add) = (part.plan.instructions for part in plan.parts)
    again = replace(plan, transfers=(plan.transfers[0], plan.transfers[0]))
    first, second = Instruction("send", (Slot(1), 1), {}, 2), Instruction("recv", (1, [8, 2], torch.float32), {}, 1)
    plan_bytes(_with(_with(again, 0, mul, send, first, commit), 1, recv, second, commit, add))


_EDITS = {
    "parts": ([], [3], [["a", 1, {}]], {"a": 1}),
    "transfers": ([[0]], [[0, 9, [], [], "", None, 0, 0]], 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    "inputs": ([0], [0, 0], [0, 2], ["a", 0], None),
    "outputs": ([0, 5], [1, 1], {}),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in _EDITS.items() for value in values])
def test_an_edited_file_is_an_error(key: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def edited(data: bytes, name: str, members: tuple[str, ...]) -> tuple[dict[str, object], dict[str, bytes]]:
        manifest, found = unseal(data, name, members)
        manifest = json.loads(json.dumps(manifest))
        manifest["plan"][key] = value
        return manifest, found

    unseal = file.unseal
    monkeypatch.setattr(file, "unseal", edited)
    with pytest.raises(PlanError):
        plan_from_bytes(plan_bytes(two_parts()))
