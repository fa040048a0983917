"""Ops of the user's own, as a plan carries them to workers that were forked before the ops were registered.

Only what `torch.library.custom_op` made can travel: it keeps the Python function. Other ops have to be registered
before the mesh is made.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._library.custom_ops import OPDEFS

from monarch.compiler.plan import Plan, PlanError


@dataclass(frozen=True)
class Definition:
    """A custom op: its name as in "mylib::scale", its schema, the arguments that it writes, and its function, pickled;
    `problem` says why the function could not be pickled."""

    name: str
    schema: str
    writes: tuple[str, ...]
    function: bytes = b""
    problem: str = ""


def definitions(plan: Plan) -> tuple[Definition, ...]:
    """The definitions of the custom ops that a plan calls."""
    names = {name for op in _called(plan) if (name := _qualified(op)) in OPDEFS}
    return tuple(_definition(name) for name in sorted(names))


def define(given: tuple[Definition, ...]) -> None:
    """Register the ops that this process does not know. Raises PlanError for one whose function could not travel."""
    for each in given:
        try:
            torch._C._dispatch_find_schema_or_throw(each.name, "")
        except RuntimeError:
            if each.problem:
                raise PlanError(
                    f"the workers do not know the op {each.name}, and it cannot be sent to them: {each.problem}",
                    hint="define it at the top level of a module, or before the mesh is made: workers are forked then.",
                ) from None
            function = pickle.loads(each.function)
            torch.library.custom_op(each.name, function, mutates_args=each.writes, schema=each.schema)


def _called(plan: Plan) -> Iterator[str]:
    for instruction in plan.all_instructions:
        yield str(instruction.args[0]) if instruction.op == "out_of_place" else instruction.op


def _qualified(op: str) -> str:
    return "::".join(op.split(".")[:2])


def _definition(name: str) -> Definition:
    import cloudpickle

    op = OPDEFS[name]
    writes = tuple(argument.name for argument in op._opoverload._schema.arguments if argument.is_write)
    try:
        return Definition(name, op._schema, writes, cloudpickle.dumps(op._init_fn))
    except Exception as error:  # pickling runs code of the user's classes; workers that know the op do not need it
        return Definition(name, op._schema, writes, problem=str(error))
