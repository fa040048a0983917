"""Random programs with deaths at random points: the same run in peace gives the bits to compare with.

An act is a function of the pool of tensors and of a random generator of its own, so that it does the same when it is
called again: programs with and without collectives, of several outputs, on parts of the mesh and on several of them,
training steps, ops outside of programs that write in place, syncs, and what drops handles.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError
from monarch.testing import chaos

LAYOUTS = ("[8@data, 6]", "[8, 6@model]", "[8, 6]")
"""Each is replicated along a mesh dim, so that nothing is lost with one worker."""


@monarch.program
def scaled(x, a):  # type: ignore[no-untyped-def]
    return x * a + 0.5


@monarch.program
def both(x, y):  # type: ignore[no-untyped-def]
    return x + y, (x - y).sin(), x.mean()


@monarch.program
def centered(x):  # type: ignore[no-untyped-def]
    return x - x.mean()


class World:
    """All that a random program works on."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.left, self.right = mesh.slice(data=0), mesh.slice(data=1)
        torch.manual_seed(3)
        self.pool: dict[str, list[Any]] = {
            "mesh": [monarch.distribute(torch.randn(8, 6), mesh, layout) for layout in LAYOUTS],
            "left": [monarch.distribute(torch.randn(8, 6), self.left, "[8, 6]") for _ in range(2)],
            "right": [monarch.distribute(torch.randn(8, 6), self.right, "[8, 6]") for _ in range(2)],
        }
        self.model = monarch.module_to_mesh(nn.Linear(6, 6), mesh, {"*": None})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.trained = monarch.module_to_mesh(nn.Linear(6, 6), self.left, {"*": None})
        self.sgd = torch.optim.SGD(self.trained.parameters(), lr=0.01, momentum=0.9)
        self.copied = monarch.module_to_mesh(nn.Linear(6, 6), self.right, {"*": None})

        @monarch.program
        def train(x):  # type: ignore[no-untyped-def]
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

        @monarch.program
        def train_left(x):  # type: ignore[no-untyped-def]
            self.sgd.zero_grad()
            loss = self.trained(x).square().mean()
            loss.backward()
            self.sgd.step()
            return loss

        @monarch.program
        def across(x):  # type: ignore[no-untyped-def]
            return self.trained(x).to(self.right) * 2

        self.train, self.train_left, self.across = train, train_left, across

    def state(self) -> list[torch.Tensor]:
        values = [each for kind in sorted(self.pool) for each in self.pool[kind]]
        for model in (self.model, self.trained, self.copied):
            values += model.parameters()
        return [value.detach().full_tensor() for value in values]

    def act(self, chance: random.Random) -> list[Any]:
        """Do something; what it gave."""
        kind = chance.choice(("mesh", "mesh", "left", "right"))
        pool = self.pool[kind]
        at, other = chance.randrange(len(pool)), chance.randrange(len(pool))
        x, a = pool[at], chance.random()
        what = chance.choice(
            ["scaled"] * 5
            + ["both"] * 2
            + ["centered", "drop", "grow", "in place", "train", "train left", "across", "sync", "place"]
        )
        made: list[Any] = []
        if what == "scaled":
            pool[at] = scaled(x, a)
            made = [pool[at]]
        elif what == "both":
            if pool[other].sharding == x.sharding:
                one, two, unread = both(x, pool[other])
                pool[at] = two if chance.random() < 0.5 else one
                made = [one]
        elif what == "centered":
            pool[other] = centered(x)
        elif what == "drop":
            if len(pool) > 2:
                del pool[at]
        elif what == "grow":
            pool.append(scaled(x, a))
        elif what == "in place":
            x.mul_(0.5).add_(a)
        elif what == "train":
            made = [self.train(self.pool["mesh"][at % len(self.pool["mesh"])])]
        elif what == "train left":
            made = [self.train_left(self.pool["left"][0])]
        elif what == "across":
            self.pool["right"][other % len(self.pool["right"])] = self.across(self.pool["left"][0])
        elif what == "sync":
            monarch.sync(self.trained, self.copied)
        else:
            layout = chance.choice(LAYOUTS) if kind == "mesh" else "[8, 6]"
            where = {"mesh": self.mesh, "left": self.left, "right": self.right}[kind]
            pool[at] = monarch.distribute(torch.full((8, 6), a), where, layout)
        return made


class Deaths:
    """Now and then a worker dies within the next steps, one at a time, and others are held up, so that some run
    ahead."""

    def __init__(self, mesh: Mesh, seed: int, chance: float) -> None:
        self.mesh, self.chance, self.dice = mesh, chance, random.Random(seed)
        self.doomed = False
        self.heals = 0

    def come(self) -> None:
        dice = self.dice
        if self.doomed or dice.random() > self.chance:
            return
        self.doomed = True
        workers = dice.sample(range(4), 4)
        for worker in workers[1 : 1 + dice.randrange(3)]:
            chaos.slow(self.mesh, worker, dice.choice([0.0005, 0.003]))
        chaos.kill(self.mesh, workers[0], dice.randrange(4))

    def heal(self, error: DeviceMeshError) -> None:
        if not error.mesh_lost:
            raise error
        monarch.heal_mesh(self.mesh)
        self.doomed = False
        self.heals += 1


def run(mesh: Mesh, seed: int, acts: int, deaths: Deaths | None) -> list[torch.Tensor]:
    """The final state."""
    world, number = World(mesh), 0
    while True:
        before = {kind: list(pool) for kind, pool in world.pool.items()}
        try:
            if number == acts:
                for part in (mesh, world.left, world.right):
                    part.flush("the end")
                monarch.distribute(torch.zeros(1), mesh, "[-]").full_tensor()  # wait: no other step is what fails
                return world.state()
            if deaths is not None:
                deaths.come()
            chance = random.Random(1000 * seed + number)
            made = world.act(chance)
            if made and chance.random() < 0.3:
                made[0].full_tensor()
            number += 1
        except DeviceMeshError as error:
            if deaths is None:
                raise
            world.pool = before
            deaths.heal(error)
