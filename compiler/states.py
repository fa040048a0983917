"""What a program's states are called: the key of each, and the label that graphs, plans and people see of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateKey:
    """Whose a state is, and what it is.

        fc.weight                StateKey("fc.weight")                      a parameter, a buffer
        grad[fc.weight]          StateKey("fc.weight", "grad")              a gradient
        adamw.exp_avg[fc.weight] StateKey("fc.weight", "exp_avg", "adamw")  what an optimizer keeps

    `parameter`  the path of the parameter or buffer
    `role`       what the state is for it; empty for the parameter itself
    `owner`      the name of the optimizer that keeps it, if one does

    `str` gives the label, and `StateKey.of` reads it.
    """

    parameter: str
    role: str = ""
    owner: str = ""

    @staticmethod
    def of(label: str) -> StateKey:
        """The key with this label. A label of another form is a parameter's path."""
        head, _, parameter = label.partition("[")
        owner, _, role = head.rpartition(".")
        key = StateKey(parameter[:-1], role, owner)
        return key if str(key) == label else StateKey(label)

    def __str__(self) -> str:
        head = f"{self.owner}.{self.role}" if self.owner else self.role
        return f"{head}[{self.parameter}]" if head else self.parameter

    @property
    def kind(self) -> str:
        """ "parameter", "gradient" or "optimizer state"."""
        if not self.role:
            return "parameter"
        return "gradient" if self.role == "grad" and not self.owner else "optimizer state"

    @property
    def module(self) -> str:
        """The path of the module that the parameter belongs to: "blocks.0" of "blocks.0.weight"."""
        return self.parameter.rpartition(".")[0]

    @property
    def layer(self) -> str:
        """The layer that the parameter belongs to: its path up to the last number, "blocks.0" of
        "blocks.0.attn.q.weight"; a path without a number goes by its first part."""
        parts = self.parameter.split(".")
        numbers = [at for at, part in enumerate(parts) if part.isdigit()]
        return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:1])
