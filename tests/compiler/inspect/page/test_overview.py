"""The page's first view, in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from playwright.sync_api import expect

import monarch
from monarch.compiler.inspect.inspection import Inspection
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


def test_several_meshes_are_shown_one_at_a_time(open_page: Open, tmp_path: Path) -> None:
    root = monarch.Mesh.abstract(stage=2, data=2)
    first, second = root.slice(stage=0), root.slice(stage=1)
    up = monarch.module_to_mesh(torch.nn.Linear(8, 16), first)
    down = monarch.module_to_mesh(torch.nn.Linear(16, 8), second)

    @monarch.program
    def step(x: "f32[4@data, 8]") -> torch.Tensor:
        loss = down(up(x).relu().to(second)).square().mean()
        loss.backward()
        return loss

    file = tmp_path / "stages.html"
    Inspection(step.compile(torch.zeros(4, 8))).save(file)
    page = open_page(file, "")
    meshes = page.locator(".overview section", has_text="what each runs in a step")
    expect(meshes).to_contain_text("2 transfers in a step")
    expect(meshes).to_contain_text("stage0 → stage1")
    expect(meshes.locator("b")).to_have_text("stage0, shown below")
    meshes.get_by_role("button", name="stage1").click()
    expect(meshes.locator("b")).to_have_text("stage1, shown below")
    page.keyboard.press("2")
    expect(page.locator('.group[data-group="backward"]')).to_have_count(1)
    expect(page.locator("header.top")).to_have_count(1)
    assert re.search("part=stage1", page.url)
    again = open_page(file, "#" + page.url.partition("#")[2])
    expect(again.get_by_label("Which mesh is shown")).to_have_value("1")
    expect(again.locator(".crumbs")).to_have_text("step.stage1")
