"""Errors in a user's program that only the language knows: where they stand, and the call to write instead."""

from __future__ import annotations

import re

import torch

from monarch.compiler.errors import MonarchError, ProgramError, Source, beside
from monarch.language.rewritten import asked, looked_up, rewritten, without_reading


class OperatorError(MonarchError, RuntimeError):
    """An op that PyTorch refuses (shapes that do not fit, a wrong dtype), in PyTorch's words, at the user's line.

    Also a RuntimeError, as PyTorch's own would be, and of the class of PyTorch's: an IndexError, a TypeError.
    """


class _OperatorIndexError(OperatorError, IndexError):
    pass


class _OperatorTypeError(OperatorError, TypeError):
    pass


class _OperatorValueError(OperatorError, ValueError):
    pass


class ArgumentsError(ProgramError, TypeError):
    """Arguments that a program's function does not take. Also a TypeError, as Python's own would be."""


def operator_error(error: Exception) -> type[OperatorError]:
    """The OperatorErrors that are of the class of an error of PyTorch's."""
    kinds = _OperatorIndexError, _OperatorTypeError, _OperatorValueError
    return next((kind for kind in kinds if isinstance(error, kind.__bases__[1])), OperatorError)


class TracedAgainWarning(UserWarning):
    """A program depends on Python state that no guard can follow, and is traced at each call."""


_CALLS = {
    "allclose": "torch.isclose(a, b).all()",
    "equal": "(a == b).all()",
    "one_hot": "F.one_hot(x, num_classes=10)",
    "torch.select": "x.select(0, i)",
    "tensor_split": "x * (torch.arange(x.shape[0]) < at)",
    "cov": "centred = x - (x * w).sum(1, True) / w.sum(); (centred * w) @ centred.T / (w.sum() - 1)",
}
"""Replacements for functions of PyTorch's that read a value themselves."""
_CALLED = re.compile(rf"\b({'|'.join(map(re.escape, _CALLS))})\(")


_INSTEAD: dict[str, tuple[list[str], str, str]] = {
    "decision": (
        ["y = torch.where(loss > 0.1, a, b)"],
        "both sides are computed, the workers choose",
        "if step(x).item() > 0.1:",
    ),
    "output": (["return loss"], "give the tensor back", "print(step(x))"),
    "number": (
        ["step(x, 3)"],
        "a number of Python's, as an argument: each new value traces again",
        "step(x, n.item())",
    ),
    "value": (["return loss"], "give the tensor back", "step(x).item()"),
}
"""By what asks for a value, what to write instead in the program, why that is right, and what outside of it."""
_ARRAYS = re.compile(r"\b(?:np|numpy)\.(\w+)\(")


def numpy_error(source: Source | None) -> ProgramError:
    """NumPy asked for a tensor's values while a program was traced."""
    called = next(iter(_ARRAYS.findall(source.own.text if source else "")), "")
    return ProgramError(
        "NumPy asks for a tensor's values while a program is traced: they are on the workers",
        hint=f"write torch.{called} for {called} of NumPy's: it runs on the workers."
        if callable(getattr(torch, called, None))
        else "have arrays be tensors before they meet one: x + torch.as_tensor(array).",
        source=source,
    )


def lengths_error(source: Source | None) -> ProgramError:
    """A program got the lengths of packed sequences as a tensor, which that of a PackedSequence is too."""
    return ProgramError(
        "the lengths of packed sequences are a tensor, and the program has to know them while it is traced",
        hint="step(x, lengths), step(packed)                   # wrong: only the workers know their values\n"
        "step(x, lengths.tolist())                        # right: Python's numbers; others trace again\n"
        "pack_padded_sequence(x, lengths, ...)            # in the program, of these\n"
        "y, _ = layer(x)                                  # right, for any lengths: the padded batch\n"
        "last = y[torch.arange(len(x)), lengths - 1]      # and the last output of each sequence (batch_first)",
        source=source,
    )


def loader_error(source: Source | None) -> ProgramError:
    """A program iterates over a DataLoader, which draws a seed and reads it."""
    return ProgramError(
        "a program cannot read a DataLoader: it would have the batches of the call that is traced",
        hint="for batch in loader: step(batch)  # right: outside of the program, which takes a batch",
        source=source,
    )


def branch_error(source: Source | None, own: str = "") -> ProgramError:
    """A tensor's value was asked for (`if t`, `float(t)`, `t.item()`, `range(t)`, `print(t)`) while a program was
    traced; in per-worker code that of a tensor that varies along the mesh dim `own`."""
    if torch.is_anomaly_enabled() and torch._C._current_graph_task_id() != -1:
        return ProgramError(
            "PyTorch's anomaly mode reads each gradient, and a program's are on the workers",
            hint="turn it off, and have the workers look for the first op that gives NaN:\n"
            "with mesh.detect_anomaly(): step(x)",
            source=source,
        )
    if own:
        return ProgramError(
            f"per-worker code cannot branch on a value that varies along '{own}', or read it into Python",
            hint="y = torch.where(x > 0, a, b)  # right: each worker chooses by its own value\n"
            f"x.to_local({own}=0).item()        # right outside of programs: the value of one worker",
            source=source,
        )
    line = source.excerpt().splitlines()[0].strip() if source and source.excerpt() else "if loss > 0.1:"
    right, why, outside = _INSTEAD[asked(source)]
    if instead := rewritten(source):
        right, why = instead, "the workers decide"
    elif known := _CALLS.get(called := next(iter(_CALLED.findall(line)), "")):
        right, why = [known], f"{called}() reads the value, and this does not"
    elif code := looked_up(source):
        why = "so many entries, a known number" if ".narrow(" in code else "the workers look into the tensor"
        right = [code]
    elif code := without_reading(source):
        right, why = [code], "the value stays on the workers"
    hint = beside(
        (line, "wrong: the value lives on the workers, and this line runs once, when the program is traced"),
        *((code, "") for code in right[:-1]),
        (right[-1], f"right: {why}"),
        (outside, "right outside the program: waits for the value"),
    )
    return ProgramError(
        "a @monarch.program cannot branch on a tensor's value, or read it into Python",
        hint=hint,
        source=source,
    )
