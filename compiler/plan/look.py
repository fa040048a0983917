"""A plan's file, read to be looked at: what its report and its head say, without torch, and nothing that could be run.

Reading a plan to run it checks every op, and loads torch for that, which takes longer than all that is asked of it.
`Seen` has of a `Plan` what `inspect.costs` and `inspect.why` read, under the same names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from monarch.compiler.errors import PlanError, Source
from monarch.compiler.layout import ITEM_SIZES, Layout, MeshSpec, local_shape
from monarch.compiler.plan.checks import Checks
from monarch.compiler.plan.container import GRAPH, MEMBERS, PROGRAM, REPORT, load_json, unseal
from monarch.compiler.plan.decode_report import decode_report
from monarch.compiler.plan.report import Report


class SeenDtype(NamedTuple):
    """A dtype's name, and the bytes of an element."""

    name: str
    itemsize: int


@dataclass(frozen=True)
class SeenType:
    """A `TensorType` to look at."""

    dtype: SeenDtype
    shape: tuple[int, ...]
    layout: Layout

    def local_shape(self, mesh: MeshSpec) -> tuple[int, ...]:
        """The shape of what one worker holds."""
        return local_shape(self.shape, self.layout, mesh)

    def __str__(self) -> str:
        return self.dtype.name + self.layout.dims_text(self.shape) + self.layout.tail_text()


@dataclass(frozen=True)
class Seen:
    """A plan to look at. Its instructions have `op`, `args` and `out`, its inputs `label`, its outputs `slot`."""

    name: str
    hash: str
    mesh: MeshSpec
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    donated: Sequence[bool]
    instructions: Sequence[Any]
    sources: tuple[Source, ...]
    report: Report | None
    graph: str
    costs: dict[str, Any]


def look_at(path: Path) -> Seen | None:
    """What there is to see in a plan's file; None where it is of several parts, each a plan. Raises PlanError where it
    is no plan's file, or damaged."""
    data = read_file(path)
    manifest, members = unseal(data, path.name, MEMBERS)
    checks = _Types(path.name)
    head = checks.mapping(manifest.get("plan"), "the plan")
    if "parts" in head:
        return None
    costs = checks.mapping(manifest.get("costs"), "'costs'")
    program = load_json(b"[" + members[PROGRAM].replace(b"\n", b",\n") + b"]", f"{PROGRAM} of {path.name}")
    instructions = [checks.instruction(each) for each in checks.items(program, PROGRAM)]
    mesh, sources = checks.mesh(head.get("mesh")), checks.sources(head.get("sources"))
    report = load_json(members[REPORT], f"{REPORT} of {path.name}")
    inputs, outputs = (
        [checks.items(each, "an input or output", 4) for each in checks.items(head.get(kind), kind)]
        for kind in ("inputs", "outputs")
    )
    donated = checks.items(head.get("donated"), "'donated'")
    if len(donated) != len(inputs):
        checks.fail(f"'donated' tells of {len(donated)} of its {len(inputs)} inputs")
    return Seen(
        name=checks.string(head.get("name"), "its name"),
        hash=checks.string(manifest.get("hash"), "its hash"),
        mesh=mesh,
        inputs=[SimpleNamespace(label=row[1]) for row in inputs],
        outputs=[SimpleNamespace(slot=row[3]) for row in outputs],
        donated=donated,
        instructions=instructions,
        sources=sources,
        report=None if report is None else decode_report(report, checks, mesh, len(instructions), len(sources)),
        graph=checks.text(members[GRAPH], GRAPH),
        costs=costs,
    )


def read_file(path: Path) -> bytes:
    """The bytes of a plan's file. Raises PlanError."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PlanError(f"{path} is not a regular file", hint="give a file that plan.save() wrote.")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PlanError(f"cannot read {path}: {reason}", hint="give a file that plan.save() wrote.") from None


def _open_at_once(path: str, flags: int) -> int:
    """A named pipe would otherwise be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Types(Checks):
    def type(self, value: Any, mesh: MeshSpec, what: str) -> SeenType:
        dtype, shape, layout = self.parts_of_type(value, what)
        if layout.ndim != len(shape) or not set(layout.mesh_dims) <= set(mesh.names):
            self.fail(f"the layout of {what} is {layout}")
        return SeenType(SeenDtype(dtype, ITEM_SIZES[dtype]), shape, layout)

    def instruction(self, value: Any) -> SimpleNamespace:
        op, args, _, out, *_ = self.items(value, "an instruction", 7)
        if self.string(op, "an instruction's op") == "kernel":
            operands, text, over = self.items(args, "the arguments of a kernel", 3)
            most = len(self.items(operands, "a kernel's operands"))
            self.string(text, "a kernel")
            for each in self.items(over, "what a kernel writes over"):
                self.integer(each, "what a kernel writes over", -1, most)
        return SimpleNamespace(op=op, args=args, out=out)
