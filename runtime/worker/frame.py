"""A plan as one straight Python function, a line an instruction, so that running it costs little more than its ops.

    def step(arguments):
        s0, s1 = arguments; arguments.clear()
        s2 = f0(s0, s1)
        s1 = None
        s3 = f1([s2])
        return (s3,)

Names are made here, from slot numbers; ops and constants are bound as globals; only ints, bools, None and finite
floats are written out. So nothing that a plan says becomes code. When an op fails, the line number of the traceback
gives the instruction, at no cost to the steps that do not fail. In front of each instruction stands `if stopping:
halt()`: the controller may want the step given up.

To be measured, a plan is written a second time, with what notes down times and values between the lines:

    def step(arguments, now, enter, ran, met, freed):
        s0, s1 = arguments; arguments.clear()
        enter((0, 1), (s0, s1))
        t = now()
        s2 = f0(s0, s1)
        ran(0, t, now(), 2, s2)
        s1 = None
        freed((1,))
        ...

Stretches of a plan that are to be CUDA graphs (`graphs`) are functions of their own, which it calls instead:

    def stretch(arguments):
        s0, s1, = arguments
        arguments.clear()
        s2 = f0(s0, s1)
        ...
        return (s7, s9, )

    def step(arguments):
        ...
        given = [s0, s1, ]
        s1 = None
        s7, s9, = h0(given)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.plan import DTYPE_NAMES, OPS, ArenaRange, Instruction, Plan, PlanError, Slot
from monarch.compiler.plan.check_parts import MOVING
from monarch.runtime.processes.looking import running, stopping
from monarch.runtime.shared.checking import WITH_FUNCTIONS, slots_of
from monarch.runtime.worker import control
from monarch.runtime.worker.arena import Arena, SubArena
from monarch.runtime.worker.bindings import resolve, resolve_into
from monarch.runtime.worker.summing import sums_of_arrivals

if TYPE_CHECKING:  # the calls that make them are for GPUs
    from monarch.compiler.plan.stretches import Stretch

_LITERALS = (str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_PARAMETERS = {
    name: tuple(part.strip() for part in op.signature.strip("()").split(",") if part.strip())
    for name, op in OPS.items()
    if op.collective
}


@dataclass
class Location:
    """Where in a plan, or in a function of one, an exception came from."""

    plan: Plan
    number: int
    instruction: Instruction
    operands: list[str]
    whole: bool = True
    """Whether `plan` is the frame's, and not a function of it."""


class Observer(Protocol):
    """The calls of a measured frame, in this order: the inputs and constants; for each instruction, whether it `ran`
    alone or `met` other workers (a commit makes no value, and comes without slot), and which slots were `freed` behind
    it."""

    @property
    def clock(self) -> Callable[[], int]: ...

    def enter(self, slots: Sequence[int], values: Sequence[Any]) -> None: ...

    def ran(self, instruction: int, start: int, end: int, slot: int, value: Any) -> None: ...

    def met(self, instruction: int, start: int, end: int, slot: int = -1, value: Any = None) -> None: ...

    def freed(self, slots: Sequence[int]) -> None: ...


Function = Callable[[list[Any]], tuple[Any, ...]]
"""Takes values in order, and empties the list; gives values in order."""

Locate = Callable[[TracebackType | None], Location | None]
"""Gives the instruction from which an exception came."""


class Graphs(Protocol):
    """The part of `graphs.Graphs` that a frame needs: `captured` replaces the functions that run `stretches` of its
    plan, and `around` the one that runs a step."""

    @property
    def stretches(self) -> Sequence[Stretch]: ...

    def captured(self, stretch: Stretch, function: Function, locate: Locate) -> Function: ...

    def around(self, step: Function) -> Function: ...


class Frame:
    """A plan, ready to run. `run(arguments)` takes the inputs' values in order (and empties the list), and gives the
    outputs' in order. `bind(name, *args)` gives the callable for a local op, a collective or a kernel of
    `compiler.ops`; `arena` has room for the plan's regions, and is one of its own where the caller has none. While it
    is measured it runs without `graphs`."""

    def __init__(
        self,
        plan: Plan,
        bind: Callable[..., Callable[..., Any]],
        arena: Arena | SubArena | None = None,
        graphs: Graphs | None = None,
        commits: bool = False,
        told: Sequence[int] = (),
        halt: Callable[[], None] | None = None,
    ) -> None:
        """`commits` says that the step replaces states, though it be those of other parts. The commit is called with
        those values of the slots `told` that are made before it: `told_early`. `halt` raises where the controller gives
        the step up."""
        self.plan = plan
        says_when = any(instruction.op == "commit" for instruction in plan.instructions)
        commits = says_when or commits or any(plan.donated)
        self.told_early = _made_early(plan, told) if commits else ()
        self._bind = bind
        # torch's C++ looks for its lazy imports among the builtins of its caller.
        self._globals: dict[str, Any] = {"__builtins__": {"__import__": __import__}, "stopping": stopping}
        self._halts = halt is not None
        if self._halts:
            self._globals["halt"] = halt
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []
        self._lines_of: dict[CodeType, dict[int, int]] = {}
        self._regions: dict[str, ArenaRange] = {}
        arena = Arena(plan.arena) if arena is None else arena
        self._functions = {
            name: Frame(function, bind, SubArena(arena, plan.own_arena), halt=halt)
            for name, function in plan.functions.items()
        }
        self._sums = sums_of_arrivals(plan)
        self._calls = [self._call(instruction) for instruction in plan.instructions]
        self.use(arena)
        self._commit = ""
        if commits and not says_when:
            # States are replaced by all workers or by none, also where nothing is written in place.
            self._commit = self._commit_line()
        self._plain: Function = self._function() if graphs is None else self._with(graphs)
        self._measured: Callable[..., tuple[Any, ...]] | None = None
        self.run: Function = self._plain
        running.add(self)

    @property
    def commits_at_end(self) -> bool:
        """Whether it commits behind the plan's last instruction."""
        return bool(self._commit)

    def where(self, frame: FrameType) -> str:
        """See `looking.Running`."""
        for code, line_of in list(self._lines_of.items()):
            if code is frame.f_code and (number := line_of.get(frame.f_lineno)) is not None:
                instruction = self.plan.instructions[number]
                source = self.plan.sources[instruction.source] if instruction.source >= 0 else None
                return f"in {instruction.op}{f' ({source.file}:{source.line})' if source else ''}"
        return ""

    def use(self, arena: Arena | SubArena) -> None:
        """From the next run on, use this arena."""
        self._globals.update((name, arena.at(region)) for name, region in self._regions.items())
        for function in self._functions.values():
            function.use(SubArena(arena, self.plan.own_arena))

    def measure(self, observer: Observer | None) -> None:
        """From the next run on, tell the observer what happens; with None, nothing any more."""
        if observer is None:
            self.run = self._plain
            return
        if self._measured is None:
            self._measured = self._function(measured=True)
        tell = (observer.clock, observer.enter, observer.ran, observer.met, observer.freed)
        self.run = partial(self._measured, **dict(zip(_OBSERVER, tell, strict=True)))

    def _function(self, measured: bool = False) -> Callable[..., tuple[Any, ...]]:
        return self._made(self._write(measured), self._globals)

    def _with(self, graphs: Graphs) -> Function:
        """The step, with its stretches as functions. They take their callees as arguments: as globals, both would refer
        to each other for ever."""
        calls: dict[int, tuple[Stretch, str]] = {}
        captured: dict[str, Function] = {}
        for stretch in graphs.stretches:
            name = f"h{len(calls)}"
            calls[stretch.start] = stretch, name
            function = self._made(self._write_stretch(stretch), self._globals)
            captured[name] = graphs.captured(stretch, function, partial(_place, self.plan, self._lines_of))
        text = self._write(stretches=calls)
        return graphs.around(self._made(text, {**self._globals, **captured}))

    def _made(self, text: _Text, globals_: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
        exec(compile(text.source, f"<plan {self.plan.name}>", "exec"), globals_)
        function: Any = globals_.pop(text.name)
        self._lines_of[function.__code__] = text.line_of
        return function

    def source(self, measured: bool = False) -> str:
        """The function's text."""
        return self._write(measured).source

    def _write(self, measured: bool = False, stretches: Mapping[int, tuple[Stretch, str]] | None = None) -> _Text:
        plan = self.plan
        text = _Text("step", ("arguments", *(_OBSERVER if measured else ())))
        write = text.write

        def observe(line: str) -> None:
            if measured:
                write(line)

        text.take([spec.slot for spec in plan.inputs])
        for label, slot in plan.constant_slots.items():
            write(f"s{_number(slot)} = {self._name(plan.constants[label])}")
        given = [*(spec.slot for spec in plan.inputs), *plan.constant_slots.values()]
        observe(f"enter({_tuple(given)}, {_tuple(given, 's')})")
        number = 0
        while number < len(plan.instructions):
            if stretches is not None and number in stretches:
                stretch, name = stretches[number]
                self._write_call(text, stretch, name)
                number = stretch.stop
                continue
            instruction = plan.instructions[number]
            commit = instruction.op == "commit"
            if self._halts and not commit:
                write("if stopping: halt()", number)
            observe("t = now()")
            write(self._line(number), number)
            made = "" if commit else f", {instruction.out}, s{instruction.out}"
            observe(f"{'met' if instruction.op in (*_PARAMETERS, *MOVING) else 'ran'}({number}, t, now(){made})")
            if instruction.free:
                text.clear(instruction.free)
                observe(f"freed({_tuple(instruction.free)})")
            number += 1
        if self._commit:
            observe("t = now()")
            write(self._commit)
            observe(f"met({len(plan.instructions)}, t, now())")
        write(f"return {_tuple([spec.slot for spec in plan.outputs], 's')}")
        return text

    def _write_stretch(self, stretch: Stretch) -> _Text:
        text = _Text("stretch", ("arguments",))
        text.take(stretch.reads)
        gone = set(stretch.frees)
        for number in range(stretch.start, stretch.stop):
            if number not in stretch.apart:
                text.write(self._line(number), number)
                free = self.plan.instructions[number].free
                text.clear([slot for slot in free if slot in stretch.reads or slot not in gone])
        text.write(f"return {_tuple(stretch.gives, 's')}")
        return text

    def _write_call(self, text: _Text, stretch: Stretch, name: str) -> None:
        for number in stretch.apart:
            text.write(self._line(number), number)
        text.write(f"given = [{''.join(f's{_number(slot)}, ' for slot in stretch.reads)}]")
        text.clear(stretch.frees)
        given = "".join(f"s{_number(slot)}, " for slot in stretch.gives)
        text.write(f"{given}{'= ' if given else ''}{name}(given)", stretch.start)

    def _line(self, number: int) -> str:
        instruction = self.plan.instructions[number]
        return (
            self._calls[number]
            if instruction.op == "commit"
            else f"s{_number(instruction.out)} = {self._calls[number]}"
        )

    def _call(self, instruction: Instruction) -> str:
        op, args, kwargs = instruction.op, instruction.args, instruction.kwargs
        if op == "getitem" and isinstance(args[1], int):
            return f"{self._text(args[0])}[{args[1]:d}]"
        if op in _PARAMETERS:
            return self._collective(op, args, kwargs)
        if op == "send":
            tensor, number = args
            return f"{self._name(self._bind(op, number))}({self._text(tensor)})"
        if op == "recv":
            return f"{self._name(self._bind(op, *args, self._sums.get(instruction.out)))}()"
        if instruction.out in self._sums:
            return f"{self._name(self._sums[instruction.out].take)}()"
        if op == "kernel":
            tensors, text, over = args
            into = f", ({', '.join(map(self._placed, instruction.regions))},)" if instruction.regions else ""
            return f"{self._name(self._bind(op, text, over))}({self._text(tensors)}{into})"
        if op in WITH_FUNCTIONS:
            return self._control(op, args)
        function = self._bind(op) if op in LOCAL_OPS else resolve(op)
        parts = [self._text(arg) for arg in args]
        for name, value in kwargs.items():
            if not name.isidentifier():
                raise PlanError(f"{op} has an argument called {name!r}")
            parts.append(f"{name}={self._text(value)}")
        if instruction.regions:
            function, argument = resolve_into(op)
            parts.append(f"{argument}={self._placed(instruction.regions[0])}")
        return f"{self._name(function)}({', '.join(parts)})"

    def _control(self, op: str, args: Sequence[Any]) -> str:
        """The functions that call functions of the plan."""
        if op == "scan":
            *values, names, length, reverse = args
            (combine,) = self._run(names)
            run = control.scan(self.plan.functions[names[0]], combine, self._bind("look"), length, reverse)
        else:
            *values, names = args
            run = control.cond(*self._run(names)) if op == "cond" else self._while(names)
        return f"{self._name(run)}({', '.join(map(self._text, values))})"

    def _while(self, names: Sequence[str]) -> Callable[..., Any]:
        condition, body = self._run(names)
        return control.while_loop(condition, body, self._bind("look"))

    def _run(self, names: Sequence[str]) -> list[Function]:
        return [self._functions[name].run for name in names]

    def _placed(self, region: ArenaRange | None) -> str:
        """A global that is the tensor in the arena."""
        if region is None:
            return "None"
        name = f"a{len(self._regions)}"
        self._regions[name] = region
        return name

    def _collective(self, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Everything but the tensors is known now: the group, the blocks, the reduction."""
        parameters = _PARAMETERS[op]
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if set(given) != set(parameters) or len(args) > len(parameters):
            raise PlanError(f"{op} takes ({', '.join(parameters)}), and the plan gives ({', '.join(given)})")
        if op == "commit":
            return self._commit_line()
        if not parameters:
            return f"{self._name(self._bind(op))}()"
        tensors = given.pop("tensors")
        if op == "wait":  # a callee that waits has the tensors
            return f"{self._name(self._bind(op))}({self._text(given['pending'])})"
        return f"{self._name(self._bind(op, *given.values()))}({self._text(tensors)})"

    def _commit_line(self) -> str:
        return f"{self._name(self._bind('commit'))}({', '.join(f's{_number(slot)}' for slot in self.told_early)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, Slot):
            return f"s{_number(value.index)}"
        if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
            return f"({value!r})" if isinstance(value, (int, float)) and value < 0 else repr(value)
        if isinstance(value, (list, tuple)):
            if slots_of(value):
                return f"[{', '.join(self._text(item) for item in value)}]"
            return self._name(_frozen(value))
        if isinstance(value, (float, complex, *_LITERALS)):
            return self._name(value)
        raise PlanError(f"a plan cannot hold a {type(value).__name__} as an argument: {value!r}")

    def _name(self, value: Any) -> str:
        """A global that stands for the value."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"g{len(self._kept)}"
            self._kept.append(value)  # an id names a value only as long as it lives
            self._globals[name] = value
        return name

    # -- errors ----------------------------------------------------------------------------------------------------

    def place(self, traceback: TracebackType | None) -> Location | None:
        """The instruction from which an exception came: of a function, where one was called."""
        for function in self._functions.values():
            if (found := function.place(traceback)) is not None:
                return replace(found, whole=False)
        return _place(self.plan, self._lines_of, traceback)


def _made_early(plan: Plan, slots: Sequence[int]) -> tuple[int, ...]:
    """Those of the slots that stand when the plan commits, which it does at its end where it does not say so."""
    at = next((at for at, each in enumerate(plan.instructions) if each.op == "commit"), len(plan.instructions))
    late = {each.out for each in plan.instructions[at:]}
    return tuple(slot for slot in slots if slot not in late)


def _place(plan: Plan, lines_of: Mapping[CodeType, dict[int, int]], traceback: TracebackType | None) -> Location | None:
    found: Location | None = None
    while traceback is not None:
        if (line_of := lines_of.get(traceback.tb_frame.f_code)) is not None:
            number = line_of.get(traceback.tb_lineno)
            if number is None:
                return None
            instruction = plan.instructions[number]
            values = traceback.tb_frame.f_locals
            slots = slots_of((instruction.args, tuple(instruction.kwargs.values())))
            found = Location(plan, number, instruction, [_describe(values.get(f"s{slot}")) for slot in slots])
        traceback = traceback.tb_next  # a stretch is called by the step
    return found


class _Text:
    """A function's text as it is written, and the instruction of each line that is one."""

    def __init__(self, name: str, parameters: Sequence[str]) -> None:
        self.name = name
        self.line_of: dict[int, int] = {}
        self._lines = [f"def {name}({', '.join(parameters)}):"]

    @property
    def source(self) -> str:
        return "\n".join(self._lines) + "\n"

    def write(self, line: str, instruction: int | None = None) -> None:
        self._lines.append(f"    {line}")
        if instruction is not None:
            self.line_of[len(self._lines)] = instruction

    def take(self, slots: Sequence[int]) -> None:
        if slots:
            self.write(f"{', '.join(f's{_number(slot)}' for slot in slots)}, = arguments")
        self.write("arguments.clear()")

    def clear(self, slots: Sequence[int]) -> None:
        if slots:
            self.write(" = ".join(f"s{_number(slot)}" for slot in slots) + " = None")


_OBSERVER = ("now", "enter", "ran", "met", "freed")


def _tuple(slots: Sequence[int], prefix: str = "") -> str:
    return f"({''.join(f'{prefix}{_number(slot)}, ' for slot in slots)})"


def _number(slot: int) -> int:
    if type(slot) is not int or slot < 0:
        raise PlanError(f"a slot has to be a number from 0, not {slot!r}")
    return slot


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else _checked(value)


def _checked(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, complex, *_LITERALS)):
        return value
    raise PlanError(f"a plan cannot hold a {type(value).__name__} as an argument: {value!r}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{DTYPE_NAMES.get(value.dtype, value.dtype)}{list(value.shape)}"
        if value.dtype == torch.int64 and value.numel() and value.device.type == "cpu":  # indices, most often
            least, most = value.aminmax()
            text += f" from {int(least)} to {int(most)}"
        return text
    return type(value).__name__
