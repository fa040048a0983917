"""`monarchc run`: run a plan made elsewhere, without its program's source."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from monarch.compiler.blocks import whole_of
from monarch.compiler.cli import feed
from monarch.compiler.cli.feed import Feed, arguments
from monarch.compiler.cli.load import read_plan
from monarch.compiler.cli.screen import console, count, duration, heading, line, plain, print_json, size, table
from monarch.compiler.cli.values import read_mesh, read_pairs
from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.executor import Executor, Handle
from monarch.compiler.execution.factories import executor_for
from monarch.compiler.inspect.labels import input_names
from monarch.compiler.plan import Plan
from monarch.compiler.schedule.family import plan_at, sizes_of_inputs
from monarch.compiler.types import TensorType


def run(
    plan: Path,
    mesh: str | None,
    inputs: Path | None,
    outputs: Path | None,
    scalar: list[str] | None,
    named: list[str] | None,
    fill: str | None,
    steps: int,
    seed: int,
    as_json: bool,
) -> None:
    """Run the plan, and print or write its results."""
    loaded = read_plan(plan, report=False)
    check_machine(loaded, mesh)
    if outputs is not None:
        feed.check_can_write(outputs)
    tensors = feed.read_tensors(inputs)
    loaded = _at_sizes(loaded, tensors, named)
    fed = feed.feed(loaded, tensors, numbers(scalar), fill)
    feed.restart_seeds(seed)
    executor = executor_for(loaded.mesh)
    try:
        handles, seconds = run_steps(executor, loaded, fed, steps)
        results = {
            name: _whole(executor, handle)
            for name, handle in handles.items()
            if outputs is not None or name.startswith("return.")
        }
    finally:
        executor.close()
    if outputs is not None:
        feed.write_tensors(outputs, results)
    returned = {name: tensor for name, tensor in results.items() if name.startswith("return.")}
    if as_json:
        print_json(_summary(loaded, fed, returned, seconds))
    else:
        _show(loaded, fed, returned, seconds, outputs, len(results))


def _at_sizes(plan: Plan, tensors: Mapping[str, torch.Tensor], texts: list[str] | None) -> Plan:
    """The plan for the given named sizes, or for those of the given tensors."""
    given: dict[str, int] = {}
    for name, text in read_pairs(texts, "--size").items():
        if not text.isdecimal():
            raise MonarchError(f"--size {name}: {text!r} is not a whole number")
        given[name] = int(text)
    if plan.sizes is None:
        if given:
            raise MonarchError(
                f"--size {min(given)}: the sizes of the plan '{plan.name}' have no names",
                hint='name them where the program is written, x: "f32[n, 8]", and compile it without --arg.',
            )
        return plan
    return plan_at(plan, {**sizes_of_inputs(plan, input_names(plan), tensors), **given})


def check_machine(plan: Plan, mesh: str | None) -> None:
    asked = read_mesh(mesh)
    if asked is not None and asked != plan.mesh:
        raise MonarchError(
            f"the plan is for {plan.mesh}, and --mesh asks for {asked}",
            hint="a plan is for its mesh: compile the program for the other one.",
        )
    if plan.target != "cpu" and not _has_gpu():
        raise MonarchError(
            f"the plan is for {plan.target}, and this machine has no GPU",
            hint="compile the program with --target cpu to run it here.",
        )


def _has_gpu() -> bool:
    """By its devices' files: asking torch would load the driver, after which this process could not fork workers."""
    return any(True for pattern in ("nvidia[0-9]*", "kfd") for _ in Path("/dev").glob(pattern))


def numbers(texts: list[str] | None) -> dict[str, float]:
    found = {}
    for name, text in read_pairs(texts, "--scalar").items():
        try:
            found[name] = float(text)
        except ValueError:
            raise MonarchError(f"--scalar {name}: {text!r} is not a number") from None
    return found


def run_steps(executor: Executor, plan: Plan, fed: Feed, steps: int) -> tuple[dict[str, Handle], list[float]]:
    """Run the plan, each step on the state that the one before left: the last step's results, and their seconds."""
    state: dict[str, Handle] = {}
    made: dict[str, Handle] = {}
    seconds = []
    for _ in range(steps):
        values: list[Any] = arguments(plan, fed)
        for at, spec in enumerate(plan.inputs):
            if spec.kind == "state":
                label = str(spec.label)
                values[at] = state.get(label) or executor.put(values[at], spec.type)
                if not plan.donated[at]:
                    state[label] = values[at]
        start = time.perf_counter()
        handles = executor.run(plan, values)
        for handle in handles[:1]:  # all of them are of one step
            executor.wait(handle)
        seconds.append(time.perf_counter() - start)
        made = {
            f"return.{spec.label}" if spec.kind == "return" else str(spec.label): handle
            for spec, handle in zip(plan.outputs, handles, strict=True)
        }
        state.update((name, handle) for name, handle in made.items() if not name.startswith("return."))
    return made, seconds


def _whole(executor: Executor, handle: Handle) -> torch.Tensor:
    if handle.type.layout.is_replicated:
        return executor.shards(handle, [0])[0]
    return whole_of(executor.shards(handle), handle.type, executor.mesh)


def _summary(plan: Plan, fed: Feed, returned: dict[str, torch.Tensor], seconds: list[float]) -> dict[str, Any]:
    return {
        "name": plan.name,
        "hash": plan.hash,
        "mesh": dict(plan.mesh.dims),
        "results": {name: {"type": _type(tensor), "value": _numbers_of(tensor)} for name, tensor in returned.items()},
        "seconds": seconds,
        "filled": list(fed.filled),
        "unused": list(fed.unused),
    }


def _type(tensor: torch.Tensor) -> str:
    return str(TensorType(tensor.dtype, tuple(tensor.shape)))


def _numbers_of(tensor: torch.Tensor) -> Any:
    """The values of a small tensor, and None for a large one; nan and infinities as text, for JSON has none."""
    if tensor.numel() > 64:
        return None
    return _finite(tensor.tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def _show(
    plan: Plan,
    fed: Feed,
    returned: dict[str, torch.Tensor],
    seconds: list[float],
    outputs: Path | None,
    written: int,
) -> None:
    out = console()
    line(out, plain(plan.name, "bold"), f"ran {count(len(seconds), 'step')} on {plan.mesh}")
    if fed.filled:
        line(out, plain(f"  filled: {_some(fed.filled)}", "dim"))
    if fed.unused:
        line(out, plain(f"  not taken by the plan: {_some(fed.unused)}", "yellow"))
    if returned:
        heading(out, "results")
        table(out, ["", "", "~"], [(name, _type(tensor), _shown(tensor)) for name, tensor in returned.items()])
    heading(out, "time")
    rows = [("first step, with loading the plan", duration(seconds[0]))]
    if len(seconds) > 1:
        rows.append((f"median of the other {len(seconds) - 1}", duration(statistics.median(seconds[1:]))))
    table(out, ["", ">"], rows)
    if outputs is not None:
        out.print()
        line(out, f"wrote {count(written, 'tensor')} to {outputs}, {size(outputs.stat().st_size)}")


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shown(tensor: torch.Tensor) -> str:
    """A tensor in one line: its values, or its layout."""
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}" if tensor.dtype.is_floating_point else str(tensor.item())
    if tensor.numel() <= 8:
        return str(tensor.tolist())
    values = tensor.double()
    return f"from {values.min().item():.4g} to {values.max().item():.4g}, mean {values.mean().item():.4g}"
