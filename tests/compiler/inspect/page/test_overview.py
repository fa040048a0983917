"""The page's first view, in a browser."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.compiler.inspect.page.conftest import Open


def test_it_opens_on_the_overview(open_page: Open) -> None:
    page = open_page("middle", "")
    expect(page).to_have_title("train_step")
    expect(page.get_by_role("tab", selected=True)).to_have_text("Overview")
    overview = page.locator(".overview")
    expect(overview).to_contain_text("waiting for model")
    expect(overview).to_contain_text("the median of 2 steps of all workers")
    expect(overview).to_contain_text("The 5 lines that cost most")
    expect(overview.locator(".costs th code").first).to_have_text("loss.backward()")
    expect(page.locator(".panel")).to_be_hidden()


def test_the_repeated_block_is_open_and_others_open_with_a_click(open_page: Open) -> None:
    page = open_page("middle", "")
    shown = page.locator(".model tbody tr:visible th")
    expect(shown).to_contain_text(["embed", "blocks×7", "norm1", "attn", "norm2", "mlp", "(no module)"])
    page.get_by_role("button", name="What is in mlp").click()
    expect(shown).to_contain_text(["mlp", "up", "down"])
    page.get_by_role("button", name="What is in blocks").click()
    expect(shown).to_contain_text(["embed", "blocks×7", "(no module)"])
    expect(shown).to_have_count(3)
    page.locator(".model").get_by_role("button", name="blocks", exact=True).click()
    expect(page.get_by_role("tab", selected=True)).to_have_text("Graph")
    expect(page.locator('.group.selected[data-group="forward/blocks/0"]')).to_be_visible()


def test_the_peak_leads_to_the_memory(open_page: Open) -> None:
    page = open_page("small", "")
    page.locator(".overview .value-link", has_text="%relu").click()
    expect(page.get_by_role("tab", selected=True)).to_have_text("Memory")
    expect(page.locator(".panel h2")).to_have_text("%relu")
