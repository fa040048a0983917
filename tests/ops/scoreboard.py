"""PyTorch's own op database as a scoreboard: every sample of every op, forward and backward, in every layout.

    python -m tests.ops                          # all, and benchmarks/results/ops.md
    python -m tests.ops mm nn.functional         # entries whose names have one of these in them

A sample is traced once; its graph is partitioned for each layout of its operands, and run by the reference executor.
The results, and the gradients of what is differentiable, have to be those of plain PyTorch:

Padding that the compiler takes to hold anything is poisoned.

right     they are
whole     they are, and some op ran whole, for want of a rule, though its operands were sharded
refused   the program is refused, with a reason
wrong     other results, or an error that is none of ours
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from monarch.compiler import ops
from monarch.compiler.errors import GraphError, MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.rules.call import called_op, op_name
from monarch.compiler.types import Layout
from monarch.language import Mesh, program
from tests.compiler.reference import run_reference

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

MESHES = (Mesh.abstract(a=2), Mesh.abstract(a=2, b=2), Mesh.abstract(a=3))
"""Over 3 workers dims are sharded also where they do not divide."""
PATTERNS = ("replicated", "first", "last", "mixed")
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
ARBITRARY = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())
"""Ops whose results are whatever memory holds: their shapes are compared alone."""

RIGHT, WHOLE, REFUSED, WRONG = "right", "whole", "refused", "wrong"


@dataclass
class Entry:
    """What became of an entry: how many cases had each outcome, and the reasons of those that were not right."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def verdict(self) -> str:
        """The worst outcome; "-" where there is no sample."""
        return next((each for each in (WRONG, REFUSED, WHOLE, RIGHT) if self.outcomes[each]), "-")

    @property
    def in_part(self) -> bool:
        """Whether some cases are refused, and others are not."""
        return self.verdict == REFUSED and self.outcomes.total() > self.outcomes[REFUSED]

    def add(self, outcome: str, reason: str = "") -> None:
        self.outcomes[outcome] += 1
        if reason:
            self.reasons[outcome, reason] += 1


def full_name(op: OpInfo) -> str:
    return str(op.name) + (f".{op.variant_test_name}" if op.variant_test_name else "")


@cache
def _database() -> list[OpInfo]:
    # Loading it takes seconds, and changes settings of the process: only who plays it does.
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def entries(words: Iterable[str] = ()) -> list[OpInfo]:
    """The entries of the database whose names have one of the words in them; all without words."""
    words = list(words)
    return [op for op in _database() if not words or any(word in full_name(op) for word in words)]


def play(op: OpInfo, samples: int = 6) -> Entry:
    """Try an entry's first samples in all layouts."""
    entry = Entry(full_name(op))
    dtype = next((each for each in DTYPES if each in op.dtypes), None)
    if dtype is None:
        return entry
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), samples):
            _play_sample(entry, op, sample)
    return entry


def _play_sample(entry: Entry, op: OpInfo, sample: SampleInput) -> None:
    call = _Call(op, sample)
    try:
        with torch.random.fork_rng():
            dense = call(*call.operands)
    except Exception:  # a sample that PyTorch itself refuses tells nothing
        return
    try:
        graph = program(mesh=MESHES[0])(call).trace(*call.operands).graph
    except MonarchError as error:
        entry.add(REFUSED, _with_way_out(error))
        return
    except Exception as error:  # torch refuses to be traced so
        entry.add(REFUSED, f"in torch's words: {_first_line(error)}")
        return
    if any(node.target is ops.random for node in graph.calls):
        dense = run_reference(graph, _inputs(graph, call.operands))[0]
    seen = set()
    for mesh in MESHES:
        for pattern in PATTERNS:
            layouts = [_layout(pattern, at, value, mesh) for at, value in enumerate(call.operands)]
            if (key := (mesh.spec, tuple(map(str, layouts)))) in seen:
                continue
            seen.add(key)
            outcome, reason = _compare(entry, graph, mesh, layouts, call.operands, dense)
            entry.add(outcome, reason and f"{reason} [{', '.join(map(str, layouts))}]" if outcome == WRONG else reason)


def _compare(
    entry: Entry, graph: Graph, mesh: Mesh, layouts: Sequence[Layout], operands: Sequence[torch.Tensor], dense: Any
) -> tuple[str, str]:
    placed = graph.copy()
    placed.mesh = mesh.spec
    for node in placed.placeholders:
        if node.meta["kind"] == "input":
            node.meta["type"] = node.meta["type"].with_layout(layouts[node.meta["label"]])
    try:
        partitioned = partition_graph(placed)
        made = run_reference(partitioned, _inputs(graph, operands), poison=True)[0]
    except GraphError as error:
        return WRONG, _first_line(error)
    except MonarchError as error:
        return REFUSED, _with_way_out(error)
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {_first_line(error)}"
    if len(made) != len(dense):
        return WRONG, f"{len(made)} results for {len(dense)}"
    for one, other in zip(made, dense, strict=True):
        if (difference := _difference(one, other, shapes=entry.name.partition(".")[0] in ARBITRARY)) is not None:
            return WRONG, difference
    gathered = sorted({op_name(called_op(node)) for node in partitioned.calls if "gathered" in node.meta})
    return (WHOLE, ", ".join(gathered)) if gathered else (RIGHT, "")


def _difference(one: torch.Tensor, other: torch.Tensor, shapes: bool) -> str | None:
    if shapes:
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return None if same else f"{one.dtype} {list(one.shape)} for {other.dtype} {list(other.shape)}"
    try:
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return _first_line(error)
    return None


class _Call:
    """A sample as a function of its tensors, which gives its results and the gradients of what is differentiable."""

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves = leaves
        self.at = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.operands = [leaves[at].detach().clone() for at in self.at]
        self.needs = [leaves[at].requires_grad for at in self.at]
        self.op = op
        self.process = sample.output_process_fn_grad
        self.__name__ = "sample"

    def __call__(self, *operands: torch.Tensor) -> Any:
        taken = [x.detach().clone().requires_grad_(need) for x, need in zip(operands, self.needs, strict=True)]
        leaves = list(self.leaves)
        for at, operand in zip(self.at, taken, strict=True):
            leaves[at] = operand
        x, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = self.process(self.op.op(x, *args, **kwargs))
        results = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        sources = [operand for operand, need in zip(taken, self.needs, strict=True) if need]
        through = [result for result in results if result.requires_grad]
        gradients: Sequence[Any] = ()
        if sources and through:
            weights = [torch.ones_like(result) * (number + 1) for number, result in enumerate(through)]
            gradients = torch.autograd.grad(through, sources, weights, allow_unused=True)
        made = [result.detach() for result in results] + [each for each in gradients if each is not None]
        return list({id(each): each for each in made}.values())  # a graph gives each tensor once


def _inputs(graph: Graph, operands: Sequence[torch.Tensor]) -> dict[str | int, Any]:
    others = {str(node.meta["label"]): 7 for node in graph.placeholders if node.meta["kind"] in ("seed", "scalar")}
    return {**dict(enumerate(operands)), **others}


def _layout(pattern: str, number: int, value: torch.Tensor, mesh: Mesh) -> Layout:
    """How operand `number` lies: on its first dim, its last, or (mixed) each operand elsewhere; over two mesh dims on
    both. Over 2 workers a dim that does not divide stays whole."""
    layout = Layout.replicated(value.ndim)
    if pattern == "replicated" or not value.ndim:
        return layout
    first, last = 0, value.ndim - 1
    place = {"first": [first, last], "last": [last, first], "mixed": [first, last] if number % 2 else [last, None]}
    left = list(value.shape)
    for name, dim in zip(mesh.spec.names, place[pattern], strict=False):
        size = mesh.spec.sizes[name]
        if dim is not None and left[dim] > 1 and (size != 2 or left[dim] % size == 0):
            left[dim] = -(-left[dim] // size)
            layout = layout.place(name, dim)
    return layout


def _with_way_out(error: MonarchError) -> str:
    """What is wrong, and the first line of what to do about it."""
    first = error.hint.splitlines()[0] if error.hint else ""
    if "# wrong" in first:  # it shows the user's line, and the right one below
        first = " ".join(error.hint.splitlines()[1].split())
    return f"{_first_line(error)}: {first.strip().rstrip(';')}" if first else _first_line(error)


def _first_line(error: BaseException) -> str:
    text = getattr(error, "message", "") or str(error).strip() or type(error).__name__
    return str(text.splitlines()[0][:160])


@cache
def sample_of(count: int, seed: int) -> list[OpInfo]:
    """As many entries, drawn by `seed`."""
    return random.Random(seed).sample(_database(), count)
