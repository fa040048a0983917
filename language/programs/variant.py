"""What a program does at a call: the plan that workers run, and where a call finds its arguments and puts its results.

A `Compiled` is a graph's plan. A `Variant` is one trace that has this graph: its guards say whether it tells what the
program does at a call, and then the call is one command and what the trace left in Python, set anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from copy import copy
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ArgumentWritten, DeviceMeshError, ProgramError
from monarch.compiler.execution.executor import Bind, Handle, TakeBack
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.symbols import is_named, value_at
from monarch.compiler.tape import Expr, Value, evaluate
from monarch.language.compile import compile_graph, compile_template
from monarch.language.placing.asked import others_take_turns
from monarch.language.placing.replacing import reshard
from monarch.language.programs.attempt import Attempt
from monarch.language.programs.autocasts import CASTS
from monarch.language.programs.call import leads_to
from monarch.language.programs.changes import Change, Gradients, Outcome, undoing
from monarch.language.programs.effects import Alias
from monarch.language.programs.given_up import GivenUp
from monarch.language.programs.growing import Growth
from monarch.language.programs.guards import views_of
from monarch.language.programs.handlers import ALL, HandlersLater
from monarch.language.programs.held import same_plain
from monarch.language.programs.nodes import Live
from monarch.language.programs.passed import also_read, containers_in
from monarch.language.programs.recorded import Trace
from monarch.language.programs.signature import source_of
from monarch.language.recorder.random import next_seed
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.history import Ending, ended
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.plain import check_data, same_content
from monarch.language.tensors.shapes import default_dtype, make_fake, strided_fake
from monarch.language.tensors.tensor import DistributedTensor, Ref

if TYPE_CHECKING:
    from monarch.compiler.schedule.template import Template

_INPUT, _STATE, _SCALAR, _SEED = range(4)
_REF, _PARENT, _CELL, _FAILURE, _HANDLE, _TYPE = map(attrgetter, "_ref parent cell failure handle type".split())
"""What hundreds of states are asked for at each call, in one go."""


class Compiled:
    """The plan of a traced graph, which all traces with this graph share. `values` are those of its named sizes, and
    `before` is what a search for layouts has found for the call before."""

    def __init__(
        self,
        trace: Trace,
        options: CompileOptions,
        values: Mapping[str, int] = MappingProxyType({}),
        before: dict[str, Any] | None = None,
    ) -> None:
        self.values = values
        self.template: Template | None = None
        with default_dtype(trace.dtype):
            if trace.scope is None:
                self.plan: Plan = compile_graph(trace.graph, options, kept=True, before=before)
            else:
                self.template = compile_template(trace.graph, options, trace.scope)
                self.plan = self.template.at(values, again=True)
        self.ran = False
        self.later = 0
        """In which run, from the next on, it gets a plan with generated kernels; 0 where it has what it gets."""
        self.key = trace.key
        self.constants = trace.constants
        self.free = trace.free if options.layouts else None
        """Where layouts are searched for, those that nobody had said."""
        self.state_labels = [label for label, _ in trace.states]
        self.escape_labels = [label for label, _, _ in trace.escapes]
        self.aliases: dict[str, list[str]] = {}
        for alias, label in trace.aliases.items():
            self.aliases.setdefault(label, []).append(alias)
        states = {label: number for number, label in enumerate(self.state_labels)}
        escapes = {label: number for number, label in enumerate(self.escape_labels)}
        self.fetch: list[tuple[int, Any]] = []
        for spec in self.plan.inputs:
            if spec.kind == "input":
                self.fetch.append((_INPUT, spec.label))
            elif spec.kind == "state":
                self.fetch.append((_STATE, states[str(spec.label)]))
            elif spec.kind == "scalar":
                self.fetch.append((_SCALAR, str(spec.label)))
            else:
                self.fetch.append((_SEED, None))
        results = zip(trace.result.values, trace.result.strides, strict=True)
        self._shapes = [(value.shape, strides, value.dtype) for value, strides in results]
        self._states = states
        self._typed()
        self.returns = sum(spec.kind == "return" for spec in self.plan.outputs)
        self.state_updates: list[tuple[int, int]] = []
        """The states, by number, that take an output's handle, and the output."""
        self.left_updates: list[tuple[int, int]] = []
        """Likewise the tensors that are left in Python."""
        for at, spec in enumerate(self.plan.outputs):
            labels = [str(spec.label), *self.aliases.get(str(spec.label), ())] if at >= self.returns else []
            self.state_updates += [(states[name], at) for name in labels if name in states]
            self.left_updates += [(escapes[name], at) for name in labels if name in escapes]
        taken = [at for _, at in (*self.state_updates, *self.left_updates)]
        self.shared = {at for at in taken if taken.count(at) > 1} if len(set(taken)) < len(taken) else set()
        """The outputs that several states or left tensors take."""
        self.small = [number for number, type_ in self.layouts if type_.ndim == 0]
        """The states that may share a value with others, which the plan does not know."""

    def _typed(self) -> None:
        """Take from the plan what depends on its sizes."""
        states = (spec for spec in self.plan.inputs if spec.kind == "state")
        self.layouts = [(self._states[str(spec.label)], spec.type) for spec in states]
        self.types = [type_ for _, type_ in self.layouts]
        self.fakes = [
            make_fake(value_at(shape, self.values), dtype) if strides is None else strided_fake(shape, strides, dtype)
            for shape, strides, dtype in self._shapes
        ]
        self._look = [DistributedTensor.looking(fake) for fake in self.fakes]
        """What makes each of the results."""

    def at(self, values: Mapping[str, int]) -> Compiled:
        """The same for other values of the named sizes, which meet the conditions: nothing is compiled, unless these
        come again."""
        assert self.template is not None
        found = copy(self)
        found.values, found.plan, found.ran = values, self.template.at(values), False
        found.later = 0 if self.template.lowered is None else 2
        found._typed()
        return found

    def serves(self, trace: Trace) -> bool:
        """Whether a trace of the same call's sizes has this graph."""
        return (
            (self.template is None) == (trace.scope is None)
            and self.key == trace.key
            and (self.free is None or self.free == trace.free)
            and len(self.constants) == len(trace.constants)
            and all(same_content(a, b) for a, b in zip(self.constants, trace.constants, strict=True))
        )

    def lay_out(self, cells: list[Cell]) -> None:
        """Give states the layouts that were found for them. From now on these bind."""
        if self.free is None:
            return
        found = [(cells[number], type_) for number, type_ in self.layouts]
        reshard([(cell, type_.layout) for cell, type_ in found if cell.type != type_])
        for cell in cells:
            cell.free = False

    def run(
        self,
        trace: Trace,
        leaves: list[Any],
        scalars: Mapping[str, float],
        cells: list[Cell],
        bind: Bind | None,
        release: Sequence[Handle] = (),
    ) -> list[Handle]:
        """Give the workers one step; `bind` puts what it makes where it belongs, and `release` they free first (see
        `Executor.run`)."""
        if self.later:
            self.later -= 1
            if not self.later:
                assert self.template is not None
                self.plan = self.template.at(self.values, again=True)
        if trace.weights:
            CASTS.check(trace.name, [cells[number] for number in trace.weights])
        arguments: list[Any] = []
        before: torch.Tensor | None = None  # PyTorch's generator's state, where the seed is drawn from it
        seed = 0
        for kind, where in self.fetch:
            if kind == _STATE:
                arguments.append(cells[where].handle)
            elif kind == _INPUT:
                leaf = leaves[where]
                if isinstance(leaf, DistributedTensor):
                    leaf = leaf._ref.cell.handle
                elif type(leaf) is not torch.Tensor or leaf.is_meta:
                    check_data(leaf, f"argument {where} of '{trace.name}'")
                arguments.append(leaf)
            elif kind == _SCALAR:
                arguments.append(scalars[where])
            else:
                if before is None:
                    before, seed = torch.get_rng_state(), next_seed()
                arguments.append(seed)  # one for all parts
        if before is None:
            return trace.executor.run(self.plan, arguments, bind, release=release)
        drawn = _Drawn(before, bind)
        try:
            return trace.executor.run(self.plan, arguments, drawn.bind, release=release)
        except BaseException:
            try:
                drawn.take_back(trace.mesh)
            finally:
                drawn.take_back(trace.mesh)  # where Ctrl-C has come before the first could begin
            raise

    def update_states(self, handles: list[Handle], cells: list[Cell]) -> dict[int, Handle]:
        """Give states their new values; give those of the tensors that are left in Python, by number."""
        for number, at in self.state_updates:
            cells[number].handle = handles[at]
        return {number: handles[at] for number, at in self.left_updates}

    def changes_argument(self, leaves: list[Any], cells: list[Cell]) -> bool:
        """Whether the program changes an argument, or what that is a view of, as state: in its trace they are two."""
        if not self.state_updates:
            return False
        changed = {id(cells[number]) for number, _ in self.state_updates}
        given = [leaves[number] for kind, number in self.fetch if kind == _INPUT and number < len(leaves)]  # no answers
        return any(id(source_of(leaf)) in changed for leaf in given if type(leaf) is DistributedTensor)

    def share(self, trace: Trace, cells: list[Cell], left: Mapping[int, Cell]) -> None:
        """Note the cells that were given one handle."""
        if self.shared:
            several = [cells[number] for number, at in self.state_updates if at in self.shared]
            several += [left[number] for number, at in self.left_updates if at in self.shared and number in left]
            for mesh, own in trace.by_mesh(several):
                mesh.share(own)

    def result(self, number: int, handle: Handle, mesh: Mesh, end: Ending | None) -> DistributedTensor:
        """A tensor that the plan has made, by its number among the results, and where its history ends."""
        ref = Ref(Cell(mesh, handle.type, handle), self.fakes[number])
        return self._look[number](ref) if end is None else ended(end, self._look[number], ref)

    def results(
        self,
        trace: Trace,
        handles: list[Handle],
        scalars: Mapping[str, float],
        end: Ending | None,
        outcome: Outcome | None = None,
    ) -> Any:
        """What the program returns. `outcome` finds the Python objects among it, if they are not those of the trace."""
        results: list[Any] = []
        taken = 0
        for number, leaf in enumerate(trace.result.leaves):
            if isinstance(leaf, Value):
                results.append(
                    self.result(
                        taken, handles[taken], trace.mesh_of(leaf), end if trace.result.differentiable[taken] else None
                    )
                )
                taken += 1
            elif isinstance(leaf, Alias):
                results.append(results[leaf.number])
            elif isinstance(leaf, Expr):
                results.append(evaluate(leaf, scalars))
            elif is_named(leaf):
                results.append(value_at(leaf, self.values))
            elif outcome is not None and number in trace.returned:
                results.append(trace.returned[number](outcome))
            else:
                results.append(leaf)
        spec = trace.result.spec
        return results[0] if spec.is_leaf() else pytree.tree_unflatten(results, spec)


class _Drawn:
    """What a step does that draws random numbers, and undoes where it is dropped."""

    def __init__(self, before: torch.Tensor, bind: Bind | None) -> None:
        self._before, self._bind = before, bind
        self._given = False

    def take_back(self, mesh: Mesh) -> None:
        """Have the generator's state be what it was, unless the step has been given: the call is to be made again."""
        with HandlersLater(ctrl_c=ALL):
            mesh.bind()  # a step that was given when an interrupt came
            if not self._given:
                torch.set_rng_state(self._before)

    def bind(self, handles: list[Handle]) -> TakeBack:
        self._given = True
        undo = None if self._bind is None else self._bind(handles)

        def undo_all(dropped: bool) -> None:
            if undo is not None:
                undo(dropped)
            if dropped:
                torch.set_rng_state(self._before)

        return undo_all


def first_run(compiled: Compiled, trace: Trace, leaves: list[Any], attempt: Attempt, handlers: HandlersLater) -> Any:
    """Run the step of the call that was traced: Python is as the trace left it. Says so when the step is given, and
    has signals' `handlers` run from then on."""
    scalars = {label: leaves[number] for label, number in trace.arguments.items()}
    scalars.update(trace.hyperparameters)
    scalars.update(trace.stand_ins.values)
    cells = [cell for _, cell in trace.states]
    if trace.questions:
        types = [cell.type for cell in cells]
        leaves = _answered(trace, leaves, cells)
        if types != [cell.type for cell in cells]:
            raise _replaced(trace)
    for mesh, own in trace.by_mesh(cells):
        mesh.keep(own)
    trace.mesh.name(trace.states)
    compiled.lay_out(cells)

    undo = undoing(trace.changes)

    def bind(handles: list[Handle]) -> TakeBack | None:
        left = compiled.update_states(handles, cells)
        living = {number: cell for number in left if (cell := trace.escapes[number][1]()) is not None}
        for number, cell in living.items():
            cell.set(left[number])
        compiled.share(trace, cells, living)
        attempt.given = True
        return undo

    for mesh, own in trace.by_mesh(cells[number] for number in compiled.small):
        mesh.separate(own, cells)
    if compiled.changes_argument(leaves, cells):
        raise ArgumentWritten(f"an argument of '{trace.name}' is a tensor that it changes in place")
    handles = compiled.run(trace, leaves, scalars, cells, bind)
    if trace.escapes and not compiled.ran:
        # Python holds tensors that this step makes first, such as an optimizer's state: wait whether it does.
        try:
            handlers.leave()
            parts, first = compiled.plan.parts, compiled.plan.outputs[0].part
            mesh = trace.meshes[parts[first].name] if parts else trace.mesh  # a step fails on all meshes or on none
            mesh.executor.wait(handles[0])
        except KeyboardInterrupt:
            mesh.give_up(handles[0])
            raise
        except DeviceMeshError:
            with HandlersLater(ctrl_c=ALL):
                trace.undo()  # to what an earlier step left, which may have failed as well
            for mesh in trace.meshes.values() or [trace.mesh]:
                mesh.recover()
            raise
    compiled.ran = True
    _require(trace, leaves)
    return compiled.results(trace, handles, scalars, trace.end)


def _answered(trace: Trace, leaves: list[Any], cells: list[Cell]) -> list[Any]:
    """The arguments of a call, and behind them what actors answer to it. Waits for these, and raises what they do."""
    with others_take_turns():
        for question in trace.questions:
            leaves = [*leaves, *question.answers(leaves, cells)]
    return leaves


def _replaced(trace: Trace) -> ProgramError:
    return ProgramError(
        f"while '{trace.name}' waited for actors, another thread has replaced state that it reads",
        hint="call it again, or let one thread do both.",
    )


def _require(trace: Trace, leaves: list[Any]) -> None:
    for number, required in trace.requiring:
        leaves[number].requires_grad_(required)


class Variant:
    """A trace as later calls use it."""

    def __init__(self, compiled: Compiled, trace: Trace) -> None:
        self.compiled = compiled
        self.trace = trace
        self.guards = trace.guards
        self.guards.states = [spot for spot, _ in trace.spots]
        self._shapes = [(mesh, mesh._shape) for mesh in trace.meshes.values() or [trace.mesh]]
        """The workers that each mesh consisted of, which may have another size later."""
        self._views = [views for _, views in trace.spots]
        self._viewing = any(self._views)
        inputs = [entry for entry in trace.tape.inputs if entry.kind == "state"]
        number_of = {entry.value.index: number for number, entry in enumerate(inputs)}
        self._same = [
            (number, number_of[entry.same_as.index]) for number, entry in enumerate(inputs) if entry.same_as is not None
        ]
        self._hyperparameters = [(label, spot, index) for label, (spot, index) in trace.sources.items()]
        states = set(self.guards.states)
        self._dropped = [(spot, self.guards.nodes[spot[0]]) for spot in trace.effects.replaced() if spot not in states]
        for spot in (*(spot for spot, _ in self._dropped), *(spot for _, spot, _ in self._hyperparameters)):
            self.guards.use(spot)
        self._small = compiled.small
        self._own: list[weakref.ref[Handle]] = []
        """What the last call has given to those, and to no others."""
        self._leaves_shared = any(at in compiled.shared for _, at in compiled.left_updates)
        # The number of the tensor that each cell, by its id in the trace, is among those that the trace left.
        self._left = {
            id(cell): number for number, (_, ref, _) in enumerate(trace.escapes) if (cell := ref()) is not None
        }
        left = [(ident, trace.escapes[number][2]) for ident, number in self._left.items()]
        self._meshes = {ident: trace.homes[value] for ident, value in left if trace.homes}
        self._apart = trace.apart
        self._ends = trace.end is not None
        effects = trace.effects
        matters = trace.passes and (trace.asks_which or effects.passed or effects.steps)
        puts = {(step.node, name) for step in effects.steps for name in step.names}
        places = self.guards.use_apart() if matters else []
        self._read_too = [spot for spot in places if (spot[0], self.guards.nodes[spot[0]].keys[spot[1]]) not in puts]
        """Where lists and dicts are that matter if they are arguments too."""
        self._changed = {self.guards.nodes[step.node].parent for step in effects.steps}
        for spot in trace.stand_ins.spots.values():
            self.guards.use(spot)
        self._has_numbers = bool(trace.arguments or self._hyperparameters or trace.stand_ins.spots)
        touched = (
            self.guards.states
            or compiled.left_updates
            or effects.steps
            or effects.passed
            or effects.growth
            or trace.returned
        )
        self._only_computes = not (touched or trace.requiring)
        """Whether a call gives results and no more: it has no state, and changes nothing in Python."""
        leaf = trace.result.leaves[0] if trace.result.spec.is_leaf() else None
        self._home = trace.mesh_of(leaf) if isinstance(leaf, Value) else None
        """Where the result is, if that is one tensor."""
        self._differentiable = trace.result.differentiable[:1] == [True]
        """Whether that has a history: what a call leaves in Python may have one, and its result none."""

    def at(self, compiled: Compiled) -> Variant:
        """The same trace with a plan for other sizes."""
        found = copy(self)
        found.compiled = compiled
        return found

    # -- whether it fits a call ----------------------------------------------------------------------------------

    def holds(self, leaves: list[Any]) -> tuple[Live, list[Cell], dict[str, float]] | None:
        """What a call reads, where all that the trace depended on is still so."""
        self.trace.mesh.settle()
        for mesh, shape in self._shapes:
            if mesh._shape is not shape and mesh._shape != shape:
                return None
        checked = self.guards.check(leaves)
        if checked is None or (self._apart and self.guards.expects([leaves[number] for number in self._apart])):
            return None
        live, states = checked
        scalars = self._scalars(leaves, live) if self._has_numbers else {}
        for ref, kept in self.trace.large:
            if (tensor := ref()) is not None and not same_content(kept, tensor):
                return None
        for expr, expected in self.trace.conditions:
            if not same_plain(evaluate(expr, scalars), expected):
                return None
        if not states:
            return live, [], scalars
        refs: list[Ref] = [*map(_REF, states)]
        if (self._viewing or any(map(_PARENT, refs))) and [*map(views_of, refs)] != self._views:
            return None
        cells: list[Cell] = [*map(_CELL, refs)]
        if any(map(_FAILURE, cells)):
            for cell in cells:
                cell.raise_failure()
        if not self._states_hold(cells) or self.compiled.changes_argument(leaves, cells):
            return None
        if self.trace.with_history and any(
            leads_to(leaves[number], {*map(id, states)}) for number in self.trace.with_history
        ):
            return None
        return live, cells, scalars

    def _scalars(self, leaves: list[Any], live: Live) -> dict[str, float]:
        values = {label: leaves[number] for label, number in self.trace.arguments.items()}
        for label, spot, index in self._hyperparameters:
            value = live[spot]
            values[label] = float(value if index is None else value[index])
        self.trace.stand_ins.read(live, values)
        return values

    def _states_hold(self, cells: list[Cell]) -> bool:
        handles = [*map(_HANDLE, cells)]
        read = [handles[number] for number, _ in self.compiled.layouts]
        try:
            types = [*map(_TYPE, read)]
        except AttributeError:  # one has no value yet
            return False
        if types != self.compiled.types:
            return False
        self.compiled.types = types  # equal ones, and at the next call the same objects, which are quicker to compare
        for number, first in self._same:
            if handles[number] is not handles[first]:
                return False
        small = {id(handles[number]) for number in self._small}
        return len(set(cells)) == len(cells) and len(small) == len(self._small)

    # -- running -------------------------------------------------------------------------------------------------

    def run(self, leaves: list[Any], found: tuple[Live, list[Cell], dict[str, float]], args: Any, kwargs: Any) -> Any:
        """Run one step, of a call with these arguments: returns at once, with tensors that are still being computed."""
        trace, compiled = self.trace, self.compiled
        if trace.questions:
            given, leaves = leaves, _answered(trace, leaves, found[1])
            again = self.holds(given)
            if again is None:
                raise _replaced(trace)
            found = again
        live, cells, scalars = found
        if self._read_too:
            self._check_containers(live, args, kwargs)
        end = trace.end_of(cells, args, kwargs) if self._ends else None
        if self._only_computes:
            return self._result(compiled.run(trace, leaves, scalars, cells, None), scalars, end)
        for mesh, kept in trace.by_mesh(cells):
            mesh.keep(kept)
        small = [cells[number] for number in self._small]
        known = not self._leaves_shared and [own() for own in self._own] == [cell.handle for cell in small]
        if not known:
            for mesh, own in trace.by_mesh(small):
                mesh.separate(own, cells)
        given_up = GivenUp()
        bound: tuple[Outcome, list[Change | Gradients | Growth]] | None = None

        def bind(handles: list[Handle]) -> TakeBack | None:
            nonlocal bound
            left = compiled.update_states(handles, cells)
            if bound is None:  # or else an interrupted call goes on with the objects that it has made
                given = {ident: left[number] for ident, number in self._left.items()}
                outcome = Outcome(trace.mesh, leaves, live, scalars, given, self._meshes, (args, kwargs), end)
                changes = trace.effects.repeat(self.guards, outcome)
                bound = bound or (outcome, changes)  # a signal's handler may have done all this meanwhile
            for change in bound[1]:
                change.make()
            if not known:
                made = bound[0].made
                living = {number: made[ident].cell for ident, number in self._left.items() if ident in made}
                compiled.share(trace, cells, living)
            return undoing(bound[1], given_up.leaves)

        try:
            release = given_up.take(self._given_up(live, leaves)) if self._dropped else ()
            handles = compiled.run(trace, leaves, scalars, cells, bind, release)
        except BaseException:
            try:
                trace.mesh.settle()
            finally:
                try:
                    given_up.give_back(trace.mesh, lambda: bound is None)
                finally:
                    given_up.give_back(trace.mesh, lambda: bound is None)  # as in `Compiled.run`
            raise
        assert bound is not None
        self._own = [weakref.ref(cell.handle) for cell in small if cell.handle is not None]
        _require(trace, leaves)
        return self._result(handles, scalars, end, bound[0])

    def _check_containers(self, live: Live, args: Any, kwargs: Any) -> None:
        """Raise ProgramError for a list or dict that is an argument and is read from Python too, if it is changed."""
        at = {id(live[spot]): spot for spot in self._read_too}
        changed = {step.node for step in self.trace.effects.passed}
        for number, each in enumerate(containers_in(args, kwargs)):
            spot = at.get(id(each))
            if spot is not None and (self.trace.asks_which or spot in self._changed or number in changed):
                raise also_read(self.trace.name, each)

    def _result(
        self, handles: list[Handle], scalars: Mapping[str, float], end: Ending | None, outcome: Outcome | None = None
    ) -> Any:
        if self._home is not None:
            return self.compiled.result(0, handles[0], self._home, end if self._differentiable else None)
        return self.compiled.results(self.trace, handles, scalars, end, outcome)

    def _given_up(self, live: Live, leaves: list[Any]) -> list[Any]:
        """The leaves whose gradients the last step left and this one makes anew without reading them."""
        return [
            live[node.parent] if node.parent is not None else node.holder(live, leaves)
            for spot, node in self._dropped
            if live.pop(spot) is not None
        ]
