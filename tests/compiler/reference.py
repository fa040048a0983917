"""The reference executor: a partitioned graph run for all workers in lockstep, in one process.

One op at a time, every worker's copy of it before the next op, collectives as plain operations on the list of all
workers' tensors. It is slow and simple, and the ground truth for everything that is fast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.blocks import block_of, own_part, reduce_in_order, whole_of
from monarch.compiler.errors import GraphError
from monarch.compiler.graph import Graph, args_of, tensor_type
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.plan.transfers import routes
from monarch.compiler.types import Layout, MeshSpec, TensorType

aten = torch.ops.aten

Value = torch.Tensor | float | int
PerWorker = list[Any]

_NO_INDEX = 101  # fits into all dtypes, and no dim of a test's is as long


def run_reference(
    graph: Graph, inputs: Mapping[str | int, Value], *, poison: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Run a graph on global values and give back global values: (returns, updated states by label).

    `inputs` holds a tensor of the global shape (or a number, for scalars and seeds) for each placeholder's label.
    A graph of several meshes that is cut runs with all its parts side by side, each as far as it comes: what one
    receives comes along the routes that workers use. `poison` overwrites padding that the compiler takes to hold
    anything with NaN, or with an int that is no index.
    A value that varies along mesh dims has a dim in front for each of them, by name. Raises GraphError where replicas
    of one value differ between workers: they would have diverged on a real mesh; for per-worker code that is not
    partitioned; and where parts wait for one another without end.
    """
    if graph.fragments:
        return _run_parts(graph, inputs, poison)
    mesh = graph.mesh if graph.partitioned else MeshSpec(())
    env = {node: _place(graph, node, inputs, mesh) for node in graph.placeholders}
    _run(graph, env, mesh, poison)

    return _results(graph, env, mesh)


def _results(graph: Graph, env: Mapping[fx.Node, PerWorker], mesh: MeshSpec) -> tuple[list[Any], dict[str, Any]]:
    def fetch(node: fx.Node | None) -> Any:
        if node is None:
            return None
        type_ = tensor_type(node)
        _check_replicas(node, env[node], mesh)
        return _fetched(env[node], type_ if graph.partitioned else _whole(type_), mesh)

    return [fetch(node) for node in graph.returns], {label: fetch(node) for label, node in graph.updates.items()}


Sent = dict[int, tuple[PerWorker, TensorType, MeshSpec]]
"""By a transfer's number what each worker of the part that sends it has, its type, and their mesh."""


def _run_parts(graph: Graph, inputs: Mapping[str | int, Value], poison: bool) -> tuple[list[Any], dict[str, Any]]:
    sent: Sent = {}
    meshes = {name: part.mesh if part.partitioned else MeshSpec(()) for name, part in graph.fragments.items()}
    envs = {
        name: {node: _place(part, node, inputs, meshes[name]) for node in part.placeholders}
        for name, part in graph.fragments.items()
    }
    running = {name: _steps(part, envs[name], meshes[name], poison, sent) for name, part in graph.fragments.items()}
    while running:
        waiting = {name: next(steps, None) for name, steps in running.items()}
        running = {name: steps for name, steps in running.items() if waiting[name] is not None}
        if running and all(number not in sent for number in waiting.values() if number is not None):
            listed = ", ".join(f"{name} for transfer {waiting[name]}" for name in running)
            raise GraphError(f"the parts of @{graph.name} wait for one another: {listed}")
    found = {name: _results(part, envs[name], meshes[name]) for name, part in graph.fragments.items()}
    returned = {name: iter(returns) for name, (returns, _) in found.items()}
    updates = {label: value for _, each in found.values() for label, value in each.items()}
    return (
        [None if node is None else next(returned[node.meta["mesh"]]) for node in graph.returns],
        {label: updates[label] for label in graph.updates},
    )


def _received(node: fx.Node, mesh: MeshSpec, sent: Sent) -> PerWorker:
    number, shape, dtype = args_of(node)
    blocks, type_, source = sent[number]
    found = [torch.zeros(shape, dtype=dtype) for _ in range(mesh.workers)]
    wanted = tensor_type(node) if mesh.dims else _whole(tensor_type(node))
    for route in routes(type_, source, wanted, mesh):
        into = tuple(slice(start, start + size) for start, size in zip(route.into, route.shape, strict=True))
        at = tuple(slice(start, start + size) for start, size in zip(route.start, route.shape, strict=True))
        found[route.target][into] = blocks[route.source][at]
    return found


def _run(graph: Graph, env: dict[fx.Node, PerWorker], mesh: MeshSpec, poison: bool) -> None:
    """Run a graph whose placeholders are in `env`, and put what each worker makes there."""
    for number in _steps(graph, env, mesh, poison, {}):
        raise GraphError(f"@{graph.name} waits for transfer {number}, and is the only graph that runs")


def _steps(graph: Graph, env: dict[fx.Node, PerWorker], mesh: MeshSpec, poison: bool, sent: Sent) -> Iterator[int]:
    """The same for a graph that may send and receive: gives the number of a transfer, again and again, until it is
    sent."""
    workers = mesh.workers
    positions = list(mesh.coordinates())
    for node in graph.fx.nodes:
        if node.op == "call_function":
            if node.target in ops.WITH_REGIONS:
                env[node] = _control(graph, node, env, mesh, poison)
            elif node.target is ops.wait:
                env[node] = env[args_of(node)[0]]
            elif node.target is ops.send:
                value, number = args_of(node)
                _check_replicas(value, env[value], mesh)
                type_ = tensor_type(value) if mesh.dims else _whole(tensor_type(value))
                env[node], sent[number] = env[value], (list(env[value]), type_, mesh)
            elif node.target is ops.recv:
                while args_of(node)[0] not in sent:
                    yield args_of(node)[0]
                env[node] = _received(node, mesh, sent)
            elif isinstance(node.target, ops.MonarchOp) and node.target.collective:
                env[node] = _collective(node, env, mesh)
            else:
                env[node] = [_local(node, env, worker, positions[worker], mesh) for worker in range(workers)]
            if poison and "undefined" in node.meta:
                env[node] = [_poisoned(node, value, mesh, rank) for rank, value in enumerate(env[node])]


def _control(graph: Graph, node: fx.Node, env: dict[fx.Node, PerWorker], mesh: MeshSpec, poison: bool) -> PerWorker:
    """A branch or a loop: all workers run the same regions, equally often. Gives each worker's results."""

    def region(name: str, values: Sequence[PerWorker]) -> list[PerWorker]:
        body = graph.regions[name]
        inner = {node: _place(body, node, {}, mesh) for node in body.placeholders if node.meta["kind"] == "constant"}
        inner |= zip(body.inputs, values, strict=True)
        _run(body, inner, mesh, poison)
        return [inner[result] for result in body.returns if result is not None]

    def agreed(predicate: PerWorker) -> bool:
        answers = {bool(value) for value in predicate}
        if len(answers) > 1:
            raise GraphError(f"the workers disagree on the predicate of %{node.name}")
        return answers.pop()

    def number(at: int) -> PerWorker:
        return [torch.tensor(at) for _ in range(mesh.workers)]

    args = args_of(node)
    if node.target is ops.cond:
        predicate, operands, (then, otherwise) = args
        results = region(then if agreed(env[predicate]) else otherwise, [env[each] for each in operands])
    elif node.target is ops.while_loop:
        carried, operands, (condition, body) = args
        rest = [env[each] for each in operands]
        results, at = [env[each] for each in carried], 0
        while agreed(region(condition, [*results, *rest, number(at)])[0]):
            results, at = region(body, [*results, *rest, number(at)]), at + 1
    else:
        carried, xs, operands, (combine,), length, reverse = args
        rest = [env[each] for each in operands]
        results = [env[each] for each in carried]
        shapes = [graph.regions[combine].local_shape(type_) for type_ in node.meta["type"]]
        dtypes = [type_.dtype for type_ in node.meta["type"]]
        stacked = [
            [torch.empty(shape, dtype=dtype) for _ in range(mesh.workers)]
            for shape, dtype in zip(shapes[len(carried) :], dtypes[len(carried) :], strict=True)
        ]
        for at in reversed(range(length)) if reverse else range(length):
            elements = [[value[at] for value in env[x]] for x in xs]
            made = region(combine, [*results, *elements, *rest, number(at)])
            results = made[: len(carried)]
            for target, element in zip(stacked, made[len(carried) :], strict=True):
                for whole, part in zip(target, element, strict=True):
                    whole[at] = part
        results += stacked
    return [tuple(result[rank] for result in results) for rank in range(mesh.workers)]


def _place(graph: Graph, node: fx.Node, inputs: Mapping[str | int, Value], mesh: MeshSpec) -> PerWorker:
    label = node.meta["label"]
    value = graph.constants[label] if node.meta["kind"] == "constant" else inputs[label]
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=tensor_type(node).dtype)
    type_ = tensor_type(node) if graph.partitioned else _whole(tensor_type(node))
    own = type_.layout.varying
    return [
        block_of(value[tuple(position[dim] for dim in own)], type_.varying_along(()), mesh, rank).contiguous()
        for rank, position in enumerate(mesh.coordinates())
    ]


def _fetched(values: PerWorker, type_: TensorType, mesh: MeshSpec) -> torch.Tensor:
    own = type_.layout.varying
    rest = MeshSpec(tuple(entry for entry in mesh.dims if entry[0] not in own))
    parts: dict[tuple[int, ...], PerWorker] = {}
    for value, position in zip(values, mesh.coordinates(), strict=True):
        parts.setdefault(tuple(position[dim] for dim in own), []).append(value)
    each = [whole_of(parts[at], type_.varying_along(()), rest) for at in sorted(parts)]
    return torch.stack(each).reshape([mesh.sizes[dim] for dim in own] + list(each[0].shape)) if own else each[0]


def _whole(type_: TensorType) -> TensorType:
    return type_.with_layout(Layout.replicated(type_.ndim))


def _poisoned(node: fx.Node, value: torch.Tensor, mesh: MeshSpec, rank: int) -> torch.Tensor:
    """The value with its undefined padding overwritten by what shows wherever it is read."""
    type_ = tensor_type(node)
    if not mesh.dims:
        type_ = _whole(type_)
    value = value.clone(memory_format=torch.preserve_format)
    part = own_part(value, type_, mesh, rank)
    for dim in node.meta["undefined"]:
        tail = value.narrow(dim, part.shape[dim], value.shape[dim] - part.shape[dim])
        tail.fill_(torch.nan if value.dtype.is_floating_point else 1 if value.dtype is torch.bool else _NO_INDEX)
    return value


def _local(
    node: fx.Node, env: Mapping[fx.Node, PerWorker], worker: int, position: dict[str, int], mesh: MeshSpec
) -> Any:
    args = fx.node.map_arg(args_of(node), lambda n: env[n][worker])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: env[n][worker])
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target in (ops.constrain, ops.transfer):
        return args[0]
    if node.target in (ops.to_varying, ops.from_varying) and args[1] not in position:
        raise GraphError(f"%{node.name} is of per-worker code, and the graph is not partitioned over '{args[1]}'")
    if isinstance(node.target, ops.MonarchOp):
        return LOCAL_OPS[node.target.name](position, mesh.sizes, *args, **kwargs)
    # As in a plan: a collective's result is contiguous where the traced value may not have been.
    target: Any = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
    return target(*args, **kwargs)


def _check_replicas(node: fx.Node, values: PerWorker, mesh: MeshSpec) -> None:
    layout = tensor_type(node).layout
    for rank, position in enumerate(mesh.coordinates()):
        first = mesh.rank({name: at if name in layout.mesh_dims else 0 for name, at in position.items()})
        if not torch.equal(torch.nan_to_num(values[rank]), torch.nan_to_num(values[first])):
            raise GraphError(
                f"%{node.name} differs between worker {first} and worker {rank}, which hold replicas of it"
            )


def _collective(node: fx.Node, env: Mapping[fx.Node, PerWorker], mesh: MeshSpec) -> PerWorker:
    results: PerWorker = [None] * mesh.workers
    if node.target is ops.commit:
        return results
    tensors, dims, *rest = args_of(node)
    for rank in range(mesh.workers):
        group = mesh.group(rank, dims)
        results[rank] = [
            COLLECTIVES[ops.name_of(node.target)](
                [env[tensor][peer] for peer in group],
                group.index(rank),
                *(
                    argument[i] if isinstance(argument, (list, tuple)) and node.target is not ops.permute else argument
                    for argument in rest
                ),
            )
            for i, tensor in enumerate(tensors)
        ]
    return results


def _all_reduce(parts: Sequence[torch.Tensor], me: int, reduction: str) -> torch.Tensor:
    return reduce_in_order(parts, reduction)


def _all_gather(parts: Sequence[torch.Tensor], me: int, dim: int) -> torch.Tensor:
    return torch.cat(list(parts), dim)


def _reduce_scatter(parts: Sequence[torch.Tensor], me: int, dim: int, reduction: str) -> torch.Tensor:
    return reduce_in_order([part.chunk(len(parts), dim)[me] for part in parts], reduction)


def _all_to_all(parts: Sequence[torch.Tensor], me: int, source_dim: int, target_dim: int) -> torch.Tensor:
    return torch.cat([part.chunk(len(parts), target_dim)[me] for part in parts], source_dim)


def _broadcast(parts: Sequence[torch.Tensor], me: int, root: int) -> torch.Tensor:
    return parts[root]


def _permute(parts: Sequence[torch.Tensor], me: int, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    source = next((source for source, target in pairs if target == me), None)
    return torch.zeros_like(parts[me]) if source is None else parts[source]


COLLECTIVES: dict[str, Callable[..., torch.Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "permute": _permute,
}
