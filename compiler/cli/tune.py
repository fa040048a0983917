"""`monarchc tune`: the variants of a plan's kernels measured on a GPU, and the plan's file written with the fastest."""

from __future__ import annotations

from pathlib import Path

from monarch.compiler.cli.screen import console, count, duration, line, print_json, table
from monarch.compiler.errors import MonarchError
from monarch.compiler.plan.binaries import KernelBinary, kernels_of
from monarch.compiler.plan.file import load_plan, save_plan
from monarch.runtime.worker.device.tune import gpu_for, on_gpu, tuned
from monarch.stdlib.kernels.tuning import fastest


def tune(plan: Path, output: Path | None, as_json: bool) -> None:
    """Measure the variants of a plan, and write the plan with the fastest."""
    loaded = load_plan(plan)
    if loaded.target == "cpu":
        raise MonarchError(
            f"{loaded.name} is compiled for CPUs, whose kernels have no variants",
            hint="compile the program for a GPU: --target cuda:90.",
        )
    device = gpu_for(loaded.target)
    best: list[KernelBinary] = []
    made = tuned(loaded, on_gpu(device), fastest, best.append)
    path = output or plan
    save_plan(made, path)
    kernels = kernels_of(made)
    names = {each.kernel: each.call.name if each.call else kernels[each.kernel].name for each in best}
    before = {each.kernel: each.variant for each in reversed(loaded.binaries)}
    if as_json:
        print_json(
            {
                "file": str(path),
                "hash": made.hash,
                "kernels": [
                    {
                        "kernel": names[each.kernel],
                        "variant": each.variant,
                        "before": before[each.kernel],
                        "seconds": each.seconds,
                    }
                    for each in best
                ],
            }
        )
        return
    out = console()
    changed = sum(each.variant != before[each.kernel] for each in best)
    line(out, f"measured {count(len(best), 'kernel')} that have variants; {changed} run another one now")
    table(
        out,
        ["~kernel", "variant", ">measured"],
        [(names[each.kernel], each.variant, duration(each.seconds)) for each in best],
    )
    line(out, f"wrote {path}")
