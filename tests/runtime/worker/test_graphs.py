"""CUDA graphs of a plan's stretches: that steps with them give what steps without them do, whatever happens between.

On a GPU where there is one; else with stand-ins for the device, its driver and its graphs (`cuda_graphs.py`), which
compute wrong numbers where graphs would."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch import DeviceMeshError
from monarch.compiler.cli.load import load_program
from monarch.compiler.graph import Graph
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph
from monarch.distributed import Mesh
from monarch.runtime.processes import parent as processes
from monarch.runtime.processes import workers
from monarch.runtime.shared import wire
from monarch.runtime.worker import graphs
from monarch.runtime.worker.device import gpu
from monarch.runtime.worker.device.gpu import OnGpu
from monarch.runtime.worker.frame import Frame
from monarch.runtime.worker.graphs import Graphs
from tests.compiler.kernels.triton.standin import stand_in
from tests.runtime.collectives.nccl import standing_in
from tests.runtime.worker.cuda_graphs import OnCpus, recording_on_cpus
from tests.runtime.worker.test_states import Worker

PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh

mesh = Mesh.abstract(data=1)
model = monarch.module_to_mesh(
    nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(), nn.LayerNorm(16), nn.Linear(16, 5)),
    mesh,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@monarch.program
def step(rows: "i64[6]", labels: "i64[6]"):
    optimizer.zero_grad()
    out = model(rows)
    loss = F.cross_entropy(out, labels)
    loss.backward()
    optimizer.step()
    return loss, out
"""


@dataclass
class Machine:
    """`recorder` is None on a GPU."""

    device: torch.device
    target: str
    recorder: type[OnCpus] | None

    def plan(self, graph: Graph, kernels: str = "all") -> Plan:
        return compile_graph(graph, CompileOptions(target=self.target, kernels=kernels, cuda_graphs=True))

    def alone(self, text: str) -> Plan:
        """Of a partitioned graph's text, as it stands there."""
        return emit_plan(parse_graph(text), CompileOptions(target=self.target, cuda_graphs=True))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(cache))
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    if torch.cuda.is_available():
        return Machine(torch.device("cuda", 0), "cuda:{}{}".format(*torch.cuda.get_device_capability()), None)
    driver = stand_in(monkeypatch)
    return Machine(torch.device("cpu"), "cuda:90", recording_on_cpus(monkeypatch, driver))


class Steps:
    """A plan on one device, step after step, with graphs and without: `run(inputs)` gives what both returned."""

    def __init__(self, machine: Machine, plan: Plan) -> None:
        self.plan = plan
        self.device = machine.device
        self.machine = machine
        self.graphs = Graphs(plan, machine.device, "worker 0")
        self.ready = [OnGpu(plan, machine.device) for _ in range(2)]

        def bind(at: int) -> Callable[..., Callable[..., Any]]:
            def rest(name: str, *arguments: Any) -> Callable[..., Any]:
                if name in LOCAL_OPS:
                    return lambda *args, **kwargs: LOCAL_OPS[name]({"data": 0}, {"data": 1}, *args, **kwargs)
                return self.ready[at].check if name == "commit" else lambda tensors: [tensor * 2 for tensor in tensors]

            return self.ready[at].binds(rest)

        self.frames = [Frame(self.ready[0].plan, bind(0), graphs=self.graphs), Frame(self.ready[1].plan, bind(1))]
        generator = torch.Generator().manual_seed(3)
        first = {
            str(spec.label): self._first(str(spec.label), torch.randn(spec.type.shape, generator=generator)).to(
                spec.type.dtype
            )
            for spec in plan.inputs
            if spec.kind == "state"
        }
        self.states = [{label: value.clone().to(machine.device) for label, value in first.items()} for _ in range(2)]

    @staticmethod
    def _first(label: str, value: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(value) if "step" in label else value.square() / 8 if "sq" in label else value / 4

    def one(self, at: int, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
        given = iter(inputs)
        scalars = {"scalar": 1e-2 * (1 + seed % 3), "seed": seed}
        arguments = [
            self.states[at][str(spec.label)]
            if spec.kind == "state"
            else next(given).clone().to(self.device)
            if spec.kind == "input"
            else torch.tensor(scalars[spec.kind], dtype=spec.type.dtype, device=self.device)
            for spec in self.plan.inputs
        ]
        with torch.inference_mode():
            results = self.frames[at].run(arguments)
            self.ready[at].check()
        for spec, donated in zip(self.plan.inputs, self.plan.donated, strict=True):
            if donated:
                del self.states[at][str(spec.label)]
        for spec, value in zip(self.plan.outputs, results, strict=True):
            if spec.kind == "state":
                self.states[at][str(spec.label)] = value
        return [value for spec, value in zip(self.plan.outputs, results, strict=True) if spec.kind == "return"]

    def run(self, inputs: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
        found, wanted = (self.one(at, inputs, seed) for at in range(2))
        same(found, wanted)
        assert self.states[0].keys() == self.states[1].keys()
        same(list(self.states[0].values()), list(self.states[1].values()))
        return found

    def replace(self, label: str, value: torch.Tensor) -> None:
        for state in self.states:
            state[label] = value.clone().to(self.device)

    @property
    def replays(self) -> list[int]:
        """How often each graph that there is now was replayed; nothing on a GPU, which does not say."""
        if self.machine.recorder is None or self.graphs.recorder is None:
            return []
        recorder: Any = self.graphs.recorder
        return [graph.replays for graph in recorder.graphs]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def traced(tmp_path: Path, text: str = PROGRAM) -> Graph:
    (tmp_path / "train.py").write_text(text)
    return load_program(f"{tmp_path / 'train.py'}:step", None, {}, False).graph


def batches(count: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(12, (6,), generator=generator), torch.randint(5, (6,), generator=generator)]
        for _ in range(count)
    ]


def test_training(machine: Machine, tmp_path: Path) -> None:
    """What a step gave, gradients too, is not touched by later steps."""
    steps = Steps(machine, machine.plan(traced(tmp_path)))
    assert len(steps.graphs.stretches) == 2
    held: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for seed, batch in enumerate(batches(7)):
        results = steps.run(batch, seed)
        now = [*results, *(value for label, value in steps.states[0].items() if label.startswith("grad["))]
        held.append((now, [value.clone() for value in now]))
        for values, copies in held:
            assert all(map(torch.equal, values, copies))
    assert steps.graphs.recorded == 1 and not steps.graphs.given_up
    if machine.recorder is not None:
        assert steps.replays == [5, 5]
    assert len({value.untyped_storage().data_ptr() for values, _ in held for value in values}) == sum(
        len(values) for values, _ in held
    )


def test_state_that_the_user_replaces(machine: Machine, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Graphs are recorded again where it lies elsewhere, and given up where that goes on; what lay there before is let
    go of."""
    steps = Steps(machine, machine.plan(traced(tmp_path), "off"))
    given = batches(5)
    for seed, batch in enumerate(given):
        steps.run(batch, seed)
    gone = weakref.ref(steps.states[0]["1.weight"])
    for times in range(1, 7):
        steps.replace("1.weight", torch.full((16, 8), 0.1 * times))
        assert gone() is None
        for seed in range(3):
            steps.run(given[seed], seed)
        assert steps.graphs.recorded == min(times, graphs.MOST_IN_A_ROW) + 1
        assert steps.graphs.given_up == (times > graphs.MOST_IN_A_ROW)
    said = capfd.readouterr().err
    assert said.startswith("monarch: worker 0 runs 'step' without CUDA graphs from here on: its state was somewhere")
    assert said.endswith("else 5 times in a row\n") and said.count("monarch:") == 1


def test_state_that_is_seldom_replaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graphs, "SETTLED", 2)
    steps = Steps(machine, machine.alone(ADDS))
    for times in range(8):
        steps.replace("total", torch.full((4,), float(times)))
        for at in range(6):
            steps.run([torch.full((4,), float(at))])
    assert steps.graphs.recorded == 8 and not steps.graphs.given_up
    assert not capfd.readouterr().err


ADDS = """graph @adds on mesh<data=1> partitioned<data> {
  %x = input 0 : f32[4]
  %t = state "total" : f32[4]
  %k = state "kept" : f32[4]
  %a = aten.mul.Tensor(%x, %k) : f32[4]
  %b = aten.exp(%a) : f32[4]
  %s = all_reduce([%b], ["data"], "sum") : (f32[4])
  %c = getitem(%s, 0) : f32[4]
  %d = aten.add.Tensor(%b, %c) : f32[4]
  %e = aten.sin(%d) : f32[4]
  %n = aten.add.Tensor(%t, %e) : f32[4]
  %o = aten.neg(%e) : f32[4]
  update "total" = %n
  return %o, %b, %c
}"""


def test_collectives_stand_between_graphs(machine: Machine) -> None:
    """What they move is read where the graph before them left it, and what they give is copied for the one behind."""
    plan = machine.alone(ADDS)
    steps = Steps(machine, plan)
    first, second, *_ = steps.graphs.stretches
    assert [plan.instructions[at].op for at in range(first.stop, second.start)] == ["all_reduce", "getitem"]
    held = [steps.run([torch.full((4,), float(at))]) for at in range(6)]
    for at, values in enumerate(held):
        same(values[1:], [(at * steps.states[0]["kept"]).exp(), 2 * (at * steps.states[0]["kept"]).exp()])
    assert steps.graphs.recorded == 1


LOOKS_UP = """graph @look on mesh<data=1> {
  %rows = input 0 : i64[4]
  %t = state "table" : f32[6, 8]
  %w = state "weight" : f32[8, 8]
  %a = aten.embedding(%t, %rows) : f32[4, 8]
  %m = aten.mm(%a, %w) : f32[4, 8]
  %s = aten.sum.dim_IntList(%m, [0]) : f32[8]
  %v = aten.view(%s, [1, 8]) : f32[1, 8]
  %n = aten.add.Tensor(%w, %v) : f32[8, 8]
  %p = aten.mm(%m, %n) : f32[4, 8]
  update "weight" = %n
  return %p
}"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", range(5))
def test_a_step_that_fails(machine: Machine, when: int) -> None:
    """While all runs as it is, while it is recorded, and while it is replayed: state stays, and the next steps are
    right."""
    steps = Steps(machine, machine.plan(parse_graph(LOOKS_UP)))
    assert len(steps.graphs.stretches) == 2 and any(each.gathers for each in steps.plan.binaries)
    rows = torch.tensor([0, 5, 2, 2])
    for step in range(6):
        if step == when:
            before = {label: value.clone() for label, value in steps.states[0].items()}
            for at in range(2):
                with pytest.raises(IndexError, match="there are 6 rows"):
                    steps.one(at, [rows + 1], 0)
            assert all(torch.equal(value, before[label]) for label, value in steps.states[0].items())
        steps.run([(rows + step) % 6])
    assert steps.graphs.recorded == 1 and not steps.graphs.given_up


def test_what_cannot_be_recorded(machine: Machine, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By a mask, which torch counts on the host. It is said once, with the op and the line."""
    if machine.recorder is not None:
        machine.recorder.refused |= {"aten.index_put_.default", "aten.index_put.default"}
    text = """
import torch
import monarch
from monarch.distributed import Mesh

state = monarch.distribute(torch.zeros(6), Mesh.abstract(data=1))

@monarch.program
def step(x: "f32[6]", flags: "bool[6]"):
    y = torch.sin(x * 2).exp()
    z = torch.index_put(y, (flags,), torch.tensor(0.0)) + 1
    state.add_(z.cos())
    return z
"""
    steps = Steps(machine, machine.plan(traced(tmp_path, text), "off"))
    for at in range(6):
        (found,) = steps.run([torch.arange(6.0) + at, torch.arange(6) % 2 == 0])
        assert found.tolist()[::2] == [1.0] * 3
    said = capfd.readouterr().err
    assert said.startswith("monarch: worker 0 runs 'step' without CUDA graphs from here on: aten.index_put")
    assert "train.py:11" in said and "cannot be recorded" in said and said.count("monarch:") == 1
    assert steps.graphs.given_up and steps.graphs.recorded == 1


def test_state_that_is_made_anew(machine: Machine) -> None:
    """It lies elsewhere after every step, and is copied like an argument."""
    plan = machine.plan(
        parse_graph("""graph @grow on mesh<data=1> {
  %x = input 0 : f32[4]
  %t = state "total" : f32[4]
  %u = state "other" : f32[4]
  %a = aten.mul.Tensor(%t, %x) : f32[4]
  %b = aten.maximum(%a, %u) : f32[4]
  %v = aten.view(%b, [2, 2]) : f32[2, 2]
  %c = aten.cumsum(%v, 0) : f32[2, 2]
  update "total" = %b
  return %c, %v
}"""),
        "off",
    )
    assert plan.donated == (False, True, False)
    steps = Steps(machine, plan)
    for at in range(7):
        steps.run([torch.full((4,), 1.0 + at)])
    assert steps.graphs.recorded == 1 and not steps.graphs.given_up


def test_a_plan_lets_go_of_what_its_graphs_hold(machine: Machine) -> None:
    steps = Steps(machine, machine.alone(ADDS))
    for at in range(4):
        steps.run([torch.full((4,), float(at))])
    made = [weakref.ref(steps.graphs), weakref.ref(steps.graphs.recorder)]
    gc.collect()
    gc.disable()
    try:
        steps.frames.clear()
        if machine.recorder is not None:
            machine.recorder.made.clear()
        del steps
        assert [each() for each in made] == [None, None]
    finally:
        gc.enable()


def test_while_it_is_measured_a_plan_runs_without(machine: Machine) -> None:
    steps = Steps(machine, machine.alone(ADDS))
    for at in range(8):
        steps.frames[0].measure(Told() if at in (1, 4, 5) else None)
        steps.run([torch.full((4,), float(at))])
    assert steps.graphs.recorded == 1
    if machine.recorder is not None:
        assert steps.replays == [3, 3, 3]


# -- on workers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def workers_here(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Workers that are forked within the test, and where there is no GPU take the CPU for one."""
    if machine.recorder is None:
        yield machine
        return
    monkeypatch.setattr(gpu, "device_for", lambda plan, worker: torch.device("cpu"))
    warm = processes.WarmParent()
    monkeypatch.setattr(workers, "warm_parent", lambda: warm)
    yield machine
    warm.close()


def trained(
    mesh: Mesh, target: str, cuda_graphs: bool, collectives: Literal["monarch", "nccl"] = "monarch"
) -> list[torch.Tensor]:
    """Losses, outputs and weights of training with a program for each of two models that take turns, one of which reads
    what the other has made; held to the end."""
    torch.manual_seed(0)
    first = monarch.module_to_mesh(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), mesh)
    second = monarch.module_to_mesh(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), mesh)
    ahead, behind = (torch.optim.AdamW(model.parameters(), lr=0.02) for model in (first, second))

    @monarch.program(target=target, cuda_graphs=cuda_graphs, collectives=collectives)
    def one(x: "f32[8@data, 8]", labels: "i64[8@data]"):  # type: ignore[no-untyped-def]
        ahead.zero_grad()
        out = first(x)
        loss = F.cross_entropy(out, labels)
        loss.backward()
        ahead.step()
        return loss, out

    @monarch.program(target=target, cuda_graphs=cuda_graphs, collectives=collectives)
    def other(x: "f32[8@data, 4]"):  # type: ignore[no-untyped-def]
        behind.zero_grad()
        loss = (second(x) - x.sin()).square().mean()
        loss.backward()
        behind.step()
        return loss

    generator = torch.Generator().manual_seed(1)
    held: list[torch.Tensor] = []
    for at in range(7):
        x, labels = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        loss, out = one(x, labels)
        held += [loss, out, other(out.detach())]
        if at == 5:
            with torch.no_grad():
                first[0].weight.mul_(0.5)
    held += [parameter.grad for parameter in first.parameters()]
    held += [*first.parameters(), *second.parameters()]
    return [value.full_tensor().detach().cpu() for value in held]


def test_commands(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs a plan with its graphs, and lets go of them with the plan."""
    if machine.recorder is None:
        pytest.skip("says how often graphs were replayed, which those of a GPU do not")
    monkeypatch.setattr(gpu, "device_for", lambda plan, worker: torch.device("cpu"))
    worker = Worker()
    plan = machine.alone(
        "graph @f on mesh<> {\n  %x = input 0 : f32[3]\n  %y = aten.sin(%x) : f32[3]\n"
        "  %z = aten.exp(%y) : f32[3]\n  return %z\n}"
    )
    assert worker.load(1, plan) == []
    for step in range(6):
        worker.state.values[1] = torch.full((3,), float(step))
        assert worker.run(1, plan, 10 + step, 1) == []
    (recorder,) = machine.recorder.made
    assert [graph.replays for graph in recorder.graphs] == [4]
    for step in range(6):
        found = worker.state.values[10 + step]
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, torch.full((3,), float(step)).sin().exp())
    machine.recorder.made.clear()
    held = weakref.ref(recorder)
    del recorder
    worker.do(wire.numbers(wire.UNLOAD, 1))
    assert held() is None


def test_training_on_workers(workers_here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_KERNELS", "off")
    with Mesh(data=2) as mesh:
        found = trained(mesh, workers_here.target, True)
    with Mesh(data=2) as mesh:
        same(found, trained(mesh, workers_here.target, False))


def test_training_over_nccl(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose works are started and waited for between graphs."""
    monkeypatch.setenv("MONARCH_KERNELS", "off")
    if machine.recorder is None and torch.cuda.device_count() < 2:
        pytest.skip(f"needs as many GPUs as workers: torch.cuda.device_count() is {torch.cuda.device_count()}")
    with standing_in() if machine.recorder is not None else nullcontext():
        with Mesh(data=2) as mesh:
            found = trained(mesh, machine.target, True, "nccl")
        with Mesh(data=2) as mesh:
            same(found, trained(mesh, machine.target, False, "nccl"))


def test_a_worker_without_a_peer_fails_and_goes_on(workers_here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index out of range on one worker: the other's step is aborted, and the next ones are right on both."""
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    with Mesh(data=2) as mesh:
        table = monarch.distribute(torch.arange(12.0).view(6, 2), mesh)
        total = monarch.distribute(torch.zeros(2), mesh)

        @monarch.program(target=workers_here.target, cuda_graphs=True)
        def add(rows: "i64[4@data]"):  # type: ignore[no-untyped-def]
            found = F.embedding(rows, table)
            total.add_((found * found.sum(1, keepdim=True).sin()).sum(0))
            return found + total

        expected = torch.zeros(2)
        for step in range(8):
            rows = torch.tensor([0, 1, 2, 3]) + step % 3
            if step in (1, 3, 5):
                with pytest.raises(DeviceMeshError, match="an index is out of range: there are 6 rows"):
                    add(rows + 3).full_tensor()
            looked_up = torch.arange(12.0).view(6, 2)[rows]
            expected = expected + (looked_up * looked_up.sum(1, keepdim=True).sin()).sum(0)
            torch.testing.assert_close(add(rows).full_tensor().cpu(), looked_up + expected)


class Told:
    clock = staticmethod(lambda: 0)

    def enter(self, slots: Sequence[int], values: Sequence[Any]) -> None: ...

    def ran(self, instruction: int, start: int, end: int, slot: int, value: Any) -> None: ...

    def met(self, instruction: int, start: int, end: int, slot: int = -1, value: Any = None) -> None: ...

    def freed(self, slots: Sequence[int]) -> None: ...
