"""The plan: one program, lowered for every worker of a mesh, as data.

All workers run the same instructions; those that depend on where a worker is name mesh dims, never ranks, so a plan
is as long for 4,096 workers as for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from monarch.compiler.errors import Source
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.report import Report
from monarch.compiler.types import MeshSpec, TensorType

if TYPE_CHECKING:
    from monarch.compiler.plan.binaries import KernelBinary


class Slot(NamedTuple):
    """A reference, among an instruction's arguments, to the value in a slot of the worker's frame."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed


@dataclass(frozen=True)
class ValueSpec:
    """An input or output of a plan. `kind` is "input", "state", "constant", "scalar" or "seed" for inputs, "return" or
    "state" for outputs; `label` an input's position or a state's name; `slot` where it lies in the worker's frame."""

    kind: str
    label: str | int
    type: TensorType
    slot: int


class Region(NamedTuple):
    """Where a result lies in the worker's arena: a contiguous tensor that starts at byte `offset`."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One call: `out = op(*args, **kwargs)`, then the slots in `free` are cleared.

    `op` is an ATen overload ("aten.mm.default"), "getitem", or an op of `monarch.compiler.ops` by name. Arguments
    are Slots, numbers, bools, strings, None, dtypes (and torch's other such enums), and (nested) lists of these.
    `out` is a slot; a multi-output op leaves a tuple or list there, which "getitem" takes apart, and "commit", which
    makes nothing, has -1. `source` is an index into `Plan.sources`, or -1. `regions` says for each result where in the
    arena it is written, None for one that has memory of its own; it is empty where all have.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    free: tuple[int, ...] = ()
    source: int = -1
    regions: tuple[Region | None, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A compiled program.

    `inputs`   in the order in which `Executor.run` takes them: inputs, states, scalars and seeds (not constants)
    `outputs`  the program's returns in order, then every state that the step changes or makes
    `donated`  for each input, whether the step may overwrite or free its buffer (a state that it replaces). A worker
               overwrites donated buffers only after a "commit" instruction.
    `options`  how it was compiled. Workers use `target`, `collectives` and `cuda_graphs`; the inspector, which runs the
               passes again, the others too.
    `graph`    the partitioned graph's text, for people
    `traced`   the traced graph's text, with global types: the passes can be run on it again
    `report`   what the compiler knows of each value, for the inspector; None for plans compiled only to be run
    `arena`    the bytes that its regions need
    `functions` plans for the same mesh that its instructions call, by name: branches, bodies of loops. They have inputs
               of kind "input" and outputs of kind "return" alone, and write over none of their inputs
    `binaries` machine code for its kernels, for a GPU, ahead of time; empty where they are compiled when it is loaded
    `costs`    what the compiler reckoned: collectives and bytes by mesh dim, peak bytes, seconds by pass
    `hash`     of everything that a worker runs, hex; workers hold plans by it
    """

    name: str
    mesh: MeshSpec
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    instructions: tuple[Instruction, ...]
    slots: int
    donated: tuple[bool, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    constant_slots: dict[str, int] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    options: CompileOptions = field(default_factory=CompileOptions)
    graph: str = ""
    traced: str = ""
    report: Report | None = None
    arena: int = 0
    functions: dict[str, Plan] = field(default_factory=dict)
    binaries: tuple[KernelBinary, ...] = ()
    costs: dict[str, Any] = field(default_factory=dict)
    hash: str = ""

    def __str__(self) -> str:
        """One line, for `print`; what it does is in `graph`, and in `monarchc inspect`."""
        return f"plan '{self.name}' on {self.mesh}, for {self.made_for}: {len(self.instructions)} instructions"

    @property
    def own_arena(self) -> int:
        """Where in its arena that of the function begins that an instruction runs: none runs beside another."""
        return self.arena - max((function.arena for function in self.functions.values()), default=0)

    @property
    def all_instructions(self) -> Iterator[Instruction]:
        """Its instructions, and those of its functions."""
        yield from self.instructions
        for function in self.functions.values():
            yield from function.all_instructions

    @property
    def target(self) -> str:
        """What it was compiled for: "cpu", "cuda:90", "gfx942"."""
        return self.options.target

    @property
    def collectives(self) -> str:
        """What moves tensors between workers: "monarch", "gloo", "nccl"."""
        return self.options.collectives

    @property
    def cuda_graphs(self) -> bool:
        """Whether workers record it as CUDA graphs."""
        return self.options.cuda_graphs

    @property
    def made_for(self) -> str:
        """Its target and, where that is not Monarch's own, what moves its tensors: "cpu", "cpu, over gloo"; "cuda:90,
        as CUDA graphs"."""
        over = "" if self.collectives == "monarch" else f", over {self.collectives}"
        return f"{self.target}{over}{', as CUDA graphs' if self.cuda_graphs else ''}"

    def save(self, path: str) -> None:
        """Write this plan as one `.mplan` file."""
        _files().save_plan(self, path)

    @staticmethod
    def load(path: str, *, report: bool = True) -> Plan:
        """Read a `.mplan` file; without its report, which only looking needs, in half the time. Raises PlanError where
        it is truncated, edited, of another version, or no plan at all."""
        return _files().load_plan(path, report=report)


class Files(Protocol):
    """What writes plans as files, and reads them: the module `file`, which stands above this one, and is loaded when it
    is first asked for."""

    def save_plan(self, plan: Plan, path: str) -> None: ...
    def load_plan(self, path: str, *, report: bool = True) -> Plan: ...


_files: Callable[[], Files]  # the package sets it, before anything can have a plan


def set_files(files: Callable[[], Files]) -> None:
    """Say what writes and reads plans."""
    global _files
    _files = files
