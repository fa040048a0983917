"""Random numbers on a mesh: counter-based on the global index, so that they are the same on every mesh.

In a program each draw is a stream of its own, and each call has a seed of its own, derived from `manual_seed` and a
counter. Outside programs each draw has a seed of its own, drawn from PyTorch's generator. Numbers differ from a plain
PyTorch run's.

The number of a program's next stream is kept in PyTorch's generator too, as its seed, while the program is traced: so
what saves and restores the generator's state (activation checkpointing, `fork_rng`) gets the same numbers again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from monarch.compiler import ops
from monarch.language.recorder import HANDLERS
from monarch.language.recording import current_program, outside_programs, recording_for
from monarch.language.tensor import DistributedTensor

aten = torch.ops.aten


class _Seeds:
    """The seed of the next call: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of the user's seed and a counter."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, seed: int) -> None:
        self._state = seed
        self._calls = itertools.count(1)

    def next(self) -> int:
        mask = 2**64 - 1
        x = (self._state * 0xD1342543DE82EF95 + next(self._calls) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return (x ^ (x >> 31)) >> 2  # fits an int64, and stays positive


_seeds = _Seeds()
next_seed: Callable[[], int] = _seeds.next


def manual_seed(seed: int) -> None:
    """Start the random numbers of programs and of eager ops on meshes anew from `seed`. Also seeds PyTorch's own
    generator, from which eager ops draw."""
    _seeds.restart(int(seed))
    torch.manual_seed(int(seed))


@contextmanager
def counting_streams() -> Iterator[None]:
    """Count a program's streams from 0 while it is traced, and leave PyTorch's generator as it was."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _next_stream() -> int:
    stream = torch.default_generator.initial_seed()
    torch.default_generator.manual_seed(stream + 1)
    return stream % 2**48


def _own_seed() -> int:
    with outside_programs():
        return int(torch.randint(2**62, (), dtype=torch.int64))


def _draw(distribution: str, shape: Any, dtype: torch.dtype, like: DistributedTensor | None) -> DistributedTensor:
    recording = recording_for(like.mesh) if like is not None else current_program()
    assert recording is not None
    shape = tuple(int(size) for size in shape)
    if recording.program:
        arguments: tuple[Any, ...] = (distribution, shape, dtype, _next_stream())
    else:
        arguments = (distribution, shape, dtype, 0, recording.lift(_own_seed()))
    return recording.own(ops.random, arguments, shape, dtype)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument by its schema name, or its default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value)
    return None


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None else torch.get_default_dtype()


# -- functions that make a tensor ------------------------------------------------------------------------------------


def _make(distribution: str) -> Any:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _draw(distribution, args[0], _floating(kwargs.get("dtype")), None)

    return handle


def _like(distribution: str) -> Any:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _draw(distribution, args[0].shape, kwargs.get("dtype") or args[0].dtype, args[0])

    return handle


def _integers(shape: Any, low: int, high: int, dtype: torch.dtype, like: DistributedTensor | None) -> Any:
    bits = _draw("bits", shape, torch.int64, like)
    return (bits.remainder(high - low) + low).to(dtype)


def _randint(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    low = _argument(func, args, kwargs, "low") or 0
    high, size = (_argument(func, args, kwargs, name) for name in ("high", "size"))
    return _integers(size, low, high, kwargs.get("dtype") or torch.int64, None)


def _randint_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    low = _argument(func, args, kwargs, "low") or 0
    like = args[0]
    return _integers(like.shape, low, _argument(func, args, kwargs, "high"), kwargs.get("dtype") or like.dtype, like)


def _randperm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _draw("bits", (args[0],), torch.int64, None).argsort().to(kwargs.get("dtype") or torch.int64)


def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mean, std = (_argument(func, args, kwargs, name) for name in ("mean", "std"))
    like = next((value for value in (mean, std) if isinstance(value, DistributedTensor)), None)
    if like is None:
        noise = _draw("normal", _argument(func, args, kwargs, "size"), _floating(kwargs.get("dtype")), None)
    else:
        shape = torch.broadcast_shapes(*(value.shape for value in (mean, std) if isinstance(value, torch.Tensor)))
        noise = _draw("normal", shape, like.dtype, like)
    return noise * std + mean


def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With a probability for each element, or (`bernoulli.p`) one for all."""
    like = args[0]
    p = _argument(func, args, kwargs, "p")
    return _coin(like, like if p is None else p)


def _coin(like: DistributedTensor, p: Any) -> Any:
    dtype = like.dtype if like.dtype.is_floating_point else torch.float32
    return (_draw("uniform", like.shape, dtype, like) < p).to(like.dtype)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    p, train = (_argument(func, args, kwargs, name) for name in ("p", "train"))
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _draw("uniform", x.shape, x.dtype, x) >= p
    return x * keep * (1 / (1 - p) if p < 1 else 0.0), keep


# -- methods that fill a tensor --------------------------------------------------------------------------------------


def _fill(sample: Callable[[DistributedTensor, Callable[[str], Any]], Any]) -> Any:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        return target.copy_(sample(target, lambda name: _argument(func, args, kwargs, name)))

    return handle


def _float_like(target: DistributedTensor) -> torch.dtype:
    return target.dtype if target.dtype.is_floating_point else torch.get_default_dtype()


def _uniform(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    low, high = get("from"), get("to")
    return _draw("uniform", target.shape, _float_like(target), target) * (high - low) + low


def _gaussian(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _draw("normal", target.shape, _float_like(target), target) * get("std") + get("mean")


def _log_normal(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _gaussian(target, get).exp()


def _exponential(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return -torch.log1p(-_draw("uniform", target.shape, _float_like(target), target)) / get("lambd")


def _cauchy(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    uniform = _draw("uniform", target.shape, _float_like(target), target)
    return torch.tan((uniform - 0.5) * math.pi) * get("sigma") + get("median")


def _geometric(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    uniform = _draw("uniform", target.shape, torch.float32, target)
    return (torch.log1p(-uniform) / math.log1p(-get("p"))).floor() + 1


def _random(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    low, high = get("from") or 0, get("to")
    if high is None:
        dtype = target.dtype
        high = 2 ** round(-math.log2(torch.finfo(dtype).eps)) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    return _integers(target.shape, low, min(high, 2**62), torch.int64, target)


def _bernoulli_fill(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _coin(target, get("p"))


HANDLERS.update(
    {
        aten.rand: _make("uniform"),
        aten.randn: _make("normal"),
        aten.rand_like: _like("uniform"),
        aten.randn_like: _like("normal"),
        aten.randint: _randint,
        aten.randint_like: _randint_like,
        aten.randperm: _randperm,
        aten.normal: _normal,
        aten.bernoulli: _bernoulli,
        aten.native_dropout: _dropout,
        aten.uniform_: _fill(_uniform),
        aten.normal_: _fill(_gaussian),
        aten.log_normal_: _fill(_log_normal),
        aten.exponential_: _fill(_exponential),
        aten.cauchy_: _fill(_cauchy),
        aten.geometric_: _fill(_geometric),
        aten.random_: _fill(_random),
        aten.bernoulli_: _fill(_bernoulli_fill),
    }
)

__all__ = ["manual_seed", "next_seed"]
