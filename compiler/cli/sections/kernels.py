"""`--kernels`: the kernels of a worker: ATen's, generated ones, collectives."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import count, duration, heading, line, plain, size, table
from monarch.compiler.inspect.values import kernel_name, kernel_of, report_of
from monarch.compiler.loops.ir import traffic
from monarch.compiler.loops.read import Reader
from monarch.compiler.plan import OPS, Plan
from monarch.compiler.tensor_type import SEEN_DTYPES


def data(plan: Plan) -> list[dict[str, Any]]:
    """For each kernel its writer (ATen or the compiler), how often it is called, and the estimate for all its calls;
    the most expensive first.

    For a generated one also its text, how many of the program's ops it computes, on which lines of the user's, and the
    bytes that one call reads and writes.
    """
    found: dict[str, dict[str, Any]] = {}
    values = report_of(plan).values
    templates = {at: each.call.name for each in plan.binaries if each.call for at in each.call.instructions}
    inside: dict[int, list[float]] = {}
    for value in values:
        if value.kernel >= 0:
            inside.setdefault(value.kernel, []).append(value.seconds)
    for number, value in enumerate(values):
        if value.instruction < 0:
            continue
        name = plan.instructions[value.instruction].op
        text = kernel_of(plan, value)
        if name == "getitem" or (name == "kernel" and not text):
            continue
        by = (
            "generated"
            if text
            else "template"
            if value.instruction in templates
            else "ATen"
            if name.startswith("aten.")
            else "collective"
            if value.mesh_dims
            else "Monarch"
            if name in OPS
            else "user"
        )
        # Kernels of one name can differ: their texts, without the lines that they stem from, tell them apart.
        name = kernel_name(text) if text else name
        key = re.sub(r"  # .*", "", text) or name
        entry = found.setdefault(
            key, {"kernel": name, "by": by, "calls": 0, "seconds": 0.0, "values": [], "text": text}
        )
        entry["values"].append(value.name)
        entry["calls"] += 1
        entry["seconds"] += value.seconds + sum(inside.get(number, ()))
        if text and "ops" not in entry:
            entry |= _generated(text, len(inside.get(number, ())))
    return sorted(found.values(), key=lambda entry: (-entry["seconds"], -entry["calls"], entry["kernel"]))


def _generated(text: str, ops: int) -> dict[str, Any]:
    kernel = Reader(text, SEEN_DTYPES).kernel()
    lines = sorted({line for nest in kernel.nests for line in nest.lines if line}, key=_file_and_line)
    read, written = traffic(kernel)
    return {"ops": ops, "lines": lines, "bytes_read": read, "bytes_written": written}


def _file_and_line(text: str) -> tuple[str, int]:
    file, _, number = text.rpartition(":")
    return file, int(number) if number.isdecimal() else 0


def show(out: Console, plan: Plan) -> None:
    rows = data(plan)
    generated = [row for row in rows if row["by"] == "generated"]
    made = f"{len(generated):,} of them generated" if generated else "none of them generated"
    heading(out, "kernels", f"{count(len(rows), 'kernel')}, {made}", first=True)
    table(
        out,
        ["~kernel", "by", ">calls", ">estimated"],
        [(row["kernel"], row["by"], f"{row['calls']:,}", duration(row["seconds"])) for row in rows],
    )
    if not generated:
        return
    made_of = [
        (row["kernel"], f"{row['ops']:,}", size(row["bytes_read"]), size(row["bytes_written"]), _lines(row["lines"]))
        for row in generated
    ]
    heading(out, "generated", "the ops, reads and writes of a call of each")
    table(out, ["~kernel", ">ops", ">reads", ">writes", "~lines"], made_of)
    first = generated[0]
    line(out, plain(f"  the text of one: --why {first['values'][0]}", "dim"))
    line(out, plain(f"  its source: --emit triton --kernel {first['kernel']}", "dim"))


def _lines(lines: list[str]) -> str:
    """`train.py:12, 14; model.py:3`."""
    files: dict[str, list[str]] = {}
    for text in lines:
        file, _, number = text.rpartition(":")
        files.setdefault(file, []).append(number)
    return "; ".join(f"{file}:{', '.join(numbers)}" for file, numbers in files.items())
