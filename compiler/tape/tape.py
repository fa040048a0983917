"""The tape: what a recorder writes down of a user's program, before it is a graph.

A tape is a list of ATen calls as they happened, views and in-place updates included, over numbered `Value`s. It is
plain data: it holds no tensors of the user's, two runs of the same program give equal tapes, and `Tape.key` is
hashable, so a tape can be looked up before anything is compiled. `monarch.compiler.passes.functionalize` turns it
into a pure Graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from monarch.compiler.errors import Source
from monarch.compiler.tape.timetable import Task, Timetable
from monarch.compiler.types import TensorType


class Value:
    """A tensor on a tape. A view names the value it views (`parent`) and the op that made it (`view`), so that a
    write to one is seen through the other. Values compare by number, so that equal programs have equal tapes, and by
    dtype: that of `torch.ones(4)`, or of whole numbers divided, hangs on PyTorch's default, which no argument tells."""

    __slots__ = ("index", "dtype", "shape", "parent", "view")

    def __init__(
        self,
        index: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        parent: Value | None = None,
        view: View | None = None,
    ) -> None:
        self.index = index
        self.dtype = dtype
        self.shape = shape
        self.parent = parent
        self.view = view

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)

    @property
    def root(self) -> Value:
        value = self
        while value.parent is not None:
            value = value.parent
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and other.index == self.index and other.dtype is self.dtype

    def __hash__(self) -> int:
        return hash((Value, self.index))

    def __repr__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True, slots=True)
class View:
    """How a view reads its parent: `func(parent, *args, **kwargs)`, output `output` of several (or None)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    output: int | None = None
    source: Source | None = field(default=None, compare=False)
    backward: bool = field(default=False, compare=False)
    module: str = field(default="", compare=False)
    task: Task | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded call, of a view too (its outputs then have parents). Arguments are Values, Exprs, Numbers, ints,
    strings, None, dtypes, Regions and (nested) tuples of these;
    `out` is a Value, a tuple of Values and Nones, or None for an op that only writes to its arguments. `task` is the
    op's stage and microbatch, in a program that has a timetable."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: Any
    source: Source | None = None
    backward: bool = False
    module: str = ""
    task: Task | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.func, self.args, self.kwargs, self.out)

    def argument(self, name: str) -> Any:
        """An argument by its name in the schema of `func`; None where it is not given."""
        at = next(at for at, argument in enumerate(self.func._schema.arguments) if argument.name == name)
        return self.args[at] if at < len(self.args) else dict(self.kwargs).get(name)


@dataclass(slots=True)
class Input:
    """A value that a tape starts from. `kind` and `label` are those of the Graph's placeholder. `same_as` names an
    earlier input that is known to hold the same value (the step counters of an optimizer's parameters). `name` is the
    user's. `mesh` names its mesh, where the tape is of several."""

    value: Value
    kind: str
    label: str | int
    type: TensorType
    same_as: Value | None = None
    tensor: torch.Tensor | None = None
    name: str | None = None
    mesh: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.value, self.kind, self.type, self.same_as, self.mesh)


class Region:
    """What an op runs by itself, not once where it stands: a tape of its own, whose inputs are all of kind "input", in
    order. `returns` are its results, of which an op may take the same twice. `role` is its name within the op."""

    __slots__ = ("role", "tape", "returns")

    def __init__(self, role: str, tape: Tape, returns: tuple[Value, ...]) -> None:
        self.role = role
        self.tape = tape
        self.returns = returns

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.role, self.tape.key, self.returns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass
class Tape:
    """What was recorded: inputs and ops, in order. `values` counts the Values made so far."""

    inputs: list[Input] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    values: int = 0
    sizes: Callable[[tuple[Any, ...]], tuple[int, ...]] = tuple
    """What of a tensor's shape stands on the tape: a trace with named sizes puts Sizes for torch's symbols."""
    timetable: Timetable | None = None
    """Of the pipeline that the program runs, if it runs one."""

    def value(self, tensor: torch.Tensor, parent: Value | None = None, view: View | None = None) -> Value:
        """A new Value with the dtype and shape of `tensor`."""
        value = Value(self.values, tensor.dtype, self.sizes(tuple(tensor.shape)), parent, view)
        self.values += 1
        return value

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal programs; does not tell labels, scalars' values or source lines."""
        order = None if self.timetable is None else (self.timetable, tuple(op.task for op in self.ops))
        return (tuple(entry.key for entry in self.inputs), tuple(op.key for op in self.ops), order)
