"""Recordings: a tape being written, and which tensors its values belong to."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monarch.compiler.errors import MonarchError, ProgramError, Source
from monarch.compiler.tape import Expr, Input, Op, Tape, Task, Value
from monarch.compiler.types import TensorType
from monarch.language.recorder.meshes import Places, apart_error, mesh_error
from monarch.language.recorder.optimizer_state import OptimizerSnapshot
from monarch.language.recorder.places import view_on
from monarch.language.recorder.scalar import Scalar
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.operations import operations
from monarch.language.tensors.plain import LARGE, put_plain, same_content
from monarch.language.tensors.shapes import like, make_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref


@dataclass(slots=True)
class StateInput:
    """A cell that a recording reads: where it stands on the tape."""

    cell: Cell
    value: Value


class Recording:
    """A tape being written, and how its values belong to cells."""

    def __init__(self, mesh: Mesh, program: bool, symbols: Any = None) -> None:
        """`symbols` are the named sizes of a program (`tensors.symbolic.Symbols`), where it has any."""
        self.mesh = mesh
        self.program = program
        self.symbols = symbols
        self.dtype = torch.get_default_dtype()
        """The default dtype under which all of it is compiled and run."""
        self.tape = Tape() if symbols is None else Tape(sizes=symbols.shape)
        self.states: dict[int, StateInput] = {}
        self.made: list[tuple[weakref.ref[Cell], Value]] = []
        self.constants: dict[int, tuple[torch.Tensor, torch.Tensor | None, DistributedTensor]] = {}
        """The plain tensors that the program has read, by id: with the content that was built in, and their
        stand-ins."""
        self.plain: dict[int, torch.UntypedStorage] = {}
        """The memory of plain tensors that were made while the program was traced, which it may change in place."""
        self.large: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """The large plain tensors from outside that a program's ops have read, by id, each with its content."""
        self.scalars: dict[str, float] = {}
        self.guards: list[tuple[Expr, Any]] = []
        self.needs_values = False
        """Whether code has asked for the bytes of a number that only a call knows, which are others than a float's."""
        self._by_handle: dict[int | None, Value] = {}
        self._lifted: dict[str, str] = {}
        self.input_cells: dict[int, int | None] = {}
        """The arguments' cells, by id, with the number of each; None for a region's inputs."""
        self.path_of: Callable[[int], str] | None = None
        """How a program's function writes one of its arguments, by its number: \"batch['x']\"."""
        self.not_written: set[int] = set()
        """The cells of plain tensors of which views of named sizes were taken."""
        self.varies = False
        """Whether values that vary by worker are on the tape."""
        self.steps: list[tuple[int, OptimizerSnapshot]] = []
        """The state of optimizers before each of their steps, and the number of ops recorded until then."""
        self.inside = ""
        """The name of the region's owner: "the body of while_loop"."""
        self.regions: list[Any] = []
        """Objects that have to live as long as the recording does: the regions of its ops, for the ids by which they
        know tensors."""
        self.arguments = 0
        """How many arguments a call of the program has, with the answers of actors, which come behind the others."""
        self.questions: list[Any] = []
        """The question that each call asks of actors before its step (`placing.asked.Question`), in order."""
        self.answers: dict[Value, Any] = {}
        """Which values are copies of those answers, and of which."""
        self.plain_inputs: set[int] = set()
        """The arguments of which nothing says on which mesh they are, by their values' numbers."""
        self.places: Places | None = None
        """Where values are, in a program of several meshes."""
        self.repeatable: Any = None
        """Finds out whether a program's Python would do the same again (`programs.repeatable.Repeatable`)."""
        self.generator: torch.Tensor | None = None
        """The state of PyTorch's generator before the first seed was drawn from it, outside of programs."""
        self.sent = False
        """Whether the workers may have been given it, though what follows from that was interrupted."""

    def release(self) -> None:
        """Let go of cells and plain tensors: tensors keep the recording where they were last used."""
        self.states, self.made, self.constants, self._by_handle = {}, [], {}, {}
        self.plain, self.large, self.steps, self.regions = {}, {}, [], []
        self.repeatable, self.path_of = None, None

    # -- values --------------------------------------------------------------------------------------------------

    def value_of(self, ref: Ref) -> Value:
        """The Value of a tensor on this tape; reads it from its cell, and views it anew, where it comes from before."""
        if ref.recording is self:
            return ref.value  # type: ignore[return-value]
        if ref.parent is None:
            value = self._state(ref)
        else:
            parent = self.value_of(ref.parent)
            view = ref.view
            assert view is not None
            view = view_on(self, view, ref.place)
            value = self.tape.value(ref.fake, parent, view)
            out = value if view.output is None else (*(None,) * view.output, value)
            self.tape.ops.append(
                Op(view.func, (parent, *view.args), view.kwargs, out, view.source, view.backward, view.module)
            )
        ref.recording, ref.value = self, value
        return value

    def _state(self, ref: Ref) -> Value:
        cell = ref.cell
        known = self.states.get(id(cell))
        if known is not None:
            return known.value
        if isinstance(cell.recording, Recording) and cell.recording.inside and cell.handle is None:
            raise ProgramError(
                f"this tensor ({cell.type}) was made in {cell.recording.inside}, and is used outside of it",
                hint="return it there: only the function's results have a value outside.",
                source=user_source(),
            )
        cell.check()
        if cell.cut and self.program and torch.is_grad_enabled():
            raise ProgramError(
                f"a program left this tensor ({cell.type}) in Python with the history that autograd had of it, "
                "which ends with the call",
                hint="leave it without: self.h = h.detach(); or read it in torch.no_grad().",
                source=user_source(),
            )
        self.varies |= bool(cell.type.layout.varying)
        self.join(cell.mesh)
        value, inputs = self.tape.value(ref.fake), self.tape.inputs
        handle, known_as = (None if cell.handle is None else id(cell.handle)), id(cell)
        same = value if handle is None else self._by_handle.get(handle, value)
        entry = Input(value, "state", f"state{len(self.states)}", cell.type, None if same is value else same)
        state, end = StateInput(cell, value), len(inputs)
        # One line without a call, so that Ctrl-C comes before all of it or behind: an input without its state would
        # spoil every op that is recorded later.
        inputs[end:], self.states[known_as], self._by_handle[handle] = (entry,), state, same
        if self.places is not None:
            self.places.take(self.tape.inputs[-1], cell.mesh)
        return value

    # -- meshes --------------------------------------------------------------------------------------------------

    def join(self, mesh: Mesh) -> None:
        """Let a program that has tensors of `mesh` be of this mesh too. Raises ProgramError where it cannot be."""
        if mesh is self.mesh and self.places is None:
            return
        if mesh._root is not self.mesh._root:  # though nothing need be on the program's own yet
            raise apart_error(self.mesh, mesh)
        if self.places is None:
            self.places = Places(self.tape, self.mesh, self.plain_inputs)
        self.places.name(mesh)

    def where(self, ref: Ref) -> Mesh | None:
        """The mesh of a tensor of a program of several; None for one that is on none."""
        if ref.recording is not self or self.places is None:
            return ref.cell.mesh
        name = None if ref.value is None else self.places.where(ref.value)
        return None if name is None else self.places.meshes[name]

    def mesh_among(self, tensors: Iterable[DistributedTensor]) -> Mesh:
        """The mesh of an op with these operands, whose cells are of several. Raises ProgramError where they are."""
        refs = [tensor._ref for tensor in tensors]
        for ref in refs:
            self.join(ref.cell.mesh)
        found: Mesh | None = None
        for ref in refs:
            mesh = self.where(ref)
            if mesh is not None and found is not None and mesh is not found:
                raise mesh_error(found, mesh)
            found = found or mesh
        return found or self.mesh

    def mesh_of(self, value: Value) -> Mesh:
        """The mesh on which a value is kept that outlives the program."""
        return self.mesh if self.places is None else self.places.meshes[self.places.home(value)]

    def new(self, fake: torch.Tensor, value: Value, varying: tuple[str, ...] = ()) -> DistributedTensor:
        """A tensor of its own storage that a call on this tape made, which varies along these mesh dims."""
        name = None if self.places is None else self.places.where(value)
        mesh = self.mesh if self.places is None or name is None else self.places.meshes[name]
        cell = Cell(mesh, TensorType(value.dtype, value.shape).varying_along(varying))
        cell.recording = self
        self.made.append((weakref.ref(cell), value))
        return DistributedTensor(fake, Ref(cell, fake, recording=self, value=value))

    def input(
        self, fake: torch.Tensor, number: int, type: TensorType, name: str | None, mesh: Mesh | None
    ) -> DistributedTensor:
        """Argument `number` of a program, on one of its meshes; with None on each that reads it."""
        if mesh is not None:
            self.join(mesh)
        self.varies |= bool(type.layout.varying)
        value = self.tape.value(fake)
        self.tape.inputs.append(Input(value, "input", number, type, name=name))
        if mesh is None:
            self.plain_inputs.add(value.index)
        elif self.places is not None:
            self.places.take(self.tape.inputs[-1], mesh)
        cell = Cell(mesh or self.mesh, type, placed=True)
        cell.recording = self
        self.input_cells[id(cell)] = number
        return DistributedTensor(fake, Ref(cell, fake, recording=self, value=value))

    def constant(self, tensor: torch.Tensor, own: bool = False) -> DistributedTensor:
        """A plain tensor that meets distributed ones: replicated. A meta tensor, which has no data, is made of zeros by
        the workers. One that is the program's `own`, which has numbers of it, is a tensor that it has made, as the
        results of its ops are: it may leave it in Python."""
        known = self.constants.get(id(tensor))
        if known is not None and (known[1] is None or same_content(known[1], tensor)):
            return known[2]
        kept = None
        if tensor.is_meta:
            made = operations.zeros(self.mesh, tuple(tensor.shape), tensor.dtype)
        elif not self.program:
            return put_plain(tensor, self.mesh)
        else:
            fake = like(tensor)
            value = self.tape.value(fake)
            type_ = TensorType(value.dtype, value.shape)
            kept = tensor.detach().clone().resolve_conj().resolve_neg()
            self.note_large(tensor, kept)
            label = f"c{sum(entry.kind == 'constant' for entry in self.tape.inputs)}"
            self.tape.inputs.append(Input(value, "constant", label, type_, None, kept))
            cell = Cell(self.mesh, type_)
            cell.recording = self
            made = DistributedTensor(fake, Ref(cell, fake, recording=self, value=value))
            if own:
                self.made.append((weakref.ref(cell), value))
                return made
        self.constants[id(tensor)] = (tensor, kept, made)
        return made

    def read_only(self, tensor: torch.Tensor) -> DistributedTensor:
        """The workers' copy of a plain tensor that a call of named sizes reads: nothing may write to it, for the plain
        one would not change."""
        made = self.constant(tensor)
        self.not_written.add(id(made._ref.cell))
        return made

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor was made while the program was traced."""
        return tensor.untyped_storage()._cdata in self.plain

    def computed(self, operands: list[torch.Tensor], result: Any) -> None:
        """Note the results of a plain op on plain tensors."""
        outside = {operand.untyped_storage()._cdata for operand in operands if not self.is_own(operand)}
        for operand in operands:
            known = self.large.get(id(operand))
            if operand.nbytes > LARGE and (known is None or known[0]() is not operand):
                self.note_large(operand, operand.detach().clone())
        for made in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(made, torch.Tensor) and (storage := made.untyped_storage())._cdata not in outside:
                self.plain[storage._cdata] = storage

    def note_large(self, tensor: torch.Tensor, content: torch.Tensor) -> None:
        """Note a plain tensor that an op reads, for guards to compare its content, unless the program has made it."""
        if content.nbytes > LARGE and not self.is_own(tensor):
            self.large[id(tensor)] = weakref.ref(tensor), content

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """An operand as an autograd.Function of ours is to take it, which no mode of PyTorch's sees: regions give a
        stand-in where its gradient would be lost."""
        return tensor

    def meet(self, tensor: torch.Tensor) -> None:
        """Look at an operand before it is recorded: regions do."""

    # -- numbers -------------------------------------------------------------------------------------------------

    def guard(self, expr: Expr, value: Any) -> None:
        self.guards.append((expr, value))

    def scalar(self, label: str, value: float) -> Scalar:
        """A float that is another at every call."""
        self.scalars[label] = value
        return Scalar(Expr("scalar", (label, "f64")), value, self.guard)

    def lift(self, number: float | int, alone: bool = False) -> Expr:
        """A number of the eager door as an input of the plan. Equal numbers are one input, for an optimizer's bias
        corrections are the same for every parameter; one that is `alone` has its own, so that it makes no difference
        to the plan whether it equals another."""
        kind, label, text = "i64" if isinstance(number, int) else "f64", f"s{len(self.scalars)}", repr(number)
        if alone:
            self.scalars[label] = number
        else:
            label = self._lifted.get(text, label)  # 0.0 equals -0.0, and is another number
            # One line without a call: after Ctrl-C between the two another number would get this label.
            self.scalars[label], self._lifted[text] = number, label
        return Expr("scalar", (label, kind))

    def size(self, size: int) -> int:
        """A size of a tensor's shape as it stands on the tape."""
        return size if self.symbols is None else self.symbols.size(size)

    def whole(self, number: Any) -> Any:
        """A number that is the size of a dim: an int, or torch's symbol where it has a name."""
        named = self.symbols is not None and isinstance(number, torch.SymInt)
        return number if named else int(number)

    def types_of(self, tensors: Iterable[torch.Tensor]) -> list[TensorType]:
        """The types that tensors, replicated, have on the tape."""
        return [TensorType(each.dtype, self.tape.sizes(tuple(each.shape))) for each in tensors]

    def fake_of(self, type: TensorType) -> torch.Tensor:
        """A tensor without data of a type on the tape."""
        return make_fake(type.shape if self.symbols is None else self.symbols.torch_shape(type.shape), type.dtype)

    def lift_constants(self, expr: Any) -> Any:
        """An expression with its own plain numbers lifted."""
        if isinstance(expr, Expr):
            if expr.op in ("scalar", "item"):
                return expr
            return Expr(expr.op, tuple(self.lift_constants(arg) for arg in expr.args))
        return self.lift(float(expr))

    # -- ops -----------------------------------------------------------------------------------------------------

    def append(self, func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], out: Any) -> None:
        self.put(Op(func, args, kwargs, out, *source_now()))

    def put(self, op: Op) -> None:
        """Put a call onto the tape."""
        if self.places is not None:
            self.places.note(op)
        self.tape.ops.append(op)

    def own(
        self,
        func: Any,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        varying: tuple[str, ...] = (),
    ) -> DistributedTensor:
        """Record one of our own ops, which gives a tensor of this shape and dtype that varies along these mesh dims."""
        self.varies |= bool(varying)
        fake = make_fake(shape, dtype)
        value = self.tape.value(fake)
        self.append(func, args, (), value)
        return self.new(fake, value, varying)


# -- which recording -------------------------------------------------------------------------------------------------


turns = threading.RLock()
"""Held by the thread that calls a program or runs recorded ops: handles are read, and replaced by their successors, by
one thread at a time."""

if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=turns._at_fork_reinit)  # type: ignore[attr-defined]


class _Current(threading.local):
    recording: Recording | None = None
    refused: MonarchError | None = None
    ends: int = 0
    module: str = ""
    task: Task | None = None
    without_data: bool = False


current = _Current()
"""The program that each thread traces, the first thing in it that is refused, how often that has ended what ran behind
it, the path of the module whose forward it runs, the stage and microbatch of a pipeline that it records, and whether
it runs a program's code without data, to see what that calls."""


def current_program() -> Recording | None:
    """The recording of the program that is being traced in this thread, or None."""
    return current.recording


def is_tracing() -> bool:
    """Whether this thread traces a program."""
    return current.recording is not None


@contextmanager
def outside_programs(without_data: bool = False) -> Iterator[None]:
    """Do something while a program is traced that is no part of it; `without_data` says that it is its code."""
    before = current.recording, current.without_data
    current.recording, current.without_data = None, without_data
    try:
        with _disable_current_modes():
            yield
    finally:
        current.recording, current.without_data = before


def recording_for(mesh: Mesh) -> Recording:
    """Where calls on tensors of `mesh` are recorded now."""
    program = current.recording
    if program is not None:
        program.join(mesh)
        return program
    pending: Recording | None = mesh.pending
    if pending is not None and pending.dtype is not torch.get_default_dtype():
        mesh.flush()
        pending = mesh.pending
    if pending is not None and pending.sent:
        mesh.settle()  # after Ctrl-C it may have run: later ops would never run
        pending.sent, pending = False, mesh.pending
    if pending is None:
        pending = mesh.pending = Recording(mesh, program=False)
    return pending


# -- source lines ----------------------------------------------------------------------------------------------------

_forward_sources: dict[int, tuple[Source | None, str, Task | None]] = {}


def source_now() -> tuple[Source | None, bool, str, Task | None]:
    """The user's line, whether autograd runs this op, the module and the task: for autograd's ops those of the forward
    op."""
    node = torch._C._current_autograd_node()
    if node is not None:
        source, module, task = _forward_sources.get(node._sequence_nr(), (None, "", None))
        return (source if source is not None else user_source()), True, module, task
    source, module, task = user_source(), current.module, current.task
    # An op's autograd node gets its number before the op is dispatched to us.
    if len(_forward_sources) > 200_000:
        _forward_sources.clear()
    _forward_sources.setdefault(torch._C._autograd._get_sequence_nr() - 1, (source, module, task))
    return source, False, module, task
