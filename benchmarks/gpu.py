"""`make bench-gpu`: generated kernels and templates on one GPU, in one call.

    python -m benchmarks.gpu            # all
    python -m benchmarks.gpu kernels    # or: attention, matmul, step

Ours is the plan of a program of one worker, with the variants of its kernels measured first (as `monarchc tune` does),
run by the frame that workers run. Against it stand a copy of as many bytes as it reads and writes at least, what
torch.compile makes of the same lines, and torch's own ops. Prints as it goes, and writes
`benchmarks/results/<date>-<device>.md`. One GPU: what NCCL moves, and DDP over it, would take two, and is not measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import Call, Case, adamw, by_torch, flat, gelu, layer_norm, program_of, rms_gate, steps
from benchmarks.measure import Row, cells, interleaved, table
from monarch.compiler.cli.load import load_program
from monarch.compiler.errors import MonarchError
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import TARGETS, CompileOptions
from monarch.runtime.worker.device.gpu import OnGpu
from monarch.runtime.worker.device.tune import on_gpu, tuned
from monarch.runtime.worker.frame import Frame
from monarch.runtime.worker.graphs import WARM_UP, Graphs
from monarch.stdlib.kernels.tuning import fastest

RESULTS = Path(__file__).parent / "results"
COPY = 1 / 0.9
"""At most this times what copying as many bytes takes."""
COMPILED = 1.0
"""At most torch.compile's time."""
REPETITIONS = 15
LEAST_SECONDS = 0.01
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SIZES = (1024, 8, 16, 1024, 32768, 8)
"""Of the GPT: width, layers, heads, sequence, vocabulary, batch."""


@dataclass(frozen=True)
class Shapes:
    """How large the cases are: `rows` of `width`, `classes`, and attention's batch, heads, length and dim."""

    rows: int = 16384
    width: int = 4096
    classes: int = 32000
    inner: int = 4096
    attention: tuple[int, int, int, int] = (4, 16, 4096, 128)
    parameters: int = 24


def kernel_cases(at: Shapes, device: torch.device) -> list[Case]:
    """Those of `benchmarks.kernels`, in the sizes and the dtype of a GPU's training."""
    torch.manual_seed(0)
    half, single = ({"device": device, "dtype": dtype} for dtype in (torch.bfloat16, torch.float32))
    n = torch.randn
    rows, width = at.rows, at.width
    x = [n(rows, width, **half) for _ in range(3)]
    weight, bias = n(width, **half), n(width, **half)
    labels = torch.randint(at.classes, (rows // 2,), device=device)
    logits = n(rows // 2, at.classes, **half)
    shapes = [(width, width), (width,)] * at.parameters
    given = [n(shape, **single) for shape in shapes]
    held = [n(shape, **single) for shape in shapes]
    moments = [*(n(shape, **single) for shape in shapes), *(n(shape, **single).square() for shape in shapes)]
    million = sum(tensor.numel() for tensor in given) / 1e6
    return [
        Case(f"RMSNorm, residual, SiLU gate {rows}x{width}", rms_gate, (x[0], x[1], weight, x[2])),
        Case(f"LayerNorm, backward {rows}x{width}", layer_norm, (x[0], weight, bias), 3, x[1]),
        Case(f"GELU (tanh), backward {rows}x{width}", partial(gelu, "tanh"), (x[0],), 1, x[1]),
        Case(
            f"softmax cross-entropy, backward {rows // 2}x{at.classes}",
            lambda logits, labels: F.cross_entropy(logits.float(), labels),
            (logits, labels),
            1,
            torch.tensor(1.0, device=device),
        ),
        Case(
            f"AdamW, {len(shapes)} tensors, {million:.0f} M",
            partial(adamw, len(shapes)),
            (*given, torch.tensor(3.0, device=device)),
            state=(*held, *moments),
        ),
    ]


def attention_cases(at: Shapes, device: torch.device) -> list[Case]:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(at.attention, device=device, dtype=torch.bfloat16) for _ in range(4))
    name = f"causal attention {'x'.join(map(str, at.attention))}"
    function = partial(F.scaled_dot_product_attention, is_causal=True)
    return [Case(name, function, (q, k, v)), Case(f"{name}, backward", function, (q, k, v), 3, grad)]


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_residual(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + F.linear(x, weight)


def matmul_cases(at: Shapes, device: torch.device) -> list[Case]:
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    rows, width, inner = at.rows // 2, at.width, at.inner
    x, weight = torch.randn(rows, inner, **half), torch.randn(width, inner, **half) / inner**0.5
    bias, residual = torch.randn(width, **half), torch.randn(rows, width, **half)
    size = f"{rows}x{inner}x{width}"
    return [
        Case(f"matmul, bias, GELU {size}", linear_gelu, (x, weight, bias)),
        Case(f"matmul, residual {size}", linear_residual, (x, weight, residual)),
    ]


# -- ours --------------------------------------------------------------------------------------------------------------


def alone(name: str, *arguments: Any) -> Callable[..., Any]:
    """What a worker without peers needs besides kernels: nobody has to be waited for."""
    if name in LOCAL_OPS:
        return partial(LOCAL_OPS[name], {"one": 0, "data": 0}, {"one": 1, "data": 1})
    return lambda: None


def frame_on(plan: Plan, device: torch.device) -> Frame:
    """The plan, ready to run, with the variants that are fastest on the device."""
    if device.type == "cuda":
        plan = tuned(plan, on_gpu(device), fastest)
    ready = OnGpu(plan, device)
    return Frame(ready.plan, ready.binds(alone), graphs=Graphs(plan, device, "this") if plan.cuda_graphs else None)


def by_plan(case: Case, target: str, device: torch.device) -> Call:
    """The case's plan, ready to run on the device: gives the results, or the new state, as `by_torch` does."""
    program, typed = program_of(_without_data(case))
    plan = compile_graph(program.trace(*typed).graph, CompileOptions(target=target, kernels="all"))
    return steps(case, plan, frame_on(plan, device))


def _without_data(case: Case) -> Case:
    """Programs are traced on a machine's own memory, whatever they are for."""

    def typed(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu")

    upstream = None if case.upstream is None else typed(case.upstream)
    return replace(
        case, tensors=tuple(map(typed, case.tensors)), state=tuple(map(typed, case.state)), upstream=upstream
    )


def step_by_plan(
    target: str, device: torch.device, tokens: torch.Tensor, targets: torch.Tensor, cuda_graphs: bool = False
) -> Call:
    """The GPT's training step: gives the loss."""
    module = importlib.import_module("benchmarks.gpt_step")
    given = dict.fromkeys(("tokens", "targets"), f"i64[{tokens.shape[0]}, {tokens.shape[1]}]")
    loaded = load_program(f"{module.__file__}:step", given=given)
    plan = compile_graph(loaded.graph, CompileOptions(target=target, kernels="all", cuda_graphs=cuda_graphs))
    frame = frame_on(plan, device)
    parameters = {name: value.detach().to(device) for name, value in module.make_model().named_parameters()}
    state = {
        str(spec.label): parameters.get(
            str(spec.label), torch.zeros(spec.type.shape, dtype=spec.type.dtype, device=device)
        )
        for spec in plan.inputs
        if spec.kind == "state"
    }

    def argument(spec: Any) -> torch.Tensor:
        if spec.kind == "state":
            return state[str(spec.label)]
        if spec.kind == "input":
            return (tokens, targets)[int(spec.label)]
        return torch.tensor(module.RATE, dtype=spec.type.dtype, device=device)

    def run() -> torch.Tensor:
        with torch.inference_mode():
            results = frame.run([argument(spec) for spec in plan.inputs])
        named = zip(plan.outputs, results, strict=True)
        state.update({str(spec.label): made for spec, made in named if spec.kind == "state"})
        loss: torch.Tensor = results[0]
        return loss

    return run


def step_by_torch(device: torch.device, tokens: torch.Tensor, targets: torch.Tensor, compiled: bool) -> Call:
    module = importlib.import_module("benchmarks.gpt_step")
    model = module.make_model().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=module.RATE, weight_decay=module.DECAY, fused=device.type == "cuda"
    )
    loss_of = torch.compile(module.loss_of) if compiled else module.loss_of

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


# -- measured ----------------------------------------------------------------------------------------------------------


def gpu_seconds(call: Call, count: int) -> float:
    """How long a call takes on the GPU, of so many in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def compared(name: str, ours: Call, other: Call, against: str, target: float | None, note: str = "") -> Row:
    for call in (ours, other):
        call()
    count = max(1, int(LEAST_SECONDS / gpu_seconds(ours, 2)))
    pair = interleaved(partial(gpu_seconds, ours, count), partial(gpu_seconds, other, count), REPETITIONS, 2)
    return Row(name, *pair, against, target, note)


def check(case: Case, ours: object, theirs: object) -> None:
    """Raise RuntimeError where they do not compute the same: then their times cannot be compared."""
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        apart = float(((mine.float() - other.float()).abs().max() / other.float().abs().max()).detach())
        if not apart < TOLERANCE.get(mine.dtype, 1e-4):
            raise RuntimeError(f"{case.name}: results are {apart} apart")


def copying(bytes_moved: int, device: torch.device) -> Call:
    """Copies half as many bytes, which are read and written."""
    size = max(1, bytes_moved // 2)
    source, place = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: place.copy_(source)


def moved(case: Case, results: object) -> int:
    """The bytes that have to be read and written at least."""
    given = (*case.tensors, *case.state, *([] if case.upstream is None else [case.upstream]))
    return sum(tensor.nbytes for tensor in (*given, *flat(results)))


def kernel_rows(target: str, device: torch.device) -> Iterator[Row]:
    for case in kernel_cases(Shapes(), device):
        ours, compiled = by_plan(case, target, device), torch.compile(case.function)
        state = [tensor.clone() for tensor in case.state]
        theirs = partial(by_torch, case, compiled, state)
        results = ours()
        check(case, results, theirs())
        yield compared(case.name, ours, copying(moved(case, results), device), "a copy of as many bytes", COPY)
        yield compared(case.name, ours, theirs, "torch.compile", COMPILED)


def attention_rows(target: str, device: torch.device) -> Iterator[Row]:
    for case in attention_cases(Shapes(), device):
        ours = by_plan(case, target, device)

        def theirs(case: Case = case) -> object:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return by_torch(case, case.function)

        check(case, ours(), theirs())
        yield compared(case.name, ours, theirs, "scaled_dot_product_attention, flash", None)


def matmul_rows(target: str, device: torch.device) -> Iterator[Row]:
    for case in matmul_cases(Shapes(), device):
        ours = by_plan(case, target, device)
        apart, compiled = partial(by_torch, case, case.function), partial(by_torch, case, torch.compile(case.function))
        check(case, ours(), apart())
        yield compared(case.name, ours, apart, "cuBLAS, and separate kernels", None)
        yield compared(case.name, ours, compiled, "torch.compile", None)


@contextmanager
def gpt_sizes(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Within the block `benchmarks.gpt_step` has these sizes; gives batch, sequence and vocabulary."""
    os.environ["GPT_STEP"] = ",".join(map(str, sizes))
    try:
        yield sizes[5], sizes[3], sizes[4]
    finally:
        del os.environ["GPT_STEP"]


def step_rows(target: str, device: torch.device) -> Iterator[Row]:
    with gpt_sizes(SIZES) as (batch, sequence, vocabulary):
        tokens, targets = torch.randint(vocabulary, (2, batch, sequence), device=device)
        ours, theirs = step_by_plan(target, device, tokens, targets), step_by_torch(device, tokens, targets, True)
        losses = [(float(ours()), float(theirs())) for _ in range(3)]  # type: ignore[arg-type]
        if any(not abs(mine - other) < 0.05 * other for mine, other in losses):
            raise RuntimeError(f"the losses of the GPT's steps are {losses}")
        width, layers = SIZES[:2]
        name = f"GPT's training step, {layers} layers of {width}, {batch}x{sequence} tokens, bfloat16"
        yield compared(name, ours, theirs, "torch.compile, fused AdamW", COMPILED)
        recorded = step_by_plan(target, device, tokens, targets, cuda_graphs=True)
        for _ in range(WARM_UP + 1):
            recorded()
        yield compared(f"{name}, as CUDA graphs", recorded, ours, "the same, without", None)


PARTS = {"kernels": kernel_rows, "attention": attention_rows, "matmul": matmul_rows, "step": step_rows}


def gpu() -> tuple[str, torch.device]:
    """The target that the GPU of this machine is, and the device. Raises MonarchError where there is none."""
    if not torch.cuda.is_available():
        raise MonarchError("torch finds no GPU here", hint="run this on a machine that has one; no figure is guessed.")
    target = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    if target not in TARGETS:
        raise MonarchError(f"the GPU here is {target}", hint=f"plans are compiled for {', '.join(TARGETS)}.")
    return target, torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them if none is given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to write to")
    options = parser.parse_args()
    try:
        target, device = gpu()
    except MonarchError as error:
        parser.exit(1, f"bench-gpu: {error}\n")
    name = torch.cuda.get_device_name(device)
    rows: list[Row] = []
    failed: list[str] = []
    for part in options.parts or PARTS:
        try:
            for row in PARTS[part](target, device):
                rows.append(row)
                print(": ".join(cells(row)[:4]), f"against {row.against}", flush=True)
        except Exception as error:  # the others are measured all the same, for such a machine is not always at hand
            failed.append(f"{part}: {type(error).__name__}: {error}")
            print(f"{part} FAILED: {type(error).__name__}: {error}", flush=True)
    today = datetime.date.today().isoformat()
    versions = f"{name}, torch {torch.__version__}, Triton {importlib.import_module('triton').__version__}"
    text = [f"# Measured on {today} on a GPU", versions, table(rows), *(f"Not measured: {each}" for each in failed)]
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{today}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.md"
    path.write_text("\n\n".join(text) + "\n")
    print(f"written to {path}")
    if failed:
        parser.exit(1, f"bench-gpu: {len(failed)} of {len(options.parts or PARTS)} parts failed\n")


if __name__ == "__main__":
    main()
