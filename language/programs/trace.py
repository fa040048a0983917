"""Running a function once to record it: what the tape holds, what it reads and leaves behind, what it depends on."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.loading import load
from monarch.compiler.symbols import has_names
from monarch.compiler.tape import Value
from monarch.language.compile import collected_later
from monarch.language.optimizers.watch import OptimizerWatch
from monarch.language.programs.attempt import Attempt
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
from monarch.language.programs.recorded import Trace
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
from monarch.language.tensors.history import end_in_place
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor


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
    run = partial(_trace, call, mesh, environment, varying, moving, symbols, attempt)
    tries = [(all_symbolic, places), (all_symbolic, numbers), (floats, []), (frozenset(), [])]
    *tries, last = [each for each, after in zip(tries, [*tries[1:], None], strict=True) if each != after]
    for symbolic, some in tries:
        try:
            found = run(symbolic, some)
            if not attempt.asks_type:
                return found
        except Exception as error:  # which the last try raises again where it was not the symbols' doing
            has_stand_ins = some or int in symbolic
            if not (has_stand_ins or attempt.asks_type or isinstance(error, (TypeError, AttributeError))):
                raise
        attempt.take_back()
        attempt.asks_type, attempt.stand_ins = False, set()
    return run(*last)


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
    before, followed = current.recording, sys.gettrace()
    run = _Run(call, mesh, environment, varying, symbols, symbolic, places)
    attempt.mesh, attempt.undo = mesh, run.undo
    try:
        left = run.read(run.returned(attempt), moving)
        escapes = run.escapes(left.effects)
    except BaseException as error:
        attempt.asks_type = run.asks_type
        current.recording = before  # an interrupt may come where a context manager would have given this back,
        run.watch.end()  # or have ended that
        refused = current.refused
        if refused is not None and refused is not error and isinstance(error, (Exception, Ended)):
            raise refused from None
        raise
    finally:
        current.refused = None
        if current.ends:
            current.ends = 0
            sys.settrace(followed)
    return run.recorded(left, escapes)


@dataclass
class _Left:
    """What a run of a program's function has read and left behind: the fields of `Trace` with these names."""

    guards: Guards
    effects: Effects
    result: Result
    returned: dict[int, Make]
    through: list[int]
    requiring: list[tuple[int, bool]]
    apart: list[int]
    with_history: list[int]
    passes: bool
    changes: list[Change | Growth]


class _Run:
    """One run of a call's function: `returned` runs it, `read` looks at what it has met and changed, and `recorded`
    says what later calls have to know."""

    def __init__(
        self,
        call: ProgramCall,
        mesh: Mesh,
        environment: Environment,
        varying: set[tuple[str, str]],
        symbols: Any,
        symbolic: Set[type],
        places: list[Place],
    ) -> None:
        self.call, self.mesh, self.environment = call, mesh, environment
        self.symbols, self.symbolic, self.places = symbols, symbolic, places
        self.types = call.types(mesh, None if symbols is None else symbols.scope)
        for part in mesh._family:
            part.flush(call.name)
        self.recording = Recording(mesh, True, symbols)
        self.recording.arguments, self.recording.path_of = len(call.leaves), call.path_of
        self.watch = OptimizerWatch(self.recording, environment.optimizers, varying)
        self.snapshot = Snapshot()
        has_stand_ins = bool(places) or int in symbolic
        self.entered = Entered(self.snapshot, float in symbolic, symbols is not None, has_stand_ins)
        self.roots = _roots(call)
        for root in (*(root for _, root in self.roots), *environment.optimizers.values()):
            self.snapshot.visit(root)
        self.recording.repeatable = Repeatable(self.snapshot, self.entered, self.roots)
        self.stand_ins = StandIns(self.recording, self.snapshot)
        self.passed: Passed | None = None
        self.inputs: list[Any] = []
        """What the function is given for each leaf of the arguments."""
        self.as_made: list[dict[str, Any]] = []
        """The attributes of those before the function runs, where they are tensors on a mesh."""
        self.arguments: dict[str, int] = {}

    def undo(self) -> None:
        """Put Python's objects back to what they were before the run."""
        self.stand_ins.take_back()
        self.watch.restore()
        self.stand_ins.take_back()  # of an optimizer that was noted with them
        self.snapshot.restore()
        if self.passed is not None:
            self.passed.give_back()

    @property
    def asks_type(self) -> bool:
        """Whether the function asked for what only Python's own numbers and lists can answer."""
        return self.entered.asks_type or self.recording.needs_values

    # -- running -------------------------------------------------------------------------------------------------

    def returned(self, attempt: Attempt) -> Any:
        """What the function returns, run with symbolic arguments, and with stand-ins at their places."""
        call, recording, entered = self.call, self.recording, self.entered
        self.inputs, self.arguments = symbolic_arguments(
            recording, call, call.leaves, self.types, self.stand_ins, self.symbolic
        )
        self.as_made = [dict(vars(symbol)) if isinstance(symbol, DistributedTensor) else {} for symbol in self.inputs]
        given = pytree.tree_unflatten(self.inputs[: call.spec.num_leaves], with_sizes(call.spec))
        self.passed = Passed(call.args, call.kwargs, given, not call.examples)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad())
            stack.enter_context(counting_streams(lambda: entered.generator.get("manual_seed")))
            stack.enter_context(CASTS.apart())
            stack.enter_context(self.watch.watching())
            attempt.stand_ins = self.stand_ins.put(self.places, passes=bool(self.passed.ours))
            attempt.stand_ins |= {("argument", number) for number in call.moving_ints if int in self.symbolic}
            stack.enter_context(module_paths(self.environment))
            stack.enter_context(tracing(recording))
            if self.symbols is not None:
                named = stack.enter_context(load("monarch.language.recorder.named:NamedSizes")())
                stack.enter_context(self.symbols.tracing(named.where))
            stack.enter_context(entered.watching())
            try:
                returned = next(_alone(call.function, self.passed.args, self.passed.kwargs))
                if isinstance(returned, Stopped):
                    raise returned.error
            except RuntimeError as error:
                # as autograd's, which has not found the other one
                apart(call, self.inputs, self.as_made, self.snapshot.held)
                check_leaves(call, error)
                raise
            if current.refused is not None:
                raise current.refused  # which the program has caught
        entered.check_generator()
        attempt.asks_type = self.asks_type
        return returned

    # -- what it has read and left ----------------------------------------------------------------------------------

    def read(self, returned: Any, moving: set[Path]) -> _Left:
        """Find what the run has read and changed in Python, and put this call's arguments and numbers there for what
        stood for them. `moving` are the places at which there are other tensors from call to call."""
        call, recording, passed = self.call, self.recording, self.passed
        assert passed is not None
        self.stand_ins.find()
        free = dict.fromkeys(self.watch.read_at_each_call, are_floats) | self.stand_ins.free
        requiring, with_gradients = differentiated(self.inputs, call.leaves, call.given)
        for position in with_gradients:
            leaf, symbol = call.leaves[position], self.inputs[position]
            self.snapshot.visit(leaf)
            self.roots.append((("argument", position), leaf))
            leaf.requires_grad_(symbol.requires_grad).grad = symbol.grad
        among_arguments = passed.changes()
        own = [(held, now) for held, now in self.snapshot.changes() if not passed.has(held.holder)]
        changes = [*own, *((held, now) for _, held, now in among_arguments)]
        _check_regions(changes)
        if any(isinstance(value, _NAMED) for _, (_, values) in changes for value in values):
            raise Specialise("it leaves a named size in Python")
        guards = Guards(
            self.snapshot,
            self.entered,
            self.roots,
            free,
            moving | call.moving,
            rebound(own, self.snapshot.held),
            set(recording.states),
        )
        guards.tell_arguments(call.leaves, call.written)
        backward = any(op.backward for op in recording.tape.ops)
        differentiates_by = apart(call, self.inputs, self.as_made, guards.spot_of)
        check_own(call.given, self.inputs, self.as_made, self.entered, backward)
        with_history = histories(call.leaves) if backward else []
        check_histories(call, with_history, guards.spot_of)
        passed.check_apart(call.name, guards.spot_of, own, self.entered.asks_which)
        through = requiring_gradients(call.given, self.inputs)
        cells = [state.cell for state in recording.states.values()]
        end = call.end.of(cells, [call.given[number] for number in through])
        effects = Effects(guards, recording, self.inputs, call.given, passed, end)
        for held, now in own:
            if isinstance(held, Tensor) and _has_got_a_history(held):
                end_in_place(end, held.holder)
            effects.add(held, now)
        for at, held, now in among_arguments:
            effects.add(held, now, at)
        own_code = getattr(call.function, "__code__", None)
        result = result_of(
            recording, returned, effects, guards.spot_of, lambda code: code is own_code or self.entered.made_by(code)
        )
        makes = effects.returned(result.leaves)
        for held, now in changes:
            effects.concretize(held, now)
        effects.concretize_returned(result.leaves)
        self.stand_ins.settle()
        left: list[Change | Growth] = [change for held, _ in own if (change := Change.since(held)) is not None]
        for at, held, _ in among_arguments:
            left.append(Change(type(held), passed.theirs[at], *passed.contents(at), True))
            left[-1].make()
        left += self.stand_ins.grow()
        passes = bool(passed.ours)
        return _Left(guards, effects, result, makes, through, requiring, differentiates_by, with_history, passes, left)

    def escapes(self, effects: Effects) -> list[tuple[Cell, Value]]:
        """The tensors that the run has made and that are still alive, with their values."""
        self.inputs, self.as_made = [], []
        self.recording.regions.clear()  # they keep alive what the program has let go of
        found = _escapes(self.recording, effects)
        if self.symbols is not None:
            if self.recording.questions:
                raise Specialise("it asks actors")
            if any(has_names(value.shape) for _, value in found):
                raise Specialise("it leaves a tensor of a named size in Python")
            if self.entered.handled is not None:
                raise Specialise(f"it handles an error that a named size may have caused: {self.entered.handled}")
        return found

    # -- the record -----------------------------------------------------------------------------------------------

    def recorded(self, left: _Left, escapes: list[tuple[Cell, Value]]) -> Trace:
        """The record of the run. Nothing of it is needed any more but `undo`."""
        recording, guards, effects, result, watch = self.recording, left.guards, left.effects, left.result, self.watch
        homes = self._homes(result, escapes)
        labels_of = state_names(self.environment, watch.optimizers)
        taken = set(recording.scalars) | {"seed"}
        entries = [*recording.states.values()]
        states = labelled([(labels_of.get(id(entry.cell)), entry.cell) for entry in entries], taken, "state")
        inputs = [entry for entry in recording.tape.inputs if entry.kind == "state"]
        for (label, _), entry in zip(states, inputs, strict=True):
            entry.label = label
        made = labelled([(labels_of.get(id(cell)), cell) for cell, _ in escapes], taken, "made")
        spots = _spots(self.snapshot, guards, [cell for _, cell in states])
        stepped = {id(group) for optimizer in watch.optimizers for group in optimizer.param_groups}
        hyperparameters = {
            label: source
            for label, source in watch.scalars.items()
            if id(source.group) in stepped or id(source.group) in guards.node_of  # else the program cannot have read it
        }
        sources = {label: (guards.entry(each.group, each.key), each.index) for label, each in hyperparameters.items()}
        cannot = self._cannot(guards, effects, escapes)
        if cannot is None and None in spots:
            cannot = f"it reads a tensor ('{states[spots.index(None)][0]}') by a way that cannot be followed", None
        elif cannot is None and any(spot is None for spot, _ in sources.values()):
            cannot = "it makes an optimizer", None
        self.stand_ins.follow(guards)
        pinned = self.stand_ins.pinned(recording.guards)
        self.stand_ins.close()
        large = [*recording.large.values()]
        recording.release()
        if self.symbols is not None:
            self.symbols.close()
        return Trace(
            name=self.call.name,
            mesh=self.mesh,
            meshes={} if recording.places is None else recording.places.meshes,
            homes=homes,
            dtype=recording.dtype,
            tape=recording.tape,
            result=result,
            end=effects.end if effects.ends or any(result.differentiable) else None,
            through=left.through,
            states=states,
            escapes=[
                (label, weakref.ref(cell), value) for (label, cell), (_, value) in zip(made, escapes, strict=True)
            ],
            arguments=self.arguments,
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
            returned=left.returned,
            stand_ins=self.stand_ins,
            pinned=pinned,
            sources={label: (spot, index) for label, (spot, index) in sources.items() if spot is not None},
            requiring=left.requiring,
            apart=left.apart,
            passes=left.passes,
            with_history=left.with_history,
            asks_which=self.entered.asks_which,
            scope=None if self.symbols is None else self.symbols.scope,
            free=unsaid(states, self.call.leaves, self.types, recording.questions),
            large=large,
            cannot=cannot,
            weights=weights(recording.tape, [cell for _, cell in states], self.snapshot),
            questions=recording.questions,
            changes=left.changes,
            undo=self.undo,
        )

    def _homes(self, result: Result, escapes: list[tuple[Cell, Value]]) -> dict[Value, Mesh]:
        """Where results and the tensors that it leaves in Python are, in a program of several meshes."""
        recording = self.recording
        if recording.places is None:
            return {}
        values = (*result.values, *(entry.value for entry in recording.states.values()))
        homes = {value: recording.mesh_of(value) for value in values}
        for cell, value in escapes:
            cell.mesh = homes[value] = recording.mesh_of(value)
        return homes

    def _cannot(
        self, guards: Guards, effects: Effects, escapes: list[tuple[Cell, Value]]
    ) -> tuple[str, Source | None] | None:
        """Why no guards can say what a later call would do, with the line."""
        if guards.unproven is not None:
            return guards.unproven
        if effects.cannot is not None:
            what, name = effects.cannot
            return f"it {what}, and leaves it in '{name}'" if name else f"it {what}", self.entered.line(name)
        if any(id(cell) not in effects.cells for cell, _ in escapes):
            return "something that cannot be looked into keeps a tensor that it makes", None
        return None


def _roots(call: ProgramCall) -> list[tuple[Path, Any]]:
    """What the function is reached by: itself, its object, and the arguments that guards look into."""
    function = call.function
    roots: list[tuple[Path, Any]] = [(("",), function)]
    if isinstance(function, MethodType):
        roots = [(("",), function.__func__), (("self",), function.__self__)]
    return roots + [
        (("argument", number), leaf)
        for number, leaf in enumerate(call.leaves)
        if type(leaf) not in PLAIN and not isinstance(leaf, torch.Tensor)
    ]


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
