"""The page says why a value has its layout, and why a collective is there, in the words of `why.explain`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from monarch.compiler.inspect.page import page as html_of
from monarch.compiler.inspect.why import explain
from monarch.compiler.plan import Plan
from tests.compiler.inspect.page.conftest import Open
from tests.compiler.inspect.page.plans import training_plan as made_up_plan
from tests.compiler.inspect.programs import laid_out, megatron, training_plan

PLANS = {
    "megatron": megatron,
    "laid out": laid_out,
    "tensor": lambda: training_plan("tensor"),
    "nested": lambda: training_plan("nested"),
    "made up": lambda: made_up_plan(2),
}
READ = """names => names.map(name => {
    location.replace("#value=" + encodeURIComponent(name));
    dispatchEvent(new HashChangeEvent("hashchange"));
    const panel = document.querySelector(".panel");
    const text = query => [...panel.querySelectorAll(query)].map(each => each.textContent);
    const parts = each => [...each.children].map(part => part.textContent).join(" | ");
    const line = each => each.matches(".because") ? parts(each) : each.textContent;
    const lines = [...panel.querySelectorAll(".because, .said, .more")].map(line);
    return [text("h2")[0], text(".movement > .why"), text(".decision > .why"), lines];
})"""


def told(plan: Plan, name: str) -> tuple[list[str], list[str], list[str]]:
    """What moves, the decisions' reasons, and the lines of all chains, as `explain` tells them."""
    found = explain(plan, name)
    told = found.moved if len(found.moved) <= 2 else ()
    chains = [*(chain for each in told for chain in (*each.value_chains, *each.taker_chains)), *found.chains]
    lines, before = [], ""
    for line in str(found).splitlines():
        if re.match(r" +(and that )?because ", line):
            what, _, place = line.strip().partition("  # ")
            name, _, type_ = what.partition(" : ")
            lines.append(f"{name} | {':'.join(place.split(':')[:2])} | {type_}")
        elif before.strip().startswith(("because", "and that because")) and indent(line) == indent(before) + 2:
            lines.append(line.strip())
        before = line
    return [each.why or "The compiler added it." for each in found.moved], [c.decision.why for c in chains], lines


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full if kind in ("tensor", "nested", "made up") else ()) for kind in PLANS],
)
def test_the_page_gives_the_reasons_that_the_terminal_gives(open_page: Open, tmp_path: Path, kind: str) -> None:
    plan = PLANS[kind]()
    assert plan.report is not None
    path = tmp_path / "plan.html"
    path.write_text(html_of(plan))
    names = [value.name for value in plan.report.values]
    shown = open_page(path).evaluate(READ, names)
    chained = 0
    for name, (heading, moved, reasons, lines) in zip(names, shown, strict=True):
        assert heading == f"%{name}"
        assert (moved, reasons, lines) == told(plan, name), name
        chained += len(lines)
    assert chained > len(names)


def test_what_is_left_out_of_a_long_chain_comes_with_a_click(open_page: Open, tmp_path: Path) -> None:
    plan = training_plan("tensor")
    assert plan.report is not None
    long = next(value.name for value in plan.report.values if "and so on" in str(explain(plan, value.name)))
    path = tmp_path / "plan.html"
    path.write_text(html_of(plan))
    page = open_page(path, f"#value={long}")
    more = page.locator(".chain .more").first
    hidden = int(re.findall(r"\d+", more.inner_text())[0])
    buttons, shown = page.locator(".chain .more").count(), page.locator(".because").count()
    more.click()
    expect(page.locator(".chain .more")).to_have_count(buttons - 1)
    expect(page.locator(".because")).to_have_count(shown + hidden)
    page.locator(".because .value-link").first.click()
    expect(page.locator(".panel h2")).not_to_have_text(f"%{long}")
