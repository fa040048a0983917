"""Functions of PyTorch's that look at their operands' data or memory, as compositions of ops that do not.

PyTorch takes these apart in C++ before a distributed tensor is asked: bags of embeddings give tensors whose sizes
depend on the machine, and `one_hot` compares, rather than refuse a class that is not there. For distributed tensors the
functions here, and those of `recurrent`, take their place; plain ones go on to PyTorch's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from monarch.compiler.ops.grouped import FORMS, grouped_mm
from monarch.compiler.ops.record import enter
from monarch.language.errors import OperatorError
from monarch.language.recorder.dispatch import record
from monarch.language.recorder.known import known_value
from monarch.language.recorder.recording import current_program
from monarch.language.recorder.selecting import narrow
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("aten", "IMPL")


def composite(overload: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function runs in place of this overload where a distributed tensor is among its arguments."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_distributed((*args, *kwargs.values())):
                return function(*args, **kwargs)
            return overload._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

        name = overload._schema.name.split("::")[1]
        suffix = overload._schema.overload_name
        _LIBRARY.impl(f"{name}.{suffix}" if suffix else name, call, "AutogradCPU")
        # Under inference mode, which skips autograd, the recorder meets the op itself.
        if overload.overloadpacket not in _OVERLOADS:
            enter((overload.overloadpacket,), record=_handle)
        _OVERLOADS.setdefault(overload.overloadpacket, {})[overload] = function
        return function

    return register


_OVERLOADS: dict[Any, dict[Any, Callable[..., Any]]] = {}


def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _OVERLOADS[func.overloadpacket][func](*args, **kwargs)


def _is_distributed(args: Any) -> bool:
    return any(
        isinstance(arg, DistributedTensor) or (isinstance(arg, (list, tuple)) and _is_distributed(arg)) for arg in args
    )


def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a, b, ends, bias, dtype = (*args, None, None, None)[:5]
    if bias is not None or (ends is None) == ((a.ndim, b.ndim) in FORMS):
        return record(func, args, kwargs)  # PyTorch raises its error
    product = torch.bmm(a, b) if ends is None else grouped_mm()(a, b, ends)
    return product if dtype is None else product.to(dtype)


enter((aten._grouped_mm,), record=_grouped_mm)


@composite(aten.one_hot.default)
def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        num_classes = int(tensor.max().item()) + 1
    zeros = torch.zeros_like(tensor.unsqueeze(-1).expand(*tensor.shape, num_classes))
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


composite(aten.narrow.Tensor)(narrow)


@composite(aten.max_pool1d.default)
def _max_pool1d(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _max_pool1d_with_indices(*args, **kwargs)[0]


@composite(aten.max_pool1d_with_indices.default)
def _max_pool1d_with_indices(
    x: torch.Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel, stride, padding, dilation = (
        [other, *(each if isinstance(each, (list, tuple)) else [each])] if each != [] and each != () else []
        for each, other in ((kernel, 1), (stride, 1), (padding, 0), (dilation, 1))
    )
    made = F.max_pool2d_with_indices(x.unsqueeze(-2), kernel, stride or None, padding, dilation, ceil_mode)
    return made[0].squeeze(-2), made[1].squeeze(-2)


@composite(aten.tensor_split.tensor_indices_or_sections)
def _tensor_split(x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
    """How many parts there are, and how long, has to be known: a place that only workers know is an error."""
    found = places.tolist()
    return x.tensor_split(found, dim)


@composite(aten.fill_diagonal_.default)
def _fill_diagonal(x: torch.Tensor, value: Any, wrap: bool = False) -> Any:
    """PyTorch's own takes a view by strides, which workers may hold otherwise."""
    if x.ndim != 2:
        form: Any = aten.fill_diagonal_.default._op_dk
        return form(torch._C.DispatchKey.CompositeImplicitAutograd, x, value, wrap)
    for start in range(0, x.shape[0] if wrap else 1, x.shape[1] + 1):
        x[start:].diagonal().fill_(value)
    return x


@composite(aten.embedding_bag.default)
@composite(aten.embedding_bag.padding_idx)
def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Only the first result, the bags, is a value: the others serve a backward pass that never runs."""
    if scale_grad_by_freq and weight.requires_grad and torch.is_grad_enabled():
        raise OperatorError(
            "the gradient of embedding_bag with scale_grad_by_freq=True: PyTorch's on CPUs divides a row's gradient by "
            "the count of another row, and on GPUs by its own",
            hint="rows = F.embedding(indices, weight, scale_grad_by_freq=True) divides by each row's own count; "
            "rows.sum(1) makes bags of rows of indices.",
            source=user_source(),
        )
    if include_last_offset:
        offsets = offsets[:-1]
    count, width = offsets.shape[0], weight.shape[1]
    bag = torch.searchsorted(offsets, torch.arange(indices.shape[0], dtype=offsets.dtype), right=True) - 1
    rows = F.embedding(indices, weight)
    kept = torch.ones_like(indices, dtype=weight.dtype)
    if padding_idx is not None:
        kept = (indices != padding_idx % weight.shape[0]).to(weight.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == 2:
        place = _largest_of_bags(rows.detach(), bag, kept > 0, count)
        bags = torch.cat([rows, rows.new_zeros(1, width)]).gather(0, place)
    else:
        bags = rows.new_zeros(count, width).index_add(0, bag, rows * kept.unsqueeze(-1))
        if mode == 1:
            bags = bags / kept.new_zeros(count).index_add(0, bag, kept).clamp(min=1).unsqueeze(-1)
    return bags, bag, offsets, offsets


def _largest_of_bags(rows: torch.Tensor, bag: torch.Tensor, kept: torch.Tensor, count: int) -> torch.Tensor:
    """For each bag and column the first row of the largest number there, or the number of rows where a bag has none.
    PyTorch goes through a bag's rows for a number that is larger than the largest so far: a NaN stays where it comes
    first, and is passed over elsewhere."""
    at = torch.arange(rows.shape[0]).unsqueeze(-1).expand_as(rows)
    bag, kept = bag.unsqueeze(-1).expand_as(rows), kept.unsqueeze(-1)
    none = at.new_full((count, rows.shape[1]), rows.shape[0])
    first = none.scatter_reduce(0, bag, torch.where(kept, at, rows.shape[0]), "amin").gather(0, bag) == at
    rows = torch.where(first & rows.isnan(), torch.inf, rows).masked_fill(~kept | rows.isnan() & ~first, -torch.inf)
    most = rows.new_full(none.shape, -torch.inf).scatter_reduce(0, bag, rows, "amax").gather(0, bag)
    # Behind a NaN that comes first nothing is found, also no infinity.
    return none.scatter_reduce(0, bag, torch.where(kept & (rows == most), at, rows.shape[0]), "amin")


@composite(aten.kron.default)
def _kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """PyTorch's computes with sizes as numbers, as those of `cov` and `vander` do."""
    first, second = ((1,) * (max(a.ndim, b.ndim) - x.ndim) + tuple(x.shape) for x in (a, b))
    apart = a.reshape([part for size in first for part in (size, 1)])
    apart = apart * b.reshape([part for size in second for part in (1, size)])
    return apart.reshape([one * other for one, other in zip(first, second, strict=True)])


@composite(aten.kron.out)
def _kron_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """PyTorch's writes to a view that it calls none (`_unsafe_view`)."""
    made = _kron(a, b)
    return (out if out.shape == made.shape else out.resize_(made.shape)).copy_(made)


@composite(aten.linalg_multi_dot.default)
def _multi_dot(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In the order that takes the fewest multiplications, of those that do the first one that PyTorch comes to."""
    ends = len(tensors) > 1 and tensors[0].ndim == 1, len(tensors) > 1 and tensors[-1].ndim == 1
    chain = list(tensors)
    if ends[0]:
        chain[0] = chain[0].unsqueeze(0)
    if ends[1]:
        chain[-1] = chain[-1].unsqueeze(-1)
    pairs = zip(chain[:-1], chain[1:], strict=True)
    if len(chain) < 2 or any(x.ndim != 2 for x in chain) or any(x.shape[1] != y.shape[0] for x, y in pairs):
        form: Any = aten.linalg_multi_dot.default._op_dk  # which raises PyTorch's error
        return form(torch._C.DispatchKey.CompositeImplicitAutograd, tensors)
    made = _product(chain, _splits([chain[0].shape[0], *(x.shape[1] for x in chain)]), 0, len(chain) - 1)
    made = made.squeeze(0) if ends[0] else made
    return made.squeeze(-1) if ends[1] else made


def _splits(sizes: Sequence[Any]) -> dict[tuple[int, int], int]:
    """Behind which matrix a chain of them is split, by its first and last one."""
    count = len(sizes) - 1
    costs: dict[tuple[int, int], Any] = {(at, at): 0 for at in range(count)}
    found = {}
    for length in range(1, count):
        for first in range(count - length):
            last = first + length
            for at in range(first, last):
                cost = costs[first, at] + costs[at + 1, last] + sizes[first] * sizes[at + 1] * sizes[last + 1]
                # Of three matrices PyTorch takes the first two first where both orders cost the same.
                if at == first or cost < costs[first, last] or (count == 3 and cost == costs[first, last]):
                    costs[first, last], found[first, last] = cost, at
    return found


def _product(chain: Sequence[torch.Tensor], splits: dict[tuple[int, int], int], first: int, last: int) -> torch.Tensor:
    if first == last:
        return chain[first]
    at = splits[first, last]
    return _product(chain, splits, first, at) @ _product(chain, splits, at + 1, last)


@composite(aten.cov.default)
def _cov(
    x: torch.Tensor,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    if x.ndim > 2 or fweights is not None or aweights is not None:
        form: Any = aten.cov.default._op_dk  # which reads the weights, and raises PyTorch's error
        return form(
            torch._C.DispatchKey.CompositeImplicitAutograd,
            x,
            correction=correction,
            fweights=fweights,
            aweights=aweights,
        )
    x = x.reshape(1, -1) if x.ndim < 2 else x
    count = x.shape[1]
    off = x - (x.sum(1) / count).unsqueeze(1)
    if count <= correction:
        warnings.warn("cov(): degrees of freedom is <= 0.", stacklevel=2)
    return (off @ off.mT.conj() / max(count - correction, 0)).squeeze()


@composite(aten.linalg_vander.default)
def _linalg_vander(x: torch.Tensor, N: int | None = None) -> torch.Tensor:
    count = x.shape[-1] if N is None else N
    if count < 2 or x.dtype is torch.bool:
        form: Any = aten.linalg_vander.default._op_dk  # which raises PyTorch's error
        return form(torch._C.DispatchKey.CompositeImplicitAutograd, x, N=N)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.int64)
    first = torch.ones_like(x).unsqueeze(-1)
    return torch.cat([first, x.unsqueeze(-1).expand(*x.shape, count - 1)], -1).cumprod(-1)


@composite(aten.vander.default)
def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    if x.ndim != 1 or (x.shape[0] if N is None else N) < 2:
        form: Any = aten.vander.default._op_dk
        return form(torch._C.DispatchKey.CompositeImplicitAutograd, x, N, increasing)
    powers = _linalg_vander(x.to(torch.uint8) if x.dtype is torch.bool else x, N)
    return powers if increasing else powers.flip(1)


@composite(aten.ctc_loss.IntList)
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """PyTorch's makes a tensor of the lengths behind the recorder's back."""
    alone = log_probs.ndim == 2
    batch = log_probs.unsqueeze(1) if alone else log_probs
    losses = aten._ctc_loss.default(batch, targets, list(input_lengths), list(target_lengths), blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0, losses)
    if reduction == 0:
        return losses.squeeze(0) if alone else losses
    if reduction == 1:
        losses = losses / torch.tensor([max(1, length) for length in target_lengths], dtype=losses.dtype)
    return losses.mean() if reduction == 1 else losses.sum()


@composite(aten.ctc_loss.Tensor)
def _ctc_loss_of_tensors(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """How long the longest target is has to be known: lengths that only workers know are an error."""
    recording = current_program()
    lengths: list[Any] = []
    for each in (input_lengths, target_lengths):
        asked = recording is not None and isinstance(each, DistributedTensor)
        lengths.append(known_value(recording, each) if asked else each)  # type: ignore[arg-type]
    if any(each is None for each in lengths):
        found: torch.Tensor = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths)[0]
        return found  # the error that says what to do
    first, second = (each.reshape(-1).tolist() for each in lengths)
    return _ctc_loss(log_probs, targets, first, second, blank, reduction, zero_infinity)


def _not_nested(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`nn.TransformerEncoder` takes padding out of its batch, as nested tensors, where the padding stands at the ends:
    this answers that it does not."""
    return False


enter((aten._nested_tensor_from_mask_left_aligned,), record=_not_nested)
