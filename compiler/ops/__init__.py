"""The ops of a partitioned graph that ATen does not have: collectives, local slices, and the ops of sharded indexing.

They stand in a graph as these callables; the reference executor and the runtime give each its meaning (calling one
directly is an error). Mesh dims are given by name, tensor dims as ints, and shapes are those of one worker.

Collectives take a *list* of tensors and give a list (several small ones travel as one); `mesh_dims` is a list too: a
collective over several dims at once runs over the product of the groups, first dim slowest.
"""

from __future__ import annotations

from typing import Any, NoReturn


class MonarchOp:
    """A named op of ours; there is one object a name, also after copying or pickling."""

    def __init__(self, name: str, signature: str, collective: bool) -> None:
        self.name = self.__name__ = name
        self.signature = signature
        self.collective = collective

    def __reduce__(self) -> tuple[object, ...]:
        return by_name, (self.name,)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{self.name}{self.signature} runs only inside a partitioned graph")


OPS: dict[str, MonarchOp] = {}


def _op(name: str, signature: str, *, collective: bool = False) -> MonarchOp:
    OPS[name] = MonarchOp(name, signature, collective)
    return OPS[name]


# -- collectives: a list of tensors in, a list of tensors out --------------------------------------------------------

all_reduce = _op("all_reduce", "(tensors, mesh_dims, reduction)", collective=True)
"""Every worker gets the reduction over the group; the same bits on every worker, from run to run."""

all_gather = _op("all_gather", "(tensors, mesh_dims, dims)", collective=True)
"""Every worker gets the group's blocks concatenated along `dims[i]` for tensor i."""

reduce_scatter = _op("reduce_scatter", "(tensors, mesh_dims, dims, reduction)", collective=True)
"""Worker j of the group gets block j, along `dims[i]` for tensor i, of the reduction over the group."""

all_to_all = _op("all_to_all", "(tensors, mesh_dims, source_dims, target_dims)", collective=True)
"""From sharded along `source_dims[i]` to sharded along `target_dims[i]`: each worker sends block j of its target dim to
worker j, and concatenates the received blocks along the source dim."""

broadcast = _op("broadcast", "(tensors, mesh_dims, root)", collective=True)
"""Every worker gets the tensors of the group's worker number `root`."""

permute = _op("permute", "(tensors, mesh_dims, pairs)", collective=True)
"""For each (source, target) of `pairs` (positions in the group) the target gets the source's tensors; others get
zeros."""

wait = _op("wait", "(pending, tensors)", collective=True)
"""The results of the collective `pending`, which its own call has only started: plans for NCCL (see the pass
`overlap-collectives`). `tensors` are those that it moves: they are read until here."""

# -- local ops that depend on where a worker is ------------------------------------------------------------------------

shard = _op("shard", "(tensor, mesh_dim, dim)")
"""The worker's own block of a replicated tensor: no communication."""

first_only = _op("first_only", "(tensor, mesh_dim)")
"""The tensor on the first worker along `mesh_dim`, zeros on the others: a replicated value as a partial sum."""

axis_index = _op("axis_index", "(mesh_dim)")
"""The worker's position along `mesh_dim`, as an i64[] tensor."""

to_varying = _op("to_varying", "(tensor, mesh_dim, dim)")
"""Where per-worker code begins: the worker's own block of the dim `dim` along `mesh_dim`, as a tensor of that size;
with None the whole tensor, which is the same on every worker. Moves nothing where the tensor has that layout."""

from_varying = _op("from_varying", "(tensor, mesh_dim, placement)")
"""The end of per-worker code: the tensors that the workers along `mesh_dim` have of their own, as one value of the
mesh: blocks of the dim `placement`, or summands of the reduction `placement` ("sum", "max", …). Moves nothing."""

embedding_shard = _op("embedding_shard", "(weight, indices, mesh_dim)")
"""Rows of a weight whose dim 0 is sharded over `mesh_dim`: zeros where the row is another worker's (a partial sum)."""

embedding_backward_shard = _op("embedding_backward_shard", "(grad, indices, rows, padding_idx, mesh_dim)")
"""The gradient of the worker's own block of `rows` rows of an embedding sharded over `mesh_dim`."""

gather_shard = _op("gather_shard", "(tensor, dim, index, mesh_dim)")
"""`aten.gather` along a dim sharded over `mesh_dim`: zeros where the element is another worker's (a partial sum)."""

scatter_shard = _op("scatter_shard", "(tensor, dim, index, value, mesh_dim)")
"""`aten.scatter` along a dim sharded over `mesh_dim`: each worker writes the elements that are its own."""

in_range = _op("in_range", "(indices, rows, ignored)")
"""The indices as they are; an error where one is neither in 0 <= i < `rows` nor `ignored` (an int or None). It stands
in front of lookups in a dim with padding, whose own check would let an index into the padding pass."""

fill_padding = _op("fill_padding", "(tensor, dim, size, fill, mesh_dims)")
"""The tensor with `fill` behind the first `size` elements of `dim`, of which the worker has a block along the nested
`mesh_dims`. Plans write zeros over the tensor's own padding where they may (`fill_padding_`), else over a copy's."""

mean_shard = _op("mean_shard", "(tensor, dims, keepdim, count, dtype)")
"""A worker's summand of a mean over `dims`, sharded along one of them: the sum over `dims` divided by `count`, the
number of elements of the global mean (a partial sum). `dtype` is `aten.mean`'s."""

arange_shard = _op("arange_shard", "(start, step, length, dtype, mesh_dims)")
"""Elements `start + step * i` of the worker's own block of `length` along the nested `mesh_dims`."""

random = _op("random", "(distribution, shape, dtype, seed, stream, global_shape, offsets)")
"""Counter-based random numbers: element i of the *global* tensor depends on (seed, stream, i) alone.

`distribution` is "uniform" (0 <= x < 1), "normal" (mean 0, deviation 1) or "bits" (i64, 0 <= x < 2**62); `shape` is
what this worker makes, a block of `global_shape` whose start along tensor dim d is the worker's position along the
nested mesh dims `offsets[d]` (a list of names) times `shape[d]`. `seed` is an i64[] tensor or int, `stream` an int
that sets the random ops of one program apart."""

sample = _op("sample", "(distribution, parameters, seed, stream, global_shape, offsets)")
"""Counter-based random numbers of a distribution, "gamma", "poisson" or "binomial", each with the parameters at its
place (`monarch.compiler.samplers`). All parameters have one shape and dtype, which are the result's; the rest is as
of `random`."""

check = _op("check", "(tensor, valid, message)")
"""The tensor, where all of `valid` (bools, of the same shape) are true; else the step fails, with the message. Runs
whether or not its result is read."""

find_anomaly = _op("find_anomaly", "(tensor, number, op, text, inf, padding)")
"""Whether the worker's block of the tensor has a NaN (with `inf` also an infinity), as a bool[] of its own. `op` is the
one that made the tensor, or the kind of an input, which `text` describes; `number` is its place in the program.
`padding` has for each dim with padding the dim, its size without, and the mesh dims that shard it."""

number_anomaly = _op("number_anomaly", "(flags, mesh_dims)")
"""The place in the program of the first of a worker's flags that is set, times the number of workers along `mesh_dims`,
plus the worker's own there; a larger number where none is."""

raise_anomaly = _op("raise_anomaly", "(number, mesh_dims, quiet)")
"""The number, where it is of no anomaly, or of one at a place among `quiet`; else the step fails, and says so."""

kernel = _op("kernel", "(tensors, text, over)")
"""The outputs of the generated kernel whose text is `text` (`monarch.compiler.kernels`), a tuple of tensors. `over[i]`
is the number of the tensor whose memory output i takes, or -1 for memory of its own."""

out_of_place = _op("out_of_place", "(op, names, values, written)")
"""The results of the op named `op`, which writes to its arguments, on copies of them: its results that are tensors of
their own, then the copies, a tuple. `names` and `values` are its arguments, `written` the names of those that it
writes."""

constrain = _op("constrain", "(tensor, layout)")
"""The tensor, laid out as the user says (`layout` is a Layout's text). Stands only before partitioning, which makes
it so."""

# -- between the meshes of one program ---------------------------------------------------------------------------------

transfer = _op("transfer", "(tensor, mesh, layout)")
"""The tensor on another of the graph's meshes, which `mesh` names, in a layout (its text, or None: the one that it has,
as far as the dims' names and sizes fit). Stands only in graphs of several meshes; each part then has its half of it:"""

send = _op("send", "(tensor, transfer)")
"""Give what this part has of a tensor to the part that receives transfer number `transfer`. Makes nothing."""

recv = _op("recv", "(transfer, shape, dtype)")
"""The received value of transfer number `transfer`: the worker's block, of `shape`, with zeros where no one sends
anything."""

# -- ops with regions, which are graphs of the graph that they stand in (`Graph.regions`), by name ---------------------

cond = _op("cond", "(predicate, operands, regions)")
"""The results of the first of two regions where the predicate (bool[]) is true, else of the second: a tuple. Both
regions take the operands, and give results of the same types."""

while_loop = _op("while_loop", "(carried, operands, regions)")
"""As long as the first region gives true, the results of the second take the place of the carried values: a tuple of
these in the end. Both regions take the carried values, the operands, and the number of the round (i64[])."""

scan = _op("scan", "(carried, xs, operands, regions, length, reverse)")
"""For each i in 0 <= i < `length`, or from the last with `reverse`, what the one region makes of the carried values,
element i of each of `xs` along dim 0, the operands and i (i64[]): the values carried on, then what is made of this
element. A tuple: what is carried in the end, then what was made of the elements, stacked along a new dim 0."""

WITH_REGIONS = (cond, while_loop, scan)


def regions_at(target: object) -> int:
    """Which argument of an op with regions names them; the one before it holds the operands."""
    return 3 if target is scan else 2


commit = _op("commit", "()", collective=True)
"""Where a step becomes certain: every worker waits here until all have come; only after it is state overwritten."""


def name_of(target: object) -> str:
    """The name of an op of ours that is a node's target, "" for any other target."""
    return target.name if isinstance(target, MonarchOp) else ""


def is_collective(target: object) -> bool:
    """Whether a node's target moves tensors between workers (`commit` and `wait`, which only wait, do not)."""
    return isinstance(target, MonarchOp) and target.collective and target not in (commit, wait)


def acts(target: object) -> bool:
    """Whether a node's target does something besides giving its result, so that it stays where nobody reads that. An op
    with regions may: `functionalize` has left out those that do not."""
    return target in (commit, check, raise_anomaly, send, recv, *WITH_REGIONS)


def by_name(name: str) -> MonarchOp | None:
    return OPS.get(name)
