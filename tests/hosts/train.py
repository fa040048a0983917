"""Train a small GPT for a few steps here and on other hosts, and print the losses of both.

python -m tests.hosts.train 10.0.0.1:4242,10.0.0.2:4242 --tls DIR --meshes 2x2,1x4
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F

import monarch
from monarch import HostMesh
from monarch.distributed import Mesh
from monarch.language.programs.program import Backend
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import tensor_parallel

SEQUENCE = 32


def train(
    data: int, model: int, hosts: HostMesh | None, steps: int, collectives: Backend = "monarch"
) -> tuple[list[float], list[str]]:
    """The loss of each step, and the transports between hosts."""
    torch.manual_seed(0)
    with Mesh(data=data, model=model, hosts=hosts) as mesh:
        plain = GPT(vocabulary=64, width=32, heads=4, layers=1, sequence=SEQUENCE)
        gpt = monarch.module_to_mesh(plain, mesh, layouts=tensor_parallel(plain, mesh, "model"))
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)

        @monarch.program(collectives=collectives)
        def step(tokens: "i64[8@data, 32]", targets: "i64[8@data, 32]"):
            optimizer.zero_grad()
            loss = F.cross_entropy(gpt(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

        texts = torch.randint(0, 64, (steps, 8, SEQUENCE + 1))
        losses = [step(text[:, :-1], text[:, 1:]) for text in texts]
        found = [loss.item() for loss in losses]
        links = getattr(mesh.executor.connection, "links", [])
        return found, sorted({link["transport"] for each in links for link in each.values()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts")
    parser.add_argument("--tls")
    parser.add_argument("--token")
    parser.add_argument("--trusted-network", action="store_true")
    parser.add_argument("--collectives", default="monarch", help="of the hosts: here it is always Monarch's own")
    parser.add_argument("--transports", default="tcp")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--meshes", default="2x2")
    options = parser.parse_args()
    meshes = [tuple(map(int, text.split("x"))) for text in options.meshes.split(",")]
    here = [train(*mesh, None, options.steps)[0] for mesh in meshes]
    transports = options.transports.split(",")
    with monarch.hosts(
        options.hosts,
        tls=options.tls,
        token=options.token,
        trusted_network=options.trusted_network,
        transports=transports,
    ) as hosts:
        there = [train(*mesh, hosts, options.steps, options.collectives) for mesh in meshes]
    used = sorted({transport for _, transports in there for transport in transports})
    print(json.dumps({"here": here, "there": [losses for losses, _ in there], "transports": used}))


if __name__ == "__main__":
    main()
