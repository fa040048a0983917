"""What loops and branches cost: all rounds of a scan, the dearer branch of a cond, one round of a while_loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.cli.options import BY
from monarch.compiler.cli.sections import comms
from monarch.compiler.cli.sections import overview as shown
from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.inspect.inspection import Inspection
from monarch.compiler.inspect.overview import overview
from monarch.compiler.inspect.page.data import plan_data
from monarch.compiler.inspect.places import PlaceExplanation, explain_any
from monarch.compiler.inspect.verdicts import verdicts
from monarch.compiler.plan import Plan
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.report import ReportedValue, peak
from monarch.distributed import Mesh

ROUNDS = 7
X, W = torch.ones(8, 64), torch.ones(64, 64)


def compiled(body: Callable[[torch.Tensor, torch.Tensor], Any]) -> Plan:
    @monarch.program(mesh=Mesh.abstract(data=2, model=4))
    def step(x: "f32[8@data, 64]", w: "f32[64@model, 64]"):  # type: ignore[no-untyped-def]
        return body(x, w)

    return step.compile(X, W)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def scanned(x: torch.Tensor, w: torch.Tensor, rounds: int = ROUNDS) -> torch.Tensor:
    return monarch.scan(lambda c, _: (layer(c, w), c.sum()), x, torch.zeros(rounds))[0]


def branched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return monarch.cond(x.sum() > 0, lambda x: layer(layer(x, w), w), lambda x: x + 1, (x,))


def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return monarch.scan(lambda c, _: (branched(scanned(c, w, 3), w), c.sum()), x, torch.zeros(2))[0]


def unknown(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return monarch.while_loop(lambda x: x.sum() < 9, lambda x: (layer(x, w),), (x,))[0]


def unknown_in_a_scan(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return monarch.scan(lambda c, _: (unknown(c, w), c.sum()), x, torch.zeros(2))[0]


def trained(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(scanned(x, w.requires_grad_()).sum(), w)[0]


PROGRAMS = {each.__name__: each for each in (scanned, branched, nested, unknown, unknown_in_a_scan)}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: compiled(body) for name, body in PROGRAMS.items()}


def with_regions(plan: Plan) -> ReportedValue:
    assert plan.report is not None
    (found,) = [value for value in plan.report.values if value.op in ("scan", "cond", "while_loop")]
    return found


def over(plan: Plan, dim: str) -> tuple[int, int]:
    """The collectives over a mesh dim, and the bytes that a worker puts in."""
    counts = plan.costs["collectives"].get(dim, {}).values()
    return sum(each["count"] for each in counts), sum(each["bytes"] for each in counts)


def test_a_scan_costs_its_body_in_all_rounds(plans: dict[str, Plan]) -> None:
    """The same layers, written one below the other, send as much over the weights' dim, and compute as much."""

    def unrolled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(ROUNDS):
            x = layer(x, w)
        return x

    plan, flat = plans["scanned"], compiled(unrolled)
    assert over(plan, "model") == over(flat, "model") == (ROUNDS, ROUNDS * 4 * 64 * 4)
    assert flat.report is not None
    products = sum(value.flops for value in flat.report.values if value.op == "aten.mm")
    assert products == ROUNDS * 2 * 4 * 16 * 64 < with_regions(plan).flops < 1.2 * products
    longer = with_regions(compiled(lambda x, w: scanned(x, w, 10 * ROUNDS)))
    found = with_regions(plan)
    assert longer.seconds == pytest.approx(10 * found.seconds) and longer.moved == 10 * found.moved


def test_a_cond_costs_its_dearer_branch(plans: dict[str, Plan]) -> None:
    plan = plans["branched"]
    assert over(plan, "model") == (2, 2 * 4 * 64 * 4)
    turned = compiled(lambda x, w: monarch.cond(x.sum() > 0, lambda x: x + 1, lambda x: layer(layer(x, w), w), (x,)))
    assert with_regions(turned).within == with_regions(plan).within
    assert over(plans["nested"], "model") == (2 * (3 + 2), 2 * (3 + 2) * 4 * 64 * 4)


def test_a_while_loop_counts_with_one_round_and_the_words_say_so(plans: dict[str, Plan]) -> None:
    assert over(plans["unknown"], "model") == (1, 4 * 64 * 4)
    assert over(plans["unknown_in_a_scan"], "model") == (2, 2 * 4 * 64 * 4)
    for name, plan in plans.items():
        said = [each.text for each in verdicts(plan, estimate(plan, cluster_of("cpu"))) if "while_loop" in each.text]
        assert len(said) == name.startswith("unknown") and all("one round" in text for text in said)


def test_the_backward_of_a_scan_is_counted_too() -> None:
    plan = compiled(trained)
    assert plan.report is not None
    backward = [value for value in plan.report.values if value.op == "scan"][-1]
    assert backward.flops >= ROUNDS * 2 * 2 * 4 * 16 * 64


@pytest.mark.parametrize("name", PROGRAMS)
def test_everybody_says_the_same(plans: dict[str, Plan], name: str) -> None:
    """The tables by anything, the overview and its phases, the estimate of sweep and auto, the page, and the costs."""
    plan = plans[name]
    assert plan.report is not None
    values, found = plan.report.values, estimate(plan, cluster_of("cpu"))
    counts = {
        f"{op} over {dims}": (entry["count"], entry["bytes"])
        for dims, by_op in plan.costs["collectives"].items()
        for op, entry in by_op.items()
    }
    seconds, sent = sum(value.seconds for value in values), sum(value.sent for value in values)
    assert sent == sum(each for _, each in counts.values()) == sum(found.sent.values()) > 0
    assert seconds == pytest.approx(found.computing + sum(found.communicating.values()))
    assert found.seconds == pytest.approx(seconds)  # nothing is started ahead
    for by in BY:
        rows = costs_by(plan, by)
        assert sum(row["computing"] for row in rows) == pytest.approx(found.computing)
        assert sum(row["communicating"] for row in rows) == pytest.approx(sum(found.communicating.values()))
        assert sum(row["flops"] for row in rows) == found.flops and sum(row["sent"] for row in rows) == sent
        assert sum(row["peak_bytes"] for row in rows) == peak(plan)[0]
        kept: dict[str, tuple[int, int]] = {}
        for kind, each in (item for row in rows for item in row["collectives"].items()):
            many, moved = kept.get(kind, (0, 0))
            kept[kind] = many + each["count"], moved + each["bytes"]
        assert kept == counts, by
    (phase,) = shown.data(plan)["phases"].values()
    together = sum(many for many, _ in counts.values())
    assert (phase["collectives"], phase["sent"]) == (together, sent) and phase["seconds"] == pytest.approx(seconds)
    assert sum(overview(plan).time.values()) == pytest.approx(found.seconds)
    by_dim = {row["name"]: row["communicating"] for row in costs_by(plan, "mesh-dim") if row["sent"]}
    assert by_dim == pytest.approx(found.communicating)
    assert sum(row["count"] for row in comms.data(plan)) == together
    assert f"{together} collective" in repr(Inspection(plan))
    page = plan_data(plan)["values"]
    assert sum(page["sent"]) == sent and page["within"][values.index(with_regions(plan))]
    module = explain_any(plan, f"test_regions.py:{plan.sources[with_regions(plan).source].line}")
    assert isinstance(module, PlaceExplanation) and module.within and "in a loop or a branch" in str(module)
    again = plan_from_bytes(plan_bytes(plan))
    assert again.report == plan.report
