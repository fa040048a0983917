"""A second judge of the sharding rules: PyTorch's `torch.distributed.tensor._ops.strategy_validation`.

    python -m tests.ops --judge                   # all entries
    python -m tests.ops --judge mm sum            # those whose names have one of these in them

It cuts real operands over one mesh dim of 2 workers as given placements say, runs the op on each part, joins the
results, and compares them with the dense ones. Asked of each ATen op that the samples of
PyTorch's op database call, and that has a rule here:

incorrect   a strategy of ours that does not hold
missing     placements that hold, and that no strategy of ours gives, nor one from which they are had for free

Its partial averages, and pending minima and maxima of operands, are not among our placements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.ops.record import find
from monarch.compiler.rules import Strategy, rule_for
from monarch.compiler.types import DTYPE_NAMES, Placement
from tests.compiler.rules.dense import Sample, Traced, check, had_for_free, local_node, run, shape_of, trace

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo

WORKERS = 2
MOST = 1500
"""Combinations of placements that are tried for one call. Calls with more have their own strategies checked alone."""


@dataclass
class Findings:
    """What became of the calls of an entry: how many were judged, how many strategies of ours held, and what did not
    hold or was missing, by op, with an example of each."""

    name: str
    calls: int = 0
    correct: int = 0
    incorrect: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    explained: Counter[str] = field(default_factory=Counter)


def validation() -> Any:
    """PyTorch's module. ImportError where this torch has none."""
    from torch.distributed.tensor._ops import strategy_validation

    return strategy_validation


@contextmanager
def even_sizes() -> Iterator[None]:
    """Samples of sizes that 2 divides, as the judge's own command makes them."""
    from torch.testing._internal import common_methods_invocations as common
    from torch.testing._internal.opinfo import core

    sizes = {"L": 24, "M": 12, "S": 4, "XS": 2}
    before = [(module, name, getattr(module, name)) for module in (core, common) for name in sizes]
    try:
        for module, name, _ in before:
            setattr(module, name, sizes[name])
        yield
    finally:
        for module, name, size in before:
            setattr(module, name, size)


@contextmanager
def workers() -> Iterator[Any]:
    """The judge's mesh of simulated workers."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORKERS, store=FakeStore())
    try:
        with LocalTensorMode(frozenset(range(WORKERS))):
            yield init_device_mesh("cpu", (WORKERS,))
    finally:
        dist.destroy_process_group()


def judge(op: OpInfo, dtype: torch.dtype, samples: int) -> Findings:
    """Ask about the calls of an entry's first samples."""
    found, seen = Findings(str(op.name)), set()
    torch.manual_seed(0)
    try:
        with even_sizes():
            drawn = list(islice(op.sample_inputs("cpu", dtype), samples))
    except IndexError:
        found.explained["PyTorch draws no samples of even sizes"] += 1
        return found
    for sample in drawn:
        for func, args, kwargs, result in validation().get_aten_op_for_sample(op.op, sample, op.name).all_ops:
            call = Sample(func, tuple(args), kwargs)
            if str(call) not in seen:
                seen.add(str(call))
                # Later calls may have written to what this one took and gave.
                _judge_call(found, call, result if call.op._schema.is_mutable else func(*args, **kwargs))
    return found


def _judge_call(found: Findings, call: Sample, result: Any) -> None:
    if any(isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided for leaf in pytree.tree_leaves(result)):
        return  # no mesh holds such
    sv = validation()
    truth = sv._check_ground_truth(result)
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)]
    if truth is None or not tensors or not all(tensor.numel() for tensor in tensors) or _is_other(call):
        return
    both = [*tensors, *(truth if isinstance(truth, list) else [truth])]
    if any(tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES for tensor in both):
        return  # no mesh holds such
    if not all(tensor.isfinite().all() for tensor in both):
        return  # no summands make up an infinity
    traced = trace(call)
    rule = rule_for(traced.node, shape_of)
    if rule.reason:
        return
    found.calls += 1
    ours = [each for each in rule.strategies(WORKERS) if "prod" not in each.results]
    with workers() as mesh:
        truth_of = sv._prepare_aten_mitigations(_dense(call), tuple(tensors), {})

        def holds(function: Callable[..., Any], strategy: Strategy) -> bool:
            placed = [tuple(map(_placement, each)) for each in (strategy.operands, strategy.results)]
            return bool(
                sv._validate_aten_with_mitigations(
                    function, tuple(tensors), {}, *placed, truth, WORKERS, mesh, truth_of
                )
            )

        for strategy in ours:
            if _rounds(call) and "sum" in strategy.results:
                continue  # each summand
            if any(
                each == "sum" and not x.is_floating_point() for each, x in zip(strategy.operands, tensors, strict=True)
            ):
                continue  # it cuts whole numbers into fractions
            if holds(_local(traced, strategy), strategy):
                found.correct += 1
            else:
                found.incorrect.setdefault(str(call.op), f"{call}: {strategy}")
        results = truth if isinstance(truth, list) else [truth]
        into = [_placements(tensor, ("sum",) if tensor.is_floating_point() else ()) for tensor in tensors]
        out = _placements(results[0], ("sum", "max", "min"))
        if len(out) * torch.Size(map(len, into)).numel() > MOST:
            return
        for operands in product(*into):
            for made in out:
                strategy = Strategy(operands, (made,) * len(results), "?")
                if any(had_for_free(strategy, one) for one in ours) or not _may_hold(traced, call, strategy):
                    continue
                if holds(_local(traced, strategy), strategy):
                    if (why := _explained(call, strategy)) is not None:
                        found.explained[why] += 1
                    else:
                        found.missing.setdefault(str(call.op), f"{call}: {operands} -> {strategy.results}")


def _may_hold(traced: Traced, call: Sample, strategy: Strategy) -> bool:
    """Whether our own ground truth finds no difference, which takes a hundredth of the judge's time."""
    try:
        check(call, traced, [("m", WORKERS, strategy)])
    except Exception:  # the parts do not even fit together
        return False
    return True


def _rounds(call: Sample) -> bool:
    """Whether it gives fewer digits than it takes."""
    made = call.kwargs.get("dtype")
    return call.op is torch.ops.aten._to_copy.default and made in (torch.float16, torch.bfloat16, torch.float32)


def _is_other(call: Sample) -> bool:
    """Whether graphs have no such calls, or it has no rule, or its results are whatever memory holds or drawn."""
    tags = call.op.tags
    if call.op is torch.ops.aten.as_strided.default and call.args[0]._base is not None:
        return True  # it reads beside what the view shows: the recorder makes it one of all of the memory
    return (
        call.op._schema.is_mutable
        or find(call.op, "rule") is None
        or torch.Tag.nondeterministic_seeded in tags
        or "empty" in str(call.op)
    )


def _placements(tensor: torch.Tensor, reductions: Sequence[str]) -> list[Placement]:
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and size % WORKERS == 0]
    return [None, *dims, *(reductions if tensor.dtype != torch.bool else ())]


def _placement(placement: Placement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement is None:
        return Replicate()
    return Shard(placement) if isinstance(placement, int) else Partial(placement)


def _dense(call: Sample) -> Callable[..., Any]:
    """The call as a function of its tensors."""
    leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))

    def function(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
        return call.op(*args, **kwargs)

    return function


def _local(traced: Traced, strategy: Strategy) -> Callable[..., Any]:
    """What each worker calls under a strategy, as a function of all workers' tensors."""
    from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode

    node = local_node(traced, strategy, "m", WORKERS)

    def function(*tensors: Any) -> Any:
        with maybe_disable_local_tensor_mode():
            made = [
                run(node.target, node.args, node.kwargs, [x._local_tensors[at] for x in tensors], {"m": at}, {"m": 2})
                for at in range(WORKERS)
            ]
            joined = [LocalTensor(dict(enumerate(parts))) for parts in zip(*made, strict=True)]
        return joined if len(joined) > 1 else joined[0]

    return function


_LEFT_OUT = {
    "where": "what the mask passes over is not read",
    "prod": "one factor is 0",
    "split": "its one part is the whole",
    "nll_loss_forward": "without a reduction, the total weight is not computed",
    "bucketize": "counts of the boundaries below add up, and boundaries are few",
    "ormqr": "linear in what is multiplied, for which nobody has asked",
    "_safe_softmax": "whole rows are masked",
    "_unsafe_masked_index": "the mask passes over nothing",
    "grid_sampler_2d": "it reads few of the elements",
    "grid_sampler_3d": "it reads few of the elements",
    "avg_pool3d": "windows of these sizes do not cross the blocks' borders",
    "replication_pad2d": "nothing is padded along that dim",
    "xlogy": "linear in what is multiplied, but for 0 and NaN",
    **dict.fromkeys(
        ["fractional_max_pool2d", "fractional_max_pool3d"], "summands of random numbers that give the same windows"
    ),
    **dict.fromkeys(["max_unpool2d", "max_unpool3d"], "indices that two blocks share would add up"),
    **dict.fromkeys(["min", "div", "mul", "expand"], "entries that are equal"),
    **dict.fromkeys(["ne", "_cdist_forward", "linalg_vector_norm"], "numbers that differ, whose summands differ too"),
    **dict.fromkeys(
        ["add", "roll", "softshrink", "hardshrink", "nan_to_num", "pixel_shuffle", "pixel_unshuffle"],
        "it changes nothing of these numbers",
    ),
    **dict.fromkeys(
        ["fill", "full_like", "new_full", "ones_like", "slice_scatter"], "it reads no value of that operand"
    ),
    **dict.fromkeys(
        ["scatter", "scatter_reduce"], "linear where it adds, which scatter_add is asked for; these look one up each"
    ),
}
"""Why placements that hold for these numbers are no strategies, by op."""


def _explained(call: Sample, strategy: Strategy) -> str | None:
    """Why placements that hold here are no strategy of ours."""
    if {"max", "min"} & {*strategy.results}:
        return "a pending minimum or maximum that holds for these numbers alone"
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, torch.Tensor)]
    if any(tensor.numel() == 1 for tensor in tensors):
        return "an operand has one element"
    return _LEFT_OUT.get(call.op.overloadpacket.__name__)
