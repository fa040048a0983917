"""The wrong line beside the right one, for each rule."""

from __future__ import annotations

from monarch.language.check.finding import beside


def branch(line: str) -> str:
    return beside(
        line,
        "the value lives on the workers, and this runs once, when the program is traced",
        ("y = torch.where(loss > 0.1, a, b)", "both sides are computed, the workers choose"),
        ("if step(x).item() > 0.1:", "outside the program: waits for the value"),
    )


def read(line: str) -> str:
    return beside(
        line,
        "there is no value when the program is traced",
        ("return loss", "give the tensor back"),
        ("step(x).item()", "outside the program: waits for the value"),
    )


def printed(line: str) -> str:
    return beside(
        line,
        "there is no value when the program is traced",
        ("print(step(x))", "outside the program: waits for the value"),
    )


def shape(line: str) -> str:
    return beside(
        line,
        "how large the result is, only its values say",
        ("torch.where(mask, x, 0.0)", "the same shape whatever the values"),
    )


def reshaped(line: str) -> str:
    return beside(
        line,
        "a distributed tensor keeps its shape",
        ("x = x.unsqueeze(0)", "a new tensor"),
    )


def plain(line: str) -> str:
    return beside(
        line,
        "a plain tensor lies in this process, not on the workers",
        ("total = monarch.distribute(total, mesh)", "before the program: its state, updated in place on the workers"),
    )


def placed(line: str) -> str:
    return beside(
        line,
        "the tensor's data would be built into the program",
        ("x = monarch.distribute(x, mesh, layout)", "before the program: pass it, or close over it"),
    )


def layout_of_value(line: str) -> str:
    return beside(
        line,
        "nothing has been decided when the program is traced",
        ("y = monarch.layout(y, '[@data, -]')", "say what it shall be"),
        ("step(x).sharding", "outside the program"),
    )


def generator(line: str) -> str:
    return beside(
        line,
        "random numbers on a mesh come from counters",
        ("torch.manual_seed(0)", "once, before the program; leave generator= out"),
    )


def files(line: str) -> str:
    return beside(
        line,
        "tensors have no values while the program is traced",
        ("loss = step(x); monarch.save(model, path)", "between calls of the program"),
    )


def backward(line: str) -> str:
    return beside(
        line,
        "no gradients are recorded here",
        ("loss.backward()", "outside of no_grad(), as is what loss is computed from"),
    )


def changing(line: str) -> str:
    return beside(
        line,
        "no check can follow it: the program is traced at each call",
        ("def step(x, value):", "pass it: floats are given anew at every call"),
    )


def output(line: str) -> str:
    return beside(
        line,
        "runs when the program is traced, not at every call",
        ("result = step(x); print(result)", "outside: waits for the value"),
    )


def no_grad(line: str) -> str:
    return beside(
        line,
        "makes an object and drops it",
        ("with torch.no_grad():", "for the block below it"),
    )


def annotation(dtypes: str) -> str:
    return f'a tensor type begins with one of {dtypes}: x: "f32[64@data, 1024]".'
