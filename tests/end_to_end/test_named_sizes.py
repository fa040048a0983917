"""Programs of named sizes on worker processes: the plans of all sizes come from one template, and compute the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from monarch.compiler import pipeline
from monarch.language import Mesh, program

TABLE = torch.linspace(-2, 2, 11 * 64).reshape(11, 64)


def model(tokens: "i64[b@data, t]", weight: torch.Tensor) -> Any:
    hidden = F.layer_norm(F.embedding(tokens, TABLE), (64,)) @ weight
    heads = hidden.view(*tokens.shape, 4, 16).transpose(1, 2)
    seen = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(hidden.shape)
    return F.cross_entropy((seen @ TABLE.T).flatten(0, 1), tokens.flatten()), seen[:, -1], seen.mean(1)


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
