"""The rows of a batch in a program that is still being traced."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from monarch.compiler.errors import ProgramError
from monarch.compiler.passes.functionalize import Functionalizer
from monarch.compiler.passes.rows import FollowedRows, Rows
from monarch.compiler.tape import Tape, Value
from monarch.compiler.types import MeshSpec


class RowsOnTape:
    """Follows the rows of the first microbatch along a tape, as far as it is written."""

    def __init__(self, tape: Tape, mesh: MeshSpec) -> None:
        self._tape = tape
        self._walk = Functionalizer("rows", mesh)
        self._rows = FollowedRows()
        self._inputs = self._ops = 0
        self._last: fx.Node = self._walk.graph.fx._root

    def mixed_by(self, results: Iterable[Value]) -> ProgramError | None:
        """What is wrong with what was written since the last call, if it mixes rows. It gave these results."""
        try:
            self._go_on(results)
        except ProgramError as error:
            self._last = self._walk.graph.fx._root.prev
            return error
        return None

    def dim_of(self, value: Value) -> Rows:
        """The dim of a value that has the rows."""
        self._go_on((value,))
        return self._rows.dim_of(self._walk.value(value))

    def _go_on(self, results: Iterable[Value]) -> None:
        tape, walk = self._tape, self._walk
        walk.inputs(Tape(tape.inputs[self._inputs :]))
        self._inputs = len(tape.inputs)
        for op in tape.ops[self._ops :]:
            walk.op(op)
        self._ops = len(tape.ops)
        for value in results:  # views are written where they are read
            walk.value(value)
        while self._last.next is not walk.graph.fx._root:
            self._last = self._last.next
            if self._last.op == "call_function":
                self._rows.follow(self._last)
