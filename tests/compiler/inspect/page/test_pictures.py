"""What a picture of the page shows, measured (`measure.js`): nothing beyond the screen, no box over another, no edge
through a box, no text wider than its place, and names large enough to be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from monarch.compiler.inspect.page import page as html_of
from tests.compiler.inspect.page.pictures import SIZES, show
from tests.compiler.inspect.page.plans import trace_of, training_plan


@pytest.fixture(scope="module", params=[2, 14, 48])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = training_plan(request.param)
    path = tmp_path_factory.mktemp("pictures") / f"{request.param}.html"
    path.write_text(html_of(plan, trace=trace_of(plan, 1), against=training_plan(request.param, reduce_at_once=True)))
    return path


def opened(browser: Browser, file: Path, size: tuple[int, int]) -> Page:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce")
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
