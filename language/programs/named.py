"""The named sizes of a program: what they are at a call, and the traces that serve all their values."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from monarch.compiler.errors import PerformanceWarning, ProgramError
from monarch.compiler.loading import load
from monarch.compiler.symbols import LEAST, Poly, Scope, Size, has_names, is_named, poly_of
from monarch.compiler.types import DTYPE_NAMES, TensorType
from monarch.language.programs.signature import add_plain, modes, repeats_of, type_of
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor


def values_of(named: Iterable[tuple[str, Any]], annotations: Mapping[str, TensorType]) -> dict[str, int]:
    """What the names in the arguments' annotations stand for at a call. Raises ProgramError where one stands for two
    numbers. `named` are the annotated arguments."""
    values: dict[str, int] = {}
    first: dict[str, str] = {}
    for argument, value in named:
        wanted = annotations[argument]
        if not has_names(wanted.shape) or not isinstance(value, torch.Tensor) or value.ndim != wanted.ndim:
            continue
        for at, (size, found) in enumerate(zip(wanted.shape, value.shape, strict=True)):
            if not is_named(size):
                continue
            name = str(size)
            place = f"dim {at} of '{argument}'"
            if values.setdefault(name, found) != found:
                raise ProgramError(
                    f"the size '{name}' is {values[name]} in {first[name]}, and {found} in {place}",
                    hint="a name stands for one number in a call: give the other size a name of its own, "
                    "or pass tensors that agree.",
                    source=user_source(),
                )
            first.setdefault(name, place)
    return values


def family_of(
    leaves: list[Any],
    spec: Any,
    moving: Container[int],
    named: Iterable[tuple[str, Any]],
    annotations: Mapping[str, TensorType],
    values: Any,
) -> Any:
    """A key that is equal for calls that differ in the values of named sizes alone, and in ints that are inputs
    (`moving`, by the leaf's number)."""
    name_of = {id(value): name for name, value in named}
    key: list[Any] = [
        *modes(),
        spec,
        repeats_of(leaves),
        *((name, value) for name, value in values.items() if value < LEAST),
    ]
    for number, leaf in enumerate(leaves):
        name = name_of.get(id(leaf))
        if isinstance(leaf, torch.Tensor):
            type_ = str(type_of(leaf) if name is None else annotations[name])
            key += (id(leaf.mesh) if isinstance(leaf, DistributedTensor) else 0, type_, leaf.requires_grad)
        elif number in moving:
            key.append(int)
        else:
            add_plain(key, leaf)
    return tuple(key)


def symbols_for(values: Mapping[str, int]) -> Any:
    """The named sizes of a trace, or None where all are 0 or 1, which are not named: such dims broadcast, or are
    empty."""
    names = {name: value for name, value in values.items() if value >= LEAST}
    return load("monarch.compiler.symbolic:symbols_of")(Scope(names)) if names else None


def bound(type: TensorType, values: Mapping[str, int], scope: Scope | None) -> TensorType:
    """An annotation's type for a call: with the sizes of `scope`, and numbers for the other names."""

    def size(written: int) -> int:
        if not is_named(written):
            return written
        name = str(written)
        if scope is None or name not in scope.examples:
            return values[name]
        return Size(poly_of(written), scope)  # type: ignore[arg-type]

    return TensorType(type.dtype, tuple(map(size, type.shape)), type.layout)


class Specialised:
    """The shapes of arguments for which a program was compiled, to say once how one plan could serve them all."""

    def __init__(self) -> None:
        self._shapes: dict[Any, list[tuple[tuple[int, ...], ...]]] = {}
        self._values: dict[tuple[int, int], set[int | str]] = {}
        """The numbers and texts among the arguments, by how many leaves there are, and which one it is."""
        self._numbers: dict[tuple[Poly, str], set[int]] = {}
        """The values that a size was taken as, by where it was."""
        self._said = self._told = self._counted = False

    def why(self, program: str, error: Exception) -> None:
        """Say once why a program is compiled for each value of its named sizes."""
        if self._told:
            return
        self._told = True
        what = getattr(error, "message", None) or str(error).partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"the program '{program}' is compiled for each value of its named sizes: {what}",
            PerformanceWarning,
            stacklevel=6,
        )

    def note_sizes(self, program: str, scope: Scope) -> None:
        """Note the sizes that a trace of named sizes takes as numbers. Say what does, and how it is spared, with the
        third."""
        decided = {(*_apart(each.poly), where) for each, where in scope.conditions.items() if each.relation == "=="}
        for condition, where in scope.conditions.items():
            size, number = _apart(condition.poly)
            # One that is another number by the same decision is compared with numbers, and not taken as one.
            others = {each for other, each, place in decided if other == size and place == where} - {number}
            seen = self._numbers.get((size, where), set())
            if condition.relation != "==" or not condition.truth or not size.terms or others & seen:
                continue
            if len(self._numbers) >= _SHAPES:
                self._numbers.clear()
            seen = self._numbers[size, where] = {*seen, number}
            if len(seen) < _OFTEN or self._counted:
                continue
            self._counted = True
            place, _, what = where.rpartition(": ")
            called = what.partition("(")[0]
            way = next((way for name, way in _WAYS.items() if re.search(rf"\b{name}\b", called)), _WAY)
            warnings.warn(
                f"{place}{': ' * bool(place)}the program '{program}' is compiled for each value of '{size.text}' "
                f"({number} is number {_OFTEN}), which {what} takes as a number. {way}.",
                PerformanceWarning,
                stacklevel=5,
            )

    def note(
        self, program: str, leaves: list[Any], names: Mapping[int, str], annotations: Mapping[str, TensorType]
    ) -> None:
        """Note that a program was compiled for these arguments. Say the annotations that would have spared it with the
        third shape. `names` are those of the parameters, by the leaves' numbers."""
        spelled = self._spelled(leaves, names, annotations)
        if spelled:
            warnings.warn(
                f"the program '{program}' is compiled for each shape of its arguments. "
                f"Name the sizes that change, and one plan serves them all: {spelled}",
                PerformanceWarning,
                stacklevel=5,
            )

    def note_values(
        self,
        program: str,
        leaves: list[Any],
        free: Container[int],
        moving: Container[int],
        path_of: Callable[[int], str],
    ) -> None:
        """Note likewise the texts among the arguments, and the ints on whose values this trace depends: all but `free`,
        by number. Warn of one that changes at each call, but not while it may still be an input (`moving`). `path_of`
        says how a leaf is written: "i", "state['n']"."""
        for number, leaf in enumerate(leaves):
            if type(leaf) not in (int, str) or number in free:
                continue
            seen = self._values.setdefault((len(leaves), number), set())
            if len(seen) < MANY_VALUES - (number in moving) and leaf not in seen:
                seen.add(leaf)
                if len(seen) == MANY_VALUES:
                    use = "" if type(leaf) is str else ", which it uses as a size, an index, a key or text"
                    warnings.warn(
                        f"the program '{program}' is traced and compiled for each value of '{path_of(number)}' "
                        f"({leaf!r} is number {MANY_VALUES}){use}.",
                        PerformanceWarning,
                        stacklevel=5,
                    )

    def _spelled(self, leaves: list[Any], names: Mapping[int, str], annotations: Mapping[str, TensorType]) -> str:
        numbers = [
            number
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and names.get(number) is not None and names[number] not in annotations
        ]
        if self._said or not numbers:
            return ""
        types = [type_of(leaves[number]) for number in numbers]
        key = tuple((names[number], type_.dtype, type_.layout) for number, type_ in zip(numbers, types, strict=True))
        if len(self._shapes) >= _SHAPES:
            self._shapes.clear()
        seen = self._shapes.setdefault(key, [])
        shapes = tuple(type_.shape for type_ in types)
        if shapes in seen or any(size < LEAST for shape in shapes for size in shape):
            return ""
        seen.append(shapes)
        if len(seen) < _OFTEN:
            return ""
        self._said = True
        return ", ".join(_spelled(seen, [names[number] for number in numbers], types))


def _apart(poly: Poly) -> tuple[Poly, int]:
    """The size and the number whose difference an expression is: `t - 8` is t and 8."""
    size = Poly(tuple((term, factor) for term, factor in poly.terms if term))
    number = poly.plus(size, -1).value or 0
    if size.terms and size.terms[0][1] < 0:
        return Poly.of({}).plus(size, -1), number
    return size, -number


_OFTEN = 3
MANY_VALUES = 8
"""The eighth value of a number or text is said to be one too many."""
_SHAPES = 64
_LOOP = "monarch.scan along the dim goes round as often as it is long, compiled once"
_MASK = "A mask is compiled once: torch.ones(n, n, dtype=torch.bool).tril()"
_WHOLE = "Whole numbers stay sizes: n * 3 // 10"
_SHAPE = "x.shape[0] stays a size"
_COUNT = "x.numel() stays a size"
_WAY = "Pad the dim to a few sizes, which are compiled once each"
_WAYS = {
    "(range|unbind|__iter__|gru|lstm|rnn_tanh|rnn_relu)": _LOOP,
    "len": _SHAPE,
    "shape.numel": _COUNT,
    "float": "n * 1.0 is a float that follows from the size",
    "sqrt": "n ** 0.5 is a float that follows from the size",
    "(int|round|trunc|floor|ceil)": _WHOLE,
    "math": "Workers compute it of a tensor: torch.tensor(n * 1.0).log()",
    "cumprod": "Of positive numbers x.log().cumsum(dim).exp() is the same, compiled once",
    "(tril_indices|triu_indices)": _MASK,
}
"""How what takes a size as a number is spelled for all sizes."""
_LETTERS = "nmklpqrs"


def _spelled(seen: list[tuple[tuple[int, ...], ...]], names: list[str], types: list[TensorType]) -> Iterator[str]:
    """The annotations of the arguments that have changed, with a name for each size that has: the same for those that
    have always been equal."""
    letters: dict[tuple[int, ...], str] = {}
    for at, (name, type_) in enumerate(zip(names, types, strict=True)):
        heads: list[object] = []
        for sizes in zip(*(shapes[at] for shapes in seen), strict=True):
            if len(set(sizes)) > 1 and sizes not in letters and len(letters) < len(_LETTERS):
                letters[sizes] = _LETTERS[len(letters)]
            heads.append(letters.get(sizes, sizes[-1]))
        if any(isinstance(head, str) for head in heads):
            yield f'{name}: "{DTYPE_NAMES[type_.dtype]}{type_.layout.dims_text(heads)}"'
