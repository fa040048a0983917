"""The state of going through code: a function's frame, a call's arguments, and the interface of the code that follows
them."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from monarch.language.check.hints import hint
from monarch.language.check.kinds import MADE, PYTHON, UNKNOWN, AbstractValue, Kind, container, entry_of
from monarch.language.check.names import Names
from monarch.language.check.report import Reporter
from monarch.language.check.scopes import Function, Scope


@dataclass
class Frame:
    """A function being followed. `inside` is false while a value of the file's own level is only looked up."""

    scope: Scope
    env: dict[str, AbstractValue] = field(default_factory=dict)
    parent: Frame | None = None
    inside: bool = True
    program: str = ""
    no_grad: bool = False
    catches: tuple[type[BaseException] | None, ...] = ()
    """The errors raised here that a `try` of the function catches; None for a class that is not Python's own."""
    returns: list[AbstractValue] = field(default_factory=list)

    def frame_of(self, scope: Scope) -> Frame | None:
        frame: Frame | None = self
        while frame is not None and frame.scope is not scope:
            frame = frame.parent
        return frame


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call. `starred`: some of them by * or **, which may be anything."""

    positional: tuple[AbstractValue, ...]
    keywords: dict[str, AbstractValue]
    starred: bool = False

    @property
    def all(self) -> tuple[AbstractValue, ...]:
        return (*self.positional, *self.keywords.values())

    @property
    def has_tensor(self) -> bool:
        return any(
            entry.is_tensor or entry.kind is Kind.DERIVED for value in self.all for entry in (value, entry_of(value))
        )

    @property
    def key(self) -> object:
        keywords = tuple(sorted((name, value.key) for name, value in self.keywords.items()))
        return (tuple(value.key for value in self.positional), repr(keywords), self.starred)

    def first(self) -> AbstractValue:
        return self.positional[0] if self.positional else next(iter(self.keywords.values()), UNKNOWN)


class Follower(ABC):
    """Follows a program through its expressions, calls and statements, which are parts of their own."""

    def __init__(self, names: Names, reporter: Reporter) -> None:
        self.names = names
        self.file = names.file
        self.report = reporter
        self.frames: dict[int, Frame] = {}
        """The frame in which each function of a program was defined, by id of its node."""

    def refuse(self, code: str, node: ast.expr | ast.stmt, frame: Frame, message: str) -> None:
        """Report that a program breaks a rule; code outside of programs breaks none."""
        if frame.inside:
            self.report.add(code, node, message, hint(code, self.report.line_of(node)))

    @abstractmethod
    def assign(self, target: ast.expr, value: AbstractValue, frame: Frame) -> None:
        """Bind a target to a value."""

    @abstractmethod
    def call(self, function: Function, arguments: Arguments, caller: Frame) -> AbstractValue:
        """Follow a function of the file, called so."""

    @abstractmethod
    def expression(self, node: ast.expr, frame: Frame) -> AbstractValue:
        """The value of an expression; its parts are gone through."""

    @abstractmethod
    def attribute(self, holder: AbstractValue, node: ast.Attribute, frame: Frame) -> AbstractValue:
        """The value of an attribute."""

    def combined(self, values: list[AbstractValue]) -> AbstractValue:
        """The result of arithmetic."""
        tensors = [value for value in values if value.is_tensor]
        if tensors:
            kind = max(Kind.SOME, *(value.kind for value in tensors))  # its layout differs from that of its operands
            detached = all(value.detached for value in tensors)
            return AbstractValue(kind, "made", boolean=all(value.boolean for value in tensors), detached=detached)
        if any(value.kind is Kind.CONTAINER for value in values):
            made = container([entry_of(value) for value in values], known=False)
            return replace(made, mapping=any(value.mapping for value in values))
        if any(value.kind is Kind.DERIVED for value in values):
            return AbstractValue(Kind.DERIVED)
        return PYTHON if all(value.kind is Kind.PYTHON for value in values) else UNKNOWN


def result_of(arguments: Arguments, frame: Frame) -> AbstractValue:
    """The result of an op on its arguments. Inside a program, a value that depends on no tensor of the mesh may be
    known while it is traced."""
    given = [part for value in arguments.all for part in (value, entry_of(value))]
    tensors = [value for value in given if value.is_tensor]
    made = replace(MADE, detached=frame.no_grad or bool(tensors) and all(value.detached for value in tensors))
    if any(value.kind in (Kind.TENSOR, Kind.DERIVED) for value in given):
        return made
    return replace(made, kind=Kind.SOME if frame.inside or tensors else Kind.HOST)


def of_parameters(frame: Frame) -> AbstractValue:
    """The result of a module whose parameters are on the mesh."""
    return replace(MADE, detached=frame.no_grad)
