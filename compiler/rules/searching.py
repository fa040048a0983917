"""Looking for values among others: each element is looked for by itself, and counts of them add up."""

from __future__ import annotations

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, LineError, factor_names, line
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text


def _whole(shape: tuple[int, ...]) -> str:
    return tensor_text(["_"] * len(shape))


@sharding_rule("aten.searchsorted")
def _searchsorted(call: Call) -> Line:
    row = call.shape("sorted_sequence") or ()
    sought = call.shape("self") or ()
    batch = factor_names(len(row) - 1, taken=("j",))
    if not batch:
        return line("_, ..., _ -> ...")
    sequence, found = tensor_text([*batch, "_"]), tensor_text([*batch, "j"] if sought else ["_"] * len(call.result))
    return line(f"{sequence}, {found}, {sequence} -> {found}")


@sharding_rule("aten.bucketize aten.isin")
def _among(call: Call) -> Line:
    sought, *among = call.shapes
    if len(sought) != len(call.result):
        raise LineError("one number is looked for")
    return line(f"{', '.join(['...', *map(_whole, among)])} -> ...")


def _elements(call: Call) -> tuple[str, str]:
    """The text of what is counted, and of a histogram of it; all elements of a tensor count."""
    return tensor_text(factor_names(len(call.shapes[0]))), _whole(call.results[0] or ())


@sharding_rule("aten.histc")
def _histc(call: Call) -> Line:
    counted, made = _elements(call)
    # Without bounds it takes the lowest and the highest element of all.
    return line(f"{counted} -> {made}", whole=counted if call["min"] == call["max"] else "")


@sharding_rule("aten.histogram.bins_tensor aten._histogramdd_from_bin_tensors")
def _histogram(call: Call) -> Line:
    counted, made = _elements(call)
    points = counted.split()[:-1] if call.name.startswith("aten._histogramdd") else counted.split()
    text = tensor_text([*points, *["_"] * (len(call.shapes[0]) - len(points))])
    weights = [tensor_text(points)] if call.get("weight") is not None else []
    bins = [_whole(shape) for shape in call.shapes[1 : len(call.shapes) - len(weights)]]
    edges = [_whole(shape or ()) for shape in call.results[1:]]
    return line(
        f"{', '.join([text, *bins, *weights])} -> {', '.join([made, *edges])}",
        whole=" ".join(points) if call["density"] else "",
        kept=[(name, 1) for name in points] if edges else (),
    )
