"""`actors.step.rref(x)`: what actors return as distributed tensors that vary."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monarch
from monarch import LayoutError, MonarchError
from monarch.actor import Actor, ActorError, ProcMesh, as_endpoint, current_rank, endpoint, this_host
from monarch.compiler.errors import ProgramError
from monarch.distributed import Mesh
from monarch.stdlib.pipeline import pipeline
from tests.runtime.actors.services import mesh, procs

__all__ = ["mesh", "procs"]


class Linear(Actor):
    """Each has weights of its own."""

    def __init__(self) -> None:
        self.weight = torch.eye(2) * (current_rank().rank + 1)

    @endpoint(propagate=lambda x: x)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    @endpoint(propagate="inspect")
    def add(self, x: torch.Tensor) -> str:
        self.weight += x
        return "added"

    @endpoint(propagate=lambda x: x[:1])
    def promises_less(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @endpoint(propagate=lambda x: x.T)
    def promises_transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x.T.contiguous()

    @endpoint(propagate=lambda x: 3)
    def promises_a_number(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it is not called")

    @endpoint
    def fails(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no data here")

    def fails_twice(self, x: torch.Tensor) -> torch.Tensor:
        self.failures = getattr(self, "failures", 0) + 1
        if self.failures <= 2:
            raise ValueError("not yet")
        return x

    def halves(self, pair: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"half": pair["x"] / 2, "both": [pair["x"], pair["y"].sum()]}


@pytest.fixture
def linear(procs: ProcMesh) -> Iterator[Linear]:
    yield procs.spawn("linear", Linear)


def shards(value: torch.Tensor) -> list[Any]:
    return [monarch.inspect(value, data=at).tolist() for at in range(2)]


def test_each_worker_has_what_its_actor_returned(linear: Linear, mesh: Mesh) -> None:
    with mesh.activate():
        x = torch.ones(2, 2) + mesh.rank("data")
        y = torch.relu(linear.forward.rref(x))
        assert "varying<data>" in str(y)  # a value is fetched in the block too
        total = monarch.reduce(y, "data")
    assert str(y.tensor_type) == "f32[2, 2] varying<data>"  # type: ignore[attr-defined]
    assert shards(y) == [[[1, 1], [1, 1]], [[4, 4], [4, 4]]]
    assert total.full_tensor().tolist() == [[5, 5], [5, 5]]  # type: ignore[attr-defined]


def test_an_actor_gets_its_workers_shard_of_what_does_not_vary(linear: Linear, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(8.0).reshape(4, 2), mesh, "[@data, -]")
    assert shards(linear.forward.rref(x)) == [[[0, 1], [2, 3]], [[8, 10], [12, 14]]]


def test_a_result_that_nobody_needs_and_plain_arguments(linear: Linear, mesh: Mesh) -> None:
    assert linear.add.rref(torch.ones(2, 2)) is None
    with mesh.activate():  # or else the mesh would not be known, were there others
        assert shards(linear.forward.rref(torch.eye(2))) == [[[2, 1], [1, 2]], [[3, 1], [1, 3]]]


def test_a_method_that_is_not_marked_and_nested_tensors(linear: Linear, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    halves = as_endpoint(
        linear.halves, propagate=lambda pair: {"half": pair["x"], "both": [torch.rand(2), pair["y"][0]]}
    )
    made = halves.rref({"x": x, "y": torch.ones(3)})
    assert (shards(made["half"]), shards(made["both"][0])) == ([[0, 0.5], [1, 1.5]], [[0, 1], [2, 3]])
    assert shards(made["both"][1]) == [3, 3]
    with pytest.raises(LayoutError, match="the propagate of linear.promises_a_number gives int"):
        linear.promises_a_number.rref(x)


def test_what_cannot_be_is_an_error(linear: Linear, mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(2, 2), mesh)
    with pytest.raises(
        LayoutError, match=r"promises_less has returned f32\[2, 2\], and its propagate says f32\[1, 2\]"
    ):
        linear.promises_less.rref(x)
    with pytest.raises(ActorError, match="linear.* raised ValueError: no data here"):
        linear.fails.rref(x)
    with pytest.raises(ProgramError, match="needs a gradient, and actors' results have none"):
        linear.forward.rref(x.detach().requires_grad_())
    with pytest.raises(LayoutError, match="is plain: it is here, and on no mesh"):
        monarch.fetch_shard([torch.ones(2)], data=0)
    with pytest.raises(ValueError, match="propagate='cached' of .*function"):
        endpoint(propagate="cached")(lambda self: None)  # type: ignore[arg-type]
    other = this_host().spawn_procs({"data": 2}).spawn("other", Linear)
    with pytest.raises(MonarchError, match="in processes that mesh<data=2> does not run on"):
        other.forward.rref(x)
    with Mesh(data=2) as bare, pytest.raises(LayoutError, match=r"no argument is on one, and \d+ are open"):
        monarch.distribute(torch.ones(2), bare).wait()
        linear.forward.rref(torch.ones(2, 2))
    assert shards(linear.forward.rref(x))[0] == [[1, 1], [1, 1]]  # actors and mesh live on


class Loader(Actor):
    """Counts, and waits where it is asked to."""

    def __init__(self) -> None:
        self.batches = 0

    @endpoint(propagate=lambda rows=2: torch.empty(rows))
    def next(self, rows: int = 2) -> torch.Tensor:
        self.batches += 1
        return torch.full((rows,), float(self.batches))

    @endpoint(propagate=lambda x, until: x)
    def held(self, x: torch.Tensor, until: str) -> torch.Tensor:
        while not Path(until).exists():
            os.sched_yield()
        return x

    @endpoint(propagate="inspect")
    def note(self, x: torch.Tensor) -> None:
        self.batches += int(x.sum())

    @endpoint
    def count(self) -> int:
        return self.batches


@pytest.fixture
def loader(procs: ProcMesh) -> Loader:
    return procs.spawn("loader", Loader)


def test_a_program_asks_at_each_call_in_order_and_with_what_the_call_has(
    linear: Linear, loader: Loader, mesh: Mesh
) -> None:
    weight = monarch.distribute(torch.ones(2, 2), mesh)

    @monarch.program
    def step(x: "f32[4@data, 2]") -> tuple[torch.Tensor, ...]:
        batch = loader.next.rref()
        y = linear.forward.rref(linear.forward.rref(x))
        before = linear.forward.rref(weight)
        loader.note.rref(x)
        weight.add_(1)
        return monarch.reduce(batch, "data"), y * 2, before

    plan = step.compile(torch.ones(4, 2))
    assert [entry.label for entry in plan.inputs if entry.kind == "input"] == [0, 1, 2, 3, 4]
    assert loader.count.call().get().values() == [0, 0]
    for call in range(3):
        batch, y, before = step(torch.full((4, 2), 1.0 + call))  # a plain argument, and one trace
        assert batch.tolist() == [2.0 * (1 + call * 5 + 4 * sum(range(call)))] * 2
        assert shards(y)[1] == [[8.0 * (1 + call)] * 2] * 2
        assert shards(before) == [[[1.0 + call] * 2] * 2, [[2.0 + 2 * call] * 2] * 2]
    assert [entry.traces for entry in step.remembered] == [1]


def test_what_a_program_leaves_of_an_answer_and_other_actors_by_the_same_name(
    procs: ProcMesh, loader: Loader, mesh: Mesh
) -> None:
    kept: dict[str, Any] = {"from": loader}

    @monarch.program(mesh=mesh)
    def step(rows: int) -> None:
        kept["batch"] = kept["from"].next.rref(rows)

    for rows, expected in ((2, [1, 1]), (2, [2, 2]), (3, [3, 3, 3])):
        step(rows)
        assert monarch.inspect(kept["batch"], data=1).tolist() == expected
    kept["from"] = procs.spawn("others", Loader)
    step(2)
    assert monarch.inspect(kept["batch"], data=0).tolist() == [1, 1]
    assert loader.count.call().get().values() == [3, 3]


def test_what_actors_raise_fails_the_call_and_leaves_everything_as_it_was(linear: Linear, mesh: Mesh) -> None:
    fails = as_endpoint(linear.fails_twice, propagate=lambda x: x)
    x, total = monarch.distribute(torch.ones(2, 2), mesh), monarch.distribute(torch.zeros(2), mesh)
    steps: list[int] = []

    @monarch.program
    def step(x: torch.Tensor) -> torch.Tensor:
        steps.append(len(steps))
        total.add_(1)
        return fails.rref(x) + total

    for _ in range(2):  # as it is traced, and, behind that, as it is traced again
        with pytest.raises(ActorError, match=r"linear\[.\].fails_twice raised ValueError: not yet"):
            step(x)
        assert (steps, total.tolist()) == ([], [0, 0])
    assert shards(step(x))[1] == [[2, 2], [2, 2]]
    assert (steps, total.tolist()) == ([0], [1, 1])


def test_other_threads_run_programs_while_one_waits_for_actors(loader: Loader, mesh: Mesh, tmp_path: Path) -> None:
    until = str(tmp_path / "go")
    x = monarch.distribute(torch.ones(2), mesh)
    held = monarch.program(lambda x: loader.held.rref(x, until) + 1)
    double = monarch.program(lambda x: x * 2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(shards(held(x))))
    thread.start()
    assert double(x).tolist() == [2, 2]
    (tmp_path / "go").write_text("")
    thread.join()
    assert found == [[2, 2], [2, 2]]


def test_what_a_program_cannot_ask_is_an_error(linear: Linear, loader: Loader, mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(2, 2), mesh)
    weight = monarch.distribute(torch.ones(2, 2), mesh)

    def written(x: torch.Tensor) -> Any:
        weight[0].mul_(x[0])
        return linear.forward.rref(weight)

    def branch(x: torch.Tensor) -> Any:
        return monarch.cond(x.sum() > 0, lambda x: monarch.reduce(linear.forward.rref(x), "data"), lambda x: x, (x,))

    def checkpointed(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: linear.forward.rref(x), x, use_reentrant=False)

    with pytest.raises(ProgramError, match=r"forward.rref\(\) is given what the program computes \(f32\[2, 2\]\)"):
        monarch.program(lambda x: linear.forward.rref(x + 1))(x)
    with pytest.raises(ProgramError, match="is given what the program computes"):
        monarch.program(written)(x)
    with pytest.raises(ProgramError, match=r"rref\(\) in .*cond.*, which may run any number of times"):
        monarch.program(branch)(x)
    with pytest.raises(ProgramError, match=r"rref\(\) in a checkpoint, which may run any number of times"):
        monarch.program(checkpointed)(x)
    with pytest.raises(ProgramError, match=r"fails.rref\(\) in a program needs the types of the results"):
        monarch.program(lambda x: linear.fails.rref(x))(x)
    with pytest.raises(ProgramError, match="is given a plain tensor from outside"):
        plain = torch.ones(2, 2)
        monarch.program(lambda x: linear.forward.rref(plain) + x)(x)
    with pytest.raises(
        LayoutError, match=r"promises_less has returned f32\[2, 2\], and its propagate says f32\[1, 2\]"
    ):
        monarch.program(lambda x: linear.promises_less.rref(x))(x)


def test_a_microbatch_asks_no_actors(procs: ProcMesh, linear: Linear) -> None:
    with Mesh(pipe=2) as stages:

        class Asking(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(linear.forward.rref(x.detach()))

        pipe = pipeline([nn.Linear(2, 2), Asking(2, 2)], stages, microbatches=2)
        step = monarch.program(lambda x: pipe.step(x, target=x, loss_fn=nn.functional.mse_loss))
        with pytest.raises(ProgramError, match=r"forward.rref\(\) in a microbatch of a pipeline, which may run any"):
            step(torch.ones(4, 2))


def test_a_state_that_actors_are_given_keeps_its_layout_where_layouts_are_found(linear: Linear, mesh: Mesh) -> None:
    given = monarch.module_to_mesh(nn.Linear(4, 2, bias=False), mesh)

    @monarch.program(layouts="auto", mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        return linear.promises_transposed.rref(given.weight.detach()), given(x).sum()

    before, expected = given.weight.tensor_type, given.weight.full_tensor().T
    for _ in range(2):  # the first searches, and would have all of it on each worker
        answers, _ = step(torch.ones(8, 4))
        assert torch.equal(torch.cat([monarch.inspect(answers, data=at) for at in range(2)], dim=1), expected)
    assert given.weight.tensor_type == before
