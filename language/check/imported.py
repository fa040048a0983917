"""Calls of imported functions: Python's own, torch's and Monarch's."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from monarch.language.check.frames import Arguments, Follower, Frame, result_of
from monarch.language.check.kinds import (
    CHANGING,
    DERIVED,
    FACTORIES,
    FILES,
    LISTS,
    MADE,
    NUMBERED,
    OUTPUTS,
    PRINTING_CALLS,
    PYTHON,
    RANDOM,
    READING_CALLS,
    READS,
    SOME,
    TORCH_PYTHON,
    TORCH_READS,
    UNKNOWN,
    VALUE_SHAPES,
    AbstractValue,
    Kind,
    container,
    entry_of,
    iterated,
    join_all,
    named,
)
from monarch.language.check.names import is_monarch
from monarch.language.check.refused import alpha_given, changing, generator_given, printed, read, sizes, written

_ORDERING = {"builtins.max", "builtins.min", "builtins.sorted", "heapq.nlargest", "heapq.nsmallest", "heapq.heapify"}
_OF_ENTRIES = {"builtins.any", "builtins.all", "math.fsum", "math.dist"}
"""Calls that need the values of a container's entries."""
_OF_ENTRIES_IN = ("statistics.", "bisect.")
_CONTAINERS = {f"builtins.{name}" for name in ("list", "tuple", "set", "frozenset", "dict", "reversed", "iter")}
_TORCH_OPS = ("torch.nn.functional.", "torch.linalg.", "torch.fft.", "torch.special.", "torch.nn.init.", "torch.ops.")
_HIGHER = {"torch.vmap", "torch.compile", "torch.cond", "torch.while_loop", "torch.export"}
_OF_SHAPES = {"numpy.shape", "numpy.ndim", "numpy.size"}
_BOOLEAN = set("isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not".split())


@dataclass
class ImportedCall:
    interpreter: Follower
    node: ast.Call
    frame: Frame
    arguments: Arguments
    dotted: str

    def refuse(self, code: str, message: str) -> None:
        self.interpreter.refuse(code, self.node, self.frame, message)

    def value(self) -> AbstractValue:
        root = self.dotted.partition(".")[0]
        if self.dotted in FILES:
            self.refuse("M110", f"{self.dotted}() inside a program")
            return UNKNOWN
        if root == "monarch":
            return self.of_monarch()
        if root == "torch":
            return self.of_torch()
        given = self.arguments
        if named(self.dotted, CHANGING):
            changing(self.interpreter, self.node, self.dotted, self.frame)
            return PYTHON
        if self.dotted in PRINTING_CALLS:
            return self.printing()
        if self.dotted in READING_CALLS or (root == "numpy" and self.dotted not in _OF_SHAPES):
            return self.reading()
        if self.dotted in OUTPUTS:
            self.refuse("M305", f"{self.dotted} runs when '{self.frame.program}' is traced")
            return PYTHON
        if root == "builtins":
            return self.builtin(self.dotted.partition(".")[2])
        if self.dotted in ("copy.copy", "copy.deepcopy"):
            first = given.first()
            return replace(first, kind=max(first.kind, Kind.SOME), origin="made") if first.is_tensor else first
        if root == "collections":
            return AbstractValue(Kind.CONTAINER)
        if self.dotted == "functools.reduce" and len(given.positional) > 1:
            _, entries, *begin = given.positional
            return applied(
                self.interpreter, self.node, self.frame, given.first(), container(begin or [UNKNOWN]), entries
            )
        if root == "itertools":
            return self.iterating(self.dotted.partition(".")[2])
        return DERIVED if given.has_tensor else UNKNOWN

    def printing(self) -> AbstractValue:
        given = self.arguments
        printed(self.interpreter, self.node, AbstractValue(Kind.CONTAINER, items=given.all), self.frame)
        refused = self.interpreter.report.has("M103", self.node)
        if self.dotted == "builtins.print" and not refused:
            self.refuse("M305", f"print runs when '{self.frame.program}' is traced")
        return PYTHON

    def reading(self) -> AbstractValue:
        ordering = self.dotted in _ORDERING
        values = list(self.arguments.positional if ordering else self.arguments.all)
        last = values[-1] if values else UNKNOWN  # max(a, b) compares its arguments, max(list) the list's entries
        alone = len(values) == 1 or self.dotted.startswith("heapq.")
        key = self.arguments.keywords.get("key")
        if ordering and alone and last.items is not None and len(last.items) < 2:
            values = []  # nothing to compare it with
        elif ordering and key is not None and key.kind is not Kind.PYTHON:
            given = last if alone else container(values)
            values = [applied(self.interpreter, self.node, self.frame, key, given)]
        elif ordering and alone:
            values = [iterated(last)]
        elif self.dotted in _OF_ENTRIES or self.dotted.startswith(_OF_ENTRIES_IN):
            values = [entry for value in values for entry in (value, iterated(value))]
        if any(value.kind is Kind.TENSOR for value in values):
            name = self.dotted.removeprefix("builtins.")
            read(self.interpreter, self.node, self.frame, f"{name}() needs it")
        if self.dotted in ("builtins.max", "builtins.min") and any(value.is_tensor for value in values):
            return UNKNOWN
        if self.dotted == "builtins.sorted":
            return container([iterated(self.arguments.first())], known=False)
        return PYTHON

    def iterating(self, name: str) -> AbstractValue:
        """The values that functions of `itertools` give one after the other."""
        entries = [iterated(value) for value in self.arguments.positional]
        if name in ("chain", "cycle", "islice", "accumulate"):
            return AbstractValue(Kind.CONTAINER, each=join_all(entries if name == "chain" else entries[:1]))
        if name in ("product", "zip_longest"):
            return AbstractValue(Kind.CONTAINER, each=container(entries))
        if name in ("pairwise", "combinations", "permutations") and entries:
            return AbstractValue(Kind.CONTAINER, each=container([entries[0], entries[0]], known=name == "pairwise"))
        return UNKNOWN

    def builtin(self, name: str) -> AbstractValue:
        given = self.arguments
        first = given.first()
        if f"builtins.{name}" in _CONTAINERS:
            if name in ("list", "tuple") and first.items is not None:
                return first
            if name == "dict":
                entries = [entry_of(value) for value in given.positional] + list(given.keywords.values())
                return replace(container(entries, known=False), mapping=True)
            entries = [iterated(value) for value in given.positional]
            return container(entries, known=not entries)
        if name == "enumerate":
            return AbstractValue(Kind.CONTAINER, each=container([PYTHON, iterated(first)]))
        if name == "zip":
            return AbstractValue(Kind.CONTAINER, each=container([iterated(value) for value in given.positional]))
        if name in ("map", "filter") and given.positional:
            entries = [iterated(value) for value in given.positional[1:]]
            if name == "map" or first.kind is not Kind.PYTHON:
                found = applied(self.interpreter, self.node, self.frame, first, *given.positional[1:])
            else:  # filter(None, values)
                found = join_all(entries)
            if name == "filter" and found.kind is Kind.TENSOR:
                read(self.interpreter, self.node, self.frame, "filter() needs it")
            return AbstractValue(Kind.CONTAINER, each=found if name == "map" else join_all(entries))
        if name == "sum":
            return self.interpreter.combined([iterated(first), PYTHON])
        if name == "next":
            return iterated(first)
        if name in ("abs", "pow"):
            return self.interpreter.combined(list(given.positional))
        if name == "getattr":
            return UNKNOWN
        if name in ("len", "isinstance", "issubclass", "type", "id", "hash", "repr", "callable", "hasattr", "slice"):
            return PYTHON
        return DERIVED if given.has_tensor else UNKNOWN

    def of_monarch(self) -> AbstractValue:
        first = self.arguments.first()
        if is_monarch(self.dotted, "program"):
            return AbstractValue(Kind.PROGRAM, function=first.function) if first.function is not None else UNKNOWN
        if self.interpreter.names.is_mesh_call(self.node, self.frame.scope):
            return AbstractValue(Kind.MESH)
        if is_monarch(self.dotted, "distribute"):
            if first.kind is Kind.HOST:
                self.refuse("M107", "distribute() of a plain tensor inside a program")
            return MADE if self.frame.inside else AbstractValue(Kind.TENSOR, "state")
        if is_monarch(self.dotted, "layout"):
            if first.kind is Kind.HOST:
                self.refuse("M107", "layout() of a plain tensor, which is on no mesh")
            return MADE if self.frame.inside else AbstractValue(Kind.TENSOR, "state")
        if is_monarch(self.dotted, "module_to_mesh"):
            known = first.kind in (Kind.MODULE, Kind.INSTANCE)
            return replace(first, placed=True) if known else AbstractValue(Kind.MODULE, placed=True)
        return DERIVED if self.arguments.has_tensor else UNKNOWN

    def of_torch(self) -> AbstractValue:
        given, dotted = self.arguments, self.dotted
        parent, _, name = dotted.rpartition(".")
        if parent == "torch.Tensor" and name in READS or dotted in TORCH_READS:
            if any(value.kind is Kind.TENSOR for value in given.all):
                read(self.interpreter, self.node, self.frame)
            return PYTHON
        if parent in ("torch.nn", "torch") and name == "Parameter" or dotted == "torch.nn.parameter.Parameter":
            return SOME
        if dotted.startswith("torch.optim."):
            return UNKNOWN
        if dotted == "torch.Generator":
            return AbstractValue(Kind.GENERATOR)
        if dotted.startswith("torch.nn.") and name[:1].isupper():
            return AbstractValue(Kind.MODULE)
        if dotted in ("torch.autograd.grad", "torch.autograd.backward"):
            if given.first().detached:
                self.refuse("M113", "gradients are asked for where none are recorded")
            return AbstractValue(Kind.CONTAINER, each=MADE) if name == "grad" else PYTHON
        if dotted == "torch.utils.checkpoint.checkpoint":
            return self.checkpoint()
        if dotted.startswith("torch.nn.utils.clip_grad"):
            return MADE if self.frame.inside else SOME
        if parent == "torch" and name in TORCH_PYTHON or dotted.startswith("torch.autograd"):
            return PYTHON
        if (parent == "torch" or dotted.startswith(_TORCH_OPS)) and not name[:1].isupper() and dotted not in _HIGHER:
            return self.op(name)
        return DERIVED if given.has_tensor else UNKNOWN

    def checkpoint(self) -> AbstractValue:
        """The function that is checkpointed runs at once."""
        first, *rest = self.arguments.positional or (UNKNOWN,)
        if first.function is None:
            return result_of(self.arguments, self.frame)
        positional = (first.bound, *rest) if first.bound is not None else tuple(rest)
        return self.interpreter.call(first.function, Arguments(positional, {}, self.arguments.starred), self.frame)

    def op(self, name: str) -> AbstractValue:
        given = self.arguments
        alpha_given(self.interpreter, self.node, given, self.frame)
        generator_given(self.interpreter, self.node, given, self.frame)
        first = given.first()
        shaping = given.all[1:2] if name == "masked_select" else (first,)
        if any(value.kind is Kind.TENSOR for value in shaping):
            counted = {keyword.arg for keyword in self.node.keywords}
            single = name == "where" and len(given.all) == 1
            classes = name == "one_hot" and len(given.positional) < 2 and "num_classes" not in counted
            if name in VALUE_SHAPES or single or classes:
                self.refuse("M104", f"{name}() gives a shape that depends on values")
        if name.endswith("_"):
            written(self.interpreter, self.node, first, self.frame)
        if name in FACTORIES:
            sizes(self.interpreter, self.node, given, self.frame)
        elif name in NUMBERED:
            sizes(self.interpreter, self.node, replace(given, positional=given.positional[1:]), self.frame)
        elif name in ("tensor", "as_tensor") and entry_of(first).kind is Kind.TENSOR and first.kind is Kind.CONTAINER:
            read(self.interpreter, self.node, self.frame, f"torch.{name}() needs Python's numbers")
        made = MADE if name in RANDOM and self.frame.inside else result_of(given, self.frame)
        if name in LISTS or name in ("meshgrid", "broadcast_tensors", "unbind"):
            return AbstractValue(Kind.CONTAINER, each=made)
        return replace(made, boolean=name in _BOOLEAN)


def applied(
    interpreter: Follower, node: ast.Call, frame: Frame, function: AbstractValue, *given: AbstractValue
) -> AbstractValue:
    """The results of a function for the entries of a call's arguments, as map() calls it."""
    arguments = Arguments(tuple(map(iterated, given)), {})
    if function.function is not None:
        if function.bound is not None:
            arguments = replace(arguments, positional=(function.bound, *arguments.positional))
        return interpreter.call(function.function, arguments, frame)
    if function.kind is Kind.IMPORTED:
        return ImportedCall(interpreter, node, frame, arguments, function.dotted).value()
    return UNKNOWN
