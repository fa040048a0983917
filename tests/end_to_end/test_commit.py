"""A step commits or does not: an error anywhere in a training step leaves every bit of state as it was."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import DeviceMeshError
from monarch.compiler.plan import Instruction, Plan, Slot
from monarch.compiler.schedule.failing import can_fail
from monarch.compiler.text import parse_graph
from monarch.distributed import Mesh

pytestmark = pytest.mark.sample(1, of="kernels")


class Model(nn.Module):
    """With state that changes in the forward pass, and rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def training(model: nn.Module, optimizer: torch.optim.Optimizer):
    def step(tokens, targets, chosen):
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        metric = logits.detach().index_select(1, chosen).sum()
        return loss, metric + model.embedding.weight.detach().index_select(0, chosen).sum()

    return step


GOOD = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 3, 2, 1]), torch.tensor([5, 6])
BAD = (*GOOD[:2], torch.tensor([5, 99]))


def test_a_metric_behind_the_optimizer_that_fails_loses_nothing() -> None:
    torch.manual_seed(0)
    dense = Model()
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(copy.deepcopy(dense), mesh)
        step = monarch.program(training(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
        reference = training(dense, torch.optim.AdamW(dense.parameters(), lr=0.1))
        for call in range(8):
            if call % 3 == 2:
                loss, _ = step(*BAD)
                with pytest.raises(DeviceMeshError, match="index_select"):
                    loss.item()
            for mine, expected in zip(step(*GOOD), reference(*GOOD), strict=True):
                torch.testing.assert_close(mine.full_tensor(), expected.detach())
        for name, value in dense.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name].full_tensor(), value)


def test_a_state_that_is_overwritten_unread_is_what_it_was() -> None:
    with Mesh(data=2) as mesh:
        state = monarch.distribute(torch.ones(4), mesh)

        @monarch.program(mesh=mesh)
        def step(x, chosen):
            state.copy_(x)
            return x.index_select(0, chosen).sum()

        step(torch.full((4,), 2.0), torch.tensor([3]))
        with pytest.raises(DeviceMeshError, match="index_select"):
            step(torch.full((4,), 5.0), torch.tensor([99])).item()
        assert state.full_tensor().tolist() == [2.0] * 4


def failing_before(plan: Plan, number: int, ranks: list[int]) -> Plan:
    """The plan, with an instruction in front of instruction `number` that fails on these workers of two."""
    table = torch.tensor([7 if rank in ranks else 0 for rank in range(2)])
    at, index, row = (Slot(plan.slots + i) for i in range(3))
    table_slot = plan.slots + 3
    made = (
        Instruction("axis_index", ("data",), {}, at.index),
        Instruction("aten.index_select.default", (Slot(table_slot), 0, at), {}, index.index),
        Instruction("aten.index_select.default", (Slot(table_slot), 0, index), {}, row.index),
    )
    return replace(
        plan,
        name=f"fails before {number}",
        instructions=(*plan.instructions[:number], *made, *plan.instructions[number:]),
        slots=plan.slots + 4,
        constants={**plan.constants, "table": table},
        constant_slots={**plan.constant_slots, "table": table_slot},
        hash="",
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one worker", "all workers"])
def test_an_error_at_any_instruction_leaves_every_bit_of_state(ranks: list[int]) -> None:
    torch.manual_seed(0)
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(Model(), mesh)
        step = monarch.program(training(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
        step(*GOOD)
        plan = step.compile(*GOOD)
        ops = [instruction.op for instruction in plan.instructions]
        commit = ops.index("commit")
        calls = list(parse_graph(plan.graph).calls)
        assert any(can_fail(call) for call in calls[:commit]) and not any(can_fail(call) for call in calls[commit:])
        executor = mesh.executor
        values = iter(GOOD)
        given = [
            next(values) if spec.kind == "input" else 0.1 if spec.type.ndim == 0 and spec.kind == "scalar"
            else torch.rand(spec.type.shape).to(spec.type.dtype)
            for spec in plan.inputs
        ]  # fmt: skip
        arguments = [
            executor.put(value, spec.type) if spec.kind == "state" else value
            for spec, value in zip(plan.inputs, given, strict=True)
        ]
        states = [at for at, spec in enumerate(plan.inputs) if spec.kind == "state"]
        before = {plan.inputs[at].label: executor.shards(arguments[at]) for at in states}
        for number in range(commit + 1):
            outputs = executor.run(failing_before(plan, number, ranks), arguments)
            with pytest.raises(DeviceMeshError, match="index"):
                executor.wait(outputs[0])
            for spec, output in zip(plan.outputs, outputs, strict=True):
                if spec.kind == "state" and spec.label in before:
                    kept = executor.shards(executor.recover(output))
                    assert all(map(torch.equal, kept, before[spec.label])), (number, spec.label)
        executor.wait(executor.run(plan, arguments)[0])
