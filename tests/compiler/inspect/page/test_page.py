"""The page as text, and what a hostile plan can do to it: nothing."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.inspect.page import document, page
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.report import Report
from tests.compiler.inspect.page.conftest import Open
from tests.compiler.inspect.page.plans import small_plan, trace_of, training_plan

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--{{plan}}\u2028"
)


def data_of(text: str) -> dict[str, object]:
    (found,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def hostile_plan() -> Plan:
    """A plan in which everything that may be text is an attack."""
    plan = small_plan(HOSTILE)
    assert plan.report is not None
    values = tuple(
        dataclasses.replace(
            value,
            name=f"{HOSTILE}{number}",
            op=value.op if number < 3 else HOSTILE,
            call=HOSTILE,
            module=f"{HOSTILE}.x",
            traced=HOSTILE,
            why=HOSTILE,
            decisions=tuple(
                dataclasses.replace(
                    decision,
                    rule=HOSTILE,
                    factor=HOSTILE,
                    why=HOSTILE,
                    alternatives=tuple(dataclasses.replace(a, text=HOSTILE) for a in decision.alternatives),
                )
                for decision in value.decisions
            ),
        )
        for number, value in enumerate(plan.report.values)
    )
    return dataclasses.replace(
        plan,
        report=Report(values, (HOSTILE,) * len(plan.sources)),
        sources=tuple(Source(HOSTILE, source.line) for source in plan.sources),
    )


def test_the_page_holds_what_the_plan_says() -> None:
    plan = small_plan()
    data = data_of(page(plan, trace=trace_of(plan), against=training_plan(1), title="mine"))
    assert data["title"] == "mine"
    assert data["plan"]["values"]["name"][-1] == "loss"  # type: ignore[index]
    assert data["plan"]["outputs"] == [[9, "return", "0"]]  # type: ignore[index]
    assert [len(parts) for _, parts, _ in data["trace"]["steps"]] == [4, 4]  # type: ignore[index]
    assert data["comparison"]["before"]["name"] == "train_step"  # type: ignore[index]


def test_a_trace_of_another_plan_says_nothing_of_this_one() -> None:
    assert data_of(page(small_plan(), trace=trace_of(training_plan(1))))["trace"] is None


def test_the_page_asks_nothing_of_anybody() -> None:
    text = page(small_plan())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "http" not in policy
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|\bsrc=|\bhref=", markup)
    assert "url(http" not in text and "@import" not in text


def test_it_ships_the_licences_of_what_it_holds() -> None:
    text = page(small_plan())
    assert "@dagrejs/dagre" in text and text.count("Permission is hereby granted, free of charge") == 2


def test_a_plan_without_a_report_is_an_error() -> None:
    with pytest.raises(MonarchError, match="the plan 'mlp' has no report"):
        page(dataclasses.replace(small_plan(), report=None))


def test_a_page_that_was_not_built_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(document, "TEMPLATE", tmp_path / "page.html")
    with pytest.raises(MonarchError, match="has not been built(.|\n)*run 'make setup'"):
        page(small_plan())


def test_no_text_of_a_plan_ends_its_element() -> None:
    text = page(hostile_plan(), title=HOSTILE)
    plain = page(small_plan())
    assert text.lower().count("</script") == plain.lower().count("</script")
    assert text.count("<img") == plain.count("<img") == 0
    assert data_of(text)["title"] == HOSTILE


def test_lone_surrogates_can_be_written() -> None:
    page(small_plan("bad \ud800 name")).encode()


def test_a_hostile_plan_is_shown_as_text(open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page(hostile_plan(), against=hostile_plan(), title=HOSTILE))
    shown = open_page(path)
    expect(shown.locator("h1")).to_have_text(HOSTILE)
    for view in ("collectives", "memory", "timeline", "source", "compare", "graph"):
        shown.locator(f"#tab-{view}").click()
    shown.keyboard.press("/")
    shown.get_by_role("combobox").fill("onerror")
    shown.keyboard.press("Enter")
    expect(shown.locator(".panel h2")).to_contain_text("<img src=x onerror=")
    assert shown.locator("body img").count() == 0
    assert shown.title() != "owned"


def test_it_works_in_a_sandboxed_frame(open_page: Open, tmp_path: Path) -> None:
    """As a notebook shows it: in an iframe's srcdoc, which has no address and no storage."""
    path = tmp_path / "notebook.html"
    inner = html.escape(page(small_plan()), quote=True)
    frame = f'<iframe sandbox="allow-scripts" width="900" height="600" srcdoc="{inner}"></iframe>'
    path.write_text(f"<!doctype html><html data-ready><title>a notebook</title>{frame}</html>")
    shown = open_page(path).frame_locator("iframe")
    shown.locator(".overview .value-link", has_text="%relu").click()
    expect(shown.locator(".panel h2")).to_have_text("%relu")
    shown.get_by_role("button", name="Dark colours (T)").click()
    expect(shown.locator("html")).to_have_attribute("data-theme", "dark")
