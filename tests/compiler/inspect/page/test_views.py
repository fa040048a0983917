"""The page's other views, the mesh, keys, themes and sizes, in a browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.compiler.inspect.page.conftest import Open

VIEWS = ("overview", "graph", "collectives", "memory", "timeline", "source", "compare")


def column(page: Page, view: str, number: int) -> list[str]:
    return page.locator(f".{view} .space > .row .cell:nth-child({number})").all_inner_texts()


def test_collectives_are_sorted_by_bytes_and_by_what_is_clicked(open_page: Open) -> None:
    page = open_page("middle", "#view=collectives")
    assert column(page, "collectives", 4)[0] == "1 MiB"
    page.get_by_role("button", name=re.compile("^sent")).click()
    assert column(page, "collectives", 4)[0] == "4 B"
    page.get_by_role("button", name=re.compile("^over")).click()
    assert column(page, "collectives", 3)[0] == "data"
    page.locator(".totals .card", has_text="model").click()
    assert set(column(page, "collectives", 3)) == {"model"}
    page.locator(".collectives .space > .row").first.click()
    expect(page.locator(".panel h2")).to_have_text(column(page, "collectives", 1)[0])


def test_a_mesh_dim_picks_out_what_moves_over_it(open_page: Open) -> None:
    page = open_page("small")
    page.locator("button.dim", has_text="model").click()
    expect(page.locator('.value[aria-label^="%all_reduce,"]')).not_to_have_class(re.compile("faded"))
    expect(page.locator('.value[aria-label^="%loss,"]')).to_have_class(re.compile("faded"))
    expect(page.locator("button.dim", has_text="model")).to_contain_text("32 KiB in 1 collective")


def test_a_workers_coordinates_choose_its_block(open_page: Open) -> None:
    page = open_page("small", "#value=up_weight")
    mine = page.locator(".panel dt", has_text="worker data=").locator("+ dd")
    expect(mine).to_have_text("[0:256, 0:512]")
    page.get_by_role("button", name="Worker 3: data=1, model=1").click()
    expect(mine).to_have_text("[0:256, 512:1024]")
    page.get_by_label("The worker's place on model, 0 to 1").fill("0")
    page.keyboard.press("Enter")
    expect(mine).to_have_text("[0:256, 0:512]")
    expect(page.locator(".shards .block")).to_have_count(2)


def test_memory_shows_the_peak_and_what_is_alive(open_page: Open) -> None:
    page = open_page("small", "#view=memory")
    # x 32 KiB, both weights 512 KiB each, %mm and %relu 64 KiB each.
    expect(page.locator(".memory .summary")).to_contain_text("1.16 MiB at %relu in 5 buffers")
    assert sorted(column(page, "memory", 1)) == ["%down_weight", "%mm", "%relu", "%up_weight", "%x"]
    page.locator(".chart").focus()
    page.keyboard.press("End")
    expect(page.locator(".memory .summary")).to_contain_text("at %loss")
    page.keyboard.press("Home")
    expect(page.locator(".memory .summary")).to_contain_text("1.03 MiB at %down_weight in 3 buffers")
    page.get_by_role("button", name="Go to the peak").click()
    expect(page.locator(".memory .summary")).to_contain_text("at %relu")


def test_the_timeline_has_runs_lanes_and_a_critical_path(open_page: Open) -> None:
    page = open_page("middle", "#view=timeline")
    expect(page.locator(".timeline .summary")).to_contain_text("on 4 workers")
    expect(page.locator(".timeline .summary")).to_contain_text("the critical path computes for")
    expect(page.locator(".timeline option")).to_have_count(2)
    page.locator(".timeline canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".panel h2")).to_have_text("%embedding")
    expect(page.locator(".panel dt", has_text="measured")).to_be_visible()


def test_without_a_trace_the_timeline_is_the_estimate(open_page: Open) -> None:
    page = open_page("small", "#view=timeline")
    expect(page.locator(".timeline")).to_contain_text("estimated: there is no trace")
    expect(page.locator(".timeline .summary")).to_contain_text("on 1 worker")
    expect(page.locator(".timeline .summary")).not_to_contain_text("100% of it computing")  # it has a collective
    page.locator(".timeline canvas").focus()
    page.keyboard.press("End")
    expect(page.locator(".panel h2")).to_have_text("%loss")


def test_source_lines_have_their_costs_and_lead_to_values(open_page: Open) -> None:
    page = open_page("middle", "#view=source")
    row = page.locator(".source .space > .row", has_text="self.down(F.gelu(self.up(x)))")
    expect(row.locator(".cell").nth(2)).to_have_text("28")
    expect(row.locator(".cell").nth(3)).to_have_text("7")
    expect(row.locator(".cell").nth(4)).to_have_text("7 MiB")
    row.click()
    expect(page.locator(".source > h3")).to_have_text("What became of train.py:27")
    page.locator(".source .table").nth(1).locator(".space > .row").first.click()
    expect(page.locator(".panel .code")).to_have_text("return self.down(F.gelu(self.up(x)))")


def test_two_plans_are_compared(open_page: Open) -> None:
    page = open_page("middle", "#view=compare")
    summary = page.locator(".summary-table tr", has_text="collectives")
    expect(summary.locator("td")).to_have_text(["36", "71", "+35 (+97%)"])
    expect(page.locator(".summary-table tr", has_text="peak memory").locator("td").nth(2)).to_have_text("same")
    page.get_by_role("button", name=re.compile("^collectives ")).click()
    assert set(column(page, "compare", 1)) == {"collective"}
    row = page.locator(".compare .space > .row", has_text="all_reduce over data").filter(has_not_text="gone").first
    assert "not there" in row.inner_text()
    row.click()
    expect(page.locator(".panel h2")).to_have_text(re.compile("^%all_reduce"))
    expect(row).to_have_attribute("aria-selected", "true")


def test_a_plan_that_is_alone_has_nothing_to_compare(open_page: Open) -> None:
    page = open_page("small", "#view=compare")
    expect(page.get_by_role("tab", name="Compare")).to_have_count(0)
    expect(page.get_by_role("tab", name="Overview")).to_have_attribute("aria-selected", "true")


def test_the_keys(open_page: Open) -> None:
    page = open_page("middle")
    for number, view in enumerate(VIEWS, start=1):
        page.keyboard.press(str(number))
        expect(page.get_by_role("tab", selected=True)).to_have_id(f"tab-{view}")
    page.keyboard.press("2")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".surface .selected")).to_have_count(1)
    page.keyboard.press("?")
    expect(page.locator("dialog.help")).to_be_visible()
    expect(page.locator("dialog.help")).to_contain_text("Copyright (c) 2012-2014 Chris Pettitt")
    page.keyboard.press("Escape")
    expect(page.locator("dialog.help")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(page.locator(".surface .selected")).to_have_count(0)


def test_keys_walk_along_the_schedule_and_the_graph(open_page: Open) -> None:
    page = open_page("small", "#value=mm")
    heading = page.locator(".panel h2")
    for key, name in (("]", "%relu"), ("r", "%mm_1"), ("w", "%relu"), ("[", "%mm"), ("Backspace", "%mm")):
        page.keyboard.press(key)
        expect(heading).to_have_text(name)
    page.locator(".surface").focus()
    page.keyboard.press("Backspace")
    expect(heading).to_have_text("up")
    page.keyboard.press("Enter")
    expect(page.locator('[data-group="forward/up"]')).to_have_attribute("aria-expanded", "false")


def test_the_fragment_leads_back_to_what_was_shown(open_page: Open) -> None:
    page = open_page("middle")
    page.keyboard.press("3")
    page.locator(".collectives .space > .row").first.click()
    page.get_by_role("button", name="Worker 2").click()
    name = page.locator(".panel h2").inner_text()
    fragment = page.url.partition("#")[2]
    again = open_page("middle", f"#{fragment}")
    expect(again.locator(".panel h2")).to_have_text(name)
    expect(again.get_by_role("tab", name="Collectives")).to_have_attribute("aria-selected", "true")
    expect(again.get_by_role("button", name="Worker 2")).to_have_attribute("aria-pressed", "true")


@pytest.mark.sample(2)
@pytest.mark.parametrize("fragment", ["#view=nonsense&value=nothing", "#worker=9,9&dim=x", "#group=__proto__", "#%"])
def test_a_fragment_that_leads_nowhere_is_ignored(open_page: Open, fragment: str) -> None:
    page = open_page("small", fragment)
    expect(page.locator(".panel h2")).to_have_text("mlp")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_changed(open_page: Open, theme: str) -> None:
    page = open_page("small", theme=theme)
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(22, 24, 29)"
    assert page.evaluate(ground) == (light if theme == "light" else dark)
    page.keyboard.press("t")
    assert page.evaluate(ground) == (dark if theme == "light" else light)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("width", "height"), [(1920, 1080), (1280, 800), (700, 500), (400, 800)])
def test_nothing_is_wider_than_the_window(open_page: Open, width: int, height: int) -> None:
    page = open_page("middle", "#value=mm_3", width=width, height=height)
    for view in VIEWS:
        page.evaluate(f"document.getElementById('tab-{view}').click()")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("main").bounding_box()["height"] > 100, view  # type: ignore[index]


def test_everything_that_can_be_pressed_has_a_name(open_page: Open) -> None:
    page = open_page("middle", "#value=mm_3")
    for view in VIEWS:
        page.evaluate(f"document.getElementById('tab-{view}').click()")
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, input, select, [tabindex='0'], [role=treeitem]")]
                .filter(e => !(e.getAttribute("aria-label") || e.textContent.trim() || e.title))
                .map(e => e.outerHTML.slice(0, 120))"""
        )
        assert nameless == []


def test_the_estimate_stands_above_what_was_measured(open_page: Open) -> None:
    page = open_page("middle", "#view=timeline")
    expect(page.locator(".timeline .summary")).to_contain_text(re.compile(r"Estimated: [\d.]+ ms"))
    expect(page.locator(".timeline .key")).to_contain_text("waiting")
    page.locator(".timeline canvas").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    expect(page.locator(".panel h2")).to_have_text(re.compile("addcdiv"))


def test_the_workers_have_axes(open_page: Open) -> None:
    page = open_page("small")
    expect(page.locator(".axes")).to_have_text("model →data ↓")
    places = [page.get_by_role("button", name=f"Worker {number}:").bounding_box() for number in range(4)]
    across, down = [place["x"] for place in places if place], [place["y"] for place in places if place]
    assert across[0] == across[2] < across[1] == across[3]
    assert down[0] == down[1] < down[2] == down[3]


def test_all_views_are_printed_and_the_screen_is_as_before(open_page: Open) -> None:
    page = open_page("middle", "#view=memory")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    views = page.locator("main > .view")
    expect(views).to_have_count(len(VIEWS))
    for at in range(len(VIEWS)):
        expect(views.nth(at)).to_be_visible()
    assert page.evaluate(
        "[...document.querySelectorAll('main > .view')].map((view) => view.dataset.name.toLowerCase())"
    ) == [*VIEWS]
    wide = "Math.max(...[...document.querySelectorAll('main *')].map((each) => each.getBoundingClientRect().right))"
    assert page.evaluate(wide) <= page.evaluate("document.body.getBoundingClientRect().right") + 1
    assert page.locator(".collectives .space > .row").count() == 71
    lanes = page.locator(".timeline canvas").bounding_box()
    assert lanes is not None and lanes["height"] > 5 * 2 * 20  # the estimate and four workers, whole
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    expect(page.locator("main > .view:visible")).to_have_count(1)
    expect(page.get_by_role("tab", selected=True)).to_have_text("Memory")
