"""`@monarch.program`: a Python function that is traced once for each signature, compiled, and then run by one
command."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

import torch

from monarch.compiler.errors import ArgumentWritten, ProgramError, Source
from monarch.compiler.graph import Graph
from monarch.compiler.loading import load
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.sizes import parse_bytes
from monarch.compiler.symbols import Scope
from monarch.compiler.types import TensorType
from monarch.language.compile import compile_graph, compiles_templates, full_collections_later, partition_graph
from monarch.language.errors import TracedAgainWarning
from monarch.language.programs.attempt import Attempt
from monarch.language.programs.call import ADVICE, OF_DATA, Annotations, ProgramCall, with_written
from monarch.language.programs.environment import Environment, find_environment, only_mesh
from monarch.language.programs.handlers import HandlersLater
from monarch.language.programs.memory import PLANS, SIGNATURES, VARIANTS, Entry, Memory, Remembered
from monarch.language.programs.named import symbols_for
from monarch.language.programs.nodes import Path
from monarch.language.programs.recorded import Trace
from monarch.language.programs.redundancy import keep_copies
from monarch.language.programs.signature import no_function, parameters, signature, without_ints, written
from monarch.language.programs.stand_ins import Place
from monarch.language.programs.trace import trace
from monarch.language.programs.variant import Compiled, Variant, first_run
from monarch.language.programs.watched import is_watched, run_itself
from monarch.language.recorder.recording import current, turns
from monarch.language.recorder.varying import active, plainly
from monarch.language.source import shorten, user_source
from monarch.language.tensors.mesh import Mesh, looked_at
from monarch.language.tensors.tensor import DistributedTensor

if TYPE_CHECKING:
    from monarch.compiler.inspect.inspection import Inspection
    from monarch.compiler.inspect.survival import Survival

Rounding = Literal["eager", "chain"]
Backend = Literal["monarch", "gloo", "nccl"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Traced:
    """A program's graph, for reading: `print(step.trace(x).graph)`."""

    graph: Graph
    options: CompileOptions

    def partition(self) -> Traced:
        """The graph with local types and explicit collectives. Raises LayoutError and RuleError."""
        return Traced(partition_graph(self.graph, self.options), self.options)

    def compile(self) -> Plan:
        """The plan that workers run."""
        return compile_graph(self.graph, self.options, report=True)

    def __str__(self) -> str:
        return str(self.graph)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OFTEN = 8
"""After so many traces in which the same place has changed, the program says so."""


class Program(Generic[P, R]):
    """A function that runs on a mesh. Made by `monarch.program`."""

    __wrapped_program__ = True
    _own_attributes = frozenset(("options", "_mesh", "_known", "_bound", "_annotations"))
    """The attributes that are no user's, beside those that functions have."""

    def __init__(self, function: Callable[P, R], mesh: Mesh | None, options: CompileOptions) -> None:
        if isinstance(function, type) or not callable(function):
            raise no_function(function)
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._mesh = mesh
        self.options = options
        self._known: dict[Any, Memory] = {(): Memory(mesh)}
        """By the anomalies that its mesh may be looking for."""
        self._bound: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        """What its methods consist of, but for the object that each is bound to, by its id."""
        self._annotations = Annotations(function)

    # -- calls ---------------------------------------------------------------------------------------------------

    @overload
    def __call__(self: Program[P, torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> DistributedTensor: ...
    @overload
    def __call__(
        self: Program[P, tuple[torch.Tensor, ...]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[DistributedTensor, ...]: ...
    @overload
    def __call__(
        self: Program[P, Mapping[Any, torch.Tensor]], *args: P.args, **kwargs: P.kwargs
    ) -> dict[Any, DistributedTensor]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run one step on the workers. Returns at once: tensors in the result are waited for when they are read."""
        if current.recording is not None:
            return self.__wrapped__(*args, **kwargs)  # a program within a program is part of it
        if is_watched():
            call = self._call_of(args, kwargs)
            return run_itself(call, self._find_mesh(call.leaves, find_environment(self.__wrapped__)))
        try:
            with turns:  # a `return` in here would leave the block before a tracer hears of it
                if active.regions:
                    with plainly():
                        result = self._call(args, kwargs)
                else:
                    result = self._call(args, kwargs)
        except Exception as error:
            shorten(error)
            raise
        return result

    def _call(self, args: Any, kwargs: Any) -> Any:
        memory = self._memory
        if memory.only is not None and memory.only.is_closed:
            memory.forget(self._mesh)
        if self._annotations.types:
            args, kwargs = self._annotations.converted(args, kwargs)
        moving = memory.ints.numbers
        key, leaves, spec = signature(args, kwargs, self._name, moving)
        mesh = memory.resolved
        if mesh is not None and mesh.pending is not None:
            mesh.flush(self._name)
        for other in memory.others:
            other.flush(self._name)
        call: ProgramCall | None = None  # a call that is like the last needs no record
        entry = memory.last[1]
        if key != memory.last[0]:
            if key[-1] and key not in memory.entries and memory.ints.note(leaves):
                moving = memory.ints.numbers
                key = without_ints(key, moving)
            call = self._record(args, kwargs, leaves, spec, moving)
            entry = self._entry(key, call)
        if entry.written:
            leaves, call = with_written(args, kwargs), None
        for variant in entry.variants:
            found = variant.holds(leaves)
            if found is not None:
                if variant is not entry.variants[0]:
                    entry.variants.remove(variant)
                    entry.variants.insert(0, variant)
                return variant.run(leaves, found, args, kwargs)
        if moving and (needless := {("argument", number) for number in moving} & entry.needless):
            memory.ints.give_up(number for _, number in needless)
            return self._call(args, kwargs)
        call = call or self._record(args, kwargs, leaves, spec, moving)
        call.written = entry.written
        if self._keeps_names:
            call.belongs()
        if call.family is not None and (known := memory.families.find(call)) is not None:
            variant, found = known
            entry.variants = [variant, *entry.variants[: VARIANTS - 1]]
            return variant.run(leaves, found, args, kwargs)
        with HandlersLater() as handlers:
            result = self._trace_and_run(entry, call, handlers)
        return result

    def _record(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any, moving: Iterable[int] = ()) -> ProgramCall:
        ints = frozenset(number for number in moving if number < len(leaves) and type(leaves[number]) is int)
        return ProgramCall(self.__wrapped__, self._name, self._annotations, args, kwargs, leaves, spec, ints)

    def _entry(self, key: Any, call: ProgramCall) -> Entry:
        """What is known of a signature, which stands at the end from now on."""
        entries = self._memory.entries
        entry = entries.pop(key, None)
        if entry is None:
            call.check()
            entry = self._memory.entry(key)
            if len(entries) >= SIGNATURES:
                del entries[next(iter(entries))]
        entries[key] = entry
        self._memory.last = key, entry
        return entry

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: what it learns is each object's own, for what it closes over is the object's."""
        if instance is None:
            return self
        function = self.__wrapped__.__get__(instance, owner)
        known = self._bound.get(id(instance))
        if known is not None and known[0]() is instance:
            made: Any = Program.__new__(Program)
            made.__dict__.update(known[1])
            made.__wrapped__ = function
        else:
            made, bound, key = Program(function, self._mesh, self.options), self._bound, id(instance)
            parts = {name: value for name, value in vars(made).items() if name != "__wrapped__"}
            try:
                bound[key] = weakref.ref(instance, lambda _: bound.pop(key, None)), parts
            except TypeError:
                raise ProgramError(
                    f"'{getattr(self, '__name__', 'program')}' is a program, and objects of class "
                    f"'{type(instance).__name__}' allow no weak references",
                    hint="add '__weakref__' to its __slots__, or say @dataclass(slots=True, weakref_slot=True).",
                    source=user_source(),
                ) from None
        return made

    @property
    def _memory(self) -> Memory:
        key = tuple(looked_at.items()) if looked_at else ()
        return self._known.get(key) or self._known.setdefault(key, Memory(self._mesh))

    @property
    def _name(self) -> str:
        return getattr(self, "__name__", "program")

    @property
    def _keeps_names(self) -> bool:
        """Whether its plans can be for all values of named sizes."""
        options = self.options
        plain = options.memory_limit is None and not options.layouts
        return options.target == "cpu" and plain and compiles_templates() and not looked_at

    def _trace_and_run(self, entry: Entry, call: ProgramCall, handlers: HandlersLater) -> Any:
        """Run the function, which says what this call does; later calls do the same while its guards hold."""
        leaves, memory = call.leaves, self._memory
        place: Path | None = None
        stuck: Path | None = None
        places: list[Place] = []
        if entry.variants:
            place, stuck, places = entry.compare(leaves, memory.varying)
        entry.variants = [variant for variant in entry.variants if not variant.guards.dead]
        attempt, as_given = Attempt(), entry.written
        try:
            with full_collections_later():
                found, compiled = self._traced(entry, call, places, attempt)
                if compiled in entry.compiled:
                    entry.compiled.remove(compiled)
                entry.compiled = [compiled, *entry.compiled[: PLANS - 1]]
                if self.options.redundancy:
                    keep_copies(compiled.plan, found.mesh, found.meshes)
                result = first_run(compiled, found, call.leaves, attempt, handlers)
        except BaseException as error:
            try:
                attempt.take_back()
            finally:
                attempt.take_back()
            if not isinstance(error, ArgumentWritten) or not call.write():
                raise
            entry.written, entry.variants = True, []
        if entry.written and entry.written is not as_given:
            return self._trace_and_run(entry, call, handlers)
        memory.others.update(found.meshes.values())
        refused = [each.path for each in places if each.path not in attempt.stand_ins]
        if refused:
            entry.stand_ins.give_up({*refused})
            place = place or refused[0]
        memory.ints.give_up(at for at in call.moving_ints if ("argument", at) not in attempt.stand_ins)
        if found.cannot is None:
            variant = Variant(compiled, found)
            entry.variants = [variant, *entry.variants[: VARIANTS - 1]]
            if compiled.template is not None:
                memory.families.keep(call.family, variant)
                memory.specialised.note_sizes(self._name, compiled.template.scope)
            if (at := place or stuck) is not None:
                name, what, advice = call.changing(at)
                at = at[: -1 if at[-1] in OF_DATA else None]
                history = "" if place else f", and a tensor with a history: leave {name}.detach()"
                self._say(entry, at, (what + history, found.line(name)), advice)
        else:
            self._say(entry, None, found.cannot)
        if found.effects.lengthens:
            self._note_length()
        if compiled.template is None and self._keeps_names:
            memory.specialised.note(self._name, leaves, call.names, self._annotations.types)
        free = {number for number in call.moving_ints if ("argument", number) not in found.pinned}
        memory.specialised.note_values(self._name, leaves, free, memory.ints.numbers, call.path_of)
        found.release()
        return result

    def _traced(self, entry: Entry, call: ProgramCall, places: list[Place], attempt: Attempt) -> tuple[Trace, Compiled]:
        """A trace and its plan: for all values of the named sizes where the call has a family and that can be."""
        symbols = None if call.family is None else symbols_for(call.values)
        failed: Exception | None = None
        if symbols is not None:
            try:
                return self._traced_once(entry, call, places, symbols, attempt)
            except Exception as error:  # whatever it is: without names either it is the user's to see, or there is none
                attempt.take_back()
                failed = error
        found = self._traced_once(entry, call, places, None, attempt)
        if failed is not None:
            self._memory.specialised.why(self._name, failed)
        return found

    def _traced_once(
        self, entry: Entry, call: ProgramCall, places: list[Place], symbols: Any, attempt: Attempt
    ) -> tuple[Trace, Compiled]:
        found = self._trace(call, entry.moving, places, symbols, attempt)
        compiled = next((known for known in entry.compiled if known.serves(found)), None)
        if compiled is None and symbols is not None:
            compiled = self._memory.families.compiled(call, found)
        if compiled is None:
            with found.mesh.spending("compile", self._name):
                before = next((known.plan.costs.get("layouts") for known in entry.compiled), None)
                options = self.options.looking_for(found.mesh._anomaly)
                compiled = Compiled(found, options, call.values, before)
        return found, compiled

    def _say(self, entry: Entry, place: Path | None, why: tuple[str, Source | None], advice: str = ADVICE) -> None:
        """Say once that a program is traced again at each call."""
        entry.again[place] = entry.again.get(place, 0) + 1
        if entry.again[place] == (2 if place is None else _OFTEN):
            what, source = why
            where = f"{source}: " if source else ""
            warnings.warn(
                f"{where}the program '{self._name}' is traced at each call, which takes milliseconds: {what}. {advice}",
                TracedAgainWarning,
                stacklevel=5,
            )

    def _note_length(self) -> None:
        """Say once that a list among the arguments grows from call to call."""
        self._memory.lengthened += 1
        if self._memory.lengthened == _OFTEN:
            warnings.warn(
                f"the program '{self._name}' is traced and compiled for each length of a list or dict among its "
                "arguments, which it changes. Close over the list or dict, or return the new entries.",
                TracedAgainWarning,
                stacklevel=5,
            )

    @property
    def remembered(self) -> list[Remembered]:
        """What the program remembers of each signature, the one called last at the end."""
        return [Remembered(len(entry.variants), len(entry.compiled)) for entry in self._memory.entries.values()]

    # -- looking -------------------------------------------------------------------------------------------------

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced:
        """The graph for these arguments, with global types. Traces the function, and changes nothing."""
        try:
            return Traced(self._look(self._examples(args, kwargs), None), self.options)
        except Exception as error:
            shorten(error)
            raise

    def trace_named(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Graph, Scope] | None:
        """The graph for all values of the sizes that the annotations name, with these arguments as example, and what
        was decided on them; None where they name none. Raises what says why it is traced for each value."""
        call = self._examples(args, kwargs)
        symbols = symbols_for(call.values)
        return None if symbols is None else (self._look(call, symbols), symbols.scope)

    def compile(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """The plan for these arguments: `plan.save("step.mplan")`. Traces the function, and changes nothing."""
        return self.trace(*args, **kwargs).compile()

    def inspect(self, *args: P.args, **kwargs: P.kwargs) -> Inspection:
        """The inspector on what the program becomes for these arguments: its page in a notebook, a summary in a
        terminal; `.save("page.html")` writes the page. Traces and compiles the function; runs and changes nothing."""
        made: Inspection = load("monarch.compiler.inspect.inspection:Inspection")(self.compile(*args, **kwargs))
        return made

    def survives(self, *args: P.args, **kwargs: P.kwargs) -> Survival:
        """Which losses of one or two workers or hosts the program's state survives, for these arguments, in the copies
        that its layouts have, and which tensors do not: `print(train_step.survives(x, y))`. The hosts are those of the
        mesh. Traces and compiles the function; runs and changes nothing."""
        traced = self.trace(*args, **kwargs)
        mesh = self._memory.resolved
        hosts = 1 if mesh is None else mesh._hosts
        made: Survival = load("monarch.compiler.inspect.survival:Survival")(traced.compile(), hosts)
        return made

    def _repr_html_(self) -> str:
        """Name, signature and mesh, for a notebook. Traces nothing."""
        code = getattr(inspect.unwrap(self.__wrapped__), "__code__", None)
        mesh = self._memory.resolved or find_environment(self.__wrapped__).mesh()
        shown: list[tuple[str, TensorType | str]] = []
        for parameter in parameters(self.__wrapped__):
            annotated = self._annotations.types.get(parameter.name)
            shown.append((str(parameter).partition(":")[0].partition("=")[0], annotated or written(parameter)))
        known = len(self._memory.entries)
        notes = [f"traced for {known} signature{'s' * (known != 1)}"] if known else []
        if mesh is None:
            notes.append("its mesh is that of its arguments")
        draw = load("monarch.compiler.inspect.html:program_html")
        html: str = draw(
            self._name,
            shown,
            mesh.spec if mesh is not None else None,
            mesh.ranks if mesh is not None else None,
            str(Source(code.co_filename, code.co_firstlineno)) if code is not None else "",
            notes,
        )
        return html

    def _call_of(self, args: Any, kwargs: Any) -> ProgramCall:
        args, kwargs = self._annotations.converted(args, kwargs)
        _, leaves, spec = signature(args, kwargs, self._name)
        call = self._record(args, kwargs, leaves, spec)
        call.check()
        return call

    def _examples(self, args: Any, kwargs: Any) -> ProgramCall:
        return replace(self._call_of(args, kwargs), examples=True)

    def _look(self, call: ProgramCall, symbols: Any) -> Graph:
        attempt = Attempt()
        with HandlersLater():
            try:
                found = self._trace(call, set(), [], symbols, attempt)
                graph = found.graph
                found.release()
                return graph
            except ArgumentWritten:
                if symbols is not None or not call.write():
                    raise
            finally:
                try:
                    attempt.take_back()
                finally:
                    attempt.take_back()
        return self._look(call, None)

    # -- tracing -------------------------------------------------------------------------------------------------

    def _trace(
        self, call: ProgramCall, moving: set[Path], places: list[Place], symbols: Any, attempt: Attempt
    ) -> Trace:
        environment = find_environment(call.function)
        self._memory.resolved = mesh = self._find_mesh(call.leaves, environment)
        with mesh.spending("trace", self._name):
            return trace(call, mesh, environment, self._memory.varying, moving, places, symbols, attempt)

    def _find_mesh(self, leaves: list[Any], environment: Environment) -> Mesh:
        if self._mesh is not None:
            return self._mesh
        for leaf in leaves:
            if isinstance(leaf, DistributedTensor):
                return leaf.mesh
        mesh = environment.mesh() or next(iter(self._annotations.meshes.values()), None)
        if mesh is not None:
            return mesh
        if self._memory.only is None or self._memory.only.is_closed:
            self._memory.only = only_mesh(self._name)
        return self._memory.only


@overload
def program(
    function: Callable[P, R],
    /,
    *,
    mesh: Mesh | None = None,
    memory_limit: str | int | None = None,
    layouts: Literal["auto"] | None = None,
    machine: str | None = None,
    rounding: Rounding = "eager",
    collectives: Backend = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
    strict: bool = False,
    redundancy: int = 0,
) -> Program[P, R]: ...
@overload
def program(
    *,
    mesh: Mesh | None = None,
    memory_limit: str | int | None = None,
    layouts: Literal["auto"] | None = None,
    machine: str | None = None,
    rounding: Rounding = "eager",
    collectives: Backend = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
    strict: bool = False,
    redundancy: int = 0,
) -> Callable[[Callable[P, R]], Program[P, R]]: ...
def program(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    memory_limit: str | int | None = None,
    layouts: Literal["auto"] | None = None,
    machine: str | None = None,
    rounding: Rounding = "eager",
    collectives: Backend = "monarch",
    target: str = "cpu",
    cuda_graphs: bool = False,
    strict: bool = False,
    redundancy: int = 0,
) -> Any:
    """Make a function a program: traced once for each signature, compiled, and run on the workers by one command a
    call.

        @monarch.program
        def train_step(tokens: "i64[16@data, 128]", targets: "i64[16@data, 128]"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss

    Arguments and results are pytrees. Tensors among the arguments are the program's inputs: laid out as the annotation
    says, or as the distributed tensor is, or replicated. Where the annotation is a tensor type, numbers, lists and
    NumPy arrays become tensors, as by `torch.as_tensor`: Python's numbers take the annotation's dtype, and NumPy's have
    to have it. Floats are inputs too, and so are ints from the second value on, as far as the function does not need
    their values in Python (as a size, say); other Python values are part of the signature: another value traces anew.
    Distributed tensors that the function closes over are its state, read and updated in place on the workers. The mesh
    is `mesh`, or that of the arguments, or that of what the function closes over, or the only open one of the process.

    A type checker accepts the type in `Annotated`, with a name for a type that is used again:

        Tokens = Annotated[torch.Tensor, "i64[16@data, 128]"]

        @monarch.program
        def train_step(tokens: Tokens, targets: Tokens): ...

    `torch.compile` of a program is the program.

    `memory_limit` is the most that a worker may hold at once, parameters, optimizer state and inputs included: "2 GiB",
    or a number of bytes. Within it, values are computed again for the backward pass rather than kept, with the same
    bits; a limit that cannot be kept is an error when the program is compiled, with what lives at the peak.

    `layouts="auto"` has the layouts that nobody has said searched for when the program is first compiled: those of
    parameters and buffers that `module_to_mesh` was given none for, with what optimizers keep for them, of tensors that
    `distribute` was given none for, of plain arguments whose annotation shards nothing, and of activations. Of the
    layouts found, those as written, data parallel and fully sharded ones the cheapest is taken in which a worker holds
    no more than `memory_limit`. Before its first step the states get these layouts, which bind from then on: other
    programs find them so. `machine` says where it is to be cheap: one that ships ("h100-8"), or the file that `monarch
    doctor --measure` writes; of the program's target, which by itself stands for one host. `program.compile(...)` has
    what was found in `plan.costs["layouts"]`, and `monarchc inspect` shows it.

    `rounding` says when values in bf16 and f16 are rounded in generated kernels: "eager", after every op, as PyTorch
    does, or "chain", only where a kernel stores them.

    `collectives` says what moves tensors between workers: "monarch", which is Monarch's own, or process groups of
    `torch.distributed`, "gloo" on CPUs (with the same bits) or "nccl" on GPUs (beside what they compute, and sums are
    NCCL's own).

    `target` is what the workers are to run it on: "cpu", or a GPU by its kind, "cuda:90". The workers of a host take
    its GPUs in turns; tensors lie where the last program needed them. This has not run on a GPU yet
    (docs/internals/kernels.md).

    `cuda_graphs` has workers record what a step launches between its collectives, and launch it at once from the fourth
    step on; for GPUs of NVIDIA's, and as little tried on one.

    `strict` makes an op that every worker would compute whole, for want of a sharding rule, an error with its line and
    the way out (RuleError). Without it the op runs, and a PerformanceWarning says once what was gathered for it.

    `redundancy=1` has its state survive any single loss of a worker, or of a host where the mesh has several: what a
    loss would take, another worker keeps copies of, from the first call on (`Mesh.snapshots`, unless you have called
    it), and `heal_mesh` loses no step. `program.survives()` and `monarchc inspect --survives` say what that costs.

    The function itself runs when it is traced: on the first call of a signature, and whenever something that it has
    read in Python is no longer what it was: an attribute, a global, an entry of a list, a tensor bound anew. What it
    writes into Python (`self.average = ...`, `history.append(loss)`) is there after every call, whether traced or not;
    only `print` and logging happen when it is traced. A program that reads what cannot be checked (the time, a random
    number of Python's) is traced at each call, and a TracedAgainWarning says so once. Where a call raises, Python's
    state is what it was before. A gradient that comes to a result raises ProgramError: its history ends there.
    """
    options = CompileOptions(
        target=target,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit, "memory_limit"),
        layouts="" if layouts is None else layouts,
        machine="" if machine is None else machine,
        rounding=rounding,
        collectives=collectives,
        cuda_graphs=cuda_graphs,
        strict=strict,
        redundancy=redundancy,
    )
    if function is None:
        return lambda inner: Program(inner, mesh, options)
    return Program(function, mesh, options)
