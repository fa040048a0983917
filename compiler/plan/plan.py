"""The plan: one program, lowered for every worker of a mesh, as data.

All workers run the same instructions; those that depend on where a worker is name mesh dims, never ranks, so a plan
is as long for 4,096 workers as for two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.compiler.errors import Source
from monarch.compiler.layout import MeshSpec
from monarch.compiler.mesh import Shape
from monarch.compiler.plan.files import files
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.report import Report
from monarch.compiler.plan.transfers import Route, Transfer, routes
from monarch.compiler.tensor_type import TensorType

if TYPE_CHECKING:
    import torch

    from monarch.compiler.plan.binaries import KernelBinary


class Slot(NamedTuple):
    """A reference, among an instruction's arguments, to the value in a slot of the worker's frame."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed


@dataclass(frozen=True)
class ValueSpec:
    """An input or output of a plan. `kind` is "input", "state", "constant", "scalar" or "seed" for inputs, "return" or
    "state" for outputs; `label` an input's position or a state's name; `slot` where it lies in the worker's frame: of a
    plan of several parts, in the frame of the workers of part number `part`, of whose mesh `type` speaks."""

    kind: str
    label: str | int
    type: TensorType
    slot: int
    part: int = 0


class ArenaRange(NamedTuple):
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
    regions: tuple[ArenaRange | None, ...] = ()


@dataclass(frozen=True)
class Part:
    """What some of a mesh's workers run of a plan.

    `name`   what the graph calls their mesh
    `place`  which of the mesh's workers they are, in the order in which `plan.mesh` numbers them
    `plan`   their instructions, a plan on their own mesh with slots, constants and an arena of its own. Its inputs and
             outputs are those of the whole plan with this part's number, in their order
    """

    name: str
    place: Shape
    plan: Plan


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
    `parts`    where the program is of several meshes, what each runs. The plan then has no instructions, slots,
               constants or functions of its own, and `mesh` is the one that all parts are of. A scalar or seed that
               several parts read is an input of each. Parts have no workers in common
    `transfers` the values that parts send to one another, in the global order of their instructions
    `binaries` machine code for its kernels, for a GPU, ahead of time; empty where they are compiled when it is loaded
    `sizes`    where the program's sizes have names, what makes it a plan for other values of these, as JSON
               (`compiler/schedule/family.py`); None where it is for its own alone
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
    parts: tuple[Part, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    binaries: tuple[KernelBinary, ...] = ()
    sizes: Any = None
    costs: dict[str, Any] = field(default_factory=dict)
    hash: str = ""

    def __str__(self) -> str:
        """One line, for `print`; what it does is in `graph`, and in `monarchc inspect`."""
        count = sum(len(part.plan.instructions) for part in self.parts) or len(self.instructions)
        between = f" in {len(self.parts)} parts, {len(self.transfers)} transfers" if self.parts else ""
        return f"plan '{self.name}' on {self.mesh}, for {self.made_for}: {count} instructions{between}"

    @property
    def own_arena(self) -> int:
        """Where in its arena that of the function begins that an instruction runs: none runs beside another."""
        return self.arena - max((function.arena for function in self.functions.values()), default=0)

    @property
    def states(self) -> dict[str, TensorType]:
        """Every tensor of its state, as it is or as the plan makes it, with its type."""
        return {str(spec.label): spec.type for spec in (*self.inputs, *self.outputs) if spec.kind == "state"}

    @property
    def all_instructions(self) -> Iterator[Instruction]:
        """Its instructions, and those of its functions and parts."""
        yield from self.instructions
        for function in self.functions.values():
            yield from function.all_instructions
        for part in self.parts:
            yield from part.plan.all_instructions

    def routes(self, number: int) -> tuple[Route, ...]:
        """Who reads which block from whom in a transfer, by its number."""
        transfer = self.transfers[number]
        source, target = self.parts[transfer.source].plan.mesh, self.parts[transfer.target].plan.mesh
        return routes(transfer.sent, source, transfer.received, target)

    @property
    def senders(self) -> frozenset[int]:
        """Where other parts replace state, the parts that do nothing but send for it: neither results nor state of
        theirs follow from the step, so they need not wait until the others have received."""
        if not any(self.donated):
            return frozenset()
        rest = {transfer.target for transfer in self.transfers} | {spec.part for spec in self.outputs}
        rest |= {spec.part for spec, donated in zip(self.inputs, self.donated, strict=True) if donated}
        return frozenset(range(len(self.parts))) - rest

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
        files().save_plan(self, path)

    @staticmethod
    def load(path: str, *, report: bool = True) -> Plan:
        """Read a `.mplan` file; without its report, which only looking needs, in half the time. Raises PlanError where
        it is truncated, edited, of another version, or no plan at all."""
        return files().load_plan(path, report=report)
