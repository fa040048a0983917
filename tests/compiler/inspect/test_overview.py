"""A step at a glance: where its time and memory go, its blocks, and what there is to say of it in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monarch.compiler.cli.options import BY
from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.inspect.blocks import Block
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.inspect.overview import overview
from monarch.compiler.inspect.verdicts import Verdict, verdicts
from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.report import peak
from tests.compiler.inspect import programs
from tests.compiler.inspect.page.plans import ROWS, PlanBuilder, f32, training_plan


def said(plan: Plan) -> list[str]:
    return [verdict.text for verdict in verdicts(plan, estimate(plan, cluster_of(plan.target)))]


@pytest.fixture(scope="module")
def nested() -> Plan:
    return programs.training_plan("nested")


def test_the_parts_of_a_steps_time_add_up(nested: Plan) -> None:
    for plan in (nested, training_plan(3)):
        found = overview(plan)
        assert sum(found.time.values()) == pytest.approx(found.seconds)
        assert {"memory traffic", "waiting for model", "waiting for data"} <= found.time.keys()


def test_the_peak_is_told_by_what_it_is(nested: Plan) -> None:
    memory = overview(nested).memory
    most, at = peak(nested)
    assert nested.report is not None
    assert (memory.held, memory.value) == (most, nested.report.values[at].name)
    assert sum(memory.kinds.values()) == most
    assert {"weights", "forward"} <= memory.kinds.keys()
    assert memory.there is None


def test_blocks_that_are_alike_are_one(nested: Plan) -> None:
    blocks = {block.name: block for block in overview(nested).blocks}
    assert blocks["blocks"].times == 2
    assert blocks["blocks"].path == "blocks.0"
    assert [(part.name, part.times) for part in blocks["blocks"].parts] == [
        ("attention_norm", 1),
        ("attention", 1),
        ("mlp_norm", 1),
        ("mlp", 1),
    ]
    assert blocks["head"].times == 1


def test_the_blocks_have_all_of_a_steps_costs(nested: Plan) -> None:
    for plan in (nested, training_plan(5)):
        found = overview(plan)
        values = plan.report.values if plan.report else ()
        assert sum(block.sent for block in found.blocks) == sum(value.sent for value in values)
        assert sum(block.flops for block in found.blocks) == pytest.approx(sum(value.flops for value in values))

        def check(block: Block) -> None:
            assert sum(part.sent for part in block.parts) <= block.sent
            for part in block.parts:
                check(part)

        for block in found.blocks:
            check(block)


def test_blocks_with_other_parameters_are_not_alike() -> None:
    b = PlanBuilder("uneven")
    b.line = 41
    x = b.add("input", f32((64, 32), ROWS), call="input 0", name="x")
    for number, width in enumerate((32, 32, 64, 32, 32, 32)):
        b.module = f"layers.{number}"
        weight = b.add("state", f32((width,), ((),)), call=f'state "layers.{number}.weight"', name=f"w{number}")
        x = b.add("aten.mul", f32((64, 32), ROWS), (x, weight), flops=1e6)
    (layers,) = overview(b.plan()).blocks
    assert [(part.name, part.times) for part in layers.parts] == [("0", 2), ("2", 1), ("3", 3)]


def test_the_five_lines_that_cost_most_come_first() -> None:
    lines = overview(training_plan(4)).lines
    assert len(lines) == 5
    assert lines[0].code == "loss.backward()"
    assert [line.seconds for line in lines] == sorted((line.seconds for line in lines), reverse=True)


def test_a_plan_that_does_not_fit_says_so_first() -> None:
    plan = training_plan(2)
    held = peak(plan)[0]
    small = replace(plan, costs=plan.costs | {"machine": {"name": "h100-8", "memory": held // 2}})
    verdict, *_ = verdicts(small, estimate(small, cluster_of("cpu")))
    assert verdict.state == "bad"
    assert verdict.text.startswith("does not fit h100-8: a worker holds ")
    large = replace(plan, costs=plan.costs | {"machine": {"name": "h100-8", "memory": held}})
    assert said(large)[0].startswith("fits h100-8: a worker holds ")
    assert overview(large).memory.there == held
    limited = replace(plan, options=CompileOptions(memory_limit=held - 1))
    assert said(limited)[0].startswith("does not fit the limit: ")


@pytest.mark.parametrize("machine", [None, 7, {}, {"name": 3, "memory": 5}, {"name": "x", "memory": True}])
def test_a_machine_of_another_form_says_nothing(machine: object) -> None:
    plan = training_plan(1)
    assert overview(replace(plan, costs=plan.costs | {"machine": machine})).memory.there is None


def with_head(shards: tuple[tuple[str, ...], ...]) -> Plan:
    """A batch times a head's weight: whole, or sharded."""
    b = PlanBuilder("headed")
    b.line = 41
    x = b.add("input", f32((64, 256), ROWS), call="input 0", name="x")
    b.module = "head"
    head = b.add("state", f32((256, 512), shards), call='state "head.weight"', name="head_weight")
    result = f32((64, 512), (("data",), shards[1]))
    b.add("aten.mm", result, (x, head), flops=2.0 * 32 * 256 * 512, rule="m k, k n -> m n")
    return b.plan()


def test_a_product_that_every_worker_does_is_named() -> None:
    whole = "the product of head (train.py:41) is done 2 times, by every worker along model: "
    assert [text for text in said(with_head(((), ()))) if "done 2 times" in text][0].startswith(whole)
    assert not [text for text in said(with_head(((), ("model",)))) if "done 2 times" in text]


def test_work_of_a_real_program_that_tensor_parallel_repeats_is_named(nested: Plan) -> None:
    repeated = [text for text in said(nested) if "by every worker along model" in text]
    assert repeated and "the optimizer's update" in " ".join(repeated)
    assert not [text for text in said(nested) if "products of blocks" in text]


def gathering(times: int) -> Plan:
    b = PlanBuilder("gathering")
    b.line = 41
    x = b.add("input", f32((64, 256), ROWS), call="input 0", name="x")
    b.module = "attn"
    y = b.add("aten.relu", f32((64, 256), ROWS), (x,), rule="... -> ...")
    for _ in range(times):
        b.add("all_gather", f32((64, 256), ((), ())), (y,), mesh_dims=("data",), why="its users need it replicated")
    return b.plan()


def test_an_activation_that_is_gathered_twice_is_named() -> None:
    assert not [text for text in said(gathering(1)) if "gathered" in text]
    (text,) = [text for text in said(gathering(2)) if "gathered" in text]
    assert text == "attn's %relu (train.py:41) is gathered twice over data: 64.0 KiB"


def test_states_that_are_whole_on_every_worker_are_named() -> None:
    b = PlanBuilder("stateful")
    b.line = 41
    x = b.add("input", f32((64, 1024), ROWS), call="input 0", name="x")
    b.module = "up"
    up = b.add("state", f32((1024, 2048), ((), ("model",))), call='state "up.weight"', name="up_weight")
    b.add("aten.mm", f32((64, 2048), (("data",), ("model",))), (x, up), flops=1e6, rule="m k, k n -> m n")
    (text,) = [text for text in said(b.plan()) if "whole on each" in text]
    assert text == "weights of 4.0 MiB are whole on each of the 2 workers along data"


def test_waiting_is_told_where_it_is_a_part_of_the_step() -> None:
    b = PlanBuilder("waiting")
    b.line = 41
    x = b.add("input", f32((4096, 256), ROWS), call="input 0", name="x")
    y = b.add("aten.relu", f32((4096, 256), ROWS), (x,), rule="... -> ...")
    b.add("all_gather", f32((4096, 256), ((), ())), (y,), mesh_dims=("data",), why="its users need it replicated")
    found = verdicts(b.plan(), estimate(b.plan(), cluster_of("cpu")))
    assert isinstance(found[-1], Verdict) and found[-1].text.startswith("a worker waits for what moves over data for ")


def test_seconds_for_gpus_are_said_to_be_unconfirmed() -> None:
    """On CPUs estimates were compared with measured steps; for GPUs bytes, counts and order are all that is known."""
    plan = training_plan(2)
    assert not any("no GPU has confirmed" in text for text in said(plan))
    there = replace(plan, options=CompileOptions(target="cuda:90"))
    assert [text for text in said(there) if "seconds for cuda:90 are bounds" in text and "bytes, counts" in text]


def test_costs_by_anything_have_the_same_totals(nested: Plan) -> None:
    keys = ("ops", "flops", "moved", "computing", "communicating", "sent", "peak_bytes")
    for plan in (nested, training_plan(3)):
        totals = {by: [sum(row[key] for row in costs_by(plan, by)) for key in keys] for by in BY}
        assert all(each == pytest.approx(totals["op"]) for each in totals.values()) and min(totals["op"]) > 0
        assert totals["op"][-1] == peak(plan)[0]
