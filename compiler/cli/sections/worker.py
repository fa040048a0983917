"""`--worker data=0,model=1`: one worker's blocks of the plan's inputs and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import heading, size, table
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.labels import input_names
from monarch.compiler.inspect.values import local_bytes
from monarch.compiler.layout import nested_index
from monarch.compiler.plan import MeshSpec, Plan, TensorType

_TENSORS = ("input", "state")


def read_worker(text: str, mesh: MeshSpec) -> dict[str, int]:
    """`data=0,model=1` as coordinates; dims that are left out are 0. Raises MonarchError."""
    at = dict.fromkeys(mesh.names, 0)
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not (number.isascii() and number.isdigit()):
            raise MonarchError(f"--worker: {part.strip()!r} is not DIM=POSITION", hint="write it as data=0,model=1.")
        if name not in mesh.sizes:
            raise MonarchError(f"--worker: '{name}' is no dim of {mesh}", hint=f"its dims are {', '.join(mesh.names)}.")
        if len(number) > 18 or int(number) >= mesh.sizes[name]:
            raise MonarchError(
                f"--worker: no worker at {name}={number}",
                hint=f"'{name}' has size {mesh.sizes[name]}: positions are 0 to {mesh.sizes[name] - 1}.",
            )
        at[name] = int(number)
    return at


def ranges(type: TensorType, mesh: MeshSpec, at: Mapping[str, int]) -> list[tuple[int, int]]:
    """The part of each dim of the global tensor that the worker holds: from, and up to but not with."""
    found = []
    for names, length in zip(type.layout.shards, type.local_shape(mesh), strict=True):
        start = nested_index(names, dict(at), mesh.sizes) * length if names else 0
        found.append((start, start + length))
    return found


def data(plan: Plan, at: Mapping[str, int]) -> dict[str, Any]:
    def entry(kind: str, name: str, type: TensorType) -> dict[str, Any]:
        return {
            "kind": kind,
            "name": name,
            "type": str(type),
            "local": list(type.local_shape(plan.mesh)),
            "ranges": [list(range_) for range_ in ranges(type, plan.mesh, at)],
            "partial": dict(type.layout.partial),
            "varying": list(type.layout.varying),
            "bytes": local_bytes(type, plan.mesh),
        }

    tensors = [(name, spec) for name, spec in zip(input_names(plan), plan.inputs, strict=True) if spec.kind in _TENSORS]
    return {
        "worker": dict(at),
        "rank": plan.mesh.rank(at),
        "inputs": [entry(spec.kind, name, spec.type) for name, spec in tensors],
        "outputs": [entry(spec.kind, str(spec.label), spec.type) for spec in plan.outputs],
    }


def show(out: Console, plan: Plan, at: Mapping[str, int]) -> None:
    found = data(plan, at)
    sizes = {
        "inputs": [spec.type.shape for spec in plan.inputs if spec.kind in _TENSORS],
        "outputs": [spec.type.shape for spec in plan.outputs],
    }
    place = ", ".join(f"{name}={position}" for name, position in at.items())
    for title in ("inputs", "outputs"):
        rows = found[title]
        held = sum(row["bytes"] for row in rows)
        heading(out, f"{title} of worker {found['rank']}", f"at {place}: {size(held)}", first=title == "inputs")
        table(
            out,
            ["", "~name", "~type", "a worker holds", "~of the whole", ">bytes"],
            [
                (
                    row["kind"],
                    row["name"],
                    row["type"],
                    str(row["local"]),
                    _part(row, whole),
                    size(row["bytes"]),
                )
                for row, whole in zip(rows, sizes[title], strict=True)
            ],
        )


def _part(row: dict[str, Any], whole: Sequence[int]) -> str:
    """`[0:32, :]`, a colon alone for a dim of which it holds everything."""
    parts = [
        ":" if (start, stop) == (0, size_) else f"{start}:{stop}"
        for (start, stop), size_ in zip(row["ranges"], whole, strict=True)
    ]
    text = f"[{', '.join(parts)}]" if any(part != ":" for part in parts) else "all of it"
    for name, reduction in row["partial"].items():
        text += f", its part of the {reduction} over {name}"
    return text + (f", its own along {', '.join(row['varying'])}" if row["varying"] else "")
