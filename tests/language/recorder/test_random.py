"""Random numbers of programs and of the eager door: PyTorch's seeding functions, on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from monarch.language.errors import OperatorError
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


OUT: dict[str, tuple[Any, torch.dtype]] = {
    "normal": (lambda x, out: torch.normal(x, x / 8, out=out), torch.float64),
    "normal of numbers": (lambda x, out: torch.normal(4.0, 0.5, x.shape, out=out), torch.float16),
    "bernoulli": (lambda x, out: torch.bernoulli(x / 8, out=out), torch.int64),
    "rand": (lambda x, out: torch.rand(*x.shape, out=out), torch.float64),
    "randint": (lambda x, out: torch.randint(3, 9, x.shape, out=out), torch.int32),
    "multinomial": (lambda x, out: torch.multinomial(x, 30, True, out=out), torch.int64),
}


@pytest.mark.parametrize("name", OUT)
def test_a_draw_goes_where_out_says(name: str, mesh: Mesh) -> None:
    draw, dtype = OUT[name]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((40, 30), 99, dtype=dtype)
        draw(x, out)
        return out

    x = torch.full((40, 30), 4.0)
    got, want = monarch.program(mesh=mesh)(run)(x).full_tensor(), run(x)
    assert got.dtype == want.dtype
    assert abs(got.double().mean() - want.double().mean()) < 0.3 * want.double().std()
    with pytest.raises(OperatorError, match="shape in place"):
        monarch.program(mesh=mesh)(lambda x: draw(x, torch.empty(7, dtype=dtype)))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_truncated_normal_distribution_is_drawn_from(dtype: torch.dtype, mesh: Mesh) -> None:
    run = lambda: torch.nn.init.trunc_normal_(torch.empty(4000, dtype=dtype), 0.5, 2.0, -1.0, 3.0)  # noqa: E731
    got, want = monarch.program(mesh=mesh)(run)().full_tensor().float(), run().float()
    assert got.min() >= -1 and got.max() <= 3
    levels = torch.tensor([0.01, 0.1, 0.3, 0.5, 0.8, 0.99])
    assert ((got.quantile(levels) - want.quantile(levels)).abs() < 0.15).all()


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.int64, (-(2**62), 2**62 + 2**61)),
        (torch.int64, (-(2**63), None)),
        (torch.int64, (-(2**63), 2**62)),
        (torch.int64, ()),
        (torch.uint8, ()),
        (torch.bool, ()),
        (torch.float32, ()),
        (torch.float16, (-3, None)),
    ],
)
def test_whole_numbers_are_drawn_from_all_of_their_range(
    dtype: torch.dtype, numbers: tuple[Any, ...], mesh: Mesh
) -> None:
    run = lambda: torch.empty(4000, dtype=dtype).random_(*numbers)  # noqa: E731
    got, want = (x.to(torch.float64) for x in (monarch.program(mesh=mesh)(run)().full_tensor(), run()))
    for one, other in ((got.mean(), want.mean()), (got.min(), want.min()), (got.max(), want.max())):
        assert abs(one - other) <= 0.05 * (want.max() - want.min())
    assert got.max() <= (numbers[1] if len(numbers) > 1 and numbers[1] else float(2**63))


def test_a_program_that_leaves_the_generator_seeded_is_refused(mesh: Mesh) -> None:
    def sample() -> torch.Tensor:
        torch.manual_seed(3)
        return torch.rand(3)

    with pytest.raises(ProgramError, match="seeds PyTorch's generator"):
        monarch.program(mesh=mesh)(sample)()
