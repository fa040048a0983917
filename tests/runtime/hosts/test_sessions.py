"""A mesh on hosts whose connections to the controller are cut while it trains."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

import monarch
from monarch.distributed import Mesh
from monarch.testing import chaos
from tests.compiler.cli.test_hosts import TOKEN, serving

STEPS = 12


def train(mesh: Mesh, link: chaos.Link | None) -> list[float]:
    weights = monarch.distribute(torch.zeros(8), mesh, "[-]")

    @monarch.program
    def step(x: "f32[8@data]") -> torch.Tensor:  # type: ignore[name-defined, valid-type]
        weights.add_(x).mul_(0.75)
        return weights.sum()

    losses = []
    for number in range(STEPS):
        if link is not None and number % 3 == 1:
            link.cut()
        losses.append(step(torch.arange(8.0) * number))
    return [loss.item() for loss in losses]


def test_training_goes_on_over_connections_that_are_cut(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    with Mesh(data=2) as calm, ExitStack() as end:
        expected = train(calm, None)
        links = []
        for _ in range(2):
            _, line = end.enter_context(serving("--listen", "127.0.0.1:0", "--token-file", str(token)))
            links.append(end.enter_context(chaos.Link(line.split()[4])))
        hosts = end.enter_context(monarch.hosts([link.address for link in links], token=token))
        with Mesh(data=2, hosts=hosts) as mesh:
            assert train(mesh, links[1]) == expected
