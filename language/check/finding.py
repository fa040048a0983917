"""The linter's findings in a file, and the rules that they break (docs/reference/check.md shows each)."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.compiler.errors import Source

ERROR, WARNING = "error", "warning"

RULES: dict[str, str] = {
    "M101": "a branch on a tensor's value",
    "M102": "a tensor's value is read into Python",
    "M103": "a tensor's value is printed",
    "M104": "a shape that depends on values",
    "M105": "an argument's shape is changed in place",
    "M106": "a plain tensor is changed in place",
    "M107": "a plain tensor is placed inside a program",
    "M108": "the layout of a value that has none yet",
    "M109": "a torch.Generator inside a program",
    "M110": "tensors are saved or loaded inside a program",
    "M113": "backward() where no gradients are recorded",
    "M201": "an annotation that does not parse",
    "M202": "a layout that does not parse",
    "M203": "an unknown mesh dim",
    "M204": "a layout that does not fit the tensor",
    "M301": "a Python value that differs at every call",
    "M305": "output at trace time",
    "M307": "no_grad() that has no effect",
}
"""Every rule by its code. M1 and M2: the tracer refuses it. M3: it runs, but is slow, done once, or without effect."""


def level(code: str) -> str:
    """ "error" for a line that tracing refuses, "warning" for one that it takes, but not as it is meant."""
    return WARNING if code.startswith("M3") else ERROR


@dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule. Lines and columns count from 1; `end` is the column behind the last character, or 0
    where the place goes over the line's end."""

    file: str
    line: int
    column: int
    end: int
    code: str
    message: str
    hint: str = ""

    @property
    def level(self) -> str:
        return level(self.code)

    @property
    def source(self) -> Source:
        return Source(self.file, self.line, self.column, self.end)

    def __str__(self) -> str:
        parts = [f"{self.file}:{self.line}:{self.column}: {self.level}[{self.code}]: {self.message}"]
        if excerpt := self.source.excerpt():
            parts.append(excerpt)
        if self.hint:
            parts.append("\n".join("  " + line for line in self.hint.splitlines()))
        return "\n".join(parts)
