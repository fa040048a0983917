"""What a picture of the page shows, measured (`measure.js`): nothing beyond the screen, no box over another, no edge
through a box, no text wider than its place, names large enough to be read, and all text well apart from its ground."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, ViewportSize

from monarch.compiler.inspect.page import page as html_of
from tests.compiler.inspect.page.pictures import SIZES, VIEWS, show
from tests.compiler.inspect.page.plans import trace_of, training_plan


@pytest.fixture(scope="module", params=[2, 14, 48])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = training_plan(request.param)
    path = tmp_path_factory.mktemp("pictures") / f"{request.param}.html"
    path.write_text(html_of(plan, trace=trace_of(plan, 1), against=training_plan(request.param, reduce_at_once=True)))
    return path


def opened(browser: Browser, file: Path, size: tuple[int, int], theme: Literal["light", "dark"] = "light") -> Page:
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, color_scheme=theme, reduced_motion="reduce")
    page.add_init_script(path=Path(__file__).with_name("measure.js"))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    return page


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", SIZES)
def test_every_view_fits_its_screen(browser: Browser, file: Path, size: tuple[int, int]) -> None:
    page = opened(browser, file, size)
    wrong = {}
    for view in ("overview", "graph", "collectives", "memory", "timeline", "source", "compare"):
        show(page, view)
        wrong[view] = page.evaluate("measurePage()")
    page.close()
    assert {view: found for view, found in wrong.items() if found} == {}


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", SIZES)
def test_the_graph_with_all_groups_closed_can_be_read(browser: Browser, file: Path, size: tuple[int, int]) -> None:
    page = opened(browser, file, size)
    show(page, "graph-closed")
    wrong = page.evaluate("measureGraph()")
    page.close()
    assert wrong == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_can_be_told_from_its_ground(browser: Browser, file: Path, theme: Literal["light", "dark"]) -> None:
    page = opened(browser, file, SIZES[0], theme)
    found = {}
    for view in VIEWS:
        show(page, view)
        found[view] = page.evaluate("measureContrast()")
    page.evaluate("document.body.style.setProperty('opacity', 0.5)")
    faint = page.evaluate("measureContrast()")["wrong"]
    page.close()
    assert {view: each["wrong"] for view, each in found.items() if each["wrong"]} == {}
    assert min(each["measured"] for each in found.values()) > 20
    assert len(faint) > 10  # it would notice


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_timeline_can_be_told_from_its_ground(
    browser: Browser, tmp_path: Path, theme: Literal["light", "dark"]
) -> None:
    """Texts on slices and beside them, and slices themselves: whole, close, and with one chosen."""
    plan = training_plan(2)
    file = tmp_path / "page.html"
    file.write_text(html_of(plan, trace=trace_of(plan, 1)))
    page = opened(browser, file, SIZES[0], theme)
    page.evaluate("window.watched = watchCanvas()")
    show(page, "timeline")
    for _ in range(7):
        page.get_by_role("button", name="Zoom in").click()
        page.wait_for_timeout(50)
    page.locator("canvas").press("ArrowRight")
    page.wait_for_timeout(50)
    found = page.evaluate("watched()")
    page.close()
    assert found["wrong"] == [] and found["texts"] > 50 and found["slices"] > 100
