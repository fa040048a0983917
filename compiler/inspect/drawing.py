"""Small SVG drawings of tensors and meshes: a grid of blocks, with a band along it for each mesh dim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from monarch.compiler.inspect.palette import DIMS, ROLES

_BAND = 17
_GAP = 16
_LETTER = 6.3  # the width of a letter of 10.5 px in the fonts that --mono names, at most
_SHEET = 5

Point = tuple[int | None, ...]
"""Positions along some mesh dims; None from where they are left out of the drawing."""


@dataclass(frozen=True)
class Axis:
    """A mesh dim along which a drawing is cut. `size` 0: not known. `hue` is its place in the mesh."""

    name: str
    size: int
    hue: int


@dataclass(frozen=True)
class Sheets:
    """Sheets behind a drawing, or over it: `kind` "copies" (replicated), "summands" (partial) or "own" (varying)."""

    kind: str
    hue: int


def shown(size: int, most: int) -> list[int | None]:
    """The positions of a mesh dim that are drawn: all of a small one; of a large one the first ones, a gap (None), and
    the last. Of one whose size is not known, two and a gap."""
    if size == 0:
        return [0, 1, None]
    if size <= most:
        return list(range(size))
    return [*range(most - 2), None, size - 1]


def points(axes: Sequence[Axis]) -> list[Point]:
    """The positions along nested mesh dims that are drawn, the first dim outermost."""
    most = 8 if len(axes) < 2 else 4 if len(axes) == 2 else 3
    found: list[Point] = [()]
    for axis in axes:
        found = [
            (*point, position)
            for point in found
            for position in ([None] if point and point[-1] is None else shown(axis.size, most))
        ]
    return found


def text(x: float, y: float, words: str, anchor: str = "middle", classes: str = "", more: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central" class="{classes}" '
        f'fill="currentColor" {more}>{escape(words)}</text>'
    )


def rect(x: float, y: float, width: float, height: float, hue: int | None, more: str = "") -> str:
    """A rectangle in the hue of a mesh dim, or in the grey of replicated values."""
    classes, shade = ("mn-fw", ROLES["whole"]) if hue is None else (f"mn-f{hue}", DIMS[hue])
    at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {at} class="{classes}" fill="{shade.light}" {more}/>'


def hatched(x: float, y: float, width: float, height: float, hue: int) -> str:
    """Diagonal lines over a rectangle."""
    lines = []
    for start in range(7, int(width + height), 7):
        left, right = max(0, start - height), min(width, start)
        lines.append(f"M{x + left:g} {y + start - left:g}L{x + right:g} {y + start - right:g}")
    return f'<path d="{"".join(lines)}" class="mn-s{hue}" stroke="{DIMS[hue].light}" stroke-width="1.3" fill="none"/>'


def dotted(x: float, y: float, width: float, height: float, hue: int) -> str:
    """Dots over a rectangle."""
    dots = "".join(
        f"M{x + 5 + 9 * column:g} {y + 5 + 9 * row:g}h.01"
        for row in range(int((height - 2) // 9))
        for column in range(int((width - 2) // 9))
    )
    return (
        f'<path d="{dots}" class="mn-s{hue}" stroke="{DIMS[hue].light}" stroke-width="3" stroke-linecap="round" '
        'fill="none"/>'
    )


Label = Callable[[Point, Point], tuple[str, str]]
"""The text in a block, and that of a pointer over it, by its positions down and across."""


@dataclass(frozen=True)
class Drawing:
    """A grid of blocks: cut down by the mesh dims of `down`, across by those of `across`, the first of each outermost.

    `caption_down` and `caption_across` name its sides; `sheets` says what else there is of every block; `whole` is the
    least size, in pixels, of all blocks together.
    """

    down: Sequence[Axis]
    across: Sequence[Axis]
    label: Label
    caption_down: str = ""
    caption_across: str = ""
    sheets: Sequence[Sheets] = ()
    whole: tuple[int, int] = (0, 0)

    def svg(self) -> str:
        rows, columns = points(self.down), points(self.across)
        labels = {(r, c): self.label(rows[r], columns[c]) for r in range(len(rows)) for c in range(len(columns))}
        words = [label for label, _ in labels.values()]
        words += [f"{axis.name}={axis.size or 10}" for axis in self.across[-1:]]
        counted = sum(point[-1:] != (None,) for point in columns) or 1
        width = max(26.0, max(map(len, words)) * _LETTER + 10, self.whole[0] / counted)
        height = max(24.0, self.whole[1] / (sum(point[-1:] != (None,) for point in rows) or 1))
        xs = list(_edges(columns, width))
        ys = list(_edges(rows, height))
        bands = [max(len(f"{axis.name}={axis.size or 10}"), 4) * _LETTER + 8 for axis in self.down]
        left = sum(bands) + 3 * len(bands) + (18 if self.caption_down else 0)
        top = (_BAND + 3) * len(self.across) + 1
        inner = (xs[-1][1], ys[-1][1])
        parts = [*self._behind(left, top, *inner)]
        for (r, c), (label, title) in labels.items():
            parts.append(self._block(left, top, xs[c], ys[r], rows[r], columns[c], label, title))
        parts += self._over(left, top, *inner)
        y = 1.0
        for level, axis in enumerate(self.across):
            parts += _bands(axis, level, columns, xs, left, y)
            y += _BAND + 3
        x = 18.0 if self.caption_down else 0.0
        for level, axis in enumerate(self.down):
            parts += _bands(axis, level, rows, ys, x, top, bands[level])
            x += bands[level] + 3
        behind = _SHEET * min(2, len(self.sheets)) + 2
        total = (left + inner[0] + behind, top + inner[1] + behind + (16 if self.caption_across else 0))
        if self.caption_across:
            parts.append(text(left + inner[0] / 2, total[1] - 7, self.caption_across, classes="mn-m"))
        if self.caption_down:
            turned = f'transform="rotate(-90 8 {top + inner[1] / 2:g})"'
            parts.append(text(8, top + inner[1] / 2, self.caption_down, classes="mn-m", more=turned))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]:g}" height="{total[1]:g}" '
            f'viewBox="0 0 {total[0]:g} {total[1]:g}" class="mn-d" role="img" font-size="10.5">{"".join(parts)}</svg>'
        )

    def _behind(self, left: float, top: float, width: float, height: float) -> Iterator[str]:
        """The edges of further sheets."""
        for place in reversed(range(min(2, len(self.sheets)))):
            shift = _SHEET * (place + 1)
            sheet = self.sheets[place]
            hue = None if sheet.kind == "copies" else sheet.hue
            yield rect(left + shift, top + shift, width, height, hue, 'fill-opacity=".3"')
            line, shade = ("mn-sw", ROLES["whole"].light) if hue is None else (f"mn-s{hue}", DIMS[hue].light)
            yield (
                f'<rect x="{left + shift:g}" y="{top + shift:g}" width="{width:g}" height="{height:g}" class="{line}" '
                f'stroke="{shade}" fill="none"/>'
            )

    def _over(self, left: float, top: float, width: float, height: float) -> Iterator[str]:
        for sheet in self.sheets:
            if sheet.kind == "summands":
                yield hatched(left, top, width, height, sheet.hue)
            elif sheet.kind == "own":
                yield dotted(left, top, width, height, sheet.hue)

    def _block(
        self,
        left: float,
        top: float,
        x: tuple[float, float],
        y: tuple[float, float],
        row: Point,
        column: Point,
        label: str,
        title: str,
    ) -> str:
        at = (left + x[0], top + y[0], x[1] - x[0], y[1] - y[0])
        middle = (at[0] + at[2] / 2, at[1] + at[3] / 2)
        if row[-1:] == (None,) or column[-1:] == (None,):
            sign = "⋱" if row[-1:] == column[-1:] else "⋮" if row[-1:] == (None,) else "⋯"
            return text(*middle, sign, classes="mn-m")
        parts = [rect(*at, None, 'fill-opacity=".28"')] if not (self.down or self.across) else []
        if self.down or self.across:
            parts.append(
                f'<rect x="{at[0]:g}" y="{at[1]:g}" width="{at[2]:g}" height="{at[3]:g}" class="mn-g" fill="none"/>'
            )
        for axes, point in ((self.down, row), (self.across, column)):
            for axis, position in zip(axes, point, strict=True):
                # Neighbours differ in depth, so that blocks are distinct within one hue.
                depth = 0.16 + 0.16 * ((position or 0) % 2)
                parts.append(rect(*at, axis.hue, f'fill-opacity="{depth:g}"'))
        parts.append(
            f'<rect x="{at[0]:g}" y="{at[1]:g}" width="{at[2]:g}" height="{at[3]:g}" fill="none" class="mn-l" '
            'stroke="currentColor" stroke-opacity=".45"/>'
        )
        if label:
            parts.append(text(*middle, label, classes="mn-n" if self.sheets else ""))
        inner = "".join(parts)
        return f"<g><title>{escape(title)}</title>{inner}</g>" if title else inner


def _edges(found: Sequence[Point], size: float) -> Iterator[tuple[float, float]]:
    """From where to where each row or column goes: gaps are narrow, and outer dims stand a little apart."""
    at = 0.0
    for place, point in enumerate(found):
        if place and len(point) > 1 and point[0] != found[place - 1][0]:
            at += 3
        wide = _GAP if point[-1:] == (None,) else size
        yield at, at + wide
        at += wide


def _bands(
    axis: Axis,
    level: int,
    found: Sequence[Point],
    edges: Sequence[tuple[float, float]],
    left: float,
    top: float,
    beside: float = 0.0,
) -> Iterator[str]:
    """The band of one mesh dim, from `left` and `top` on: one piece for each of its positions. It is above the blocks,
    or, `beside` pixels wide, beside them."""
    start = 0
    while start < len(found):
        end = start
        while end + 1 < len(found) and found[end + 1][: level + 1] == found[start][: level + 1]:
            end += 1
        position = found[start][level]
        (first, _), (_, last) = edges[start], edges[end]
        if beside:
            x, y, width, height = left, top + first, beside, last - first
        else:
            x, y, width, height = left + first, top, last - first, float(_BAND)
        if position is None:
            if level == 0 or found[start][level - 1] is not None:
                yield text(x + width / 2, y + height / 2, "⋮" if beside else "⋯", classes="mn-m")
        else:
            yield rect(x + 0.5, y + 0.5, width - 1, height - 1, axis.hue, 'rx="2"')
            words = f"{axis.name}={position}"
            if len(words) * _LETTER > width:
                words = str(position)
            yield text(x + width / 2, y + height / 2, words, classes=f"mn-o{axis.hue}")
        start = end + 1
