"""Programs of named sizes on worker processes: the plans of all sizes come from one template, and compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch import scan
from monarch.compiler import pipeline
from monarch.compiler.kernels.cpp.emit import origin
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan import Plan
from monarch.compiler.schedule.template import Template
from monarch.language import Mesh, program
from monarch.stdlib.parallel import data_parallel
from tests.language.models import assert_same_parameters, twins

pytestmark = pytest.mark.sample(1, of="kernels")

TABLE = torch.linspace(-2, 2, 11 * 64).reshape(11, 64)


def model(tokens: "i64[b@data, t]", weight: torch.Tensor) -> Any:
    hidden = F.layer_norm(F.embedding(tokens, TABLE), (64,)) @ weight
    heads = hidden.view(*tokens.shape, 4, 16).transpose(1, 2)
    seen = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(hidden.shape)
    last, means = scan(lambda h, x: ((h * weight[0] + x).tanh(), x.mean(0)), seen[:, 0], seen, dim=1)
    return F.cross_entropy((seen @ TABLE.T).flatten(0, 1), tokens.flatten()), seen[:, -1], seen.mean(1), last, means


def test_workers_compute_every_size_from_one_compile() -> None:
    compiled: list[str] = []
    compile_template = pipeline.compile_template

    def counted(graph: Any, *rest: Any) -> Any:
        compiled.append(graph.name)
        return compile_template(graph, *rest)

    weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    with Mesh(data=2) as mesh, patch.object(pipeline, "compile_template", counted):
        step = program(mesh=mesh)(model)
        for rows, length in [(4, 37), (2, 5), (16, 130), (4, 37), (6, 11), (2, 64)]:
            tokens = torch.arange(rows * length).remainder(11).reshape(rows, length)
            for ours, theirs in zip(step(tokens, weight), model(tokens, weight), strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
        assert compiled == ["model"]


def test_several_meshes_have_one_plan_for_all_sizes() -> None:
    compiled: list[str] = []
    compile_template = pipeline.compile_template

    def counted(graph: Any, *rest: Any) -> Any:
        compiled.append(graph.name)
        return compile_template(graph, *rest)

    weight = torch.linspace(-1, 1, 12).reshape(3, 4)
    with Mesh(stage=2, data=2) as mesh, patch.object(pipeline, "compile_template", counted):
        first, second = mesh.slice(stage=0), mesh.slice(stage=1)

        @program
        def step(x: "f32[b, t, 3]") -> Any:
            hidden = (monarch.layout(x.to(first), "[-, @data, -]") @ weight).tanh()
            there = hidden.to(second, "[@data, -, -]")
            return there.softmax(1), (there.sum((1, 2)).to(first) + hidden[:, 0, 0]).exp()

        for rows, length in [(4, 6), (8, 10), (12, 4), (6, 8), (5, 7), (7, 9), (4, 6)]:
            x = torch.linspace(-1, 1, rows * length * 3).sin().reshape(rows, length, 3)
            hidden = (x @ weight).tanh()
            wanted = hidden.softmax(1), (hidden.sum((1, 2)) + hidden[:, 0, 0]).exp()
            for ours, theirs in zip(step(x), wanted, strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs)
        assert compiled == ["step", "step"]  # for sizes that two workers divide, and for those that they do not


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(F.silu(self.gate(x)) * self.up(x) + x, (64,))


def test_training_has_kernels_that_take_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    templates: list[Template] = []
    lowered: list[tuple[int, ...]] = []
    compile_template = pipeline.compile_template

    def kept(*arguments: Any) -> Template:
        made = compile_template(*arguments)

        def counted(values: Mapping[str, int]) -> Plan:
            lowered.append(tuple(values.values()))
            return made.lowered(values)

        templates.append(replace(made, lowered=counted))
        return templates[-1]

    monkeypatch.setenv("MONARCH_KERNELS", "all")
    monkeypatch.setattr(pipeline, "compile_template", kept)
    with Mesh(data=2) as mesh:
        ours, plain = twins(Gated, mesh, layouts=data_parallel(Gated()))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, plain)]

        def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            def step(x: "f32[b@data, t, 64]") -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - x.roll(1, 2)).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            return step

        step, reference = program(mesh=mesh)(training(ours, optimizers[0])), training(plain, optimizers[1])
        for rows, length in [(4, 36), (4, 64), (6, 7), (4, 36), (4, 64)]:
            x = torch.linspace(-1, 1, rows * length * 64).sin().reshape(rows, length, 64)
            torch.testing.assert_close(step(x).full_tensor(), reference(x), rtol=1e-4, atol=1e-5)
        assert lowered == [(4, 36), (4, 64)]  # the first, and what has come again
        assert_same_parameters(ours, plain)
    (template,) = templates
    plans = [template.at({"b": 4, "t": length}, again=True) for length in (36, 64)]
    texts = [[step.args[1] for step in plan.instructions if step.op == "kernel"] for plan in plans]
    assert texts[0] != texts[1] and any(text.startswith("sized ") for text in texts[0])
    assert len({origin([parse_kernel(text) for text in each]) for each in texts}) == 1
