"""The page's graph in a browser: groups open, boxes are selected, searched for and walked through."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from monarch.compiler.inspect.page import page as html_of
from monarch.compiler.inspect.page.data import plan_data
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.options import CompileOptions
from tests.compiler.inspect.page.conftest import Open
from tests.compiler.inspect.page.plans import PlanBuilder, f32
from tests.compiler.test_depth import training_step


def test_the_graph_has_groups_of_modules_and_a_summary(open_page: Open) -> None:
    page = open_page("middle")
    expect(page).to_have_title("train_step")
    expect(page.locator("h1")).to_have_text("train_step")
    for phase in ("forward", "backward", "update"):
        expect(page.locator(f'[data-group="{phase}"]')).to_have_attribute("aria-expanded", "true")
    expect(page.locator('[data-group="forward/blocks/0"]')).to_have_attribute("aria-expanded", "false")
    panel = page.locator(".panel")
    expect(panel).to_contain_text("compiled for cpu on mesh<data=2, model=2>")
    expect(panel).to_contain_text("28 MiB in 28 collectives")


def test_a_group_opens_and_closes(open_page: Open) -> None:
    page = open_page("middle")
    group = page.locator('[data-group="forward/blocks/0"]')
    assert page.locator('[data-group="forward/blocks/0/attn"]').count() == 0
    page.locator('[data-toggle="forward/blocks/0"]').click()
    expect(group).to_have_attribute("aria-expanded", "true")
    expect(page.locator('[data-group="forward/blocks/0/attn"]')).to_be_visible()
    page.locator('[data-toggle="forward/blocks/0"]').click()
    expect(group).to_have_attribute("aria-expanded", "false")
    assert page.locator('[data-group="forward/blocks/0/attn"]').count() == 0


def test_a_click_selects_and_the_panel_shows_line_bytes_and_causes(open_page: Open) -> None:
    page = open_page("small")
    page.locator('.value[aria-label^="%all_reduce,"]').click()
    panel = page.locator(".panel")
    expect(panel.locator("h2")).to_have_text("%all_reduce")
    expect(panel).to_contain_text("train.py:27")
    expect(panel.locator(".code")).to_have_text("return self.down(F.gelu(self.up(x)))")
    expect(panel).to_contain_text("%mm_1 is a pending sum over 'model'")
    # f32[64@data, 256] on data=2: 32 x 256 x 4 bytes.
    expect(panel.locator("dt", has_text="sent by a worker").locator("+ dd")).to_have_text("32 KiB")
    expect(panel.locator("dt", has_text="a worker holds").locator("+ dd")).to_have_text("f32[32, 256]")


def test_the_panel_leads_along_causes_readers_and_writers(open_page: Open) -> None:
    page = open_page("small", "#value=relu")
    panel = page.locator(".panel")
    expect(panel.locator(".chain").first).to_contain_text("%mm")
    panel.locator("section", has_text="Reads (1)").locator(".value-link").click()
    expect(panel.locator("h2")).to_have_text("%mm")
    expect(panel.locator(".decision").first).to_contain_text("m k, k n -> m n")
    expect(panel.locator(".alternatives").first.locator("tr")).to_have_count(3)
    expect(panel.locator(".alternatives").first).to_contain_text("chosen")
    panel.locator("section", has_text="Read by (1)").locator(".value-link").click()
    expect(panel.locator("h2")).to_have_text("%relu")


def test_breadcrumbs_name_the_modules_around_the_selection(open_page: Open) -> None:
    page = open_page("middle", "#value=all_reduce_2")
    crumbs = page.locator(".crumbs")
    expect(crumbs).to_have_text("train_step›forward›blocks›1›attn›out›%all_reduce_2")
    crumbs.get_by_role("button", name="attn").click()
    expect(page.locator(".panel h2")).to_have_text("attn")
    expect(page.locator(".panel")).to_contain_text("forward › blocks › 1 › attn")


def test_a_search_finds_by_name_line_module_and_layout_and_jumps(open_page: Open) -> None:
    page = open_page("middle")
    page.keyboard.press("/")
    for query, found in (
        ("%all_reduce_12", "2 values of"),
        ("blocks.3.mlp.down state exp_avg_sq", "1 value of"),
        ("nosuchthing", "0 values of"),
    ):
        page.get_by_role("combobox").fill(query)
        expect(page.locator(".results .found")).to_contain_text(found)
    page.get_by_role("combobox").fill("train.py:18 sharded over data, model")
    expect(page.locator(".results .found")).to_contain_text("7 values of")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".panel h2")).to_have_text("%scaled_dot_product_attention_1")
    expect(page.locator(".results")).to_be_hidden()
    expect(page.locator('.value.selected[aria-label^="%scaled_dot_product_attention_1,"]')).to_be_visible()


def test_edges_say_types_and_collectives_stand_out(open_page: Open) -> None:
    page = open_page("small")
    expect(page.locator(".surface .type", has_text="f32[64@data, 1024@model]").first).to_be_visible()
    expect(page.locator(".value.collective")).to_have_count(2)
    expect(page.locator(".legend")).to_contain_text("data, model")


@pytest.mark.full
def test_a_large_plan_is_laid_out_a_view_at_a_time(open_page: Open) -> None:
    page = open_page("large")
    assert page.locator("[data-value], [data-group]").count() < 100
    expect(page.locator(".top .name p")).to_contain_text("20,310 ops")
    expect(page.locator('[data-group="forward/blocks"] > .title')).to_have_text("blocks ×216")
    page.goto(page.url.split("#")[0] + "#value=all_reduce_300")
    expect(page.locator(".value.selected")).to_be_visible()
    assert page.locator("[data-value], [data-group]").count() < 400


def test_blocks_that_are_alike_are_drawn_once_and_leafed_through(open_page: Open) -> None:
    page = open_page("middle", "#group=forward/blocks/0")
    assert page.locator('[data-group^="forward/blocks/"]').count() == 1
    page.locator('[data-toggle="forward/blocks"][data-step="1"]').click()
    expect(page.locator('[data-group="forward/blocks/1"]')).to_be_visible()
    assert page.locator('[data-group^="forward/blocks/"]').count() == 1
    page.goto(page.url.split("#")[0] + "#value=all_reduce_12")
    expect(page.locator('[data-group="forward/blocks/6"]')).to_be_visible()


def test_what_one_op_reads_from_everywhere_is_one_port(open_page: Open, tmp_path: Path) -> None:
    """An optimizer's one kernel for all parameters reads hundreds of values: they are not drawn beside each other."""
    b = PlanBuilder("one_kernel")
    held = []
    for number in range(40):
        b.module = f"layers.{number}"
        held.append(b.add("state", f32((8, 8), ((), ())), call=f'state "layers.{number}.weight"', name=f"w{number}"))
    b.module, b.phase, b.line = "", "update", 43
    b.add("aten.cat", f32((320, 8), ((), ())), tuple(held))
    file = tmp_path / "one_kernel.html"
    file.write_text(html_of(b.plan()))
    page = open_page(file)
    expect(page.locator(".port text")).to_have_text("%w0 and 39 more")


def test_every_group_open_keeps_to_what_is_on_the_screen(open_page: Open) -> None:
    page = open_page("middle")
    for _ in range(12):
        closed = page.locator('[aria-expanded="false"] [data-toggle]')
        if not closed.count():
            break
        closed.first.dispatch_event("click")
    drawn = page.locator("[data-value]").count()
    page.keyboard.press("0")
    page.mouse.move(400, 400)
    for _ in range(12):
        page.mouse.wheel(0, -300)
    expect(page.locator("[data-value], [data-group]").first).to_be_attached()
    assert 0 < drawn < 400


def test_dragging_pans_and_the_wheel_zooms(open_page: Open) -> None:
    page = open_page("middle")
    world = page.locator(".surface > g")
    page.locator(".panel h2").click()
    before = world.get_attribute("transform")
    page.mouse.move(860, 700)
    page.mouse.down()
    page.mouse.move(760, 640, steps=4)
    page.mouse.up()
    expect(world).not_to_have_attribute("transform", before or "")
    expect(page.locator(".panel h2")).to_have_text("train_step")
    panned = world.get_attribute("transform")
    page.mouse.wheel(0, -240)
    expect(world).not_to_have_attribute("transform", panned or "")


def test_what_a_kernel_computes_leads_on() -> None:
    """A kernel's inner value that only one of the kernel's results needs is an edge to the kernel."""
    plan = compile_graph(training_step(["whole"]), CompileOptions(kernels="all"), report=True)
    assert plan.report is not None
    values = plan.report.values
    reads = plan_data(plan)["values"]["reads"]
    read = {number for each in reads for number in each}
    inner = [number for number, value in enumerate(values) if number < value.kernel]
    assert inner and read.issuperset(inner)
    assert not {number for value in values for number in value.reads}.issuperset(inner)


def test_names_in_the_panel_stay_in_one_piece(open_page: Open) -> None:
    """At 800 px too: an op's name that has no room beside the value's goes below it."""
    page = open_page("small", "#view=graph&group=forward")
    page.set_viewport_size({"width": 800, "height": 600})
    names = page.locator(".cost-list .muted, .cost-list .value-link")
    expect(names.first).to_be_visible()
    lines = names.evaluate_all("all => all.map((each) => each.getClientRects().length)")
    heights = page.locator(".cost-list .muted").evaluate_all("all => all.map((each) => each.offsetHeight)")
    assert set(lines) == {1} and max(heights) < 30
