"""Which sums of bits are taken as their values arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from monarch.compiler.plan import Instruction, Slot
from monarch.runtime.shared.bits import ArrivingSum, bit_sum
from monarch.runtime.worker.summing import sums_of_arrivals

VIEW, SUM = "aten.view.dtype", "aten.sum.default"
I32 = {"dtype": torch.int32}


def found(*instructions: tuple[Any, ...], target: str = "cpu") -> set[int]:
    """Slots that come with a sum, of instructions that make the slots 0, 1, …"""
    made = [
        Instruction(op, args, dict(*kwargs), out=at, free=(), source=-1)
        for at, (op, args, *kwargs) in enumerate(instructions)
    ]
    plan: Any = SimpleNamespace(instructions=made, target=target)
    return set(sums_of_arrivals(plan))


def test_sums_of_received_bits_are_found_and_no_others() -> None:
    floats, bits = ("recv", (0, [8], torch.float32)), ("recv", (0, [8], torch.int32))
    view = (VIEW, (Slot(0), torch.int32))
    assert found(floats, view, (SUM, (Slot(1),), I32)) == {0, 2}
    assert found(bits, (SUM, (Slot(0),), I32)) == {0, 1}
    assert found(floats, (SUM, (Slot(0),), I32)) == set()  # of numbers, and not of bits
    assert found(floats, view, (SUM, (Slot(1),))) == set()  # in 64 bits
    assert found(("recv", (0, [8], torch.float64)), view, (SUM, (Slot(1),), I32)) == set()
    assert found(("aten.relu.default", (Slot(9),)), view, (SUM, (Slot(1),), I32)) == set()
    assert found(floats, view, (SUM, (Slot(1),), I32), target="cuda:90") == set()


def test_the_sum_of_parts_is_that_of_the_whole_and_stays_behind_the_next() -> None:
    value, total = torch.randn(1000), ArrivingSum()
    total.begin()
    for part in value.split(300):
        total.add(part)
    taken = total.take()
    total.begin()
    total.add(torch.ones(1))
    assert taken.dtype == torch.int32 and torch.equal(taken, bit_sum(value))
    assert torch.equal(total.take(), bit_sum(torch.ones(1)))
