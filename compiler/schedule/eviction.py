"""Which values a step gives up, and where it computes them again: a walk over the schedule under a memory limit.

The walk goes through a graph's calls in order and keeps the bytes that a worker holds. Where they would pass the limit,
a buffer that is read again only later is given up, and the calls that make it are made again before that reader, with
whatever else of their operands is not there any more. So far this is dynamic tensor rematerialisation (Kirisame et al.,
"Dynamic Tensor Rematerialization", ICLR 2021), done ahead of time: what is read when is known here, so nothing that is
dead is kept, and the choice can look ahead. What is given up is an integer program: each moment has to be relieved of
its excess over the limit, a buffer relieves the moments from now until it is read, and costs the time to make it again.
The greedy rule for such programs (Dobson, "Worst-case analysis of greedy heuristics for integer programming with
nonnegative data", Mathematics of Operations Research 7(4), 1982) takes what costs least for each byte and moment of
excess that it covers.

A collective is not made again where anything else can be given up. What one gathered of a parameter is read instead
from a later gather of the same parameter, if there is one.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.schedule.buffers import Buffer, Buffers, repeatable
from monarch.compiler.sizes import format_bytes

RECOMPUTED = "recomputed"
"""In the meta of a call that is made again: the name of the first."""

_MOST_AGAIN = 2.0
"""A step that makes more than so many times its calls again is given up on."""


@dataclass(eq=False)
class Recompute:
    """A call that is made again before position `before`. `operands` are the instances that stand for the first call's;
    `elements` has the results that a narrowed collective has left, `why` the reason."""

    call: fx.Node
    before: int
    operands: dict[fx.Node, Instance]
    why: str
    elements: list[int] = field(default_factory=list)


Instance = fx.Node | Recompute
"""Where a value can be read: its own call, or a later one."""


class Eviction:
    """One walk. `peak` is the most bytes of a worker by its reckoning, `seconds` those that it adds to the step."""

    def __init__(self, buffers: Buffers, limit: int, collectives: bool = False) -> None:
        self.buffers = buffers
        self.limit = limit
        self.collectives = collectives
        self.complete = True
        self.again: list[Recompute] = []
        self.saved: list[tuple[str, int, str, str]] = []
        """An evicted value, its bytes, and the values between which these are free."""
        self.peak = self._held = buffers.start
        self.seconds = 0.0
        self._rewired: list[tuple[int, fx.Node, Recompute]] = []
        self._here: dict[Buffer, dict[fx.Node, Instance]] = {}
        """The buffers in memory, and where each of their values can be read."""
        self._gone: dict[Buffer, int] = {}
        """The evicted buffers, with the position by which they are wanted again."""
        self._gave_up: dict[Buffer, int] = {}
        """When each buffer was evicted last."""
        self._wanted: dict[Buffer, list[int]] = {}
        """Positions at which a buffer is read to make another one again."""
        self._roots = {
            buffer: value
            for value, buffer in reversed(buffers.of.items())
            if buffer is not None and value not in buffers.viewed
        }
        self._same = _gathers_of_states(buffers.calls)
        self._queue: list[tuple[float, int, Buffer]] = []
        self._tickets = 0
        held, expected = buffers.start, []
        for takes, gives in zip(buffers.takes, buffers.gives, strict=True):
            expected.append(held + takes)
            held += takes - gives
        self._expected = torch.tensor(expected, dtype=torch.int64)
        """The bytes in memory at each call, by the knowledge so far."""

    def run(self) -> bool:
        """Whether the step then stays within the limit. A walk that has to make too much again is not `complete`."""
        for at, call in enumerate(self.buffers.calls):
            self._step(at, call)
            if len(self.again) > _MOST_AGAIN * len(self.buffers.calls):
                self.complete = False
                return False
        return self.peak <= self.limit

    # -- the schedule ----------------------------------------------------------------------------------------------

    def _step(self, at: int, call: fx.Node) -> None:
        known = self.buffers
        if call.target is operator.getitem:
            buffer = known.of[call]
            if buffer is not None and (buffer.uses or buffer.result):
                self._here.setdefault(buffer, {})[call] = call
                self._offer(buffer)
            self._held -= known.gives[at]
            return
        for operand in call.all_input_nodes:
            instance = self._bring(operand, at)
            if isinstance(instance, Recompute):
                self._rewired.append((at, operand, instance))
        made_here = (each for each in known.made(call) if each is not None)
        touched = list(dict.fromkeys((*self._buffers(call.all_input_nodes), *made_here)))  # in the order of the graph
        self._held += known.takes[at]
        self._fit(at, touched)
        made = known.of.get(call)
        if made is not None and (made.uses or made.result):
            self._here.setdefault(made, {})[call] = call
        self._held -= known.gives[at]
        for buffer in touched:
            if buffer.next_use(at) is not None:
                self._offer(buffer)
            elif not buffer.result:
                self._here.pop(buffer, None)

    def _buffers(self, operands: Iterable[fx.Node]) -> Iterable[Buffer]:
        for operand in operands:
            buffer = self.buffers.of.get(operand)
            if buffer is not None:
                yield buffer

    def _bring(self, value: fx.Node, at: int) -> Instance:
        """The value that can be read at `at` in the place of another; it is made again where it was evicted."""
        buffer = self.buffers.of.get(value)
        if buffer is None:
            return value
        if value not in self._here.get(buffer, ()):
            self._make_again(value, at)
        return self._instance(self._held_as(value))

    def _make_again(self, value: fx.Node, at: int) -> None:
        steps = _by_call(self._missing([value], self._is_here))
        missing = {value for _, values in steps for value in values}
        user = self.buffers.calls[at]
        reads = [
            {operand: operand if operand in missing else self._held_as(operand) for operand in _operands(call, values)}
            for call, values in steps
        ]
        last = {buffer: number for number, read in enumerate(reads) for buffer in self._buffers(read.values())}
        for number, ((call, values), read) in enumerate(zip(steps, reads, strict=True)):
            operands = {operand: self._instance(stands_in) for operand, stands_in in read.items()}
            self._repeat(call, values, operands, at, {*self._buffers(user.all_input_nodes), *last})
            for buffer in dict.fromkeys(self._buffers(read.values())):  # in an order that is the same each time
                if last[buffer] == number:
                    del last[buffer]
                    if not self._is_wanted(buffer, at):
                        del self._here[buffer]
                        self._held -= buffer.size

    def _repeat(
        self, call: fx.Node, values: list[fx.Node], operands: dict[fx.Node, Instance], at: int, pinned: set[Buffer]
    ) -> None:
        """Make a call again, for some of its results."""
        known = self.buffers
        again = Recompute(call, at, operands, self._reason(values, known.calls[at].name))
        self.again.append(again)
        self.seconds += known.seconds[known.position[call]]
        if call in known.viewed:
            made: list[Buffer] = []
        elif values[0] is call:
            made = [buffer for buffer in known.made(call) if buffer is not None]
        else:
            indices = [args_of(value)[1] for value in values]
            if ops.is_collective(call.target):
                again.elements = indices
            made = [
                buffer
                for index, buffer in enumerate(known.elements[call])
                if buffer is not None and (index in indices or not again.elements)
            ]
        self._held += sum(buffer.size for buffer in made)
        self._fit(at, pinned.union(made))
        kept = set()
        for value in values:
            buffer = known.of[value]
            instance = again if value is call else Recompute(value, at, {call: again}, again.why)
            if value is not call:
                self.again.append(instance)
            if buffer is not None:
                kept.add(buffer)
                self._here.setdefault(buffer, {})[value] = instance
                until = self._gone.pop(buffer, at)
                self._expected[at:until] += buffer.size
                self._offer(buffer)
        self._held -= sum(buffer.size for buffer in made if buffer not in kept)

    def _reason(self, values: list[fx.Node], user: str) -> str:
        for value in values:
            buffer = self.buffers.of[value]
            if buffer in self._gone and self._roots[buffer] is value:
                before = [at for at in buffer.uses if at < self._gave_up[buffer]]
                last = self.buffers.calls[before[-1]].name if before else value.name
                self.saved.append((value.name, buffer.size, last, user))
                return f"recomputed: saves {format_bytes(buffer.size)} between %{last} and %{user}"
        return f"recomputed for %{user}"

    def _instance(self, value: fx.Node) -> Instance:
        buffer = self.buffers.of.get(value)
        return value if buffer is None else self._here[buffer][value]

    def _held_as(self, value: fx.Node) -> fx.Node:
        """The value itself where it is in memory, else an equal one that is."""
        same = (value, *self._same.get(value, ()))
        return next(other for other in same if self._holds(other))

    def _is_here(self, value: fx.Node) -> bool:
        return self._holds(value) or any(self._holds(other) for other in self._same.get(value, ()))

    def _holds(self, value: fx.Node) -> bool:
        buffer = self.buffers.of.get(value)
        return buffer is None or value in self._here.get(buffer, ())

    def _is_wanted(self, buffer: Buffer, at: int) -> bool:
        return buffer.result or buffer.next_use(at - 1) is not None

    def _missing(self, values: Sequence[fx.Node], is_here: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """The values that have to be made again for some of them, in the order of their calls."""
        position = self.buffers.position
        found: set[fx.Node] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if value in found or is_here(value):
                continue
            found.add(value)
            waiting += _operands(_call_of(value), [value])
        return sorted(found, key=lambda value: (position[_call_of(value)], position[value]))

    # -- eviction -------------------------------------------------------------------------------------------------

    def _offer(self, buffer: Buffer) -> None:
        """Put a buffer among those that can be evicted. Its cost is reckoned when it comes to that."""
        self._tickets += 1
        heapq.heappush(self._queue, (-1.0, self._tickets, buffer))

    def _fit(self, at: int, pinned: Collection[Buffer]) -> None:
        """Evict buffers, but none that is `pinned`, until the rest fits; note the peak."""
        aside: list[tuple[float, int, Buffer]] = []
        while self._held > self.limit and self._queue:
            entry = heapq.heappop(self._queue)
            _, ticket, buffer = entry
            if buffer not in self._here or buffer.result:
                continue
            if buffer in pinned:
                aside.append(entry)
                continue
            price = self._price(buffer, at)
            if price is None:
                continue
            if self._queue and price > self._queue[0][0]:
                heapq.heappush(self._queue, (price, ticket, buffer))
                continue
            self._give_up(buffer, at)
        for entry in aside:
            heapq.heappush(self._queue, entry)
        self.peak = max(self.peak, self._held)

    def _price(self, buffer: Buffer, at: int) -> float | None:
        """Seconds for each byte and moment of excess that giving up a buffer covers; None where it cannot be."""
        until = self._until(buffer, at)
        if until is None or not buffer.size:
            return None
        seconds = 0.0
        for call, _ in _by_call(self._needed(buffer, at, until)):
            if not repeatable(call) and not (self.collectives and ops.is_collective(call.target)):
                return None
            seconds += self.buffers.seconds[self.buffers.position[call]]
        excess = (self._expected[at:until] - self.limit).clamp(0, buffer.size).sum().item()
        covered = excess + min(buffer.size, max(0, self._held - self.limit))
        return seconds / covered if covered else None

    def _until(self, buffer: Buffer, at: int) -> int | None:
        """The next position at which a buffer is read, by the graph or to make another one again."""
        wanted = [position for position in self._wanted.get(buffer, ()) if position > at]
        own = buffer.next_use(at)
        return min([*wanted, *([] if own is None else [own])], default=None)

    def _needed(self, buffer: Buffer, at: int, until: int) -> list[fx.Node]:
        """The calls that have to be made again at `until` if the buffer is evicted at `at`."""

        def will_be_here(value: fx.Node) -> bool:
            other = self.buffers.of.get(value)
            if other is None:
                return True
            if other is buffer:
                return False
            if self._stays(other, until):
                return other in self._here or self._gone.get(other, until + 1) <= until
            return any(
                (lies := self.buffers.of[same]) is not None
                and self.buffers.position[same] < until
                and self._stays(lies, until)
                for same in self._same.get(value, ())
            )

        return self._missing([self._roots[buffer]], will_be_here)

    def _stays(self, buffer: Buffer, until: int) -> bool:
        return buffer.result or buffer.last_use >= until

    def _give_up(self, buffer: Buffer, at: int) -> None:
        until = self._until(buffer, at)
        assert until is not None
        needed = self._needed(buffer, at, until)
        for call, values in _by_call(needed):
            for other in self._buffers(_operands(call, values)):
                if other is not buffer and (other in self._here or other in self._gone):
                    self._wanted.setdefault(other, []).append(until)
        del self._here[buffer]
        self._gone[buffer] = until
        self._gave_up[buffer] = at
        self._held -= buffer.size
        self._expected[at:until] -= buffer.size

    # -- the graph -------------------------------------------------------------------------------------------------

    def applied(self) -> Graph:
        """A copy of the graph in which it is so."""
        graph = self.buffers.graph
        copy = graph.copy()
        of = dict(zip(graph.fx.nodes, copy.fx.nodes, strict=True))
        backward = [at for at, call in enumerate(self.buffers.calls) if provenance(call).backward]
        made: dict[Recompute, fx.Node] = {}

        for again in self.again:
            call = again.call
            args, kwargs = fx.node.map_arg(
                _narrowed(again), {operand: _at(instance, of, made) for operand, instance in again.operands.items()}.get
            )
            with copy.fx.inserting_before(of[self.buffers.calls[again.before]]):
                node = copy.fx.create_node("call_function", call.target, args, kwargs, f"{call.name}_again")
            node.meta.update({key: value for key, value in call.meta.items() if key not in _ITS_OWN})
            if again.elements:
                node.meta["type"] = tuple([call.meta["type"][index] for index in again.elements])
            node.meta[RECOMPUTED] = call.name
            node.meta["why"] = again.why
            late = bool(backward) and backward[0] <= again.before <= backward[-1]
            of_call = provenance(call)
            node.meta["provenance"] = replace(of_call, backward=of_call.backward or late, fused=())
            made[again] = node
        for at, operand, instance in self._rewired:
            of[self.buffers.calls[at]].replace_input_with(of[operand], made[instance])
        for node in reversed(list(copy.calls)):
            if not node.users and not ops.acts(node.target):
                copy.fx.erase_node(node)
        return copy


_ITS_OWN = ("key", "stands_for", "reason", "named", "why")
"""Keys of a call's meta that are not those of the same call made again."""


def _at(instance: Instance, of: dict[fx.Node, fx.Node], made: dict[Recompute, fx.Node]) -> fx.Node:
    return made[instance] if isinstance(instance, Recompute) else of[instance]


def _narrowed(again: Recompute) -> tuple[Any, Any]:
    """A call's arguments, for those results alone that are wanted."""
    call = again.call
    if call.target is operator.getitem:
        (producer,) = again.operands.values()
        index = args_of(call)[1]
        if isinstance(producer, Recompute) and producer.elements:
            index = producer.elements.index(index)
        return (args_of(call)[0], index), {}
    if not again.elements:
        return call.args, dict(call.kwargs)
    tensors, dims, *rest = args_of(call)
    narrow = [
        [each[index] for index in again.elements]
        if isinstance(each, (list, tuple)) and call.target is not ops.permute
        else each
        for each in rest
    ]
    return ([tensors[index] for index in again.elements], dims, *narrow), dict(call.kwargs)


def _call_of(value: fx.Node) -> fx.Node:
    """The call that a value is a result of: the value itself, but for an element of several."""
    return args_of(value)[0] if value.target is operator.getitem else value


def _operands(call: fx.Node, values: Sequence[fx.Node]) -> list[fx.Node]:
    """The operands of a call for some of its results: a collective can be made for these alone."""
    if ops.is_collective(call.target) and values[0] is not call:
        return [args_of(call)[0][args_of(value)[1]] for value in values]
    return call.all_input_nodes


def _by_call(values: Iterable[fx.Node]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The calls that make some values, in their order, each with those of its results that are wanted."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for value in values:
        found.setdefault(_call_of(value), []).append(value)
    return list(found.items())


def _gathers_of_states(calls: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each result of gathering a state, all results that gathered the same in the same way: they are equal."""
    groups: dict[object, list[fx.Node]] = {}
    for value in calls:
        call = _call_of(value)
        if call is value or call.target is not ops.all_gather:
            continue
        tensors, mesh_dims, dims = args_of(call)
        index = args_of(value)[1]
        if tensors[index].op == "placeholder":
            groups.setdefault((tensors[index], tuple(mesh_dims), dims[index]), []).append(value)
    return {value: group for group in groups.values() for value in group}
