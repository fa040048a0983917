"""Branches and loops on values: `cond`, `while_loop`, `scan`, and what is made of them.

In a program the workers decide by themselves, each on the same bits. Outside of programs these are Python's own `if`,
`while` and `for`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.tape import Value
from monarch.compiler.types import TensorType
from monarch.language.errors import OperatorError
from monarch.language.recorder.recording import Recording, current_program
from monarch.language.recorder.regions import (
    Call,
    Reads,
    RegionRecording,
    Traced,
    first_value,
    own_values,
    recording_to,
    restored,
    snapshot,
    trace_region,
)
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

# -- cond --------------------------------------------------------------------------------------------------------------


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: tuple[Any, ...] | list[Any] = ()
) -> Any:
    """`true_fn(*operands)` where `pred` is true, else `false_fn(*operands)`.

    `pred` is a tensor of one element, or a bool. Both functions give tensors (or lists, tuples and dicts of these) of
    the same shapes and dtypes. They may read what else there is in the program, and write to state: the step keeps what
    the branch that runs has written. Differentiable; the backward pass runs the branch again. Raises ProgramError where
    the branches differ in what they give, and OperatorError for a predicate of several elements.
    """
    recording = current_program()
    if not isinstance(pred, torch.Tensor) or recording is None:
        return (true_fn if pred else false_fn)(*operands)
    predicate = _predicate(recording, pred)
    branches = [
        trace_region(recording, f"{name} of cond", function, lambda region: ([], operands))
        for name, function in (("true_fn", true_fn), ("false_fn", false_fn))
    ]
    first, second = branches
    if (first.spec, first.tensors, first.types) != (second.spec, second.tensors, second.types):
        raise _differ("true_fn and false_fn of cond give different results", first, second)
    return restored(first, _Cond(recording, branches, predicate).run())


class _Differentiable:
    """An op with regions whose gradients may be asked for: `sources` are the tensors of the program that it has
    gradients for."""

    def __init__(self, outer: Recording, traced: Sequence[Traced]) -> None:
        self.outer = outer
        self.traced = traced
        self.held: dict[int, Value] = {}
        """What storages that the regions read held when the op ran."""

    @cached_property
    def read(self) -> dict[int, torch.Tensor]:
        """The tensors outside that the regions read, and that require gradients, by what they are known by."""
        return {
            key: source
            for each in self.traced
            for key, (source, stand_in) in each.region.stand_ins.items()
            if stand_in.requires_grad
        }

    @property
    def sources(self) -> list[torch.Tensor]:
        return list(self.read.values())

    def forward(self) -> list[DistributedTensor]:
        """Record the op."""
        raise NotImplementedError

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Record its backward op; gives the gradients of `sources`."""
        raise NotImplementedError

    def run(self) -> list[torch.Tensor]:
        differentiated = any(result.requires_grad for each in self.traced for result in each.results)
        if not (torch.is_grad_enabled() and differentiated and any(each.requires_grad for each in self.sources)):
            return [*self.forward()]
        return [*_Differentiate.apply(self, *self.sources)]

    def hold(self, storages: Reads) -> None:
        """Keep what storages hold now for the backward pass."""
        for cell, ref in storages.items():
            self.held[cell] = snapshot(self.outer, self.outer.value_of(ref))

    def values(self, storages: Reads) -> tuple[Value, ...]:
        """What storages held when the op ran."""
        return tuple(
            self.held[cell] if cell in self.held else self.outer.value_of(ref) for cell, ref in storages.items()
        )

    def gradients(
        self, traced: Traced, given: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """In a region, the gradients of these inputs of it for those `given` of its results: zeros for None."""
        pairs = [
            (result, gradient)
            for result, gradient in zip(traced.results, given, strict=True)
            if result.requires_grad and gradient is not None
        ]
        wanted = [each for each in inputs if each is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            results, of_results = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, wanted, of_results, allow_unused=True, retain_graph=True)
        return [_zeros(x) if made is None else made for x, made in zip(wanted, found, strict=True)]


class _Differentiate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: _Differentiable, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.op = op
        made = tuple(op.forward())
        ctx.mark_non_differentiable(*(each for each in made if not _is_smooth(each)))
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op: _Differentiable = ctx.op
        if current_program() is not op.outer:
            raise ProgramError(
                "a gradient goes through a branch or a loop that another program, or another region, has run",
                hint="ask for the gradient where the branch or the loop is.",
                source=user_source(),
            )
        return (None, *op.backward(gradients))


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tuple(like.shape), dtype=like.dtype)


def _is_smooth(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


class _Cond(_Differentiable):
    """The backward pass runs the branch again, on what it read, and then backward."""

    def __init__(self, outer: Recording, traced: Sequence[Traced], predicate: Value) -> None:
        super().__init__(outer, traced)
        self.predicate = predicate

    def forward(self) -> list[DistributedTensor]:
        call = Call.of(self.outer, self.traced)
        read = {**call.reads, **call.written}
        self.hold(read)
        regions = tuple(
            call.region(role, each, [read], (*each.values, *own_values(each, call.written)), index=False)
            for role, each in zip(_BRANCHES, self.traced, strict=True)
        )
        types = self.traced[0].types
        return call.append(ops.cond, (self.predicate, self.values(read), regions), types, len(types))

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        given: list[list[DistributedTensor]] = []
        returns: list[list[Value]] = []
        for branch in self.traced:
            region = branch.region
            with recording_to(region):
                own = [region.given(each) for each in gradients]
                stand_ins = [region.stand_ins[key][1] if key in region.stand_ins else None for key in self.read]
                found = iter(self.gradients(branch, own, stand_ins))
                made = [
                    _zeros(source) if stand_in is None else next(found)
                    for source, stand_in in zip(self.sources, stand_ins, strict=True)
                ]
            given.append(own)
            returns.append(_values(region, made))
        call = Call.of(self.outer, self.traced)
        read = {**call.reads, **call.written}
        call.written = {}
        regions = tuple(
            call.region(role, branch, [*_values(branch.region, own), read], results, index=False)
            for role, branch, own, results in zip(_BRANCHES, self.traced, given, returns, strict=True)
        )
        operands = (*_values(self.outer, gradients), *self.values(read))
        return [*call.append(ops.cond, (self.predicate, operands, regions), _types(self.sources), len(self.sources))]


_BRANCHES = ("then", "else")

# -- while_loop --------------------------------------------------------------------------------------------------------


def while_loop(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: tuple[Any, ...] | list[Any]
) -> tuple[Any, ...]:
    """`carried = body_fn(*carried)` as long as `cond_fn(*carried)` is true; gives what is carried in the end.

    `carried_inputs` holds tensors (or lists, tuples and dicts of these); `body_fn` gives as many, of the same shapes
    and dtypes, and `cond_fn` a tensor of one element. The functions may read what else there is in the program, and
    `body_fn` may write to state. Raises ProgramError where autograd would have to go through the loop: how often it
    runs is not known, so what its rounds made is not kept.
    """
    recording = current_program()
    if recording is None:
        numbers = (bool, int, float)
        carried = pytree.tree_map(lambda x: torch.tensor(x) if isinstance(x, numbers) else x, tuple(carried_inputs))
        while cond_fn(*carried):
            carried = _tuple(body_fn(*carried))
        return carried
    leaves, spec = pytree.tree_flatten(tuple(carried_inputs))
    init = [_tensor(recording, leaf, "what while_loop carries") for leaf in leaves]
    if torch.is_grad_enabled() and any(each.requires_grad for each in init):
        raise _no_gradient()

    def given(region: RegionRecording) -> tuple[list[DistributedTensor], Any]:
        made = [region.given(each) for each in init]
        return made, pytree.tree_unflatten(made, spec)

    def condition(*carried: Any) -> torch.Tensor:
        answer = cond_fn(*carried)
        if not isinstance(answer, torch.Tensor):
            answer = torch.full((), bool(answer))
        return _truth(answer, "what cond_fn of while_loop gives")

    def body(*carried: Any) -> Any:
        return _tuple(body_fn(*carried))

    test = trace_region(recording, "cond_fn of while_loop", condition, given)
    rounds = trace_region(recording, "body_fn of while_loop", body, given)
    if Call.of(recording, [test]).written:
        raise ProgramError("cond_fn of while_loop changes a tensor in place", hint="do that in body_fn.")
    if (rounds.spec, rounds.types) != (spec, _types(init)):
        raise _carried_differ("body_fn of while_loop", spec, _types(init), rounds)
    if torch.is_grad_enabled() and any(each.requires_grad for each in rounds.results):
        raise _no_gradient()
    call = Call.of(recording, [test, rounds])
    regions = tuple(
        call.region(role, each, [*_values(each.region, each.given[:-1]), call.written, call.reads], returns, index=True)
        for role, each, returns in (
            ("condition", test, test.values),
            ("body", rounds, (*rounds.values, *own_values(rounds, call.written))),
        )
    )
    carries = (*_values(recording, init), *call.values(call.written))
    results = call.append(ops.while_loop, (carries, call.values(call.reads), regions), _types(init), len(init))
    made: tuple[Any, ...] = pytree.tree_unflatten(results, spec)
    return made


def _no_gradient() -> ProgramError:
    return ProgramError(
        "while_loop has no gradient: how often it runs is not known, so what its rounds made is not kept",
        hint="with torch.no_grad(): ...                # right, where no gradient is needed; or x.detach()\n"
        "monarch.scan(combine_fn, init, xs)      # right: as many rounds as xs has elements, and differentiable",
        source=user_source(),
    )


# -- scan --------------------------------------------------------------------------------------------------------------


def scan(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """`carry, y = combine_fn(carry, x)` for each element x of `xs` along `dim`, from `init` on; with `reverse` from the
    last to the first. Gives what is carried in the end, and the y of all elements, stacked along `dim`.

    `init`, `xs` and what `combine_fn` gives are tensors, or lists, tuples and dicts of these. Differentiable: what is
    carried is kept for each round, and the backward pass runs each round again. Raises ProgramError where `combine_fn`
    gives another carry than it takes, and OperatorError where the tensors of `xs` have not equally many elements.
    """
    recording = current_program()
    elements, xs_spec = pytree.tree_flatten(xs)
    if not elements or not all(isinstance(each, torch.Tensor) for each in elements):
        raise OperatorError(
            "scan goes along tensors, and xs has none, or something else",
            hint="monarch.while_loop(cond_fn, body_fn, carried) goes round without elements.",
            source=user_source(),
        )
    lengths = {each.shape[dim] for each in elements}
    if len(lengths) > 1:
        raise OperatorError(
            f"scan goes along dim {dim} of tensors that have {', '.join(map(str, sorted(lengths)))} elements there",
            hint="give it equally many of each.",
            source=user_source(),
        )
    elements = [each.movedim(dim, 0) for each in elements]
    (length,) = lengths
    if recording is None:
        carry, ys = _scanned(combine_fn, init, elements, xs_spec, length, reverse)
    else:
        carry, ys = _scan(recording, combine_fn, init, elements, xs_spec, length, reverse)
    return carry, pytree.tree_map(lambda y: None if y is None else y.movedim(0, dim), ys)


def _scanned(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    elements: list[Any],
    spec: Any,
    length: int,
    back: bool,
) -> tuple[Any, Any]:
    """`scan` outside of programs."""
    if not length:
        raise OperatorError("scan goes along a dim without elements", source=user_source())
    ys: list[Any] = [None] * length
    for at in reversed(range(length)) if back else range(length):
        carry, ys[at] = combine_fn(carry, pytree.tree_unflatten([each[at] for each in elements], spec))
    return carry, pytree.tree_map(lambda *each: None if each[0] is None else torch.stack(each), *ys)


def _scan(
    recording: Recording,
    combine_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    elements: list[torch.Tensor],
    xs_spec: Any,
    length: int,
    reverse: bool,
) -> tuple[Any, Any]:
    leaves, spec = pytree.tree_flatten(init)
    carried = [_tensor(recording, leaf, "what scan carries") for leaf in leaves]
    xs = [_tensor(recording, each, "xs of scan") for each in elements]

    def given(region: RegionRecording) -> tuple[list[DistributedTensor], Any]:
        # Whatever is carried may come to depend on what requires a gradient.
        made = [region.given(each, torch.is_grad_enabled() and _is_smooth(each)) for each in carried]
        made += [region.given(x[0], torch.is_grad_enabled() and x.requires_grad) for x in xs]
        own = iter(made)
        carry = pytree.tree_unflatten([next(own) for _ in carried], spec)
        return made, (carry, pytree.tree_unflatten([*own], xs_spec))

    def combine(carry: Any, x: Any) -> Any:
        made = combine_fn(carry, x)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ProgramError(
                "combine_fn of scan gives one value, and has to give two: what is carried on, and what is kept",
                hint="def combine_fn(carry, x): ...; return carry, y      # y may be None",
                source=user_source(),
            )
        return tuple(made)

    traced = trace_region(recording, "combine_fn of scan", combine, given)
    carry_spec = traced.spec.child(0)
    count = carry_spec.num_leaves
    if carry_spec != spec or traced.types[:count] != _types(carried) or not all(traced.tensors[:count]):
        raise _carried_differ("combine_fn of scan", spec, _types(carried), traced, count)
    results = _Scan(recording, traced, carried, xs, length, reverse).run()
    made: tuple[Any, Any] = restored(traced, results)
    return made


class _Scan(_Differentiable):
    """The backward pass goes the other way: it carries the gradient of what was carried, and the sums of the gradients
    of what the rounds read from outside."""

    def __init__(
        self,
        outer: Recording,
        traced: Traced,
        carried: list[DistributedTensor],
        xs: list[DistributedTensor],
        length: int,
        reverse: bool,
    ) -> None:
        super().__init__(outer, [traced])
        self.carried, self.xs, self.length, self.reverse = carried, xs, length, reverse
        self.body = traced
        self.saved: list[DistributedTensor] = []
        """What was carried into each round, then what was in the storages that the rounds write."""
        self.written: Reads = {}
        self.elements: list[Value] = []

    @property
    def sources(self) -> list[torch.Tensor]:
        return [*self.carried, *self.xs, *super().sources]

    def forward(self) -> list[DistributedTensor]:
        body, region = self.body, self.body.region
        call = Call.of(self.outer, self.traced)
        self.hold(call.reads)
        self.written = dict(call.written)
        count = len(self.carried)
        own = _values(region, body.given[:-1])
        kept = [*own[:count], *own_values(body, self.written)]
        # What a round is given, not what it leaves there: copies, taken before its first op.
        before = [first_value(region, value) for value in kept]
        returns = (*body.values[:count], *own_values(body, self.written), *body.values[count:], *before)
        inputs = [*own[:count], call.written, *own[count:], call.reads]
        self.elements = [snapshot(self.outer, value) for value in _values(self.outer, self.xs)]
        carries = (*_values(self.outer, self.carried), *call.values(call.written))
        types = [
            *body.types[:count],
            *(self.stacked(type_) for type_ in body.types[count:]),
            *(self.stacked(value.type) for value in before),
        ]
        args = (
            carries,
            tuple(self.elements),
            self.values(call.reads),
            (call.region("body", body, inputs, returns, index=True),),
            self.length,
            self.reverse,
        )
        made = call.append(ops.scan, args, types, count)
        self.saved = made[len(body.results) :]
        return made[: len(body.results)]

    def stacked(self, type_: TensorType) -> TensorType:
        return TensorType(type_.dtype, (self.length, *type_.shape))

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        body, region = self.body, self.body.region
        count = len(self.carried)
        smooth = [_is_smooth(each) for each in self.carried]
        outside = super().sources
        with recording_to(region):
            of_carry = [region.given(each) for each, able in zip(gradients[:count], smooth, strict=False) if able]
            sums = [region.given(each) for each in outside]
            of_ys = [region.given(each[0]) for each in gradients[count:]]
            carry_of = iter(of_carry)
            given = [*(next(carry_of) if able else None for able in smooth), *of_ys]
            takes: list[torch.Tensor | None] = [
                *(own if able else None for own, able in zip(body.given, smooth, strict=False)),
                *(own if own.requires_grad else None for own in body.given[count:-1]),
                *(region.stand_ins[key][1] for key in self.read),
            ]
            found = self.gradients(body, given, takes)
            first, last = len(of_carry), len(found) - len(outside)
            added = [total + each for total, each in zip(sums, found[last:], strict=True)]
            returns = _values(region, [*found[:first], *added, *found[first:last]])
        call = Call.of(self.outer, self.traced)
        call.reads = {cell: ref for cell, ref in call.reads.items() if cell not in self.written}
        call.written = {}
        own = _values(region, body.given[:-1])
        inputs = [
            *_values(region, [*of_carry, *sums]),
            *own[:count],
            self.written,
            *own[count:],
            *_values(region, of_ys),
            call.reads,
        ]
        start = [each for each, able in zip(gradients[:count], smooth, strict=False) if able]
        zeros = [_zeros(each) for each in outside]
        args = (
            tuple(_values(self.outer, [*start, *zeros])),
            (*_values(self.outer, self.saved), *self.elements, *_values(self.outer, gradients[count:])),
            self.values(call.reads),
            (call.region("backward", body, inputs, returns, index=True),),
            self.length,
            not self.reverse,
        )
        of_xs = [self.stacked(TensorType(x.dtype, tuple(x.shape[1:]))) for x in self.xs if x.requires_grad]
        made = iter(call.append(ops.scan, args, [*_types(start), *_types(outside), *of_xs], 0))
        of_init = [next(made) if able else None for able in smooth]
        of_outside = [next(made) for _ in outside]
        return [*of_init, *(next(made) if x.requires_grad else None for x in self.xs), *of_outside]


# -- what is made of these ---------------------------------------------------------------------------------------------


def map_over(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    """`f(x, *args)` for each element x of `xs` along dim 0, stacked: a `scan` that carries nothing."""
    return scan(lambda carry, x: (carry, f(x, *args)), [], xs)[1]


def associative_scan(
    combine_fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """The first element of `xs` along `dim`, and each further one combined with what was made of those before it:
    a `scan` that carries what it gives, one element after the other."""
    del combine_mode
    first = -1 if reverse else 0

    def rest(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(dim, 0 if reverse else 1, x.shape[dim] - 1)

    def combine(carry: Any, x: Any) -> tuple[Any, Any]:
        made = combine_fn(carry, x)
        return made, pytree.tree_map(torch.clone, made)

    init = pytree.tree_map(lambda x: x.select(dim, first), xs)
    if pytree.tree_leaves(xs)[0].shape[dim] == 1:
        return xs
    _, ys = scan(combine, init, pytree.tree_map(rest, xs), dim=dim, reverse=reverse)

    def joined(one: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
        parts = (one.unsqueeze(dim), many)
        return torch.cat(parts[::-1] if reverse else parts, dim)

    return pytree.tree_map(joined, init, ys)


# -- values ------------------------------------------------------------------------------------------------------------


def _truth(value: torch.Tensor, what: str) -> torch.Tensor:
    if value.numel() != 1:
        raise OperatorError(
            f"{what} has {value.numel()} elements, and has to have one",
            hint="ask for .any() or .all() of it.",
            source=user_source(),
        )
    value = value.detach().reshape(())
    return value if value.dtype is torch.bool else value != 0


def _predicate(recording: Recording, pred: torch.Tensor) -> Value:
    truth = _truth(pred, "the predicate of cond")
    return snapshot(recording, _values(recording, [truth])[0])


def _tensor(recording: Recording, value: Any, what: str) -> DistributedTensor:
    if isinstance(value, (bool, int, float)):
        value = torch.tensor(value)
    if isinstance(value, DistributedTensor):
        return value
    if isinstance(value, torch.Tensor):
        return recording.constant(value)
    raise ProgramError(
        f"{what} has {value!r:.60}, a {type(value).__name__}, and has to be tensors",
        hint="leave it out: the functions can read it from outside.",
        source=user_source(),
    )


def _values(recording: Recording, tensors: Sequence[torch.Tensor]) -> list[Value]:
    found = []
    for each in tensors:
        own = each if isinstance(each, DistributedTensor) else recording.constant(each)
        found.append(recording.value_of(own._ref))
    return found


def _types(tensors: Sequence[torch.Tensor]) -> list[TensorType]:
    return [TensorType(each.dtype, tuple(each.shape)) for each in tensors]


def _tuple(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


# -- errors ------------------------------------------------------------------------------------------------------------


def _differ(message: str, first: Traced, second: Traced) -> ProgramError:
    return ProgramError(
        message,
        hint="\n".join(f"{each.region.inside} gives {_shown(each.types)}" for each in (first, second))
        + "\nShapes, dtypes and structure have to be the same: cast or expand one of them.",
        source=user_source(),
    )


def _carried_differ(
    what: str, spec: Any, types: list[TensorType], traced: Traced, count: int | None = None
) -> ProgramError:
    made = traced.types[:count]
    shape = "" if made != types else "\nThe lists, tuples and dicts that hold them differ."
    return ProgramError(
        f"{what} carries on other values than it is given",
        hint=f"it is given {_shown(types)}, and gives {_shown(made)}{shape}"
        "\nWhat is carried keeps its shapes, dtypes and structure: cast it, or begin with such values.",
        source=user_source(),
    )


def _shown(types: Sequence[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"


# -- PyTorch's own -----------------------------------------------------------------------------------------------------


def _take_over() -> None:
    """In programs, PyTorch's functions of these names are those here: its own compile what they are given."""
    ours: dict[str, Callable[..., Any]] = {
        "cond": cond,
        "while_loop": while_loop,
        "scan": scan,
        "map": map_over,
        "associative_scan": associative_scan,
    }
    package = torch._higher_order_ops
    for name, own in ours.items():
        taken = _taken(getattr(package, name), own)
        for holder in (torch, package, sys.modules[f"{package.__name__}.{name}"]):
            if hasattr(holder, name):
                setattr(holder, name, taken)


def _taken(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if current_program() is None else own)(*args, **kwargs)

    return call


_take_over()
