"""The rows of a batch in a program that is still being traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from monarch.compiler.errors import ProgramError
from monarch.compiler.passes.functionalize import Functionalizer
from monarch.compiler.passes.rows import FollowedRows, Rows, Way, way_of_loss
from monarch.compiler.tape import Tape, Value
from monarch.compiler.types import MeshSpec


class RowsOnTape:
    """Follows the rows of the first microbatch along a tape, as far as it is written."""

    def __init__(self, tape: Tape, mesh: MeshSpec, gradients: bool = True) -> None:
        """Without `gradients` those that the model has computed are left out."""
        self._tape = tape
        self._walk = Functionalizer("rows", mesh)
        self._rows = FollowedRows(backward=gradients)
        self._inputs = self._ops = 0
        self._last: fx.Node = self._walk.graph.fx._root

    def mixed_by(self, results: Iterable[Value]) -> ProgramError | None:
        """The error of the ops since the last call, if they mix rows. They gave these results."""
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

    def note_gradients(self, gradients: Mapping[Value, Value]) -> None:
        """Note that gradients have the rows where the values have them of which they are the gradients."""
        self.mixed_by(gradients)  # each gradient of a row is of that row alone, whatever its ops compute besides
        for gradient, of in gradients.items():
            self._rows.note(self._walk.value(gradient), self.dim_of(of))

    @property
    def by_number(self) -> Sequence[ProgramError]:
        """For each op that takes rows by their numbers its error, unless the numbers count the rows."""
        return self._rows.by_number

    def counts(self, value: Value, size: int) -> bool:
        """Whether a value without rows has numbers along a dim of that size."""
        self._go_on((value,))
        node = self._walk.value(value)
        return any(node.meta["type"].shape[dim] == size for dim in self._rows.counted_along(node))

    def way_of(self, given: Mapping[Value, Rows], followed: bool, loss: Callable[[], Value]) -> Way | None:
        """How a loss follows from rows; a call of `loss` writes its ops. `given` are dims of its arguments; other
        values have theirs where the model has been `followed`, and else none."""
        self._go_on(given)
        known, last = {self._walk.value(value): dim for value, dim in given.items()}, self._last
        written = loss()
        self._go_on((written,))
        nodes: list[fx.Node] = []
        while last.next is not self._walk.graph.fx._root:
            nodes.append(last := last.next)

        def dim_of(node: fx.Node) -> Rows:
            return known[node] if node in known else self._rows.dim_of(node) if followed else None

        return way_of_loss(nodes, dim_of, self._walk.value(written))

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
