"""A program's results have a history that ends at the program: a gradient that would go on is an error, never lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.errors import MonarchError, ProgramError
from monarch.language import Mesh

ENDS = "result of the program 'step' .* whose history ends with the call"


def parameter(mesh: Mesh) -> torch.Tensor:
    return monarch.distribute(torch.linspace(-1, 1, 4).requires_grad_(), mesh)


@pytest.fixture
def w(mesh: Mesh) -> torch.Tensor:
    return parameter(mesh)


@pytest.mark.parametrize("times", [1, 2])
def test_a_loss_that_mixes_a_result_with_others_raises_in_backward(times: int, w: torch.Tensor) -> None:
    @monarch.program
    def step() -> Any:
        return (w * 3).sum()

    for _ in range(times):  # traced, and repeated
        y = step()
        assert y.requires_grad
        total = y + (w * w).sum()
        total.item()
    with pytest.raises(ProgramError, match=ENDS) as caught:
        total.backward()
    assert "total.backward()" in str(caught.value)
    with pytest.raises(ProgramError, match=ENDS):
        torch.autograd.grad(step() * 2 + w.sum(), w)
    w.grad = None
    (step().detach() + (w * w).sum()).backward()
    torch.testing.assert_close(w.grad.full_tensor(), 2 * w.full_tensor())


def test_several_results_and_those_that_state_keeps_raise(w: torch.Tensor) -> None:
    kept: dict[str, Any] = {}

    @monarch.program
    def step(x: torch.Tensor) -> Any:
        kept["y"] = w * x
        return {"kept": kept["y"], "sum": w.sum(), "count": (w > 0).sum(), "constant": x * 2, "view": w[1:]}

    for _ in range(2):
        found = step(torch.ones(4))
        assert not found["count"].requires_grad and not found["constant"].requires_grad
        for name in ("kept", "sum", "view"):
            with pytest.raises(ProgramError, match=ENDS):
                (found[name].sum() + w.sum()).backward()


def test_a_loss_whose_backward_ran_in_the_program_raises(w: torch.Tensor) -> None:
    @monarch.program
    def step() -> Any:
        w.grad = None
        loss = (w * w).sum()
        loss.backward()
        return loss

    losses, total = [], 0.0
    for _ in range(3):
        loss = step()
        losses.append(loss)
        total += loss
    assert torch.stack(losses).mean().item() == pytest.approx(total.item() / 3) == pytest.approx(float(loss))
    with pytest.raises(ProgramError, match=ENDS):
        (loss + w.sum()).backward()


def test_a_program_that_differentiates_through_a_result_is_refused(mesh: Mesh, w: torch.Tensor) -> None:
    head = parameter(mesh)

    @monarch.program
    def step(x: torch.Tensor) -> Any:
        return w * x

    @monarch.program
    def train(h: torch.Tensor, through: bool) -> Any:
        head.grad = None
        loss = (head * (h if through else h.detach())).sum()
        loss.backward()
        return loss

    h = step(torch.ones(4))
    for _ in range(2):
        train(h, False)
        for each in (h, h * 2):
            with pytest.raises(ProgramError, match="history ends"):
                train(each, True)
    train(h.detach(), True)
    torch.testing.assert_close(head.grad.full_tensor(), h.full_tensor())


def test_without_gradients_nothing_has_a_history(w: torch.Tensor) -> None:
    @monarch.program
    def step(x: torch.Tensor) -> Any:
        return w * x

    with torch.no_grad():
        y = step(torch.ones(4))
        z = step(y)
    assert not y.requires_grad and not z.requires_grad
    (y.sum() + w.sum()).backward()


def test_a_cache_goes_round(w: torch.Tensor, mesh: Mesh, traces: list[str]) -> None:
    @monarch.program
    def step(x: torch.Tensor, cache: torch.Tensor, at: int) -> Any:
        cache = cache.clone()
        cache[0] = (w * x).sum()
        return cache

    cache = monarch.distribute(torch.zeros(3), mesh)
    for _ in range(4):
        cache = step(torch.ones(4), cache, 0)
    assert traces == ["step"] * 2  # once more for a cache that requires a gradient
    with pytest.raises(ProgramError, match=ENDS):
        (cache.sum() + w.sum()).backward()


@pytest.mark.parametrize("detached", [True, False])
def test_a_tensor_that_is_left_with_its_history_is_named(
    detached: bool, w: torch.Tensor, traces: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    left = {"loss": torch.zeros(())}

    @monarch.program
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * w).exp().sum()
        left["loss"] = loss.detach() if detached else loss
        return loss

    for _ in range(9):
        step(torch.ones(4))
    said = [str(each.message) for each in recwarn if "traced at each call" in str(each.message)]
    assert len(traces) == (2 if detached else 9) and len(said) == (not detached)
    assert detached or "'loss' differs at each call, and a tensor with a history: leave loss.detach()" in said[0]


def test_a_loop_that_passes_results_on_keeps_none_of_them(w: torch.Tensor, mesh: Mesh) -> None:
    @monarch.program
    def first(x: torch.Tensor) -> Any:
        return w * x

    @monarch.program
    def step(h: torch.Tensor) -> Any:
        return h * 2

    h = first(torch.ones(4))
    for _ in range(3):
        h = step(h)
    assert [node for node, _ in h.grad_fn.next_functions if type(node) is type(h.grad_fn)] == []
    with pytest.raises(ProgramError, match=ENDS):
        torch.autograd.grad(h.sum() + w.sum(), w)
    other = parameter(mesh)
    torch.autograd.grad(h.sum() + other.sum(), other)


def test_a_result_is_one_on_another_mesh_too(w: torch.Tensor) -> None:
    @monarch.program
    def step() -> Any:
        return w * 3

    with Mesh(other=2) as other:
        v = parameter(other)
        moved: Any = step()
        moved = moved.to_mesh(other)
        torch.testing.assert_close(moved.full_tensor(), w.full_tensor() * 3)
        with pytest.raises(ProgramError, match=ENDS):
            (moved * v).sum().backward()
        v.grad = None
        (moved.detach() * v).sum().backward()
        torch.testing.assert_close(v.grad.full_tensor(), w.full_tensor() * 3)


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("passed", [True, False])
def test_what_a_program_writes_in_place_has_a_history_that_ends(
    passed: bool, calls: int, mesh: Mesh, w: torch.Tensor
) -> None:
    cache: Any = monarch.distribute(torch.zeros(3), mesh)

    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor, given: Any = None) -> Any:
        (cache if given is None else given)[1] = (w * x).sum()
        return cache * 2

    for call in range(calls):
        x = monarch.distribute(torch.full((4,), call + 1.0), mesh)
        step(x, cache) if passed else step(x)
        torch.testing.assert_close(cache.full_tensor()[1], (w.full_tensor() * (call + 1)).sum())
        assert cache.requires_grad
    with pytest.raises(MonarchError):
        (cache.sum() + (w * w).sum()).backward()


def test_what_a_program_wrote_in_place_before_it_raised_has_no_history(mesh: Mesh, w: torch.Tensor) -> None:
    cache: Any = monarch.distribute(torch.zeros(3), mesh)

    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor) -> None:
        cache[1] = (w * x).sum()
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            step(torch.ones(4))
        assert not cache.requires_grad and cache.is_leaf
        assert torch.equal(cache.full_tensor(), torch.zeros(3))


def test_a_result_has_no_history_where_only_what_is_left_in_python_has_one(mesh: Mesh, w: torch.Tensor) -> None:
    kept: list[Any] = [None]

    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        kept[0] = w * x
        return x * 2

    for _ in range(4):
        kept[0] = None
        result = step(torch.ones(4))
        assert (result.requires_grad, kept[0].requires_grad) == (False, True)


def test_a_program_asks_for_gradients_of_what_it_has_changed_and_a_view_shows(mesh: Mesh) -> None:
    held: Any = monarch.distribute(torch.ones(3), mesh)
    view = held[:2]

    @monarch.program(mesh=mesh)
    def step() -> Any:
        held.mul_(0.5)
        held.requires_grad_()
        return view * 1

    assert step().full_tensor().tolist() == [0.5, 0.5]
    assert held.requires_grad and held.is_leaf
    assert held.full_tensor().tolist() == [0.5] * 3
