"""The recorder: every ATen call that touches a distributed tensor goes onto a tape, with the user's source line.

There is one recorder and two doors to it. While a `@monarch.program` is traced, calls go to the program's tape, and
factory functions make distributed tensors too (`modes`). Otherwise they go to the mesh's pending tape, which runs as an
implicit program when a value is needed (`monarch.language.eager`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from monarch.compiler.errors import MonarchError, ProgramError
from monarch.compiler.ops.record import enter
from monarch.compiler.ops.schema import memory_of, pure_form
from monarch.compiler.tape import Expr, Number, Op, Value, View
from monarch.compiler.types import TensorType
from monarch.language.errors import branch_error, operator_error
from monarch.language.recorder.known import known_value
from monarch.language.recorder.meshes import mesh_error
from monarch.language.recorder.places import PlaceNode, place_of
from monarch.language.recorder.recording import (
    Recording,
    current,
    outside_programs,
    recording_for,
    source_now,
    turns,
)
from monarch.language.recorder.refusals import check_refused, refuse
from monarch.language.recorder.refused_shapes import masked_error, sized_error
from monarch.language.recorder.refused_writes import argument_write, plain_write, reshaped_in_place
from monarch.language.recorder.scalar import ScalarNode
from monarch.language.recorder.varying import (
    active,
    check_gradients,
    refuse_write,
    varying_of,
    varying_together,
)
from monarch.language.recorder.whole import with_own_dtypes
from monarch.language.source import user_source
from monarch.language.tensors.facts import Facts, facts_of
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import DependsOnData, run_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref

aten = torch.ops.aten

_EAGER_LIMIT = 4000
"""Recorded ops after which the eager mode runs them."""

# -- dispatch --------------------------------------------------------------------------------------------------------

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes a call that is not recorded as it is: (func, args, kwargs) -> result."""


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One ATen call with a distributed tensor among its arguments, or, in a program, one that makes a tensor."""
    if current.recording is not None:
        check_refused()
        return _dispatch(func, args, kwargs)
    with turns:  # the pending tape is all threads'
        result = _dispatch(func, args, kwargs)  # a `return` here would leave the block before a tracer hears of it
    return result


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled() and facts_of(func).view and not args[0].is_inference():
        with torch.inference_mode(False):  # a view of a tensor that is none of inference mode's is none, for PyTorch
            return _dispatch(func, args, kwargs)
    if func is aten.detach.default or func is aten.alias.default:
        tensor = args[0]
        return DistributedTensor(tensor._ref.fake, tensor._ref)
    if kwargs.get("generator") is not None:
        raise ProgramError(
            "random numbers on a mesh come from counters, not from a torch.Generator",
            hint="leave generator= out, and seed with torch.manual_seed(n).",
            source=user_source(),
        )
    facts = facts_of(func)
    handler = facts.known.record
    if handler is not None:
        return handler(func, args, kwargs)
    if facts.moves:
        return _reshape_in_place(func, args, kwargs)
    return record(func, args, kwargs)


def zeros(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> DistributedTensor:
    """Record a replicated tensor of zeros."""
    made: DistributedTensor = record(aten.zeros.default, (list(shape),), {"dtype": dtype}, mesh)
    return made


def clone(tensor: DistributedTensor) -> DistributedTensor:
    """Record a copy of a tensor, with a cell of its own."""
    copy: DistributedTensor = record(aten.clone.default, (tensor,), {})
    return copy


def find_mesh(args: Any, kwargs: Any = None) -> Mesh | None:
    """The mesh of the distributed tensors in a call's arguments. ProgramError where they are on several."""
    mesh = None
    stack = [*args, *(kwargs.values() if kwargs else ())]
    while stack:
        entry = stack.pop()
        if isinstance(entry, DistributedTensor):
            found = entry._ref.cell.mesh
            if mesh is None:
                mesh = found
            elif mesh is not found:
                if current.recording is None:
                    raise mesh_error(mesh, found)
                return current.recording.mesh_among(_distributed((*args, *(kwargs or {}).values())))
        elif isinstance(entry, (list, tuple)):
            stack.extend(entry)
    return mesh


def is_distributed(args: Any, kwargs: Any) -> bool:
    """Whether a call has a distributed tensor among its arguments; they may be on several meshes, as the lists are that
    `torch._foreach_*` take."""
    return next(_distributed((args, list(kwargs.values()))), None) is not None


def mesh_now() -> Mesh:
    """The mesh on which a function makes a tensor that takes none: that of the program, or of the per-worker code."""
    return current.recording.mesh if current.recording is not None else active.regions[-1][0]


class _Call:
    """The two forms of a call's arguments: for the tape, and for the fake run."""

    def __init__(self, recording: Recording, func: Any, facts: Facts) -> None:
        self.recording = recording
        self.func = func
        self.lifts = facts.lifts
        self.whole = facts.whole

    def argument(self, value: Any, place: int | str | None = None) -> tuple[Any, Any]:
        kind = type(value)
        if kind is float:  # the commonest kinds, before all that a value may be
            if place in self.lifts and not self.recording.program:
                return self.recording.lift(value), value
            return Number.of(value), value
        if isinstance(value, torch.Tensor):
            if kind is not DistributedTensor and not isinstance(value, DistributedTensor):
                number = getattr(value, "_wrapped_number", None)
                if number is not None:
                    return self.argument(number, place)
                self.recording.meet(value)
                value = self.recording.constant(value)
            self.recording.meet(value)
            return self.recording.value_of(value._ref), value._ref.fake
        if isinstance(value, (list, tuple)):
            pairs = [self.argument(entry) for entry in value]
            return tuple(pair[0] for pair in pairs), [pair[1] for pair in pairs]
        if isinstance(value, torch.SymInt):
            if isinstance(value.node, PlaceNode):
                return value.node.expr(self.recording), value.node.hint
            return self.recording.symbols.size(value), value
        if isinstance(value, torch.SymBool):
            return Number.of(bool(value)), bool(value)
        if isinstance(value, torch.SymFloat) and not isinstance(value.node, ScalarNode):  # of named sizes
            computed = self.recording.symbols.expression(value, self._size, Expr) if place in self.lifts else None
            return self.argument(float(value), place) if computed is None else (computed, value.node.hint)
        if isinstance(value, torch.SymFloat):
            node = value.node
            if place not in self.lifts:
                if node.hint is None:
                    raise ProgramError(f"{self.func} takes no number that only the workers know", source=user_source())
                fixed = float(node.value())  # the trace holds while this value stays the same
                return Number.of(fixed), fixed
            expr = node.expr if self.recording.program else self.recording.lift_constants(node.expr)
            return expr, 0.5 if node.hint is None else node.hint
        if isinstance(value, (bool, complex)):
            return Number.of(value), value
        if isinstance(value, float):
            if place in self.lifts and not self.recording.program:
                return self.recording.lift(value), value
            return Number.of(value), value
        if isinstance(value, int):
            if self.whole and place in self.lifts and not self.recording.program:
                return self.recording.lift(int(value)), value
            return int(value), value
        if value is None or isinstance(value, (str, torch.dtype)):
            return value, value
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return str(value), value
        if isinstance(value, torch.UntypedStorage):
            raise ProgramError(
                "a distributed tensor cannot take up memory from elsewhere, as torch.load does",
                hint="load the tensor outside of the program, and close over it or pass it. A part of a distributed\n"
                "tensor's memory: x.set_(y.as_strided(size, stride, offset)).",
                source=user_source(),
            )
        raise ProgramError(f"cannot record an argument of type {type(value).__name__}: {value!r}", source=user_source())

    def _size(self, size: int) -> Expr:
        """A named size as a float that the workers compute with."""
        number = self.recording.symbols.torch_sizes(size)
        made = record(aten.full.default, ([], number), {"dtype": torch.float64}, self.recording.mesh)
        return Expr("item", (self.recording.value_of(made._ref),))


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh | None = None) -> Any:
    """Put a call on the tape; give its results as distributed tensors. `mesh` says where, for calls without a
    tensor."""
    mesh = mesh or find_mesh(args, kwargs) or mesh_now()
    recording = recording_for(mesh)
    facts = facts_of(func)
    if not recording.program:
        if len(recording.tape.ops) >= _EAGER_LIMIT:
            mesh.flush()
        if _has_numbers(args) or _has_numbers(kwargs.values()):
            pending = None
            while pending is not mesh.pending:  # a value that is asked for runs the tape, on which others may have been
                pending = mesh.pending
                args = tuple(_number(mesh, value, place in facts.lifts) for place, value in enumerate(args))
                kwargs = {name: _number(mesh, value, name in facts.lifts) for name, value in kwargs.items()}
        if mesh.pending is not recording:
            recording = recording_for(mesh)
    if facts.composite:
        # Reached only under inference mode, which skips autograd, where such ops are taken apart otherwise.
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
    call = _Call(recording, func, facts)
    encoded, fakes = [], []
    for place, value in enumerate(args):
        on_tape, fake = call.argument(value, place)
        encoded.append(on_tape)
        fakes.append(fake)
    encoded_kwargs, fake_kwargs = [], {}
    for name, value in kwargs.items():
        on_tape, fake_kwargs[name] = call.argument(value, name)
        encoded_kwargs.append((name, on_tape))
    try:
        out = run_fake(func, fakes, fake_kwargs)
    except DependsOnData as error:
        return _data_dependent(func, args, kwargs, recording, error)
    except MonarchError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError) as error:
        real = _torchs_error(func, fakes, fake_kwargs)
        kind, words = operator_error(real or error), str(real or error).strip()
        found = kind(words, hint=_operands(func, args), source=source_now()[0])
        raise (refuse(found) if real is None else found) from (None if real else error)
    if recording.dtype is not torch.get_default_dtype() and not facts.mutable:
        explicit = with_own_dtypes(recording.dtype, func, args, kwargs, fakes, fake_kwargs, out)
        if explicit is not None:
            return record(func, *explicit, mesh)
    return _results(recording, facts, func, args, kwargs, tuple(encoded), tuple(encoded_kwargs), out)


def _has_numbers(values: Iterable[Any]) -> bool:
    """Whether arguments have a float among them that may be a Scalar of the eager door."""
    for value in values:  # a loop: a generator for `any` takes longer than all it would look at
        if isinstance(value, torch.SymFloat):
            return True
    return False


def _number(mesh: Mesh, value: Any, lifted: bool) -> Any:
    """A Scalar of the eager door, or its value where the pending tape cannot take it: one of a tape that has run
    since, or one for an argument that is no tensor's element. Asking for a value runs the pending tape."""
    if isinstance(value, torch.SymFloat) and value.node.ask is not None:
        if not lifted or value.node.guard.__self__ is not mesh.pending:
            return value.node.value()
    return value


_SMALL = 2**20


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements of a tensor's memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _torchs_error(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Exception | None:
    """PyTorch's own error for a call that the fake run refused: kernels and fake kernels word some errors
    differently. None where PyTorch does not refuse it."""

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() > _SMALL:  # a large operand takes no memory
                return torch.zeros((), dtype=value.dtype).expand(value.shape)
            zeros = torch.zeros(_extent(value), dtype=value.dtype)
            return zeros.as_strided(value.shape, value.stride())
        return [real(entry) for entry in value] if isinstance(value, list) else value

    try:
        with outside_programs():
            func(*(real(value) for value in args), **{name: real(value) for name, value in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError) as real_error:
        return real_error
    return None


def _results(
    recording: Recording,
    facts: Facts,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    encoded: tuple[Any, ...],
    encoded_kwargs: tuple[tuple[str, Any], ...],
    out: Any,
) -> Any:
    single = isinstance(out, torch.Tensor)
    fakes = [out] if single else list(out) if isinstance(out, (list, tuple)) else []
    if not single and not facts.mutable and not any(isinstance(fake, torch.Tensor) for fake in fakes):
        return out  # a question about shapes, or which kernel to take
    tape = recording.tape
    varying: tuple[str, ...] = ()
    if recording.varies:
        operands = list(_distributed((args, list(kwargs.values()))))
        varying = varying_together(operands)
        check_gradients(operands, varying)
    if facts.mutable:
        return _results_of_write(recording, func, args, kwargs, encoded, encoded_kwargs, out, varying)
    view = facts.view
    where = source_now()
    if single and not view:
        result = tape.value(out)
        recording.put(Op(func, encoded, encoded_kwargs, result, *where))
        return recording.new(out, result, varying)
    values: list[Value | None] = []
    for index, fake in enumerate(fakes):
        if not isinstance(fake, torch.Tensor):
            values.append(None)
        elif view:
            step = View(func, encoded[1:], encoded_kwargs, None if single else index, *where)
            values.append(tape.value(fake, recording.value_of(_viewed(args)._ref), step))
        else:
            values.append(tape.value(fake))
    recording.put(Op(func, encoded, encoded_kwargs, values[0] if single else tuple(values), *where))
    results: list[Any] = []
    for fake, value in zip(fakes, values, strict=True):
        if value is not None and view:
            source = _viewed(args)._ref
            ref = Ref(source.cell, fake, source, value.view, recording, value, place_of(args))
            made = DistributedTensor(fake, ref)
            results.append(made)
        else:
            results.append(fake if value is None else recording.new(fake, value, varying))
    return results[0] if single else results if isinstance(out, list) else tuple(results)


def _viewed(args: tuple[Any, ...]) -> DistributedTensor:
    source = args[0]
    assert isinstance(source, DistributedTensor)
    return source


def _results_of_write(
    recording: Recording,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    encoded: tuple[Any, ...],
    encoded_kwargs: tuple[tuple[str, Any], ...],
    out: Any,
    varying: tuple[str, ...],
) -> Any:
    """Put a call that writes to its arguments on the tape. Of its results some are tensors that it writes."""
    written = writes_of(func, args, kwargs)
    if func.namespace == "aten" and any(isinstance(value, list) for value in written.values()):
        raise ProgramError(
            f"{func.overloadpacket} changes lists of tensors in place, which cannot be recorded",
            hint="a GradScaler does so: leave it out, with bfloat16 no gradient needs scaling.",
            source=user_source(),
        )
    for tensor in (each for value in written.values() for each in (value if isinstance(value, list) else [value])):
        if not isinstance(tensor, DistributedTensor) or id(tensor._ref.cell) in recording.not_written:
            raise plain_write(tensor)
        if id(tensor._ref.cell) in recording.input_cells:
            raise argument_write(recording, tensor._ref.cell)
        if tensor._ref.fake.shape != tensor.shape:
            raise reshaped_in_place(func)
        cell = tensor._ref.cell
        if varying_of(tensor) != varying and (cell.recording is not recording or not cell.vary(varying)):
            raise refuse_write(tensor, varying)
    single = len(func._schema.returns) == 1
    names = memory_of(func).results
    fakes: list[Any] = [out] if single else list(out or ())
    if any(isinstance(fake, (list, tuple)) for fake in fakes):
        raise ProgramError(f"{func} writes to its arguments and gives a list of tensors", source=user_source())
    values = [
        None if name or not isinstance(fake, torch.Tensor) else recording.tape.value(fake)
        for name, fake in zip(names, fakes, strict=True)
    ]
    recorded = None if not any(values) else values[0] if single else tuple(values)
    recording.append(func, encoded, encoded_kwargs, recorded)
    if recording.places is not None:  # a tensor that was on no mesh is on that of the call that wrote it
        for tensor in _distributed(written.values()):
            if (mesh := recording.where(tensor._ref)) is not None:
                tensor._ref.cell.mesh = mesh
    results = [
        written.get(name) if name else fake if value is None else recording.new(fake, value, varying)
        for name, fake, value in zip(names, fakes, values, strict=True)
    ]
    return (results[0] if single else tuple(results)) if results else None


def writes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The tensors, or lists of them, that a call writes to, by the arguments' names."""
    found = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if value is not None:
                found[argument.name] = list(value) if isinstance(value, tuple) else value
    return found


def _reshape_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.squeeze_()`: from now on the tensor stands for a view of its former self."""
    view = pure_form(func)
    tensor = args[0]
    if view is None or not isinstance(tensor, DistributedTensor):
        raise reshaped_in_place(func)
    if func.overloadpacket in _BY_MEMORY and (tensor._ref.parent is not None or not tensor.is_contiguous()):
        raise reshaped_in_place(func)  # its content then, and its changes, follow the order of its memory
    recording = recording_for(tensor._ref.cell.mesh)
    if recording.program and tensor._ref.cell.recording is not recording:
        raise reshaped_in_place(func)  # the program's caller would see the shape of its first call only
    if id(tensor._ref.cell) in recording.input_cells:
        raise reshaped_in_place(func)
    viewed = record(view, args, kwargs)
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)  # the wrapper's own sizes
    tensor._ref = viewed._ref
    return tensor


_BY_MEMORY = (aten.resize_, aten.resize_as_)


def _operands(func: Any, args: tuple[Any, ...]) -> str:
    types = [
        str(arg._ref.type if isinstance(arg, DistributedTensor) else TensorType(arg.dtype, tuple(arg.shape)))
        for arg in tensors_in(args)
    ]
    return f"in {func.overloadpacket}({', '.join(types)})" if types else ""


def _data_dependent(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording, error: Exception
) -> Any:
    """An op whose result, in Python, depends on values: `equal`, `nonzero`."""
    if not recording.program:
        return _with_data(func, args, kwargs)
    if func is aten.index.Tensor:
        indices = _places(recording, args[1])
        if not any(map(_is_mask, indices)):
            return record(func, (args[0], indices), kwargs)
        raise masked_error(args[0], indices) from error
    if func is aten.masked_select.default and not isinstance(known := _known(recording, args[1]), DistributedTensor):
        return _select_by(args[0], known)
    whole = [_known(recording, arg) for arg in args]
    if not any(True for _ in _distributed(whole)):
        with outside_programs():
            found = func(*whole, **kwargs)
        return _placed(recording, found)
    if any("Tensor" in str(value.type) for value in func._schema.returns):
        raise sized_error(func) from error
    raise branch_error(user_source()) from error


def _places(recording: Recording, indices: Any) -> list[Any]:
    """Indices, with the places that it sets for each mask that is known while the program is traced."""
    found: list[Any] = []
    for index in indices:
        if _is_mask(index) and not isinstance(known := _known(recording, index), DistributedTensor):
            with outside_programs():
                found += known.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def _select_by(x: DistributedTensor, mask: torch.Tensor) -> Any:
    """`x.masked_select(mask)` of a mask that is known while the program is traced."""
    wide = x.expand(torch.broadcast_shapes(x.shape, mask.shape) or (1,))
    with outside_programs():
        places = mask.expand([int(size) for size in wide.shape]).nonzero(as_tuple=True)
    return record(aten.index.Tensor, (wide, list(places)), {})


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _with_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outside of programs such an op runs here, on the workers' values."""
    mesh = find_mesh(args, kwargs)
    assert mesh is not None
    if func is aten.index.Tensor:  # only the masks are fetched
        indices: list[Any] = []
        for index in args[1]:
            if _is_mask(index):
                indices += _fetched(index).nonzero(as_tuple=True)
            else:
                indices.append(index)
        return record(func, (args[0], indices), kwargs)
    found = func(*(_fetched(arg) for arg in args), **kwargs)
    return _placed(recording_for(mesh), found)


def _fetched(value: Any) -> Any:
    if isinstance(value, DistributedTensor):
        return value.full_tensor()
    return [_fetched(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _placed(recording: Recording, found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return type(found)(_placed(recording, entry) for entry in found)
    return recording.constant(found) if isinstance(found, torch.Tensor) else found


def _distributed(entries: Any) -> Iterator[DistributedTensor]:
    return (tensor for tensor in tensors_in(entries) if isinstance(tensor, DistributedTensor))


def _known(recording: Recording, value: Any) -> Any:
    """An argument with the known facts about it while the program is traced."""
    if isinstance(value, DistributedTensor):
        known = known_value(recording, value)
        return value if known is None else known
    if isinstance(value, (list, tuple)):
        return [_known(recording, entry) for entry in value]
    return value


def _sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """C++ that asks a tensor of named sizes for numbers."""
    raise ProgramError("PyTorch computes this op with its operands' sizes as numbers", source=user_source())


enter((aten.size,), record=_sizes)


def tensors_in(entries: Any) -> Iterator[torch.Tensor]:
    """The tensors among a call's arguments, also in lists and tuples."""
    for entry in entries:
        if isinstance(entry, torch.Tensor):
            yield entry
        elif isinstance(entry, (list, tuple)):
            yield from tensors_in(entry)
