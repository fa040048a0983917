"""The wrong line beside the right one, for each rule."""

from __future__ import annotations

from monarch.compiler.errors import beside

_RIGHT: dict[str, tuple[str, *tuple[tuple[str, str], ...]]] = {
    "M101": (
        "the value lives on the workers, and this runs once, when the program is traced",
        ("y = torch.where(loss > 0.1, a, b)", "both sides are computed, the workers choose"),
        ("if step(x).item() > 0.1:", "outside the program: waits for the value"),
    ),
    "M102": (
        "the value is unknown when the program is traced",
        ("return loss", "give the tensor back"),
        ("step(x).item()", "outside the program: waits for the value"),
    ),
    "M103": (
        "the value is unknown when the program is traced",
        ("print(step(x))", "outside the program: waits for the value"),
    ),
    "M104": (
        "how large the result is, only its values say",
        ("torch.where(mask, x, 0.0)", "the same shape whatever the values"),
    ),
    "M105": ("a distributed tensor keeps its shape", ("x = x.unsqueeze(0)", "a new tensor")),
    "M106": (
        "a plain tensor is in this process, not on the workers",
        ("total = monarch.distribute(total, mesh)", "before the program: its state, updated in place on the workers"),
    ),
    "M107": (
        "the tensor's data would be built into the program",
        ("x = monarch.distribute(x, mesh, layout)", "before the program: pass it, or close over it"),
    ),
    "M108": (
        "nothing has been decided when the program is traced",
        ("y = monarch.layout(y, '[@data, -]')", "say what it shall be"),
        ("step(x).sharding", "outside the program"),
    ),
    "M109": (
        "random numbers on a mesh come from counters",
        ("torch.manual_seed(0)", "once, before the program; leave generator= out"),
    ),
    "M110": (
        "tensors have no values while the program is traced",
        ("loss = step(x); monarch.save(model, path)", "between calls of the program"),
    ),
    "M113": (
        "no gradients are recorded here",
        ("loss.backward()", "outside of no_grad(), as are the operands of loss"),
    ),
    "M301": (
        "no check can follow it: the program is traced at each call",
        ("def step(x, value):", "pass it as an argument: each call passes its floats"),
    ),
    "M305": (
        "runs when the program is traced, not at every call",
        ("result = step(x); print(result)", "outside: waits for the value"),
    ),
    "M307": ("makes an object and drops it", ("with torch.no_grad():", "for the block below it")),
}
"""By rule, why a line is wrong, and the right lines, each with its effect."""


def hint(code: str, line: str) -> str:
    """The wrong line above the right ones, each with its effect in a column of its own."""
    why, *right = _RIGHT[code]
    return beside((line, f"wrong: {why}"), *((code, f"right: {what}") for code, what in right))
