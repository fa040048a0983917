"""Random numbers of programs and of the eager door: PyTorch's seeding functions, on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh


def draws(mesh: Mesh, door: str, calls: int = 2) -> list[torch.Tensor]:
    x = monarch.distribute(torch.ones(8, 4), mesh, "[@data, -]" if "data" in mesh.spec.names else None)

    def sample(x: torch.Tensor) -> Any:
        return F.dropout(x, 0.5), torch.rand_like(x), torch.bernoulli(x / 2), x.clone().normal_()

    run = monarch.program(sample) if door == "program" else sample
    return [value.full_tensor() for _ in range(calls) for value in run(x)]


def equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(ones, others, strict=True)]


@pytest.mark.parametrize("door", ["program", "eager"])
def test_equally_seeded_runs_are_equal_on_any_mesh(door: str) -> None:
    found = []
    for dims in ({"data": 2}, {"data": 2, "model": 2}, {"model": 1}, {"data": 2}):
        torch.manual_seed(len(found) // 3)
        with partitioned_mesh(**dims) as mesh:
            found.append(draws(mesh, door))
    assert all(equal(found[0], found[1])) and all(equal(found[0], found[2]))
    assert not any(equal(found[0], found[3]))
    assert not any(equal(found[0][:4], found[0][4:]))  # one call's are not the next one's


@pytest.mark.parametrize("door", ["program", "eager"])
def test_the_generator_s_state_is_saved_restored_and_forked(door: str, mesh: Mesh) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = draws(mesh, door)
    torch.set_rng_state(state)
    assert all(equal(first, draws(mesh, door)))
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        draws(mesh, door, calls=1)
    assert all(equal(first, draws(mesh, door)))


def test_tracing_leaves_the_generator_as_it_is(mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(3), mesh)
    state = torch.get_rng_state()
    monarch.program(lambda: (x + torch.rand(3)) * 2).trace()
    monarch.program(lambda: x * 2)()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_program_that_seeds_for_a_while_draws_the_same_at_each_call(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def sample() -> Any:
        own = torch.rand(3)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            seeded, further = torch.rand(3), torch.rand(3)
            torch.manual_seed(3)
            again = torch.rand(3)
        return seeded, further, again, own, torch.rand(3)

    one, two = ([value.full_tensor() for value in sample()] for _ in range(2))
    assert equal(one, two) == [True, True, True, False, False]
    assert torch.equal(one[0], one[2])
    assert len({tuple(value.tolist()) for value in one}) == 4


def test_a_program_that_leaves_the_generator_seeded_is_refused(mesh: Mesh) -> None:
    def sample() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.rand(3)

    with pytest.raises(ProgramError, match="seeds PyTorch's generator"):
        monarch.program(mesh=mesh)(sample)()
