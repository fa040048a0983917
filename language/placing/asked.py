"""`actors.step.rref(x)` in a program: each call of the program asks the actors before its step, and their answer is an
input of that.

The question's arguments are known at the call: the program's arguments, its state as the step finds it, other answers,
and plain values. A value that the step itself computes would come too late, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.tape import Op, Tape, Value
from monarch.compiler.types import Layout, TensorType
from monarch.language.placing.distribute import distribute
from monarch.language.recorder.checkpoints import checkpoint_part
from monarch.language.recorder.recording import Recording, current, outside_programs, turns
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import make_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref

Ask = Callable[[Mesh, tuple[Any, ...], dict[str, Any]], Any]
"""Calls the actors and waits: their results as tensors of the mesh, nested as they return them."""

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype)
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class _Argument:
    """An argument of the call, or an answer, by its number, and its layout."""

    number: int
    type: TensorType

    def shard(self, mesh: Mesh) -> torch.Tensor:
        return make_fake(self.type.local_shape(mesh.spec), self.type.dtype)


@dataclass(frozen=True)
class _State(_Argument):
    """A state of the program, by its number, its layout, and its type."""

    fake: torch.Tensor


@dataclass(frozen=True)
class Question:
    """One `rref` of a program."""

    ask: Ask
    mesh: Mesh
    leaves: tuple[Any, ...]
    """The arguments, flat: `_Argument` and `_State` stand for tensors."""
    spec: Any

    @property
    def states(self) -> list[int]:
        """The states that it is asked with, by number."""
        return [leaf.number for leaf in self.leaves if isinstance(leaf, _State)]

    def answers(self, arguments: Sequence[Any], states: Sequence[Cell]) -> list[DistributedTensor]:
        """Ask with the arguments of a call. Raises the actors' errors."""
        args, kwargs = pytree.tree_unflatten([self._now(leaf, arguments, states) for leaf in self.leaves], self.spec)
        made = self.ask(self.mesh, args, kwargs)
        return [] if made is None else pytree.tree_leaves(made)

    def _now(self, leaf: Any, arguments: Sequence[Any], states: Sequence[Cell]) -> Any:
        if isinstance(leaf, _State):
            return DistributedTensor(leaf.fake, Ref(states[leaf.number], leaf.fake))
        if isinstance(leaf, _Argument):
            given = arguments[leaf.number].detach()
            return given if isinstance(given, DistributedTensor) else distribute(given, self.mesh, leaf.type.layout)
        return leaf


def asked_in_program(
    recording: Recording,
    ask: Ask,
    said: Callable[[Mesh, tuple[Any, ...], dict[str, Any]], Any] | None,
    mesh: Mesh | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
) -> Any:
    """Have each call of the program ask, and give the answer's stand-ins: tensors that vary, of the types that `said`
    gives; None without it, for a question that is asked for its effect alone. Raises ProgramError."""
    source = user_source()
    if where := recording.inside or ("a checkpoint" if checkpoint_part() else "") or _task():
        raise ProgramError(
            f"{name}.rref() in {where}, which may run any number of times",
            hint="call it before that in the program, and use the tensor there.",
            source=source,
        )
    given, spec = pytree.tree_flatten((args, kwargs))
    mesh = mesh or recording.mesh
    leaves = tuple(_leaf(recording, leaf, mesh, name, source) for leaf in given)
    recording.questions.append(Question(ask, mesh, leaves, spec))
    if said is None:
        return None
    shards = [leaf.shard(mesh) if isinstance(leaf, (_Argument, _State)) else leaf for leaf in leaves]
    with outside_programs():
        types, tree = pytree.tree_flatten(said(mesh, *pytree.tree_unflatten(shards, spec)))
    return pytree.tree_unflatten([_answer(recording, mesh, type_, name) for type_ in types], tree)


def _answer(recording: Recording, mesh: Mesh, type_: TensorType, name: str) -> torch.Tensor:
    varying = type_.with_layout(replace(Layout.replicated(type_.ndim), varying=mesh.spec.names))
    number = recording.arguments
    recording.arguments += 1
    given = recording.input(make_fake(type_.shape, type_.dtype), number, varying, name, mesh)
    made: DistributedTensor = given.clone()  # one that the program made, which it may leave in Python
    recording.answers[recording.value_of(made._ref)] = _Argument(number, varying)
    return made


def _task() -> str:
    return "" if current.task is None else "a microbatch of a pipeline"


def _leaf(recording: Recording, leaf: Any, mesh: Mesh, name: str, source: Source | None) -> Any:
    """The stand-in of an argument. Raises ProgramError for one that a call does not have before its step."""
    if isinstance(leaf, torch.SymFloat):
        raise TypeError(f"{name}.rref() takes no number that changes from call to call: pass it as a tensor")
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, _PLAIN):
            return leaf
        raise ProgramError(
            f"{name}.rref() in a program is given a {type(leaf).__name__}",
            hint="in a program it takes tensors, plain numbers, strings and None, nested in tuples, lists and dicts;\n"
            "outside of programs it takes all that messages may contain.",
            source=source,
        )
    if not isinstance(leaf, DistributedTensor):
        if recording.is_own(leaf):
            raise _too_late(name, str(TensorType(leaf.dtype, tuple(leaf.shape))), source)
        raise ProgramError(
            f"{name}.rref() in a program is given a plain tensor from outside of it",
            hint="pass it to the program as an argument.",
            source=source,
        )
    value = recording.value_of(leaf._ref)
    while value.parent is not None and value.view is not None and value.view.func in _SAME:
        value = value.parent
    entry = next((entry for entry in recording.tape.inputs if entry.value == value), None)
    answer = recording.answers.get(value)
    known = answer is not None or (entry is not None and entry.kind in ("input", "state"))
    if not known or value in set(_written(recording.tape)):
        raise _too_late(name, str(leaf._ref.type), source)
    if entry is None:
        return answer
    if entry.kind == "input":
        return _Argument(int(entry.label), entry.type)
    number = next(at for at, state in enumerate(recording.states.values()) if state.value == value)
    return _State(number, entry.type, leaf._ref.fake)


def _too_late(name: str, what: str, source: Source | None) -> ProgramError:
    return ProgramError(
        f"{name}.rref() is given what the program computes ({what}), and a program asks actors before its step",
        hint="it takes the program's arguments, and state that was not written before. Split the program there:\n"
        "    x = first(batch)\n"
        f"    y = {name}.rref(x)\n"
        "    second(y)",
        source=source,
    )


def _written(tape: Tape) -> Iterator[Value]:
    """The storages that ops on a tape have written to so far."""
    for op in tape.ops:
        if isinstance(op.func, torch._ops.OpOverload) and (names := memory_of(op.func).writes):
            yield from (value.root for value in _given(op, names))


def _given(op: Op, names: Sequence[str]) -> Iterator[Value]:
    arguments = dict(zip((argument.name for argument in op.func._schema.arguments), op.args, strict=False))
    arguments.update(op.kwargs)
    for name in names:
        yield from (leaf for leaf in pytree.tree_leaves(arguments.get(name)) if isinstance(leaf, Value))


@contextmanager
def others_take_turns() -> Iterator[None]:
    """Let other threads call programs while this one, which has its turn, waits for actors: the actors' own calls may
    need that."""
    kept = turns._release_save()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        turns._acquire_restore(kept)  # type: ignore[attr-defined]
