"""From a tape, with views and in-place updates, to a pure Graph on a small op set.

    %0 = input "w" : f32[4, 4]
    %1 = aten.select(%0, 0, 1)              %row = aten.select.int(%w, 0, 1)
    aten.mul_(%1, 2)                 -->    %new = aten.mul.Tensor(%row, 2)
                                            %w2  = aten.select_scatter(%w, %new, 0, 1)       # the new w

A storage (a value that views nothing) has a node that holds it now; a write replaces that node, and views are read
anew after one. Composite ATen ops with kernels of their own (softmax, norms, attention, convolution) stay whole. What
copies without computing (`clone`, `detach`, a cast to the same dtype) goes, and so does what nothing depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from monarch.compiler import ops
from monarch.compiler.errors import ArgumentWritten, ProgramError
from monarch.compiler.graph import Graph, Provenance, Types, provenance, tensor_type
from monarch.compiler.mesh import Shape
from monarch.compiler.ops.record import enter, of_packet
from monarch.compiler.ops.regions import acts_for_itself, drop_unread
from monarch.compiler.ops.schema import memory_of, pure_form, viewed_operand
from monarch.compiler.passes.cut import place_values
from monarch.compiler.passes.emitter import Emitter
from monarch.compiler.passes.lift import Lifted, lift, own_inputs
from monarch.compiler.passes.numbers import with_tensors
from monarch.compiler.passes.timetable import order_by_timetable
from monarch.compiler.passes.views import read_view, write_places, write_view
from monarch.compiler.tape import Expr, Number, Op, Tape, Value
from monarch.compiler.types import MeshSpec, TensorType

aten = torch.ops.aten


class Functionalizer(Emitter):
    """Walks a tape and keeps, for every storage, the node that holds it now."""

    def __init__(self, name: str, mesh: MeshSpec) -> None:
        super().__init__(Graph(name, mesh))
        self._now: dict[Value, fx.Node] = {}
        self._writes: dict[Value, int] = {}
        self._views: dict[Value, tuple[int, fx.Node]] = {}
        self._initial: dict[Value, fx.Node] = {}
        self._laid_out: dict[tuple[fx.Node, str], fx.Node] = {}

    def value(self, value: Value) -> fx.Node:
        if value.parent is None:
            return self._now[value]
        writes = self._writes.get(value.root, 0)
        known = self._views.get(value)
        if known is not None and known[0] == writes:
            return known[1]
        assert value.view is not None
        base = self.value(value.parent)
        here = self.source, self.backward, self.module, self.task
        view = value.view
        self.source, self.backward, self.module, self.task = view.source, view.backward, view.module, view.task
        node = read_view(self, value, base)
        self.source, self.backward, self.module, self.task = here
        self._views[value] = (writes, node)
        return node

    def define(self, value: Value, node: fx.Node) -> None:
        self._now[value] = node

    def write(self, value: Value, node: fx.Node) -> None:
        """`node` takes the place of the value that `value` held, also in its base."""
        node = self.expand(self.cast(node, value.dtype), value.shape)
        written, at = node, value
        while at.parent is not None:
            written = write_view(self, at, self.value(at.parent), written)
            at = at.parent
        self._now[at] = written
        self._writes[at] = self._writes.get(at, 0) + 1
        if value.parent is not None:
            self._views[value] = (self._writes[at], node)

    def inputs(self, tape: Tape) -> None:
        for entry in tape.inputs:
            if entry.same_as is not None:
                node = self._initial[entry.same_as]
            else:
                node = self.graph.placeholder(entry.kind, entry.label, entry.type, entry.name)
                if entry.mesh:
                    node.meta["mesh"] = entry.mesh
                if entry.tensor is not None:
                    self.graph.constants[str(entry.label)] = entry.tensor
            self._initial[entry.value] = node
            self.define(entry.value, node)

    def op(self, op: Op) -> None:
        self.source, self.backward, self.module, self.task = op.source, op.backward, op.module, op.task
        outs = op.out if isinstance(op.out, tuple) else (op.out,)
        if any(out is not None and out.parent is not None for out in outs):
            return  # a view is read where it is used, for its base may have changed by then
        if op.func in ops.WITH_REGIONS:
            self._with_regions(op, [self.decode(argument) for argument in op.args])
        elif isinstance(op.func, ops.MonarchOp):
            self._own(op)
        elif (normalise := of_packet(op.func.overloadpacket, "normalise")) is not None:
            normalise(self, op)
        else:
            self._aten(op)

    def _own(self, op: Op) -> None:
        args = [self.decode(argument) for argument in op.args]
        type_ = op.out.type
        if op.func is ops.permute:
            tensor, *where = args
            self.define(op.out, self.item(self.call(op.func, [tensor], *where, type=(type_,)), 0, type_))
            return
        if op.func is ops.random:
            # With a seed of its own, or with that of the call.
            distribution, shape, dtype, stream, *seeds = args
            args = [
                distribution,
                shape,
                dtype,
                seeds[0] if seeds else self.seed(),
                stream,
                list(shape),
                [[] for _ in shape],
            ]
        elif op.func is ops.sample:
            distribution, parameters, stream, *seeds = args
            shape = op.out.shape
            seed = seeds[0] if seeds else self.seed()
            args = [distribution, parameters, seed, stream, list(shape), [[] for _ in shape]]
        elif op.func is ops.constrain:
            type_ = type_.with_layout(op.args[1])
            args = [args[0], str(op.args[1])]
            known = self._laid_out.get((args[0], args[1]))
            if known is None:  # a value that is laid out twice is moved once
                known = self._laid_out[args[0], args[1]] = self.call(op.func, *args, type=type_)
            self.define(op.out, known)
            return
        elif op.func is ops.transfer:
            args[2] = None if args[2] is None else str(args[2])
        self.define(op.out, self.call(op.func, *args, type=type_))

    def _with_regions(self, op: Op, args: list[Any]) -> None:
        """An op with regions, whose names take the place of the tapes, and which takes the numbers that they read."""
        at = ops.regions_at(op.func)
        number = len({name.partition(".")[0] for name in self.graph.regions})
        loop = op.func is not ops.cond
        regions: dict[str, Graph] = {}
        lifted: list[Lifted] = []
        for region in args[at]:
            walk = Functionalizer(f"{op.func.name}{number}.{region.role}", self.graph.mesh)
            walk.inputs(region.tape)
            for each in region.tape.ops:
                walk.op(each)
            held: set[fx.Node] = set()
            walk.graph.output([_own_buffer(walk, walk.value(value), held) for value in region.returns], {})
            _drop_dead(walk.graph)
            lifted += (each for each in own_inputs(walk.graph) if each not in lifted)
            regions[walk.graph.name] = walk.graph
        for graph in regions.values():
            lift(graph, lifted, loop)
        self.graph.regions.update(regions)
        args[at] = list(regions)
        args[at - 1] = [
            *args[at - 1],
            *(self.seed() if kind == "seed" else self.scalar(label, dtype) for kind, label, dtype in lifted),
        ]
        node = self.call(op.func, *args, type=_types(op.out))
        for index, out in enumerate(op.out):
            self.define(out, self.item(node, index, out.type))

    def _aten(self, op: Op) -> None:
        written = memory_of(op.func).writes
        func = pure_form(op.func) if written else op.func
        if func is None:
            self._out_of_place(op)
            return
        args, kwargs = op.args, op.kwargs
        targets = [value for name in written if isinstance(value := op.argument(name), Value)]
        if written and func._schema.name == op.func._schema.name:  # an out= overload
            kwargs = tuple(entry for entry in kwargs if entry[0] not in written)
        several = targets if len(targets) > 1 else op.out if not targets else targets[0]
        types = _types(several)
        if written and isinstance(types, TensorType):
            if not any(isinstance(value, Value) for value in _leaves((args, kwargs))) and _takes_dtype(func):
                kwargs = (*((name, value) for name, value in kwargs if name != "dtype"), ("dtype", types.dtype))
            types = replace(types, dtype=_computed_in(func, args, kwargs, types.dtype))
        if _has_expr(args) or _has_expr(kwargs):
            first = next(value for value in _leaves((args, kwargs)) if isinstance(value, Value))
            func, decoded, keywords = with_tensors(self, func, args, dict(kwargs), types, first)
            node = self.call(func, *decoded, type=types, **keywords)
        else:
            node = self.call(func, *(self.decode(a) for a in args), type=types, **self.decode_kwargs(kwargs))
        if isinstance(several, Value):
            self._made(several, self.cast(node, several.dtype) if written else node, written=bool(targets))
            return
        for index, out in enumerate(several or ()):
            if out is not None:
                self._made(out, self.item(node, index, out.type), written=bool(targets))

    def _made(self, out: Value, node: fx.Node, *, written: bool) -> None:
        if written:
            self.write(out, node)
        else:
            self.define(out, node)

    def _out_of_place(self, op: Op) -> None:
        """An op that writes to its arguments, and has no pure form: it runs on copies of them."""
        memory, schema = memory_of(op.func), op.func._schema
        given = dict(zip((argument.name for argument in schema.arguments), op.args, strict=False)) | dict(op.kwargs)
        written = [name for name in memory.writes if given.get(name) is not None]
        copies = [value for name in written for value in _leaves(given[name])]
        roots = [value.root for value in _leaves(tuple(given.values())) if isinstance(value, Value)]
        if any(roots.count(copy.root) > 1 for copy in copies):
            raise ProgramError(
                f"{op.func} writes to an operand that shares memory with another operand of it",
                hint="give it a copy of one of them: x.clone().",
                source=op.source,
            )
        outs = (op.out,) if isinstance(op.out, Value) else op.out or ()
        made = [outs[at] for at in memory.gives]
        arguments = [list(given), [self.decode(value) for value in given.values()], written]
        node = self.call(ops.out_of_place, str(op.func), *arguments, type=_types((*made, *copies)))
        for index, value in enumerate((*made, *copies)):
            if value is not None:
                self._made(value, self.item(node, index, value.type), written=index >= len(made))


def _types(values: Any) -> Types:
    """The type of a value, or of each of several."""
    if isinstance(values, Value):
        return values.type
    return tuple(None if value is None else value.type for value in values or ())


_GIVE_BOOL = frozenset(
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isposinf isneginf signbit".split()
)
"""Pointwise ops whose results are bool, whatever they compute with."""


def _takes_dtype(func: Any) -> bool:
    return any(argument.name == "dtype" for argument in func._schema.arguments)


def _computed_in(func: Any, args: Any, kwargs: Any, written: torch.dtype) -> torch.dtype:
    """The dtype in which a call computes that writes to an operand of dtype `written`: `half.add_(single)` adds in that
    of `single`, and casts its result."""

    def alike(value: Any) -> Any:
        if isinstance(value, tuple):
            return [alike(each) for each in value]
        if isinstance(value, Value):
            return torch.empty((1,) * len(value.shape), dtype=value.dtype, device="meta")
        return 1.0 if isinstance(value, Expr) else value.value if isinstance(value, Number) else value

    if torch.Tag.pointwise not in func.tags:
        return written
    values = [value for value in _leaves((args, kwargs)) if isinstance(value, Value)]
    if all(value.dtype == written for value in values):
        return torch.bool if func.overloadpacket.__name__ in _GIVE_BOOL else written
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # rows are followed while a program is traced
        made: Any = func(*(alike(value) for value in args), **{name: alike(value) for name, value in kwargs})
    return made.dtype if isinstance(made, torch.Tensor) else written


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, tuple):
        for entry in tree:
            yield from _leaves(entry)
    else:
        yield tree


def _has_expr(tree: Any) -> bool:
    return any(isinstance(leaf, Expr) for leaf in _leaves(tree))


# -- ops that are normalised -------------------------------------------------------------------------------------------


def _same(self: Functionalizer, op: Op) -> None:
    self.define(op.out, self.value(op.args[0]))


def _cast(self: Functionalizer, op: Op) -> None:
    source = op.args[0]
    if isinstance(source, Value):
        self.define(op.out, self.cast(self.value(source), op.out.dtype))
    else:  # a number, of which `vmap` makes a tensor
        self.define(op.out, self.full(op.out.type, source if isinstance(source, Expr) else self.decode(source)))


def _reshaped(self: Functionalizer, op: Op) -> None:
    self.define(op.out, self.reshape(self.value(op.args[0]), op.out.shape))


def _copied(self: Functionalizer, op: Op) -> None:
    self.write(op.args[0], self.value(op.args[1]))


def _filled(self: Functionalizer, op: Op) -> None:
    target: Value = op.args[0]
    source = op.args[1]
    if isinstance(source, Value):
        self.write(target, self.value(source))
    else:
        self.write(target, self.full(target.type, source if isinstance(source, Expr) else self.decode(source)))


def _zeroed(self: Functionalizer, op: Op) -> None:
    target: Value = op.args[0]
    self.write(target, self.full(target.type, _zero(target.dtype)))


def _zero(dtype: torch.dtype, value: int = 0) -> Any:
    return bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else value


def _constant(value: int) -> Any:
    def emit(self: Functionalizer, op: Op) -> None:
        out = _given(op)
        _give(self, op, self.full(out.type, _zero(out.dtype, value)))

    return emit


def _given(op: Op) -> Value:
    """The result of a factory, also where it writes it: `torch.zeros(3, out=x)`."""
    return op.argument("out") if op.out is None else op.out


def _give(self: Functionalizer, op: Op, node: fx.Node) -> None:
    self._made(_given(op), node, written=op.out is None)


def _full(self: Functionalizer, op: Op) -> None:
    name = op.func._schema.name
    position = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}[name]
    value = op.args[position] if position < len(op.args) else dict(op.kwargs)["fill_value"]
    out = _given(op)
    if isinstance(value, Value):
        _give(self, op, self.expand(self.cast(self.value(value), out.dtype), out.shape))
    else:
        _give(self, op, self.full(out.type, value if isinstance(value, Expr) else self.decode(value)))


def _arange(self: Functionalizer, op: Op) -> None:
    numbers = [self.decode(argument) for argument in op.args]
    start, end = (0, numbers[0]) if op.func._schema.overload_name in ("", "out") else numbers[:2]
    step = numbers[2] if len(numbers) > 2 else self.decode(dict(op.kwargs).get("step", 1))
    out = _given(op)
    _give(self, op, self.call(aten.arange.start_step, start, end, step, type=out.type, dtype=out.dtype))


def _part_backward(self: Functionalizer, op: Op) -> None:
    """The gradient of a view, of which only the workers may know where it begins."""
    place = op.args[3]
    if not isinstance(place, Expr):
        self._aten(op)
        return
    type_: TensorType = op.out.type
    zeros = self.full(type_, _zero(type_.dtype))
    gradient = self.value(op.args[0])
    self.define(op.out, write_places(self, zeros, gradient, op.args[2] % type_.ndim, place, adds=True))


def _batch_norm(self: Functionalizer, op: Op) -> None:
    """Batch norm in training updates its running statistics in place, which its schema does not tell."""
    if op.func is aten._native_batch_norm_legit.no_stats:
        self._aten(op)
        return
    x, weight, bias, mean, var, training, momentum, eps = op.args
    stats = [value.type for value in op.out]
    if not (isinstance(training, Number) and training.value and isinstance(mean, Value)):
        self._aten(replace(op, func=aten.native_batch_norm.default))  # whose schema names nothing that is written
        return
    args = [self.decode(argument) for argument in (x, weight, bias, mean, var, training, momentum, eps)]
    func = aten._native_batch_norm_legit_functional.default
    node = self.call(func, *args, type=(*stats, mean.type, var.type))
    for index, out in enumerate(op.out):
        self.define(out, self.item(node, index, out.type))
    self.write(mean, self.item(node, 3, mean.type))
    self.write(var, self.item(node, 4, var.type))


def _of_row_major(self: Functionalizer, op: Op) -> None:
    """Its kernels refuse operands that are not contiguous, of which PyTorch has made copies; those are dropped here."""

    def whole(argument: Any) -> Any:
        node = self.decode(argument)
        if not isinstance(node, fx.Node) or node.op == "placeholder":
            return node
        return self.call(aten.contiguous.default, node, type=node.meta["type"])

    node = self.call(op.func, *map(whole, op.args), type=_types(op.out))
    if isinstance(op.out, Value):
        self.define(op.out, node)
        return
    for index, out in enumerate(op.out):
        if out is not None:
            self.define(out, self.item(node, index, out.type))


_ROW_MAJOR = (aten._weight_norm_interface, aten.native_group_norm, aten._pdist_forward)
_ROW_MAJOR_BACKWARD = (aten._weight_norm_interface_backward, aten.native_group_norm_backward, aten._pdist_backward)
enter((*_ROW_MAJOR, *_ROW_MAJOR_BACKWARD), normalise=_of_row_major)
enter(
    (aten.clone, aten.lift_fresh, aten.lift_fresh_copy, aten.positive, aten.contiguous),
    normalise=_same,
)
enter((aten._to_copy,), normalise=_cast)
enter((aten._unsafe_view, aten.reshape), normalise=_reshaped)
enter((aten.copy_,), normalise=_copied)
enter((aten.fill_,), normalise=_filled)
enter((aten.zero_,), normalise=_zeroed)
# `empty` holds whatever: zeros are as good, and the same on every worker.
_EMPTY = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted)
enter((aten.zeros, aten.zeros_like, aten.new_zeros, aten._efficientzerotensor, *_EMPTY), normalise=_constant(0))
enter((aten.ones, aten.ones_like, aten.new_ones), normalise=_constant(1))
enter((aten.full, aten.full_like, aten.new_full, aten.scalar_tensor), normalise=_full)
enter((aten.arange,), normalise=_arange)
enter((aten.select_backward, aten.slice_backward), normalise=_part_backward)
enter((aten.native_batch_norm, aten._native_batch_norm_legit), normalise=_batch_norm)

# -- the pass --------------------------------------------------------------------------------------------------------


def functionalize(
    tape: Tape,
    *,
    name: str,
    mesh: MeshSpec,
    returns: Sequence[Value | None],
    updates: Mapping[str, Value],
    parts: Mapping[str, Shape] = MappingProxyType({}),
    homes: Mapping[Value, str] = MappingProxyType({}),
) -> tuple[Graph, dict[str, str]]:
    """The pure graph of a tape.

    `returns` are the values that the program gives back, as they are at its end; `updates` names, by state label, the
    storages that outlive it. A state that the tape does not change is left out of the graph's updates. Several labels
    may end with the same 0-dim value: the graph then updates the first, and the second result maps each of the others
    to it.

    `parts` are the meshes of a tape of several, by the names that it has for them, and `homes` the names of those on
    which returned and updated values are kept.
    """
    walk = Functionalizer(name, mesh)
    walk.inputs(tape)
    for op in tape.ops:
        walk.op(op)
    walk.source, walk.backward, walk.module, walk.task = None, False, "", None
    walk.graph.parts = dict(parts)
    for entry in tape.inputs:
        if entry.kind == "input" and (now := walk.value(entry.value)) is not walk._initial[entry.value]:
            x = entry.name or "x"
            copy, placed = f"{x} = {x}.clone()", f"{x} = monarch.distribute({x}, mesh)"
            raise ArgumentWritten(
                f"argument {entry.name or entry.label} of '{name}', a plain tensor, is changed in place",
                hint=f"{copy:{len(placed)}}   # right: at the program's start, which returns what its caller needs\n"
                f"{placed}   # right: before the call, and passed, which changes it",
                source=provenance(now).source,
            )

    finals = {label: walk.value(value) for label, value in updates.items()}
    for entry in tape.inputs:
        if entry.kind == "state" and entry.label in finals:
            finals[str(entry.label)] = _varying_as(walk, finals[str(entry.label)], entry.type)
    at_home: dict[tuple[fx.Node, str], fx.Node] = {}
    if parts:
        place_values(walk.graph)
        finals = {label: _at_home(walk, node, homes[updates[label]], at_home) for label, node in finals.items()}
    shared = _shared_inputs(tape, finals, walk)
    new: dict[str, fx.Node] = {}
    aliases: dict[str, str] = {}
    for label, node in finals.items():
        initial = walk._initial.get(updates[label])
        if node is initial and node.meta["kind"] == "state" and label not in shared:
            continue  # a constant that the program leaves in Python is no state yet
        small = tensor_type(node).ndim == 0
        twin = next((known for known, other in new.items() if other is node), None) if small else None
        if twin is not None:
            aliases[label] = twin
        else:
            new[label] = node
    held: set[fx.Node] = set()
    new = {label: _own_buffer(walk, node, held) for label, node in new.items()}
    last = [None if value is None else walk.value(value) for value in returns]
    if parts:
        place_values(walk.graph)
        last = [
            node if node is None or value is None else _at_home(walk, node, homes[value], at_home)
            for node, value in zip(last, returns, strict=True)
        ]
    given = [None if node is None else _own_buffer(walk, node, held) for node in last]
    graph = walk.graph
    graph.output(given, new)
    _drop_dead(graph)
    if tape.timetable is not None:
        order_by_timetable(graph, tape.timetable)
    if parts:
        place_values(graph)
        # In the order in which they come to run: a sent value has its layout before it is received.
        inner = [each for node in graph.calls for each in (*node.all_input_nodes, node)] + graph.placeholders
        graph.parts = {part: parts[part] for node in inner if (part := node.meta.get("mesh")) is not None}
    return graph, aliases


def _at_home(walk: Functionalizer, node: fx.Node, home: str, known: dict[tuple[fx.Node, str], fx.Node]) -> fx.Node:
    """A value that is on no mesh, on that on which it is kept."""
    if "mesh" in node.meta:
        return node
    if (node, home) not in known:
        known[node, home] = walk.graph.call(
            ops.transfer, node, home, None, type=tensor_type(node), provenance=provenance(node)
        )
        known[node, home].meta["mesh"] = home
    return known[node, home]


def _varying_as(walk: Functionalizer, node: fx.Node, state: TensorType) -> fx.Node:
    """A state's new value, each worker's own along the mesh dims along which the state varies, also where a program has
    written the same to all: the workers may write their own again."""
    if node.op != "placeholder":
        for mesh_dim in state.layout.varying:
            node = walk.call(ops.to_varying, node, mesh_dim, None, type=tensor_type(node))
    return node


def _shared_inputs(tape: Tape, finals: Mapping[str, fx.Node], walk: Functionalizer) -> set[str]:
    """Labels of states that share a placeholder with one that changes: they need a value of their own, or the new
    one."""
    groups: dict[fx.Node, list[str]] = {}
    for entry in tape.inputs:
        if entry.kind == "state" and entry.label in finals:
            groups.setdefault(walk._initial[entry.value], []).append(str(entry.label))
    return {
        label
        for node, labels in groups.items()
        if len(labels) > 1 and any(finals[label] is not node for label in labels)
        for label in labels
    }


def _own_buffer(walk: Functionalizer, node: fx.Node, held: set[fx.Node]) -> fx.Node:
    """The node, or a copy where its buffer is another output's or an input's: one of two that share a buffer could be
    overwritten."""
    base = node
    while (viewed := viewed_operand(base)) is not None:
        base = viewed
    if base.op == "placeholder" or base in held:
        type_ = tensor_type(node)
        node = walk.graph.call(aten.clone.default, node, type=type_, provenance=Provenance(provenance(node).source))
        base = node
    held.add(base)
    return node


def written_inputs(tape: Tape, mesh: MeshSpec) -> list[int]:
    """Which inputs of a tape it writes over, by position."""
    walk = Functionalizer("", mesh)
    walk.inputs(tape)
    for op in tape.ops:
        walk.op(op)
    return [at for at, entry in enumerate(tape.inputs) if walk.value(entry.value) is not walk._initial[entry.value]]


def _drop_dead(graph: Graph) -> None:
    """Remove ops and placeholders that nothing depends on, and constants and regions with them. A program's inputs
    stay, and so does a state that is overwritten: after a failed step it is the state of before."""
    for node in reversed(list(graph.fx.nodes)):
        if node.op == "output" or node.users or (node.op == "placeholder" and node.meta["kind"] == "input"):
            continue
        if node.op == "placeholder" and node.meta["kind"] == "state" and node.meta["label"] in graph.updates:
            continue
        if acts_for_itself(graph, node):
            continue
        if node.op == "placeholder" and node.meta["kind"] == "constant":
            graph.constants.pop(str(node.meta["label"]), None)
        graph.fx.erase_node(node)
    drop_unread(graph)
