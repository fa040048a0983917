"""Random numbers on a mesh: counter-based on the global index, so that they are the same on every mesh.

In a program each draw is a stream of its own, and each call draws a seed from PyTorch's generator; outside programs
each draw does. So `torch.manual_seed`, `fork_rng`, `get_rng_state` and `set_rng_state` mean what they mean for plain
tensors, but the numbers are others.

While a program is traced, the number of its next stream is kept in PyTorch's generator, as its seed: so what saves and
restores the generator's state (activation checkpointing, `fork_rng`) gets the same numbers again. Where the program
itself seeds the generator, its draws take that seed instead of the call's.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.ops.record import record
from monarch.language.errors import OperatorError
from monarch.language.recorder.checkpoints import checkpoint_part, drawn_along
from monarch.language.recorder.dispatch import mesh_now
from monarch.language.recorder.recording import Recording, outside_programs, recording_for
from monarch.language.recorder.refused_writes import reshaped_in_place
from monarch.language.recorder.validation import check
from monarch.language.recorder.varying import (
    active_dims,
    from_varying,
    to_varying,
    vary,
    varying_together,
)
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import run_fake
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten


_FIRST_STREAM, _FIRST_SEEDED = 0x6D6F6E6172 << 24, 0x63680000 << 24
"""The seeds of PyTorch's generator while a program is traced: the first plus the number of the next stream, or,
once the program has seeded it, the second plus an entry of `_Streams.seeded`."""


class _Streams:
    """The streams of a program that is traced."""

    def __init__(self) -> None:
        self.seeded: list[tuple[int, int]] = []
        """Seeds that the program has given, and the number of the next stream behind each."""

    def next(self) -> tuple[int, int | None]:
        """The number of the next stream, and its seed where that is not the call's."""
        generator = torch.default_generator
        at = generator.initial_seed()
        if 0 <= at - _FIRST_STREAM < 2**24:
            generator.manual_seed(at + 1)
            return at - _FIRST_STREAM, None
        entry = at - _FIRST_SEEDED
        seed, stream = self.seeded[entry] if 0 <= entry < len(self.seeded) else (at % 2**62, 0)
        generator.manual_seed(_FIRST_SEEDED + len(self.seeded))
        self.seeded.append((seed, stream + 1))
        return stream, seed


_streams = threading.local()


def next_seed() -> int:
    """A seed from PyTorch's generator: of a program's call, or of one draw outside of programs."""
    with outside_programs():
        return int(torch.randint(2**62, (), dtype=torch.int64))


def manual_seed(seed: int) -> None:
    """`torch.manual_seed`, which seeds programs and ops on meshes too."""
    torch.manual_seed(int(seed))


@contextmanager
def counting_streams(seeds_at: Callable[[], Source | None]) -> Iterator[None]:
    """Count a program's streams from 0 while it is traced, and leave PyTorch's generator as it was. Raises ProgramError
    where the program leaves the generator seeded anew, with the line where it has done so, if that is known."""
    state = torch.default_generator.get_state()
    _streams.now = _Streams()
    try:
        torch.default_generator.manual_seed(_FIRST_STREAM)
        yield
        if not 0 <= torch.default_generator.initial_seed() - _FIRST_STREAM < 2**24:
            raise ProgramError(
                "the program seeds PyTorch's generator, and leaves it so",
                hint="inside the program that happens only when it is traced: call torch.manual_seed between calls, "
                "or seed within `with torch.random.fork_rng():`.",
                source=seeds_at() or user_source(),
            )
    finally:
        torch.default_generator.set_state(state)


def drawn_streams() -> int | None:
    """How many streams the program that is traced has drawn; None where it has seeded the generator."""
    drawn = torch.default_generator.initial_seed() - _FIRST_STREAM
    return drawn if 0 <= drawn < 2**24 else None


def skip_streams(count: int) -> None:
    """Take this many streams as drawn."""
    torch.default_generator.manual_seed(torch.default_generator.initial_seed() + count)


def _draw(distribution: str, shape: Any, dtype: torch.dtype, like: DistributedTensor | None) -> DistributedTensor:
    mesh = like.mesh if like is not None else mesh_now()
    recording = recording_for(mesh)
    shape = tuple([recording.whole(size) for size in shape])
    if like is None and not recording.program and checkpoint_part():
        raise ProgramError(
            "a checkpoint in per-worker code outside of programs draws random numbers that are like no tensor",
            hint="it would draw others when it computes its values again: use torch.rand_like(x), or a program.",
            source=user_source(),
        )
    stream, key = _stream(recording)
    dims = _own_draws(mesh, key, [] if like is None else [like])
    if dims:
        shape = (mesh.size(dims), *shape)
    drawn = recording.own(ops.random, (distribution, recording.tape.sizes(shape), dtype, *stream), shape, dtype)
    return _own_part(drawn, dims) if dims else drawn


def _own_draws(mesh: Mesh, key: Any, operands: Sequence[DistributedTensor]) -> tuple[str, ...]:
    """The mesh dims along which each worker draws numbers of its own: those of the per-worker code that this is, and
    those along which an operand varies. A checkpoint that computes its values again draws as it did first."""
    found = {*active_dims(mesh), *varying_together(operands)}
    return drawn_along(key, tuple(dim for dim in mesh.mesh_dim_names if dim in found))


def _own_part(drawn: DistributedTensor, dims: tuple[str, ...]) -> DistributedTensor:
    """Each worker's own part of numbers drawn for all workers along these mesh dims, in a dim in front."""
    for dim in dims:
        drawn = to_varying(drawn, dim, 0)
    part: Any = drawn.squeeze(0)
    own: DistributedTensor = part
    return own


def _stream(recording: Recording) -> tuple[tuple[Any, ...], Any]:
    """The number of a draw's stream, and its seed where that is not the call's, as arguments; and what tells the draw
    from others, and is the same where the generator's state is restored."""
    if not recording.program:
        if recording.generator is None:
            recording.generator = torch.get_rng_state()
        number = next_seed()
        return (0, recording.lift(number)), number
    stream, seed = _streams.now.next()
    return ((stream,) if seed is None else (stream, seed)), (stream, seed)


def _sample(distribution: str, *parameters: torch.Tensor) -> DistributedTensor:
    """Numbers of a distribution that takes its parameters at each place; all have one shape and dtype."""
    tensors = [each for each in parameters if isinstance(each, DistributedTensor)]
    mesh = tensors[0].mesh
    recording = recording_for(mesh)
    stream, key = _stream(recording)
    dims = _own_draws(mesh, key, tensors)
    if dims:
        tensors = [_for_all(each, dims) for each in tensors]
    values = tuple(recording.value_of(each._ref) for each in tensors)
    shape, dtype = tuple(tensors[0].shape), tensors[0].dtype
    drawn = recording.own(ops.sample, (distribution, values, *stream), shape, dtype)
    return _own_part(drawn, dims) if dims else drawn


def _for_all(tensor: DistributedTensor, dims: tuple[str, ...]) -> DistributedTensor:
    """The workers' own values along these mesh dims, one behind the other in a dim in front."""
    with torch.no_grad():
        made: Any = vary(tensor, dims).unsqueeze(0)
        for dim in reversed(dims):
            made = from_varying(made, dim, 0)
    several: DistributedTensor = made
    return several


_HALVES = {torch.bfloat16: 8, torch.float16: 11}
"""The digits of dtypes in which a number just below 1 would become 1."""


def _uniforms(shape: Any, dtype: torch.dtype, like: DistributedTensor | None) -> Any:
    """Uniform numbers, 0 <= x < 1; of a complex dtype both parts are."""
    if dtype.is_complex:
        return torch.complex(*(_draw("uniform", shape, dtype.to_real(), like) for _ in range(2)))
    digits = _HALVES.get(dtype)
    if digits is None:
        return _draw("uniform", shape, dtype, like)
    return ((_draw("uniform", shape, torch.float32, like) * 2**digits).floor() * 2.0**-digits).to(dtype)


def _normals(shape: Any, dtype: torch.dtype, like: DistributedTensor | None) -> Any:
    """Normal numbers of mean 0 and variance 1; of a complex dtype each part has half of it."""
    if dtype.is_complex:
        return torch.complex(*(_draw("normal", shape, dtype.to_real(), like) * math.sqrt(0.5) for _ in range(2)))
    return _draw("normal", shape, dtype, like)


_MAKES = {"uniform": _uniforms, "normal": _normals}


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what PyTorch says of arguments that it refuses, whatever the values of the tensors: it is asked for tensors
    without elements."""
    try:
        with outside_programs():
            func(
                *(torch.empty(0, dtype=each.dtype) if isinstance(each, torch.Tensor) else each for each in args),
                **kwargs,
            )
    except (RuntimeError, ValueError) as error:
        raise OperatorError(str(error).strip(), source=user_source()) from error


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
        return _MAKES[distribution](args[0], _floating(kwargs.get("dtype")), None)

    return handle


def _like(distribution: str) -> Any:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _MAKES[distribution](args[0].shape, kwargs.get("dtype") or args[0].dtype, args[0])

    return handle


def _integers(shape: Any, low: int, high: int, dtype: torch.dtype, like: DistributedTensor | None) -> Any:
    if low >= high:
        raise OperatorError(
            f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}", source=user_source()
        )
    bits: torch.Tensor = _draw("bits", shape, torch.int64, like)  # 62 bits
    span = high - low
    if span > 2**62:  # of 64, which are negative where they mean 2**63 and more; sums wrap around
        bits = (bits << 2) ^ (_draw("bits", shape, torch.int64, like) & 3)
        if span < 2**63:
            bits = (bits & (2**63 - 1)).remainder(span)
        elif span < 2**64:
            above = (bits ^ -(2**63)) >= span - 2**63
            bits = torch.where(above, bits - (span - 2**63) - 2**62 - 2**62, bits)
        return (bits + low).to(dtype)
    return (bits.remainder(span) + low).to(dtype)


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
    if isinstance(std, DistributedTensor):
        std = check(std, std >= 0, "normal expects all elements of std >= 0.0")
    elif not isinstance(std, torch.Tensor) and std < 0:
        raise OperatorError(f"normal expects std >= 0.0, but found std {std}", source=user_source())
    if like is None:
        noise = _normals(_argument(func, args, kwargs, "size"), _floating(kwargs.get("dtype")), None)
    else:
        shape = torch.broadcast_shapes(*(value.shape for value in (mean, std) if isinstance(value, torch.Tensor)))
        noise = _normals(shape, like.dtype, like)
    return noise * std + mean


def _bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With a probability for each element, or (`bernoulli.p`) one for all."""
    like = args[0]
    p = _argument(func, args, kwargs, "p")
    return _coin(like, like if p is None else p)


def _coin(like: DistributedTensor, p: Any) -> Any:
    said = "bernoulli expects all elements of p to be in [0, 1]"
    if isinstance(p, DistributedTensor):
        p = check(p, (p >= 0) & (p <= 1), said)
    elif not isinstance(p, torch.Tensor) and not 0 <= p <= 1:
        raise OperatorError(f"{said}, but found {p}", source=user_source())
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return (_draw("uniform", like.shape, dtype, like) < p).to(like.dtype)


def _multinomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices of the last dim, each drawn with a probability that is proportional to the value there."""
    x = args[0]
    count, replacement = (_argument(func, args, kwargs, name) for name in ("num_samples", "replacement"))
    try:
        run_fake(aten.multinomial.default, [x._ref.fake, count, bool(replacement)], {})
    except RuntimeError as error:  # wrong shapes and counts
        raise OperatorError(str(error).strip(), source=user_source()) from error
    x = check(x, (x >= 0) & (x < math.inf), "probability tensor contains either `inf`, `nan` or element < 0")
    x = x.to(torch.float64) if x.dtype == torch.float64 else x.to(torch.float32)
    x = check(x, x.sum(-1, True) > 0, "invalid multinomial distribution (sum of probabilities <= 0)")
    if count == 1 or not replacement:
        return (x / _exponentials(x, 1.0)).topk(count).indices  # the first of races at these rates
    sums = x.cumsum(-1)
    total = sums[..., -1:]
    at: torch.Tensor = _draw("uniform", (*x.shape[:-1], count), x.dtype, x) * total
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))  # the product may have been rounded up
    return torch.searchsorted(sums, at, right=True)


def _poisson(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rate = args[0]
    return _sample("poisson", check(rate, rate >= 0, "invalid Poisson rate, expected rate to be non-negative"))


def _binomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    count, prob = torch.broadcast_tensors(args[0], args[1])
    like = count if isinstance(count, DistributedTensor) else prob
    recording = recording_for(like.mesh)
    count, prob = (x if isinstance(x, DistributedTensor) else recording.constant(x) for x in (count, prob))
    return _sample("binomial", count, prob.to(count.dtype))


def _gamma(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gamma numbers of scale 1, and never 0: PyTorch's gradients take their logarithm."""
    return _sample("gamma", args[0]).clamp(min=torch.finfo(args[0].dtype).tiny)


def _dirichlet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    made = _gamma(func, (x.to(torch.float64),), {})
    return (made / made.sum(-1, True)).to(x.dtype).clamp(min=torch.finfo(x.dtype).tiny)


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    p, train = (_argument(func, args, kwargs, name) for name in ("p", "train"))
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = _draw("uniform", x.shape, torch.float64 if x.dtype == torch.float64 else torch.float32, x) >= p
    return x * keep * (1 / (1 - p) if p < 1 else 0.0), keep


def _rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leaky ReLU with a slope for each element, which is left in `noise`; also in place."""
    x, noise = args[0], args[1]
    lower, upper, training = (_argument(func, args, kwargs, name) for name in ("lower", "upper", "training"))
    if training:
        slope = _uniforms(x.shape, x.dtype, x) * (upper - lower) + lower
        noise.copy_(torch.where(x <= 0, slope, 1.0))
        made = x * noise
    else:
        made = torch.where(x <= 0, x * ((lower + upper) / 2), x)
    return x.copy_(made) if func.overloadpacket is aten.rrelu_with_noise_ else made


# -- methods that fill a tensor --------------------------------------------------------------------------------------


def _fill(sample: Callable[[DistributedTensor, Callable[[str], Any]], Any]) -> Any:
    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        _refuse(func, args, kwargs)
        return target.copy_(sample(target, lambda name: _argument(func, args, kwargs, name)))

    return handle


def _float_like(target: DistributedTensor) -> torch.dtype:
    dtype = target.dtype
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def _uniform(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    low, high = get("from"), get("to")
    return _uniforms(target.shape, _float_like(target), target) * (high - low) + low


def _gaussian(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _normals(target.shape, _float_like(target), target) * get("std") + get("mean")


def _log_normal(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _gaussian(target, get).exp()


def _exponential(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _exponentials(target, get("lambd"))


def _exponentials(like: DistributedTensor, rate: float) -> Any:
    """Never 0, as PyTorch's: others divide by them."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    uniform = _draw("uniform", like.shape, dtype, like)
    return (-torch.log1p(-uniform)).clamp(min=torch.finfo(dtype).eps / 2) / rate


def _cauchy(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    uniform = _draw("uniform", target.shape, torch.float32, target)
    return torch.tan((uniform - 0.5) * math.pi) * get("sigma") + get("median")


def _geometric(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    uniform = _draw("uniform", target.shape, torch.float32, target)
    return (torch.log1p(-uniform) / math.log1p(-get("p"))).floor() + 1


def _random(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    low, high = get("from") or 0, get("to")
    if high is None:
        dtype = target.dtype
        if dtype.is_floating_point:  # all that it has exactly, from 0 on
            high = round(2 / torch.finfo(dtype).eps) + 1
        else:
            high = 2 if dtype is torch.bool else torch.iinfo(dtype).max + 1
    return _integers(target.shape, low, high, torch.int64, target)


def _bernoulli_fill(target: DistributedTensor, get: Callable[[str], Any]) -> Any:
    return _coin(target, get("p"))


def _or_into_out(handler: Any) -> Any:
    """A handler of calls that may say where their result goes: `torch.normal(mean, std, out=x)`."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.get("out")
        if out is None:
            return handler(func, args, kwargs)
        made = handler(func, args, {**kwargs, "out": None, "dtype": out.dtype})
        if made.shape != out.shape:
            raise reshaped_in_place(func)
        return out.copy_(made)

    return handle


for _op, _handler in {
    aten.rand: _make("uniform"),
    aten.randn: _make("normal"),
    aten.rand_like: _like("uniform"),
    aten.randn_like: _like("normal"),
    aten.randint: _randint,
    aten.randint_like: _randint_like,
    aten.randperm: _randperm,
    aten.normal: _normal,
    aten.bernoulli: _bernoulli,
    aten.multinomial: _multinomial,
    aten.poisson: _poisson,
    aten.binomial: _binomial,
    aten._standard_gamma: _gamma,
    aten._sample_dirichlet: _dirichlet,
    aten.native_dropout: _dropout,
    aten.rrelu_with_noise: _rrelu,
    aten.rrelu_with_noise_: _rrelu,
    aten.uniform_: _fill(_uniform),
    aten.normal_: _fill(_gaussian),
    aten.log_normal_: _fill(_log_normal),
    aten.exponential_: _fill(_exponential),
    aten.cauchy_: _fill(_cauchy),
    aten.geometric_: _fill(_geometric),
    aten.random_: _fill(_random),
    aten.bernoulli_: _fill(_bernoulli_fill),
}.items():
    record(_op).record = _or_into_out(_handler)

__all__ = ["manual_seed", "next_seed"]
