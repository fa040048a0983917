"""Running a function once to record it: what the tape holds, what it reads and leaves behind, what it depends on."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.execution.executor import Executor
from monarch.compiler.graph import Graph
from monarch.compiler.loading import load
from monarch.compiler.passes.functionalize import functionalize
from monarch.compiler.symbols import Scope, has_names, is_named, poly_of
from monarch.compiler.tape import Expr, Tape, Value
from monarch.compiler.types import TensorType
from monarch.language.compile import collected_later
from monarch.language.optimizers.watch import OptimizerWatch
from monarch.language.placing.asked import Question
from monarch.language.programs.attempt import Attempt, nothing
from monarch.language.programs.autocasts import CASTS, weights
from monarch.language.programs.call import (
    ProgramCall,
    apart,
    check_histories,
    check_leaves,
    differentiated,
    histories,
    requiring_gradients,
)
from monarch.language.programs.changes import Change
from monarch.language.programs.effects import Effects, Make, Specialise, rebound
from monarch.language.programs.entered import Entered
from monarch.language.programs.environment import Environment, labelled, state_names
from monarch.language.programs.growing import Growth
from monarch.language.programs.guards import Guards, views_of
from monarch.language.programs.held import MISSING, PLAIN, Contents, Held
from monarch.language.programs.inputs import symbolic_arguments
from monarch.language.programs.kinds import Tensor
from monarch.language.programs.modules import module_paths
from monarch.language.programs.nodes import Path, Spot
from monarch.language.programs.own import check_own
from monarch.language.programs.passed import Passed
from monarch.language.programs.repeatable import Repeatable
from monarch.language.programs.results import Result, Stopped, result_of, with_sizes
from monarch.language.programs.snapshot import Snapshot
from monarch.language.programs.stand_ins import Place, StandIns, are_floats
from monarch.language.programs.unsaid import unsaid
from monarch.language.recorder.modes import tracing
from monarch.language.recorder.random import counting_streams
from monarch.language.recorder.recording import Recording, current
from monarch.language.recorder.refusals import Ended
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.history import Ending, end_in_place
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.shapes import default_dtype
from monarch.language.tensors.tensor import DistributedTensor


@dataclass
class Trace:
    """One run of a program's function, recorded."""

    name: str
    mesh: Mesh
    meshes: dict[str, Mesh]
    """Those of a program of several, by their names; empty for one of one mesh."""
    homes: dict[Value, Mesh]
    """Where results and the tensors that it leaves in Python are, in a program of several meshes."""
    dtype: torch.dtype
    """PyTorch's default dtype when it began, under which it is compiled and run."""
    tape: Tape
    result: Result
    end: Ending | None
    """Where the history of its results ends; None where none would have one in PyTorch."""
    through: list[int]
    """The arguments, by number, that require a gradient, to which such a history leads."""
    states: list[tuple[str, Cell]]
    """Label and cell of each state that is read or updated, in the order of first use."""
    escapes: list[tuple[str, weakref.ref[Cell], Value]]
    """Label, cell and value of each tensor that the trace made and that outlives it."""
    arguments: dict[str, int]
    """The numbers that are arguments: label -> number of the argument leaf."""
    hyperparameters: dict[str, float]
    """What the numbers of optimizers are in the call that is traced."""
    conditions: list[tuple[Expr, Any]]
    """What has to hold of the numbers of a call."""
    guards: Guards
    effects: Effects
    spots: list[tuple[Spot, tuple[Any, ...]]]
    """Where each state is found at a later call, and how the tensor there views it."""
    fixed: dict[Path, tuple[str, str]]
    """Hyperparameters that are built in, by place: optimizer's label and key."""
    returned: dict[int, Make]
    """The Python objects among the results, by the leaf's number: how another call finds or makes them."""
    sources: dict[str, tuple[Spot, int | None]]
    """Where each hyperparameter is found: its place, and its number among several."""
    stand_ins: StandIns
    """The numbers that each call reads in Python, and the lists to which it appends."""
    pinned: set[Path]
    """The places of such numbers of which the trace is valid for one value alone."""
    requiring: list[tuple[int, bool]]
    """The plain arguments, by number, that the program has require a gradient, or none."""
    apart: list[int]
    """The arguments, by number, by which it may differentiate: no other way leads to them."""
    passes: bool
    """Whether there are lists or dicts among its arguments."""
    asks_which: bool
    """Whether it may have asked which object an argument is."""
    with_history: list[int]
    """The arguments, by number, whose history ends at the program, where that differentiates."""
    scope: Scope | None
    """The named sizes that it is valid for all values of, under conditions; None where it has none."""
    free: frozenset[str | int]
    """The states, by label, and the arguments, by number, whose layouts nobody has said."""
    large: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]]
    """The large plain tensors from outside that ops have read, each with its content."""
    cannot: tuple[str, Source | None] | None
    """Why a later call has to trace again, with the line, where no guards can say what it would do."""
    weights: list[int]
    """The states, by number, of which an autocast around a call would keep casts."""
    questions: list[Question]
    """What each call asks of actors before its step."""
    changes: list[Change | Growth]
    """What the traced call changes in Python."""
    undo: Callable[[], None]
    """Puts all Python objects back to what they were before the trace."""

    def end_of(self, cells: list[Cell], args: Any, kwargs: Any) -> Ending | None:
        """Where the history ends of what a call returns that reads these cells."""
        assert self.end is not None
        given = pytree.tree_leaves((args, kwargs)) if self.through else ()
        return self.end[0].of(cells, [given[number] for number in self.through])

    @cached_property
    def _functional(self) -> tuple[Graph, dict[str, str]]:
        updates = {label: entry.value for (label, _), entry in zip(self.states, self._state_inputs, strict=True)}
        updates.update({label: value for label, _, value in self.escapes})
        names = {mesh: name for name, mesh in self.meshes.items()}
        with default_dtype(self.dtype):
            graph, aliases = functionalize(
                self.tape,
                name=self.name,
                mesh=self.mesh._workers.spec if names else self.mesh.spec,
                returns=self.result.values,
                updates=updates,
                parts={name: mesh._shape for name, mesh in self.meshes.items()},
                homes={value: names[mesh] for value, mesh in self.homes.items()},
            )
        graph.free = self.free
        return graph, aliases

    @property
    def executor(self) -> Executor:
        """What runs its plan: for a program of several meshes that of the mesh of which all are parts."""
        executor = self.mesh.executor
        return executor.whole if self.meshes else executor

    def mesh_of(self, value: Value) -> Mesh:
        """The mesh on which a result is."""
        return self.homes.get(value, self.mesh)

    def by_mesh(self, cells: Iterable[Cell]) -> Iterator[tuple[Mesh, list[Cell]]]:
        """Cells by the mesh that they are on."""
        if not self.meshes:
            yield self.mesh, list(cells)
            return
        found: dict[Mesh, list[Cell]] = {}
        for cell in cells:
            found.setdefault(cell.mesh, []).append(cell)
        yield from found.items()

    @property
    def _state_inputs(self) -> list[Any]:
        return [entry for entry in self.tape.inputs if entry.kind == "state"]

    @property
    def graph(self) -> Graph:
        return self._functional[0]

    @property
    def aliases(self) -> dict[str, str]:
        """States that share another's output: label -> the label that the graph updates."""
        return self._functional[1]

    @cached_property
    def key(self) -> Any:
        """Equal for equal programs."""
        key = self.tape.key if self.scope is None else _unscoped(self.tape.key)
        shapes = tuple((name, mesh._shape) for name, mesh in (self.meshes or {"": self.mesh}).items())
        homes = tuple(mesh._shape for mesh in self.homes.values())
        escapes = tuple(value for _, _, value in self.escapes)
        return key, tuple(self.result.values), tuple(self.result.strides), escapes, shapes, homes

    def release(self) -> None:
        """Let go of what only the traced call needed, and keep nothing of the user's alive."""
        for number in self.returned:
            self.result.leaves[number] = None
        self.states = []
        self.end = None if self.end is None else self.end[0].of((), ())
        self.hyperparameters = {}
        self.stand_ins.release()
        self.changes = []
        self.undo = nothing
        self.guards.close()
        self.effects.close()

    def line(self, name: str) -> Source | None:
        """Where the user's code names something first."""
        return self.guards.entered.line(name)

    @cached_property
    def constants(self) -> list[torch.Tensor]:
        """The plain tensors that are built in."""
        return [entry.tensor for entry in self.tape.inputs if entry.tensor is not None]


def trace(
    call: ProgramCall,
    mesh: Mesh,
    environment: Environment,
    varying: set[tuple[str, str]],
    moving: set[Path],
    places: list[Place],
    symbols: Any,
    attempt: Attempt,
) -> Trace:
    """Run the function of a call with symbolic arguments and record it.

    `varying` are the hyperparameters that are known to vary, `moving` the places at which there are other tensors from
    call to call, and `places` those of numbers that change and of lists that grow; `symbols` are the named sizes of the
    call, if there are any. `attempt` can take back what the function changes in Python.

    A float argument is a symbol in the trace, and so is an int among those that change; at the `places` there are
    stand-ins. Where the function asks for the exact type of one, or hands it to what takes only Python's own, it is
    traced once more with the value itself, which another value does not fit: first with those lists, then with those
    numbers and ints, and last with the floats.
    """
    floats = frozenset((float,) if any(type(leaf) is float for leaf in call.leaves) else ())
    all_symbolic = floats | frozenset((int,) if call.moving_ints else ())
    numbers = [place for place in places if place.type is not list]
    steps = [(places, all_symbolic), (numbers, all_symbolic), ([], floats), ([], frozenset())]
    *steps, last = [step for step, after in zip(steps, [*steps[1:], None], strict=True) if step != after]
    for some, symbolic in steps:
        try:
            found = _trace(call, mesh, environment, varying, moving, symbols, attempt, symbolic, some)
            if not attempt.asks_type:
                return found
        except Exception as error:  # which is raised again where it was not the symbols' doing
            has_ints = some or int in symbolic
            if not (has_ints or attempt.asks_type or isinstance(error, (TypeError, AttributeError))):
                raise
        attempt.take_back()
        attempt.asks_type, attempt.stand_ins = False, set()
    return _trace(call, mesh, environment, varying, moving, symbols, attempt, last[1], last[0])


@collected_later()
def _trace(
    call: ProgramCall,
    mesh: Mesh,
    environment: Environment,
    varying: set[tuple[str, str]],
    moving: set[Path],
    symbols: Any,
    attempt: Attempt,
    symbolic: Set[type],
    places: list[Place],
) -> Trace:
    function, leaves = call.function, call.leaves
    types = call.types(mesh, None if symbols is None else symbols.scope)
    for part in mesh._family:
        part.flush(call.name)
    before, followed = current.recording, sys.gettrace()
    recording = Recording(mesh, True, symbols)
    recording.arguments, recording.path_of = len(leaves), call.path_of
    watch = OptimizerWatch(recording, environment.optimizers, varying)
    snapshot = Snapshot()
    entered = Entered(snapshot, float in symbolic, symbols is not None, bool(places) or int in symbolic)
    roots: list[tuple[Path, Any]] = [(("",), function)]
    if isinstance(function, MethodType):
        roots = [(("",), function.__func__), (("self",), function.__self__)]
    roots += [
        (("argument", number), leaf)
        for number, leaf in enumerate(leaves)
        if type(leaf) not in PLAIN and not isinstance(leaf, torch.Tensor)
    ]
    for root in (*(root for _, root in roots), *environment.optimizers.values()):
        snapshot.visit(root)
    recording.repeatable = Repeatable(snapshot, entered, roots)

    of_caller: list[Passed] = []
    stand_ins = StandIns(recording, snapshot)

    def undo() -> None:
        stand_ins.take_back()
        watch.restore()
        stand_ins.take_back()  # of an optimizer that was noted with them
        snapshot.restore()
        for each in of_caller:
            each.give_back()

    attempt.mesh, attempt.undo = mesh, undo
    try:
        inputs_, arguments = symbolic_arguments(recording, call, leaves, types, stand_ins, symbolic)
        as_made = [dict(vars(symbol)) if isinstance(symbol, DistributedTensor) else {} for symbol in inputs_]
        passed = Passed(
            call.args,
            call.kwargs,
            pytree.tree_unflatten(inputs_[: call.spec.num_leaves], with_sizes(call.spec)),
            not call.examples,
        )
        of_caller.append(passed)
        args, kwargs = passed.args, passed.kwargs
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad())
            stack.enter_context(counting_streams(lambda: entered.generator.get("manual_seed")))
            stack.enter_context(CASTS.apart())
            stack.enter_context(watch.watching())
            attempt.stand_ins = stand_ins.put(places, passes=bool(passed.ours))
            attempt.stand_ins |= {("argument", number) for number in call.moving_ints if int in symbolic}
            stack.enter_context(module_paths(environment))
            stack.enter_context(tracing(recording))
            if symbols is not None:
                named = stack.enter_context(load("monarch.language.recorder.named:NamedSizes")())
                stack.enter_context(symbols.tracing(named.where))
            stack.enter_context(entered.watching())
            try:
                returned = next(_alone(function, args, kwargs))
                if isinstance(returned, Stopped):
                    raise returned.error
            except RuntimeError as error:
                apart(call, inputs_, as_made, snapshot.held)  # as autograd's, which has not found the other one
                check_leaves(call, error)
                raise
            if current.refused is not None:
                raise current.refused  # which the program has caught
        entered.check_generator()
        attempt.asks_type = entered.asks_type or recording.needs_values
        del args, kwargs
        stand_ins.find()
        free = dict.fromkeys(watch.read_at_each_call, are_floats) | stand_ins.free
        requiring, with_gradients = differentiated(inputs_, leaves, call.given)
        for position in with_gradients:
            snapshot.visit(leaves[position])
            roots.append((("argument", position), leaves[position]))
            leaves[position].requires_grad_(inputs_[position].requires_grad).grad = inputs_[position].grad
        among_arguments = passed.changes()
        own = [(held, now) for held, now in snapshot.changes() if not passed.has(held.holder)]
        changes = [*own, *((held, now) for _, held, now in among_arguments)]
        _check_regions(changes)
        if any(isinstance(value, _NAMED) for _, (_, values) in changes for value in values):
            raise Specialise("it leaves a named size in Python")
        guards = Guards(
            snapshot, entered, roots, free, moving | call.moving, rebound(own, snapshot.held), set(recording.states)
        )
        guards.tell_arguments(leaves, call.written)
        backward = any(op.backward for op in recording.tape.ops)
        requiring_apart = apart(call, inputs_, as_made, guards.spot_of)
        check_own(call.given, inputs_, as_made, entered, backward)
        with_history = histories(call.leaves) if backward else []
        check_histories(call, with_history, guards.spot_of)
        passed.check_apart(call.name, guards.spot_of, own, entered.asks_which)
        through = requiring_gradients(call.given, inputs_)
        cells = [state.cell for state in recording.states.values()]
        end = call.end.of(cells, [call.given[number] for number in through])
        effects = Effects(guards, recording, inputs_, call.given, passed, end)
        for held, now in own:
            if isinstance(held, Tensor) and _has_got_a_history(held):
                end_in_place(end, held.holder)
            effects.add(held, now)
        for at, held, now in among_arguments:
            effects.add(held, now, at)
        own_code = getattr(function, "__code__", None)
        result = result_of(
            recording, returned, effects, guards.spot_of, lambda code: code is own_code or entered.made_by(code)
        )
        returned = effects.returned(result.leaves)
        for held, now in changes:
            effects.concretize(held, now)
        effects.concretize_returned(result.leaves)
        stand_ins.settle()
        changed: list[Change | Growth] = [change for held, _ in own if (change := Change.since(held)) is not None]
        for at, held, _ in among_arguments:
            changed.append(Change(type(held), passed.theirs[at], *passed.contents(at), True))
            changed[-1].make()
        changed += stand_ins.grow()
        passes = bool(passed.ours)
        now = [], []  # the last one's tensors have histories, which keep what autograd has saved
        del changes, own, among_arguments, passed, inputs_
        recording.regions.clear()  # they keep alive what the program has let go of
        if recording.questions and symbols is not None:
            raise Specialise("it asks actors")
        labels_of = state_names(environment, watch.optimizers)
        escapes = _escapes(recording, effects)
        if any(has_names(value.shape) for _, value in escapes):
            raise Specialise("it leaves a tensor of a named size in Python")
        if entered.handled is not None and symbols is not None:
            raise Specialise(f"it handles an error that a named size may have caused: {entered.handled}")
    except BaseException as error:
        attempt.asks_type = entered.asks_type or recording.needs_values
        current.recording = before  # an interrupt may come where a context manager would have given this back,
        watch.end()  # or have ended that
        refused = current.refused
        if refused is not None and refused is not error and isinstance(error, (Exception, Ended)):
            raise refused from None
        raise
    finally:
        current.refused = None
        if current.ends:
            current.ends = 0
            sys.settrace(followed)
    taken: set[str] = set(recording.scalars) | {"seed"}
    homes: dict[Value, Mesh] = {}
    if recording.places is not None:
        for value in (*result.values, *(entry.value for entry in recording.states.values())):
            homes[value] = recording.mesh_of(value)
        for cell, value in escapes:
            cell.mesh = homes[value] = recording.mesh_of(value)
    states = labelled(
        [(labels_of.get(id(entry.cell)), entry.cell) for entry in recording.states.values()], taken, "state"
    )
    inputs = [entry for entry in recording.tape.inputs if entry.kind == "state"]
    for (label, _), entry in zip(states, inputs, strict=True):
        entry.label = label
    made = labelled([(labels_of.get(id(cell)), cell) for cell, _ in escapes], taken, "made")
    spots = _spots(snapshot, guards, [cell for _, cell in states])
    cannot = guards.unproven
    if cannot is None and effects.cannot is not None:
        what, name = effects.cannot
        cannot = f"it {what}, and leaves it in '{name}'" if name else f"it {what}", entered.line(name)
    if cannot is None and any(id(cell) not in effects.cells for cell, _ in escapes):
        cannot = "something that cannot be looked into keeps a tensor that it makes", None
    if cannot is None and None in spots:
        cannot = f"it reads a tensor ('{states[spots.index(None)][0]}') by a way that cannot be followed", None
    stepped = {id(group) for optimizer in watch.optimizers for group in optimizer.param_groups}
    hyperparameters = {
        label: source
        for label, source in watch.scalars.items()
        if id(source.group) in stepped or id(source.group) in guards.node_of  # else the program cannot have read it
    }
    sources = {
        label: (guards.entry(source.group, source.key), source.index) for label, source in hyperparameters.items()
    }
    if cannot is None and any(spot is None for spot, _ in sources.values()):
        cannot = "it makes an optimizer", None
    stand_ins.follow(guards)
    pinned = stand_ins.pinned(recording.guards)
    stand_ins.close()
    large = [*recording.large.values()]
    recording.release()
    if symbols is not None:
        symbols.close()
    return Trace(
        name=call.name,
        mesh=mesh,
        meshes={} if recording.places is None else recording.places.meshes,
        homes=homes,
        dtype=recording.dtype,
        tape=recording.tape,
        result=result,
        end=effects.end if effects.ends or any(result.differentiable) else None,
        through=through,
        states=states,
        escapes=[(label, weakref.ref(cell), value) for (label, cell), (_, value) in zip(made, escapes, strict=True)],
        arguments=arguments,
        hyperparameters={label: source.value for label, source in hyperparameters.items()},
        conditions=list(dict.fromkeys(recording.guards)),
        guards=guards,
        effects=effects,
        spots=[spot for spot in spots if spot is not None],
        fixed={
            (*guards.nodes[number].path, key): (label, key)
            for label, group, key in watch.fixed
            if (number := guards.node_of.get(id(group))) is not None
        },
        returned=returned,
        stand_ins=stand_ins,
        pinned=pinned,
        sources={label: (spot, index) for label, (spot, index) in sources.items() if spot is not None},
        requiring=requiring,
        apart=requiring_apart,
        passes=passes,
        with_history=with_history,
        asks_which=entered.asks_which,
        scope=None if symbols is None else symbols.scope,
        free=unsaid(states, leaves, types, recording.questions),
        large=large,
        cannot=cannot,
        weights=weights(recording.tape, [cell for _, cell in states], snapshot),
        questions=recording.questions,
        changes=changed,
        undo=undo,
    )


def _unscoped(key: Any) -> Any:
    """A tape's key with sizes that can be compared with another trace's."""
    if isinstance(key, tuple):
        return tuple([_unscoped(entry) for entry in key])
    if isinstance(key, TensorType):
        return str(key)
    return poly_of(key) if is_named(key) else key


def _has_got_a_history(held: Tensor) -> bool:
    """Whether it has been written in place, by what requires a gradient: it is what the program leaves in Python."""
    tensor, before = held.holder, dict(zip(*held.before, strict=True))
    if not isinstance(tensor, DistributedTensor) or tensor._is_view():  # whose history is that of what it views
        return False
    return tensor.grad_fn is not None and not before["requires_grad"]


def _check_regions(changes: list[tuple[Held, Contents]]) -> None:
    """What a branch or a loop makes has a value only where it runs, and only as its result."""
    for held, (keys, values) in changes:
        before = dict(zip(*held.before, strict=True))
        new = [value for key, value in zip(keys, values, strict=True) if before.get(key, MISSING) is not value]
        for value in pytree.tree_leaves(new):
            cell = value._ref.cell if isinstance(value, DistributedTensor) else None
            if cell is None or not isinstance(cell.recording, Recording) or not cell.recording.inside:
                continue
            raise ProgramError(
                f"{cell.recording.inside} makes a tensor ({cell.type}) and leaves it in Python, whichever way the "
                "workers go",
                hint="return it from the function, and store it outside.\n"
                "An optimizer makes its state in its first step: take that outside of the branch, or in a program of "
                "its own.",
            )


def _spots(snapshot: Snapshot, guards: Guards, cells: list[Cell]) -> list[tuple[Spot, tuple[Any, ...]] | None]:
    """Where a tensor with each of these cells was before the trace, and how it views the cell."""
    found: dict[int, tuple[Spot, tuple[Any, ...]]] = {}
    for held in snapshot.held.values():
        if isinstance(held, Tensor):
            ref = dict(zip(*held.before, strict=True)).get("_ref")
            spot = guards.spot_of.get(id(held.holder))
            if ref is not None and spot is not None:
                found.setdefault(id(ref.cell), (spot, views_of(ref)))
    return [found.get(id(cell)) for cell in cells]


def _alone(function: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """Gives what the function returns. A generator has an error that it handles to itself: where a refusal is raised at
    a line of the program's own, in a handler, Python forgets to take back which error is handled."""
    try:
        yield function(*args, **kwargs)
    except StopIteration as error:  # Python makes a RuntimeError of one that a generator raises
        yield Stopped(error)


_NAMED = (torch.SymInt, torch.SymBool)


def _escapes(recording: Recording, effects: Effects) -> list[tuple[Cell, Value]]:
    """The tensors that the trace made and that are still alive. One that is not known to be left anywhere may only be
    waiting for the garbage collector, which has not run since the trace began: what the trace made is its youngest, and
    is looked at alone first. Looking at all of a process's objects takes longer than many a trace."""

    def living() -> list[tuple[Cell, Value]]:
        return [(cell, value) for ref, value in recording.made if (cell := ref()) is not None]

    found = living()
    for generation in (0, 2):
        if all(id(cell) in effects.cells for cell, _ in found):
            break
        del found
        gc.collect(generation)
        found = living()
    return found
