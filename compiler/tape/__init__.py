"""What a recorder writes down of a user's program, before it is a graph."""

from monarch.compiler.tape.numbers import FUNCTIONS, Expr, Number, evaluate
from monarch.compiler.tape.tape import Input, Op, Region, Tape, Value, View
from monarch.compiler.tape.timetable import Barrier, Task, Timetable

__all__ = [
    "FUNCTIONS",
    "Barrier",
    "Expr",
    "Input",
    "Number",
    "Op",
    "Region",
    "Tape",
    "Task",
    "Timetable",
    "Value",
    "View",
    "evaluate",
]
