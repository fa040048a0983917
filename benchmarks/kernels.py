"""Generated C++ kernels on one thread, against torch's own ops and against what torch.compile makes of the same lines.

All compute the same function of the same float32 tensors; where it has a backward pass, that is part of it. Ours is the
plan of a program on a mesh of one worker, run in this process as a worker runs it. The last row is what making the
kernels of the demo's training step takes, in CPU-seconds, from nothing.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import monarch
from benchmarks import measure
from benchmarks.measure import Row, interleaved, seconds, table
from monarch.compiler.kernels.cpp.build import build_kernels
from monarch.compiler.plan import Plan
from monarch.distributed import Mesh
from monarch.runtime.worker.device.native import bind
from monarch.runtime.worker.frame import Frame

EAGER = 1 / 3
"""At most this share of eager's time, in the geometric mean."""
COMPILED = 1.0
"""The same of torch.compile's."""
COPY = "a copy of as many bytes"
"""What nothing that reads and writes them in memory can be much faster than."""
COLD = 0.1
"""At most this share of Inductor's CPU-seconds."""
REPETITIONS = 15
LEAST_SECONDS = 0.02
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """`function` of `tensors`; with `upstream`, its gradients with respect to the first `wanted` of them too. `state`
    comes before them, and is written over. `eager` is how torch itself does that, where it does so otherwise."""

    name: str
    function: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    wanted: int = 0
    upstream: torch.Tensor | None = None
    eager: Call | None = None
    state: tuple[torch.Tensor, ...] = ()


def rms_gate(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> Any:
    h = x + residual
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return h, y * F.silu(gate)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def gelu(approximate: str, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


def adamw(count: int, *tensors: torch.Tensor) -> None:
    """One step: parameters, first and second moments, gradients, `count` of each, and the step's number."""
    step = tensors[-1]
    groups = [tensors[at * count : (at + 1) * count] for at in range(4)]
    rate, size = 1e-3 / (1 - torch.pow(0.9, step)), torch.sqrt(1 - torch.pow(0.999, step))
    for p, m, v, g in zip(*groups, strict=True):
        p.mul_(1 - 1e-3 * 0.1)
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(rate * m / (v.sqrt() / size + 1e-8))


def optimizer_step(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Call:
    """The same by `torch.optim.AdamW`, which works in place."""
    held = [torch.nn.Parameter(parameter.clone()) for parameter in parameters]
    for parameter, gradient in zip(held, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.AdamW(held, lr=1e-3, weight_decay=0.1).step


def parameter_shapes() -> list[tuple[int, ...]]:
    """Those of a small transformer: 36 tensors, 3.2 million numbers."""
    block = [(256,), (256,), (768, 256), (256, 256), (256,), (256,), (1024, 256), (256, 1024)]
    return block * 4 + [(256, 256), (128, 256), (256,), (256,)]


def cases() -> list[Case]:
    torch.manual_seed(0)
    n = torch.randn
    tensors = (n(4096, 1024), n(4096, 1024), n(1024), n(4096, 1024))
    found = [Case("RMSNorm, residual, SiLU gate 4096x1024", rms_gate, tensors)]
    for rows, classes in ((1024, 256), (1024, 32000)):
        name = f"softmax cross-entropy, backward {rows}x{classes}"
        labels = torch.randint(classes, (rows,))
        found.append(Case(name, F.cross_entropy, (n(rows, classes), labels), 1, torch.tensor(1.0)))
    shapes = parameter_shapes()
    parameters, gradients = ([n(shape) for shape in shapes] for _ in range(2))
    moments = [*(n(shape) for shape in shapes), *(n(shape).square() for shape in shapes)]
    name = f"AdamW, {len(shapes)} tensors, {sum(map(math.prod, shapes)) / 1e6:.1f} M"
    eager = optimizer_step(parameters, gradients)
    given = (*gradients, torch.tensor(3.0))
    found.append(Case(name, partial(adamw, len(shapes)), given, eager=eager, state=(*parameters, *moments)))
    for approximate in ("tanh", "none"):
        name = f"GELU ({'erf' if approximate == 'none' else 'tanh'}), backward 1024x1024"
        found.append(Case(name, partial(gelu, approximate), (n(1024, 1024),), 1, n(1024, 1024)))
    for rows, width in ((1024, 256), (4096, 1024)):
        tensors = (n(rows, width), n(width), n(width))
        found.append(Case(f"LayerNorm, backward {rows}x{width}", layer_norm, tensors, 3, n(rows, width)))
    return found


def by_torch(case: Case, function: Callable[..., Any], state: Sequence[torch.Tensor] = ()) -> Any:
    """The case's results, with `function` for its own or for what torch.compile made of it; or its new state."""
    if case.upstream is None:
        result = function(*state, *case.tensors)
        return result if result is not None else state
    wanted = [tensor.detach().requires_grad_() for tensor in case.tensors[: case.wanted]]
    result = function(*wanted, *case.tensors[case.wanted :])
    return result, *torch.autograd.grad(result, wanted, case.upstream)


def program_of(case: Case) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The case as a program of one worker, and its arguments."""
    given = case.tensors if case.upstream is None else (*case.tensors, case.upstream)
    mesh = Mesh.abstract(one=1)
    held = [monarch.distribute(tensor, mesh) for tensor in case.state]

    @monarch.program(mesh=mesh)
    def program(*tensors):  # type: ignore[no-untyped-def]
        if case.upstream is None:
            return case.function(*held, *tensors)
        *tensors, upstream = tensors
        wanted = [tensor.detach().requires_grad_() for tensor in tensors[: case.wanted]]
        result = case.function(*wanted, *tensors[case.wanted :])
        return result, *torch.autograd.grad(result, wanted, upstream)

    return program, given


def by_kernels(case: Case) -> Call:
    """The case's plan, ready to run here."""
    program, given = program_of(case)
    with measure.kernels("all"):
        plan = program.compile(*given)
    path = build_kernels([each.args[1] for each in plan.instructions if each.op == "kernel"])
    if path is None:
        raise RuntimeError("no kernels can be built here")

    def bound(op: str, *arguments: Any) -> Callable[..., Any]:
        # One worker need not wait for others before it writes over state.
        return bind(path, *arguments, 1) if op == "kernel" else lambda: None

    return steps(case, plan, Frame(plan, bound))


def steps(case: Case, plan: Plan, frame: Frame) -> Call:
    """Runs the case's plan: gives its results, or the new state, in the order that `by_torch` has."""
    given = case.tensors if case.upstream is None else (*case.tensors, case.upstream)
    # The traced names of state are those of the list: held[0], held[1], …
    order = {str(spec.label): int(re.sub(r"\D", "", str(spec.label))) for spec in plan.inputs if spec.kind == "state"}
    state = {label: case.state[at].clone() for label, at in order.items()}

    def run() -> object:
        arguments = [state[str(spec.label)] if spec.kind == "state" else given[int(spec.label)] for spec in plan.inputs]
        with torch.inference_mode():
            results = frame.run(arguments)
        if not state:
            return results
        state.update({str(spec.label): made for spec, made in zip(plan.outputs, results, strict=True)})
        return [state[label] for label in sorted(order, key=lambda label: order[label])]

    return run


def _clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in flat(result)]


def check(case: Case, ours: object, theirs: object) -> None:
    """Raise RuntimeError where they do not compute the same: then their times cannot be compared."""
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        apart = float(((mine - other).abs().max() / other.abs().max()).detach())
        if not apart < 1e-4:
            raise RuntimeError(f"{case.name}: results are {apart} apart")


def copy_of(case: Case, results: Any) -> Call:
    """Copies as many bytes as the case reads and writes if each operand, result and state is touched once."""
    given = [*case.tensors, *case.state, *([] if case.upstream is None else [case.upstream])]
    made = case.state or flat(results)
    source = torch.ones(sum(tensor.nbytes for tensor in (*given, *made)) // 2, dtype=torch.uint8)
    return partial(torch.empty_like(source).copy_, source)


def rows() -> list[Row]:
    torch.set_num_threads(1)
    # Memory that was used once is used again, for all alike and in all sizes, as in a training step: the logits of a
    # large vocabulary would be mapped anew for each call otherwise, and their pages cost three times the computing.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    found: list[Row] = []
    sums: dict[str, list[tuple[tuple[float, ...], tuple[float, ...]]]] = {"eager": [], "torch.compile": []}
    for case in cases():
        ours = by_kernels(case)
        expected = by_torch(case, case.function, _clones(case.state))
        check(case, ours(), expected)
        compiled = torch.compile(case.function)
        state = _clones(case.state)
        check(case, by_torch(case, compiled, state), expected)
        others: dict[str, Call] = {
            COPY: copy_of(case, expected),
            "eager": case.eager or partial(by_torch, case, case.function),
            "torch.compile": partial(by_torch, case, compiled, state),
        }
        for against, other in others.items():
            count = max(1, int(LEAST_SECONDS / seconds(ours)))
            pair = interleaved(partial(seconds, ours, count), partial(seconds, other, count), REPETITIONS, 2)
            if against in sums:
                sums[against].append(pair)
            found.append(Row(case.name, *pair, against))
    for against, target in (("eager", EAGER), ("torch.compile", COMPILED)):
        mine, theirs = (
            tuple(math.exp(sum(map(math.log, times)) / len(times)) for times in zip(*sides, strict=True))
            for sides in zip(*sums[against], strict=True)
        )
        found.append(Row("kernels on one thread, geometric mean", mine, theirs, against, target))
    return [*found, cold_row()]


# -- from nothing ------------------------------------------------------------------------------------------------------


def cold_row() -> Row:
    ours, inductor = _cold("ours"), _cold("inductor")
    note = "CPU-seconds, fusing included"
    return Row("kernels of the demo's step, cold", (ours,), (inductor,), "Inductor", COLD, note)


def _cold(side: str) -> float:
    """CPU-seconds of making the kernels of a training step in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"MONARCH_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.kernels", side]
        done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _make_kernels(side: str) -> float:
    from benchmarks.train_step import SEQUENCE, loss_of, make_model, make_optimizer, make_step
    from monarch.compiler.kernels.fuse import FuseKernels

    torch.set_num_threads(1)
    tokens, targets = torch.randint(256, (2, 16, SEQUENCE))
    if side == "inductor":
        model = make_model()
        optimizer = make_optimizer(model)
        loss_of(model, tokens, targets).backward()
        optimizer.step()
        start = _cpu_seconds()
        loss = torch.compile(loss_of)(model, tokens, targets)
        loss.backward()
        torch.compile(optimizer.step)()
        return _cpu_seconds() - start
    train_step = make_step(Mesh.abstract(data=2))
    spent = 0.0
    fuse = FuseKernels.run

    def measured(self: FuseKernels, graph: Any, context: Any) -> Any:
        nonlocal spent
        start = _cpu_seconds()
        fused = fuse(self, graph, context)
        spent += _cpu_seconds() - start
        return fused

    FuseKernels.run = measured  # type: ignore[method-assign]
    plan = train_step.compile(tokens, targets)
    start = _cpu_seconds()
    build_kernels([each.args[1] for each in plan.instructions if each.op == "kernel"])
    return spent + _cpu_seconds() - start


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(_make_kernels(sys.argv[1])))
    else:
        print(table(rows()))
