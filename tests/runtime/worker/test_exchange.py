"""What programs and actors of one process give each other: no process, no socket."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from monarch.compiler.plan import MonarchError
from monarch.runtime.shared import wire
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker import exchange
from monarch.runtime.worker.exchange import Gifts, Loan, Loans
from tests.runtime.worker.test_states import Worker, scaled


class Beside:
    """The actors of a worker's process."""

    def __init__(self) -> None:
        self.lent: dict[int, Sequence[Loan | str]] = {}
        self.gifts: dict[int, list[torch.Tensor]] = {}

    def lend(self, token: int, loans: Sequence[Loan | str], messages: int) -> None:
        self.lent[token] = loans

    def adopt(self, token: int) -> list[torch.Tensor]:
        return self.gifts.pop(token)


def worker_with(actors: Beside) -> Worker:
    worker = Worker(actors)
    worker.load(7, scaled(donate=True))
    return worker


def lend(worker: Worker, token: int, handle: int) -> Loan | str:
    """To one message in the process of worker 2, which it is."""
    actors = worker.state.actors
    assert isinstance(actors, Beside)
    assert worker.do(wire.numbers(wire.LEND, token, 1, handle, 0, 0, 1, 0)) == []
    (loan,) = actors.lent.pop(token)
    return loan


# -- loans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(12)[3:9:2],
        torch.ones(1).expand(2, 3),
        torch.zeros(0, 4),
        torch.tensor(True),
        torch.arange(4.0).bfloat16()[1:],
    ],
    ids=str,
)
def test_a_loan_is_the_tensor_whatever_its_strides(tensor: torch.Tensor) -> None:
    lent = Loan(tensor).tensor()
    assert torch.equal(lent, tensor) and (lent.dtype, lent.stride()) == (tensor.dtype, tensor.stride())
    assert not tensor.numel() or lent.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.numpy(),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: (tensor.requires_grad_() ** 2).sum(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: tensor.untyped_storage(),
    ],
    ids=["a view", "an array", "a parameter", "a graph", "a buffer", "a storage"],
)
def test_whatever_is_made_of_its_memory_holds_it(keep: object) -> None:
    loan = Loan(torch.arange(4.0))
    held = loan.held()
    assert held is not None and callable(keep)
    kept = keep(loan.tensor())
    del loan
    gc.collect()
    assert held() is not None
    del kept
    gc.collect()
    assert held() is None


def test_a_step_does_not_write_what_an_actor_has() -> None:
    worker = worker_with(Beside())
    worker.state.values[1] = state = torch.tensor([1.0, 2.0])
    loan = lend(worker, 0, 1)
    assert isinstance(loan, Loan)
    assert worker.run(7, scaled(donate=True), 5, 1, 2.0) == []
    assert (state.tolist(), worker.state.values[5].tolist()) == ([1, 2], [2, 4])  # type: ignore[union-attr]
    del loan
    state = worker.state.values[5]  # type: ignore[assignment]
    assert worker.run(7, scaled(donate=True), 6, 5, 2.0) == []
    assert worker.state.values[6] is state and not worker.state.seen


def test_a_copy_for_which_there_is_no_memory_fails_the_step_and_no_more() -> None:
    class Large(torch.Tensor):
        def clone(self, **_: object) -> torch.Tensor:  # type: ignore[override]
            raise RuntimeError("not enough memory")

    actors = Beside()
    actors.gifts[0] = [torch.tensor([1.0, 2.0]).as_subclass(Large)]
    worker = worker_with(actors)
    assert worker.do(wire.numbers(wire.ADOPT, 0, 1, 1)) == []
    (report,) = worker.run(7, scaled(donate=True), 5, 1, 2.0)
    assert isinstance(report, Report) and (report.kind, report.committed) == ("failed", False)
    assert "not enough memory" in report.error
    assert worker.alone.steps == [worker.step]  # so that its peers are told
    assert worker.state.values[1].tolist() == [1, 2]  # type: ignore[union-attr]


def test_the_worker_does_not_wait_for_who_reads_and_who_reads_waits_for_it() -> None:
    loans = Loans("mesh")
    loans.read(3)  # one of two messages is dropped before the worker comes to it
    value = torch.arange(2.0)
    loans.lend(3, [Loan(value), "it failed"], 2)
    assert exchange.take("mesh", 3, 0, False, True).requires_grad
    with pytest.raises(MonarchError, match="has no value: it failed"):
        exchange.take("mesh", 3, 1, False, False)
    alive = weakref.ref(value)
    del value
    assert alive() is not None
    exchange.read(("mesh", 3))
    assert alive() is None
    loans.end()
    with pytest.raises(MonarchError, match="is no more"):
        exchange.take("mesh", 3, 0, False, False)
    assert "mesh" not in exchange.of_mesh


def test_what_was_lent_can_be_taken_after_the_end() -> None:
    loans = Loans("ended")
    loans.lend(0, [Loan(torch.ones(2))], 1)
    loans.end()
    assert exchange.take("ended", 0, 0, True, True).tolist() == [1, 1]
    exchange.wait(("ended", 1))  # for ever, if it did wait
    exchange.read(("ended", 0))
    assert "ended" not in exchange.of_mesh


# -- gifts -------------------------------------------------------------------------------------------------------------


def test_what_is_dropped_before_it_is_made_is_not_kept() -> None:
    gifts = Gifts()
    gifts.drop("root", 0)
    gifts.give("root", 0, [torch.ones(1)])
    assert len(gifts) == 0
    gifts.give("root", 1, [])  # the call failed
    gifts.drop("root", 1)
    assert len(gifts) == 0
    gifts.give("root", 2, [torch.ones(1)])
    assert gifts.adopt("root", 2)[0].item() == 1
    with pytest.raises(KeyError):
        gifts.adopt("root", 2)


def test_who_has_gone_wants_nothing() -> None:
    gifts = Gifts()
    for caller in ("one", "other"):
        gifts.give(caller, 0, [torch.ones(1)])
        gifts.drop(caller, 1)
    gifts.gone("one")
    assert len(gifts) == 2
    gifts.gone("other")
    assert len(gifts) == 0
