"""Recording the ops of a branch or a loop: a tape of its own, which takes the program's values that it reads as inputs.

While a region is recorded, PyTorch's functions get stand-ins for tensors of the program that require gradients: leaves
of the region's own autograd graph. So the gradients of its results with respect to all that it reads can be asked for
later, and what that runs is recorded behind the region's own ops: the region of the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.passes.functionalize import written_inputs
from monarch.compiler.tape import Input, Op, Region, Tape, Value
from monarch.compiler.types import TensorType
from monarch.language.recorder.checkpoints import checkpoint_part
from monarch.language.recorder.meshes import mesh_error
from monarch.language.recorder.places import view_on
from monarch.language.recorder.recording import Recording, current
from monarch.language.source import raised_at, user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import make_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref

aten = torch.ops.aten


class RegionRecording(Recording):
    """The tape of a region. A value that it reads of the recording `outer` becomes an input: the whole of a storage,
    which it then views as the program does."""

    def __init__(self, outer: Recording, inside: str) -> None:
        super().__init__(outer.mesh, True, outer.symbols)
        self.outer = outer
        self.inside, self.dtype, self.repeatable = inside, outer.dtype, outer.repeatable
        self.path_of = outer.path_of
        self.tape.values = outer.tape.values  # so that no value of it is taken for one of the program's
        self.scalars, self.guards, self.plain = outer.scalars, outer.guards, outer.plain
        self.input_cells = dict(outer.input_cells)
        self.reads: dict[int, tuple[Ref, Value]] = {}
        """By cell, the storages of the program that it reads, and their values here."""
        self.stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id, the tensors of the program that require gradients, and their stand-ins."""
        self._known: dict[int, tuple[Ref, Value]] = {}
        self._plain_before = set(outer.plain)
        """The memory of the plain tensors that the program had made before the region."""
        self._mesh_known = False
        """Whether it has read a tensor of the program, on whose mesh it is then."""

    def join(self, mesh: Mesh) -> None:
        self.outer.join(mesh)

    def where(self, ref: Ref) -> Mesh | None:
        return None if ref.recording is self else self.outer.where(ref)

    def value_of(self, ref: Ref) -> Value:
        if ref.recording is self:
            return ref.value  # type: ignore[return-value]
        known = self._known.get(id(ref))
        if known is None:
            known = self._known[id(ref)] = (ref, self._read(ref))
        return known[1]

    def _read(self, ref: Ref) -> Value:
        if ref.parent is not None:
            view = ref.view
            assert view is not None
            parent = self.value_of(ref.parent)
            view = view_on(self, view, ref.place)
            value = self.tape.value(ref.fake, parent, view)
            out = value if view.output is None else (*(None,) * view.output, value)
            self.tape.ops.append(
                Op(view.func, (parent, *view.args), view.kwargs, out, view.source, view.backward, view.module)
            )
            return value
        if (read := self.reads.get(id(ref.cell))) is not None:
            return read[1]
        self.outer.value_of(ref)
        self._refuse_varying(ref.cell)
        mesh = self.outer.where(ref)
        if mesh is not None and mesh is not self.mesh and self._mesh_known:
            raise mesh_error(self.mesh, mesh)
        if mesh is not None:
            self.mesh, self._mesh_known = mesh, True
        value = self.tape.value(ref.fake)
        self._take(value)
        self.reads[id(ref.cell)] = (ref, value)
        return value

    def _take(self, value: Value) -> None:
        self.tape.inputs.append(Input(value, "input", len(self.tape.inputs), value.type))

    def _refuse_varying(self, cell: Cell) -> None:
        """Raises ProgramError for an input that varies: within a region each is the same on all workers."""
        if varying := cell.type.layout.varying:
            raise ProgramError(
                f"{cell.type} varies along '{varying[0]}', and goes into {self.inside}",
                hint=f"reduce it first, as monarch.reduce(x, {varying[0]!r}, 'avg') does; or put all of the "
                "per-worker code into the branch or the loop.",
                source=user_source(),
            )

    def constant(self, tensor: torch.Tensor, own: bool = False) -> DistributedTensor:
        return self.outer.constant(tensor, own)

    def given(self, like: torch.Tensor, requires_grad: bool = False) -> DistributedTensor:
        """An input that stands for no one value of the program."""
        if isinstance(like, DistributedTensor):
            self._refuse_varying(like._ref.cell)
        fake = make_fake(tuple(like.shape), like.dtype)
        value = self.tape.value(fake)
        self._take(value)
        cell = Cell(self.mesh, value.type)
        cell.recording = self
        self.input_cells[id(cell)] = None
        return DistributedTensor(fake, Ref(cell, fake, recording=self, value=value), requires_grad)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in that PyTorch's functions get for a tensor of the program that requires a gradient."""
        known = self.stand_ins.get(id(tensor))
        if known is None:
            ref = (tensor if isinstance(tensor, DistributedTensor) else self.constant(tensor))._ref
            made = DistributedTensor(ref.fake, ref, requires_grad=True)
            made._stands_in = True
            source: torch.Tensor = tensor
            if isinstance(self.outer, RegionRecording) and self.outer.is_outside(tensor):
                source = self.outer.stand_in(tensor)
            known = self.stand_ins[id(tensor)] = (source, made)
            self.outer.regions.append(tensor)  # an id names a tensor only as long as it lives
        return known[1]

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether it is a tensor from outside that requires a gradient."""
        if not tensor.requires_grad:
            return False
        if isinstance(tensor, DistributedTensor):  # nor a view that was made here of an outer one
            return tensor._ref.recording is not self and not tensor._stands_in
        made_here = self.is_own(tensor) and tensor.untyped_storage()._cdata not in self._plain_before
        return torch.is_grad_enabled() and not made_here

    def all_taken(self, arguments: Any) -> Any:
        """A call's arguments with stand-ins for outer tensors."""
        return pytree.tree_map_only(torch.Tensor, lambda t: self.stand_in(t) if self.is_outside(t) else t, arguments)

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.stand_in(tensor) if self.is_outside(tensor) else tensor

    def meet(self, tensor: torch.Tensor) -> None:
        """Raises ProgramError for a tensor that should have a stand-in: its gradient would be lost. Not where a
        checkpoint computes its values again, through which no gradient goes."""
        if torch.is_grad_enabled() and self.is_outside(tensor) and checkpoint_part() != "unpack_hook":
            raise _bypassed()

    def check_kept(self, results: list[DistributedTensor]) -> None:
        """Raises ProgramError where a result's gradient would go to a tensor from outside, past its stand-in."""
        own = {id(made) for _, made in self.stand_ins.values()}
        waiting: list[Any] = [each.grad_fn for each in results if each.grad_fn is not None]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, DistributedTensor) and (
                self.is_outside(leaf) or leaf._stands_in and id(leaf) not in own
            ):
                raise _bypassed()
            following = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= following
            waiting += following


def _bypassed() -> ProgramError:
    return ProgramError(
        "a tensor from outside of a branch or a loop requires a gradient, and is given to a function that PyTorch's "
        "modes do not see",
        hint="give it x.view_as(x) there.",
        source=user_source(),
    )


_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_REFUSED = {
    torch.Tensor.backward: "loss.backward() in a branch or a loop would write .grad, whichever way the workers go",
    _GRAD.__set__: "a branch or a loop sets .grad, whichever way the workers go",
    _GRAD.__delete__: "a branch or a loop deletes .grad, whichever way the workers go",
    _DATA.__set__: "a branch or a loop sets .data, whichever way the workers go",
}


_ASKED = {getattr(torch.Tensor, name).__get__ for name in "grad requires_grad grad_fn is_leaf shape dtype ndim".split()}
"""Questions to a tensor itself: in the region around it, a result's stand-in has no history."""
_READ = {getattr(torch.Tensor, name) for name in "detach item numpy tolist __bool__ __float__ __int__".split()}
"""Functions that carry no gradient, and read a plain tensor into Python."""


class _StandIns(TorchFunctionMode):
    """Gives PyTorch's functions the stand-ins."""

    def __init__(self, region: RegionRecording) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current.recording is not self.region:  # but one within it
            return func(*args, **kwargs)
        if func in _REFUSED:
            raise ProgramError(
                _REFUSED[func],
                hint="return the gradients: grads = torch.autograd.grad(loss, parameters), and use them outside.",
                source=user_source(),
            )
        if func in _ASKED or func in _READ and not isinstance(args[0], DistributedTensor):
            return func(*args, **kwargs)
        args, kwargs = self.region.all_taken((args, kwargs))
        return func(*args, **kwargs)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.Function.apply`, which no mode sees."""
    if isinstance(current.recording, RegionRecording):
        args, kwargs = current.recording.all_taken((args, kwargs))
    return _APPLY(cls, *args, **kwargs)


_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
torch.autograd.Function.apply = classmethod(functools.wraps(_APPLY)(_apply))  # type: ignore[assignment, method-assign]


@contextmanager
def recording_to(region: RegionRecording) -> Iterator[None]:
    """Let this thread's calls go to a region."""
    before, current.recording = current.recording, region
    try:
        with _StandIns(region):
            yield
    finally:
        current.recording = before


@dataclass
class TracedRegion:
    """A function that was recorded as a region: its arguments (last, the number of the round), and its results,
    flattened; `tensors` says for each leaf of `spec` whether it is a tensor, and not None."""

    region: RegionRecording
    given: list[DistributedTensor]
    spec: Any
    results: list[DistributedTensor] = field(default_factory=list)
    tensors: list[bool] = field(default_factory=list)

    @property
    def types(self) -> list[TensorType]:
        return self.region.types_of(self.results)

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(self.region.value_of(each._ref) for each in self.results)


def trace_region(
    outer: Recording,
    inside: str,
    function: Callable[..., Any],
    args: Callable[[RegionRecording], tuple[list[DistributedTensor], Any]],
) -> TracedRegion:
    """Record the ops of a function. `args(region)` makes its inputs, and the function's arguments. Raises ProgramError
    for a result that is no tensor, and for tensors that it leaves elsewhere."""
    if checkpoint_part() == "unpack_hook":
        raise ProgramError(
            f"a checkpoint recomputes {inside}, whose backward pass recomputes it by itself",
            hint="leave the checkpoint out, or put it into the function: it may stand in a branch or a loop.",
            source=user_source(),
        )
    region = RegionRecording(outer, inside)
    outer.regions.append(region)
    python = region.repeatable
    held = None if python is None else python.changes()
    with recording_to(region):
        given, arguments = args(region)
        index = region.given(torch.empty((), dtype=torch.int64, device="meta"))
        try:
            returned = function(*arguments)
        except RuntimeError as error:
            if "a leaf Variable" in str(error) and any(not made.is_leaf for made, _ in region.stand_ins.values()):
                raise _changes_history(inside, error) from error
            raise
        leaves, spec = pytree.tree_flatten(returned)
        made = TracedRegion(region, [*given, index], spec)
        for leaf in leaves:
            made.tensors.append(leaf is not None)
            if isinstance(leaf, torch.Tensor):
                leaf = region.taken(leaf)
                if not isinstance(leaf, DistributedTensor):
                    leaf = region.constant(leaf)
                region.value_of(leaf._ref)
                made.results.append(leaf)
            elif leaf is not None:
                raise ProgramError(
                    f"{inside} gives {leaf!r:.60}, a {type(leaf).__name__}",
                    hint="its results have to be tensors, and lists, tuples and dicts of these.",
                    source=user_source(),
                )
    for _, made_for in region.stand_ins.values():
        if made_for.grad is not None:
            raise ProgramError(
                f"{inside} gives a tensor its gradient, whichever way the workers go",
                hint="return the gradients: grads = torch.autograd.grad(loss, parameters), and use them outside.",
                source=user_source(),
            )
    region.check_kept(made.results)
    changed = None if python is None else python.bound_since(held)
    if changed is not None:
        raise ProgramError(
            f"{inside} changes '{changed}' in Python, whichever way the workers go, and however often",
            hint="return a tensor that says it, such as a count: n = n + 1; or change it outside of the function.",
            source=user_source(),
        )
    return made


def _changes_history(inside: str, error: RuntimeError) -> ProgramError:
    return ProgramError(
        f"{inside} changes a tensor that was made outside in place, and gradients go through it",
        hint="y.mul_(2)                                    # wrong, in a branch or a loop\n"
        "y = monarch.cond(p, lambda: y * 2, lambda: y)  # right: it gives the new value\n"
        "with torch.no_grad(): y.mul_(2)                # right, where no gradient is to go through the change",
        source=raised_at(error) or user_source(),
    )


# -- putting a region onto the tape ------------------------------------------------------------------------------------


Reads = dict[int, Ref]
"""Storages of the program, by their cells."""


@dataclass
class RegionOp:
    """An op with regions, as it is put together: `reads` are the storages that its regions take as operands, `written`
    others, which they also write over, and which the op gives the new value of."""

    outer: Recording
    reads: Reads
    written: Reads

    @staticmethod
    def of(outer: Recording, traced: Sequence[TracedRegion]) -> RegionOp:
        reads: Reads = {}
        changed: set[int] = set()
        for each in traced:
            tape = each.region.tape
            values = {tape.inputs[at].value for at in written_inputs(tape, outer.mesh.spec)}
            for cell, (ref, value) in each.region.reads.items():
                reads[cell] = ref
                if value in values:
                    changed.add(cell)
        written = {cell: reads.pop(cell) for cell in list(reads) if cell in changed}
        return RegionOp(outer, reads, written)

    def values(self, refs: Reads) -> tuple[Value, ...]:
        """The present values of storages."""
        return tuple(self.outer.value_of(ref) for ref in refs.values())

    def region(
        self, role: str, traced: TracedRegion, inputs: Sequence[Any], returns: Sequence[Value], index: bool
    ) -> Region:
        """A region whose inputs are values of its own, and what storages (`Reads`) hold; then the number of the
        round."""
        own = traced.region
        values: list[Value] = []
        for entry in inputs:
            values += [entry] if isinstance(entry, Value) else own_values(traced, entry)
        if index:
            values.append(own.value_of(traced.given[-1]._ref))
        taken = [Input(value, "input", at, value.type) for at, value in enumerate(values)]
        return Region(role, Tape(taken, list(own.tape.ops), own.tape.values), tuple(returns))

    def append(
        self, op: ops.MonarchOp, args: tuple[Any, ...], types: Sequence[TensorType], at: int
    ) -> list[DistributedTensor]:
        """Record the op, which gives tensors of these types, and in front of number `at` the values left in the
        storages that it writes."""
        left = self.outer.types_of([ref.fake for ref in self.written.values()])
        fakes = [self.outer.fake_of(type_) for type_ in (*types[:at], *left, *types[at:])]
        outs = [self.outer.tape.value(fake) for fake in fakes]
        self.outer.append(op, args, (), tuple(outs))
        for out, ref in zip(outs[at:], self.written.values(), strict=False):
            self.outer.append(aten.copy_.default, (self.outer.value_of(ref), out), (), None)
        made = [self.outer.new(fake, out) for fake, out in zip(fakes, outs, strict=True)]
        return [*made[:at], *made[at + len(left) :]]


def own_values(traced: TracedRegion, storages: Reads) -> tuple[Value, ...]:
    """The values of storages of the program in a region: the present ones there, or the former ones as its inputs."""
    return tuple(traced.region.value_of(ref) for ref in storages.values())


def snapshot(outer: Recording, value: Value) -> Value:
    """The value that a storage has now."""
    copy = Value(outer.tape.values, value.dtype, value.shape)
    outer.tape.values += 1
    outer.append(aten.clone.default, (value,), (), copy)
    return copy


def first_value(region: RegionRecording, value: Value) -> Value:
    """The value that an input of a region has before the region writes over it."""
    copy = Value(region.tape.values, value.dtype, value.shape)
    region.tape.values += 1
    region.tape.ops.insert(0, Op(aten.clone.default, (value,), (), copy))
    return copy


def restored(traced: TracedRegion, results: Sequence[torch.Tensor]) -> Any:
    """An op's results in the form in which its functions give them."""
    made = iter(results)
    return pytree.tree_unflatten([next(made) if each else None for each in traced.tensors], traced.spec)
