"""The computations of the local ops of `monarch.compiler.ops`: shared by the workers and the tests' reference executor.

Each takes the op's arguments, and `position` and `sizes`: the worker's coordinate, and the mesh's size, by mesh dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from monarch.compiler.layout import nested_index
from monarch.compiler.loops.interpret import interpret
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.names import find_op
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.samplers import SAMPLERS

Where = Mapping[str, int]


def shard(position: Where, sizes: Where, tensor: torch.Tensor, mesh_dim: str, dim: int) -> torch.Tensor:
    block = tensor.shape[dim] // sizes[mesh_dim]
    return tensor.narrow(dim, position[mesh_dim] * block, block).contiguous()


def first_only(position: Where, sizes: Where, tensor: torch.Tensor, mesh_dim: str) -> torch.Tensor:
    return tensor if position[mesh_dim] == 0 else torch.zeros_like(tensor)


def axis_index(position: Where, sizes: Where, mesh_dim: str) -> torch.Tensor:
    return torch.full((), position[mesh_dim])  # filled on the device, where torch.tensor would copy it there


def same(position: Where, sizes: Where, tensor: torch.Tensor, mesh_dim: str, placement: object) -> torch.Tensor:
    return tensor


def _own(
    index: torch.Tensor, length: int, mesh_dim: str, position: Where, sizes: Where
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global indices as indices into the worker's own block of `length` (0 where they are another worker's), and which
    are. Raises IndexError for an index that is no worker's."""
    _check_range(index, length * sizes[mesh_dim])
    local = index - position[mesh_dim] * length
    own = (local >= 0) & (local < length)
    return torch.where(own, local, 0), own


def _check_range(index: torch.Tensor, size: int) -> None:
    """Raise IndexError unless all of `index` is in 0 <= i < size. On a GPU the device stops, as in ATen's lookups."""
    if index.numel() == 0:
        return
    if index.device.type != "cpu" or type(index) is not torch.Tensor:  # on a GPU, or without data
        torch._assert_async(((index >= 0) & (index < size)).all())
        return
    least, most = (int(bound) for bound in index.aminmax())
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise IndexError(f"index out of range: {wrong}, and there are {size} rows")


def fill_padding(position: Where, sizes: Where, tensor: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    return fill_padding_(position, sizes, tensor.clone(), *rest, **named)


def fill_padding_(
    position: Where,
    sizes: Where,
    tensor: torch.Tensor,
    dim: int,
    size: int,
    fill: float,
    mesh_dims: Sequence[str],
) -> torch.Tensor:
    length = tensor.shape[dim]
    own = min(max(size - nested_index(mesh_dims, position, sizes) * length, 0), length)
    if own < length:
        tensor.narrow(dim, own, length - own).fill_(fill)
    return tensor


def in_range(position: Where, sizes: Where, indices: torch.Tensor, rows: int, ignored: int | None) -> torch.Tensor:
    _check_range(indices if ignored is None else indices.masked_fill(indices == ignored, 0), rows)
    return indices


def embedding_shard(
    position: Where, sizes: Where, weight: torch.Tensor, indices: torch.Tensor, mesh_dim: str
) -> torch.Tensor:
    local, own = _own(indices, weight.shape[0], mesh_dim, position, sizes)
    rows = torch.nn.functional.embedding(local, weight)
    return rows.masked_fill_(~own.unsqueeze(-1), 0)  # 0 times an infinity would be NaN


def embedding_backward_shard(
    position: Where, sizes: Where, grad: torch.Tensor, indices: torch.Tensor, rows: int, padding_idx: int, mesh_dim: str
) -> torch.Tensor:
    local, own = _own(indices, rows, mesh_dim, position, sizes)
    if padding_idx >= 0:
        own = own & (indices != padding_idx)
    return torch.ops.aten.embedding_dense_backward(grad.masked_fill(~own.unsqueeze(-1), 0), local, rows, -1, False)


def gather_shard(
    position: Where, sizes: Where, tensor: torch.Tensor, dim: int, index: torch.Tensor, mesh_dim: str
) -> torch.Tensor:
    local, own = _own(index, tensor.shape[dim], mesh_dim, position, sizes)
    return tensor.gather(dim, local).masked_fill_(~own, 0)


def scatter_shard(
    position: Where,
    sizes: Where,
    tensor: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    value: torch.Tensor | float,
    mesh_dim: str,
) -> torch.Tensor:
    local, own = _own(index, tensor.shape[dim], mesh_dim, position, sizes)
    # Elements of other workers are written to one extra place past the block, which is then cut off.
    length = tensor.shape[dim]
    padded = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
    local = torch.where(own, local, length)
    return padded.scatter(dim, local, value).narrow(dim, 0, length).contiguous()


def mean_shard(
    position: Where,
    sizes: Where,
    tensor: torch.Tensor,
    dims: Sequence[int],
    keepdim: bool,
    count: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # Scaling the block's own mean, not dividing its sum, keeps half-precision sums from overflowing.
    own = math.prod(tensor.shape[dim] for dim in dims)
    return tensor.mean(list(dims), keepdim, dtype=dtype) * (own / max(count, 1))  # of nothing it is NaN


def arange_shard(
    position: Where,
    sizes: Where,
    start: float,
    step: float,
    length: int,
    dtype: torch.dtype,
    mesh_dims: Sequence[str],
) -> torch.Tensor:
    first = nested_index(mesh_dims, position, sizes) * length
    index = torch.arange(first, first + length)
    if not (isinstance(start, int) and isinstance(step, int)):
        index = index.to(torch.float64)  # as torch.arange reckons; times a Python float an int tensor would be float32
    return index.mul(step).add(start).to(dtype)


MIX1, MIX2, GOLDEN = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """An unsigned right shift: int64 shifts bring in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer (Steele, Lea and Flood, OOPSLA 2014) on int64, which wraps as unsigned does."""
    x = (x ^ _shift(x, 30)) * MIX1
    x = (x ^ _shift(x, 27)) * MIX2
    return x ^ _shift(x, 31)


def random(
    position: Where,
    sizes: Where,
    distribution: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor | int,
    stream: int,
    global_shape: Sequence[int],
    offsets: Sequence[Sequence[str]],
) -> torch.Tensor:
    index = _numbered(position, sizes, shape, global_shape, offsets)
    bits = _mix(index * GOLDEN + _key(seed, stream))
    if distribution == "bits":
        return _shift(bits, 2)
    uniform = _shift(bits, 40).to(torch.float64) * 2.0**-24  # 24 bits: exact in float32, never 1
    if distribution == "uniform":
        return uniform.to(dtype)
    if distribution != "normal":
        raise ValueError(f"no such distribution: {distribution!r}")
    # Box and Muller (1958): a second, independent stream of bits gives the angle; 1 - u keeps the logarithm finite.
    angle = _shift(_mix(bits ^ GOLDEN), 40).to(torch.float64) * (2.0**-24 * 2 * math.pi)
    return (torch.sqrt(-2 * torch.log1p(-uniform)) * torch.cos(angle)).to(dtype)


def _numbered(
    position: Where, sizes: Where, shape: Sequence[int], global_shape: Sequence[int], offsets: Sequence[Sequence[str]]
) -> torch.Tensor:
    """The numbers, in the global tensor, of the elements of the worker's own block."""
    index = torch.zeros([1] * len(shape), dtype=torch.int64)
    for dim, length in enumerate(shape):
        first = nested_index(offsets[dim], position, sizes) * length
        stride = math.prod(global_shape[dim + 1 :])
        along = torch.arange(first, first + length).mul(stride)
        index = index + along.view([-1 if d == dim else 1 for d in range(len(shape))])
    return index


def _key(seed: torch.Tensor | int, stream: int) -> torch.Tensor:
    return _mix(_mix(torch.as_tensor(seed, dtype=torch.int64) + GOLDEN) + stream * 2 + 1)


def sample(
    position: Where,
    sizes: Where,
    distribution: str,
    parameters: Sequence[torch.Tensor],
    seed: torch.Tensor | int,
    stream: int,
    global_shape: Sequence[int],
    offsets: Sequence[Sequence[str]],
) -> torch.Tensor:
    first = parameters[0]
    if first.is_meta or type(first) is not torch.Tensor:  # without data
        return torch.empty_like(first, memory_format=torch.contiguous_format)
    index = _numbered(position, sizes, first.shape, global_shape, offsets) * GOLDEN
    key = _key(seed, stream)

    def uniform() -> torch.Tensor:
        nonlocal key
        key = _mix(key + GOLDEN)
        return (_shift(_mix(index + key), 11).to(torch.float64) + 0.5) * 2.0**-53

    made = SAMPLERS[distribution](*(each.to(torch.float64) for each in parameters), uniform)
    return made.to(first.dtype)


class CheckFailed(RuntimeError, ValueError, AssertionError):
    """A `check` has met a value that is not as it has to be."""


def check(position: Where, sizes: Where, tensor: torch.Tensor, valid: torch.Tensor, message: str) -> torch.Tensor:
    if valid.device.type != "cpu" or type(valid) is not torch.Tensor:  # on a GPU, or without data
        torch._assert_async(valid.all())
    elif not valid.all():
        raise CheckFailed(message)
    return tensor


class AnomalyFound(RuntimeError):
    """The first anomaly of a step: its place in the program, and the number of the worker that has it."""

    def __init__(self, number: int, worker: int) -> None:
        super().__init__(number, worker)
        self.number, self.worker = number, worker


_NO_ANOMALY = 1 << 62


def find_anomaly(
    position: Where,
    sizes: Where,
    tensor: torch.Tensor,
    number: int,
    op: str,
    text: str,
    inf: bool,
    padding: Sequence[tuple[int, int, Sequence[str]]],
) -> torch.Tensor:
    for dim, size, mesh_dims in padding:
        length = tensor.shape[dim]
        own = min(max(size - nested_index(mesh_dims, position, sizes) * length, 0), length)
        tensor = tensor.narrow(dim, 0, own)
    if tensor.dtype.itemsize == 1:  # few ops know types of 8 bits
        tensor = tensor.to(torch.float32)
    return (~tensor.isfinite() if inf else tensor.isnan()).any()


def number_anomaly(
    position: Where, sizes: Where, flags: Sequence[torch.Tensor], mesh_dims: Sequence[str]
) -> torch.Tensor:
    workers = math.prod(sizes[name] for name in mesh_dims)
    mine = nested_index(mesh_dims, position, sizes)
    found = torch.stack(list(flags))
    numbers = torch.arange(len(flags), device=found.device) * workers + mine
    return torch.where(found, numbers, _NO_ANOMALY).amin()


def raise_anomaly(
    position: Where, sizes: Where, number: torch.Tensor, mesh_dims: Sequence[str], quiet: Sequence[int]
) -> torch.Tensor:
    if type(number) is torch.Tensor and not number.is_meta and (first := int(number)) != _NO_ANOMALY:
        place, worker = divmod(first, math.prod(sizes[name] for name in mesh_dims))
        if place not in quiet:
            raise AnomalyFound(place, worker)
    return number


def kernel(
    position: Where, sizes: Where, tensors: Sequence[torch.Tensor], text: str, over: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    # The memory of the results makes no difference to their values.
    return tuple(interpret(parse_kernel(text), tensors))


def out_of_place(
    position: Where, sizes: Where, op: str, names: Sequence[str], values: Sequence[Any], written: Sequence[str]
) -> tuple[Any, ...]:
    given = dict(zip(names, values, strict=True))
    copies: list[torch.Tensor] = []
    for name in written:
        value = given[name]
        several = [each.clone() for each in value] if isinstance(value, (list, tuple)) else [value.clone()]
        given[name] = several if isinstance(value, (list, tuple)) else several[0]
        copies += several
    overload = find_op(op)
    made = overload(**given)
    results = made if isinstance(made, (list, tuple)) else [made]
    return (*(results[at] for at in memory_of(overload).gives), *copies)


_OWN_NAMES: tuple[Callable[..., Any], ...] = (
    *(shard, first_only, axis_index, fill_padding, fill_padding_, in_range, embedding_shard, embedding_backward_shard),
    *(gather_shard, scatter_shard, mean_shard, arange_shard, random, sample, check, find_anomaly, number_anomaly),
    *(raise_anomaly, kernel, out_of_place),
)
LOCAL_OPS = {op.__name__: op for op in _OWN_NAMES} | {"to_varying": same, "from_varying": same}
