"""How long the controller takes: to trace, partition and plan a training step, and to start one.

The mesh's size should not matter: what is compiled is one program for all workers, whatever their number.
"""

from __future__ import annotations

import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import compile_graph
from monarch.distributed import Mesh
from monarch.language.compile import full_collections_later
from monarch.language.programs import native
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import tensor_parallel

SEQUENCE = 128
LAYERS = (4, 12)
DEEP = 48
MESHES = ({"data": 2, "model": 2}, {"data": 32, "model": 8}, {"data": 512, "model": 8})


@dataclass(frozen=True)
class CompileTime:
    """Processor seconds to get from Python to a plan."""

    layers: int
    workers: int
    ops: int
    trace: float
    partition: float
    plan: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of the controller's for one step: from calling the program until the call returns (the median), the
    least processor time of such a call, and the least that it took to check what the program reads of Python. `floor`
    is the least that Python takes to look up as many places and compare what is there, in nothing but C."""

    layers: int
    workers: int
    step: float
    processor: float
    check: float
    places: int
    floor: float


def training_step(mesh: Mesh, layers: int, width: int) -> tuple[Any, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """A GPT's training step, data parallel over `data` and tensor parallel over `model`; and what makes arguments."""
    model = GPT(width=width, layers=layers, heads=8, sequence=SEQUENCE)
    model = monarch.module_to_mesh(model, mesh, layouts=tensor_parallel(model, mesh, "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = 2 * mesh.size("data")

    @monarch.program
    def train_step(tokens, targets):  # type: ignore[no-untyped-def]
        tokens, targets = monarch.layout(tokens, "[@data, -]"), monarch.layout(targets, "[@data, -]")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    def arguments() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(256, (batch, SEQUENCE)), torch.randint(256, (batch, SEQUENCE))

    return train_step, arguments


def compile_time(layers: int, dims: dict[str, int], repetitions: int = 3) -> CompileTime:
    """Trace, partition and plan the GPT's training step for an abstract mesh (medians). The model is new each time, so
    nothing is known of it before."""
    traces, partitions, plans = [], [], []
    for _ in range(repetitions):
        mesh = Mesh.abstract(**dims)
        train_step, arguments = training_step(mesh, layers, width=256)
        tokens, targets = arguments()
        with full_collections_later():  # as a program's first call has it
            times = [time.process_time()]
            graph = train_step.trace(tokens, targets).graph
            times.append(time.process_time())

            def passed(name: str, seconds: float, graph: Graph, times: list[float] = times) -> None:
                times.append(time.process_time())

            compile_graph(graph, progress=passed)
        traces.append(times[1] - times[0])
        partitions.append(times[-2] - times[1])
        plans.append(times[-1] - times[-2])
    medians = (statistics.median(seconds) for seconds in (traces, partitions, plans))
    return CompileTime(layers, mesh.size(), sum(1 for _ in graph.calls), *medians)


def step_time(layers: int, steps: int = 30) -> StepTime:
    """A small model on two workers, so that they are done with a step before the next one is started."""
    with Mesh(data=2, model=1) as mesh:
        train_step, arguments = training_step(mesh, layers, width=64)
        tokens, targets = arguments()
        seconds, processor = [], []
        for _ in range(steps):
            start, started = time.perf_counter(), time.thread_time()
            loss = train_step(tokens, targets)
            processor.append(time.thread_time() - started)
            seconds.append(time.perf_counter() - start)
            loss.item()
        variant = next(iter(train_step._memory.entries.values())).variants[0]
        places = sum(len(node.keys) for node in variant.guards.nodes)
        looking_up = lookups(places)
        native.begin().result()  # the steps may have been over before it was built
        checks, floors = [], []
        for _ in range(200):
            start = time.perf_counter()
            variant.guards.check([tokens, targets])
            checks.append(time.perf_counter() - start)
            start = time.perf_counter()
            looking_up()
            floors.append(time.perf_counter() - start)
        step = statistics.median(seconds[steps // 3 :])
        return StepTime(layers, mesh.size(), step, min(processor), min(checks), places, min(floors))


def lookups(count: int) -> Callable[[], bool]:
    """Looks up so many entries of dicts that have twenty each, and compares them with the objects that were there."""
    entries = [{f"name{at}": object() for at in range(20)} for _ in range(-(-count // 20))]
    dicts = [each for each in entries for _ in each][:count]
    names = [name for each in entries for name in each][:count]
    expected = [*map(operator.getitem, dicts, names)]
    return lambda: [*map(operator.getitem, dicts, names)] == expected


def first_call(layers: int) -> float:
    """Processor seconds of this process for the first call of a GPT's training step on four workers."""
    with Mesh(data=2, model=2) as mesh:
        train_step, arguments = training_step(mesh, layers, width=256)
        tokens, targets = arguments()
        start = time.process_time()
        train_step(tokens, targets)
        return time.process_time() - start


def llamas_first_call(layers: int, width: int = 64) -> float:
    """The same for a Llama of `transformers`, data parallel on two workers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(LlamaForCausalLM(config), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        @monarch.program
        def train_step(tokens):  # type: ignore[no-untyped-def]
            tokens = monarch.layout(tokens, "[@data, -]")
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            return loss

        tokens = torch.randint(256, (4, 32))
        start = time.process_time()
        train_step(tokens)
        return time.process_time() - start


FIRST_CALLS: dict[str, Callable[[int], float]] = {"GPT": first_call, "Llama": llamas_first_call}


def stacked_time(layers: int, width: int = 64) -> CompileTime:
    """The same once for a step through `monarch.scan` over stacked layers of two matrices, data parallel."""
    mesh = Mesh.abstract(data=2)
    weights = [monarch.distribute(torch.randn(layers, width, width), mesh, "[-, -, -]") for _ in range(2)]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights, lr=1e-3)

    def layer(x, both):  # type: ignore[no-untyped-def]
        up, down = both
        return x + F.gelu(x @ up) @ down, None

    @monarch.program
    def train_step(x):  # type: ignore[no-untyped-def]
        optimizer.zero_grad()
        loss = monarch.scan(layer, monarch.layout(x, "[@data, -]"), tuple(weights))[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(4, width)
    times = [time.process_time()]
    graph = train_step.trace(x).graph
    times.append(time.process_time())
    compile_graph(graph, progress=lambda name, seconds, graph: times.append(time.process_time()))
    return CompileTime(
        layers,
        mesh.size(),
        sum(1 for _ in graph.calls),
        times[1] - times[0],
        times[-2] - times[1],
        times[-1] - times[-2],
    )


@dataclass(frozen=True)
class FirstCall:
    """Processor seconds of the first call in new processes, whose kernels are built: without a plan on disk, and with
    it."""

    model: str
    layers: int
    cold: float
    kept: float


def first_calls(model: str, layers: int, repetitions: int = 3) -> FirstCall:
    """The medians of some processes each."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "benchmarks.compile_time", model, str(layers)]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / ".src"), str(root)]), "MONARCH_CACHE": cache}

        def seconds(plans: str) -> float:
            ran = {**env, "MONARCH_PLAN_CACHE": plans}
            return float(subprocess.run(command, env=ran, cwd=root, check=True, stdout=subprocess.PIPE).stdout)

        seconds("1 GiB")  # which keeps the plan and the kernels
        times = [(seconds("0"), seconds("1 GiB")) for _ in range(repetitions)]
    return FirstCall(model, layers, *map(statistics.median, zip(*times, strict=True)))


def measure() -> tuple[list[CompileTime], list[CompileTime], list[FirstCall], list[StepTime]]:
    compile_time(1, {"data": 2, "model": 2})  # imports and first uses
    stacked_time(2)
    return (
        [*(compile_time(layers, dims) for layers in LAYERS for dims in MESHES), compile_time(DEEP, MESHES[0], 1)],
        [stacked_time(layers) for layers in (*LAYERS, DEEP)],
        [first_calls(model, layers) for model, layers in (("GPT", 4), ("GPT", 12), ("Llama", 2))],
        [step_time(layers) for layers in LAYERS],
    )


if __name__ == "__main__":
    print(FIRST_CALLS[sys.argv[1]](int(sys.argv[2])))
