"""HTML of meshes, layouts, tensors and programs, for notebooks.

Everything stands in its own output: text in the notebook's own colour, hues from the palette by classes that one small
style sheet defines for light and dark, and the light theme's as attributes where a notebook drops style sheets. Every
name is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape

from monarch.compiler.inspect.drawing import Axis, Drawing, Point, Sheets, rect
from monarch.compiler.inspect.drawing import dotted as _dotted
from monarch.compiler.inspect.drawing import hatched as _hatched
from monarch.compiler.inspect.palette import DIMS, variables
from monarch.compiler.layout import VARYING, Layout, MeshSpec
from monarch.compiler.tensor_type import TensorType

_MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


# -- the frame of an output ------------------------------------------------------------------------------------------


def _luminance(color: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@cache
def style() -> str:
    """The style sheet of an output: the palette for the theme that JupyterLab, VS Code, Colab or the browser say."""
    declared = {}
    for theme in ("light", "dark"):
        on = " ".join(
            f"--mn-on{place}: {max(('#ffffff', '#101318'), key=lambda ink: contrast(ink, getattr(shade, theme)))};"
            for place, shade in enumerate(DIMS)
        )
        declared[theme] = variables(theme, "--mn-") + " " + on
    light, dark = declared["light"], declared["dark"]
    rules = [
        f".mn{{{light} font: 12.5px/1.45 {_SANS}; margin: 4px 0; text-align: left; overflow-x: auto}}",
        f"@media (prefers-color-scheme: dark){{.mn{{{dark}}}}}",
        f'[data-jp-theme-light="true"] .mn, .vscode-light .mn, html[theme="light"] .mn{{{light}}}',
        f'[data-jp-theme-light="false"] .mn, .vscode-dark .mn, html[theme="dark"] .mn{{{dark}}}',
        f".mn code, .mn svg{{font-family: {_MONO}}}",
        ".mn code{font-size: 12.5px; background: none; padding: 0; color: inherit; white-space: pre-wrap}",
        ".mn-d{display: block; overflow: visible; margin: 7px 0 3px}",
        ".mn-fw{fill: var(--mn-whole)} .mn-sw{stroke: var(--mn-whole)} .mn-m{opacity: .72}",
        ".mn-k{display: grid; grid-template-columns: auto auto 1fr; gap: 2px 8px; align-items: center}",
        ".mn-k svg{display: block}",
        ".mn-e{font-weight: 600; color: var(--mn-error)}",
        ".mn-n{paint-order: stroke; stroke: var(--mn-ground); stroke-width: 5px; stroke-linejoin: round}",
    ]
    for place in range(len(DIMS)):
        hue = f"var(--mn-dim{place})"
        rules.append(f".mn-f{place}{{fill: {hue}}} .mn-s{place}{{stroke: {hue}}} .mn-c{place}{{color: {hue}}}")
        rules.append(f".mn-o{place}{{fill: var(--mn-on{place})}}")
    return f"<style>{''.join(rules)}</style>"


def _output(*parts: str) -> str:
    return f'<div class="mn">{style()}{"".join(parts)}</div>'


def _line(*parts: str) -> str:
    return f"<div>{' '.join(part for part in parts if part)}</div>"


def _muted(words: str) -> str:
    return f'<span class="mn-m">{escape(words)}</span>'


def size_text(count: float) -> str:
    """Bytes for people: `1.5 MiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < 5:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def _hues(names: Sequence[str]) -> dict[str, int]:
    return {name: place % len(DIMS) for place, name in enumerate(names)}


def _named(name: str, hue: int) -> str:
    return f'<b class="mn-c{hue}">{escape(name)}</b>'


def type_text(type: TensorType, hues: Mapping[str, int]) -> str:
    """A tensor type as text, its mesh dims in their colours."""
    return f"<code>{type.dtype_name}{_layout_text(type.layout, type.shape, hues)}</code>"


def _layout_text(layout: Layout, heads: Sequence[object], hues: Mapping[str, int]) -> str:
    def names(found: Iterable[str]) -> str:
        return ",".join(_named(name, hues.get(name, 0)) for name in found)

    parts = []
    for head, found in zip(heads, layout.shards, strict=True):
        where = "" if not found else f"@{names(found)}" if len(found) == 1 else f"@({names(found)})"
        parts.append(escape(str(head)) + where)
    tail = ""
    for reduction in dict.fromkeys(op for _, op in layout.partial):
        tail += f" partial&lt;{escape(reduction)}: {names(n for n, op in layout.partial if op == reduction)}&gt;"
    if layout.varying:
        tail += f" varying&lt;{names(layout.varying)}&gt;"
    return f"[{', '.join(parts)}]{tail}"


def _mesh_text(mesh: MeshSpec) -> str:
    dims = ", ".join(_named(name, hue) + f"={mesh.sizes[name]}" for name, hue in _hues(mesh.names).items())
    return f"<code>mesh&lt;{dims}&gt;</code>"


# -- meshes ----------------------------------------------------------------------------------------------------------


def mesh_html(mesh: MeshSpec, ranks: Sequence[int] | None = None, note: str = "") -> str:
    """A mesh as a grid of its workers, the last dim across and the others down. `ranks` are the workers' numbers where
    they are not 0, 1, 2, …; `note` says what else there is to it."""
    count = "1 worker" if mesh.workers == 1 else f"{mesh.workers:,} workers"
    facts = _muted(" · ".join(fact for fact in (count, note) if fact))
    return _output(_line(_mesh_text(mesh), facts), _mesh_drawing(mesh, ranks))


def _mesh_drawing(mesh: MeshSpec, ranks: Sequence[int] | None) -> str:
    axes = [Axis(name, size, hue) for (name, size), hue in zip(mesh.dims, _hues(mesh.names).values(), strict=True)]

    def worker(down: Point, across: Point) -> tuple[str, str]:
        point = (*down, *across)
        if None in point:
            return "", ""
        at = dict(zip(mesh.names, (position or 0 for position in point), strict=True))
        rank = mesh.rank(at)
        number = str(ranks[rank] if ranks is not None else rank)
        where = ", ".join(f"{name}={position}" for name, position in at.items())
        return number, f"worker {number}" + (f": {where}" if where else "")

    return Drawing(axes[:-1], axes[-1:], worker).svg()


# -- layouts and types -----------------------------------------------------------------------------------------------


def layout_html(layout: Layout) -> str:
    """A layout as a drawing of a tensor that is cut so. Its mesh, and so how many blocks there are, is not known."""
    hues = _hues(sorted(dict.fromkeys(layout.mesh_dims)))
    heads = ["" if names else "-" for names in layout.shards]
    head = _line(f"<code>{_layout_text(layout, heads, hues)}</code>")
    sizes = dict.fromkeys(layout.mesh_dims, 0)
    return _output(head, _cut(layout, None, sizes, hues, None), _key(layout, None, sizes, hues))


def html_of(value: Layout | TensorType) -> str:
    """The drawing of a layout or a tensor type."""
    return layout_html(value) if isinstance(value, Layout) else type_html(value)


def type_html(type: TensorType) -> str:
    """A tensor type as a drawing. Its mesh is not known."""
    hues = _hues(sorted(dict.fromkeys(type.layout.mesh_dims)))
    sizes = dict.fromkeys(type.layout.mesh_dims, 0)
    head = _line(type_text(type, hues), _muted(size_text(type.nbytes)))
    return _output(head, _cut(type.layout, type.shape, sizes, hues, None), _key(type.layout, type.shape, sizes, hues))


def tensor_html(
    type: TensorType,
    mesh: MeshSpec,
    ranks: Sequence[int] | None = None,
    notes: Sequence[str] = (),
    error: str = "",
    placed: bool = True,
) -> str:
    """A tensor on a mesh: its type, how it is cut, and the workers that hold each block.

    `notes` stand beside the type; `error` is the error of computing it. Where it is not `placed` its layout is not
    known yet, and its whole is drawn.
    """
    hues = _hues(mesh.names)
    head = _line(type_text(type, hues), "on", _mesh_text(mesh))
    local = math.prod(type.local_shape(mesh)) * type.dtype.itemsize
    facts = [f"{size_text(type.nbytes)} in all"]
    if placed:
        facts.append(f"{size_text(local)} on each worker: {list(type.local_shape(mesh))}")
    parts = [head, _line(_muted(" · ".join([*facts, *notes])))]
    if error:
        parts.append(_line(f'<span class="mn-e">failed:</span> {escape(error)}'))
    if not placed:
        return _output(*parts, _cut(Layout.replicated(type.ndim), type.shape, {}, hues, None))
    holders = _Holders(mesh, ranks)
    return _output(
        *parts,
        _cut(type.layout, type.shape, mesh.sizes, hues, holders),
        _key(type.layout, type.shape, mesh.sizes, hues, all_dims=True),
    )


class _Holders:
    """The workers that hold a block."""

    def __init__(self, mesh: MeshSpec, ranks: Sequence[int] | None) -> None:
        self.mesh = mesh
        self.ranks = ranks

    def of(self, fixed: Mapping[str, int]) -> tuple[str, str]:
        """Their numbers, shortened where they are many, and their coordinates. `fixed` has those of the drawing; all
        positions along the other mesh dims are meant."""
        free = [name for name in self.mesh.names if name not in fixed]
        count = math.prod(self.mesh.sizes[name] for name in free)
        numbers = [self._rank(fixed, free, place) for place in range(min(count, 3))]
        words = ", ".join(map(str, numbers))
        last = self._rank(fixed, free, count - 1)
        if count > 2 and last - numbers[0] == count - 1:
            words = f"{numbers[0]}–{last}"
        elif count > 3:
            words = f"{numbers[0]}, {numbers[1]} … {last}"
        where = ", ".join(f"{name}={fixed.get(name, '*')}" for name in self.mesh.names)
        return words, f"{'worker' if count == 1 else f'{count:,} workers:'} {words if count == 1 else where}"

    def _rank(self, fixed: Mapping[str, int], free: Sequence[str], place: int) -> int:
        point = dict(fixed)
        for name in reversed(free):
            place, point[name] = divmod(place, self.mesh.sizes[name])
        rank = self.mesh.rank(point)
        return self.ranks[rank] if self.ranks is not None else rank


def _cut(
    layout: Layout,
    shape: Sequence[int] | None,
    sizes: Mapping[str, int],
    hues: Mapping[str, int],
    holders: _Holders | None,
) -> str:
    """The drawing of a tensor: two of its dims, those that are cut first."""
    cut = [dim for dim, names in enumerate(layout.shards) if names][:2]
    rest = [dim for dim in reversed(range(layout.ndim)) if dim not in cut]
    drawn = sorted([*cut, *rest][: min(2, layout.ndim)])
    down, across = (drawn[0], drawn[1]) if len(drawn) == 2 else (None, drawn[0] if drawn else None)

    def axes(dim: int | None) -> list[Axis]:
        names = layout.shards[dim] if dim is not None else ()
        return [Axis(name, sizes[name], hues[name]) for name in names]

    def caption(dim: int | None) -> str:
        if dim is None or (shape is None and layout.ndim < 2):
            return ""
        return f"dim {dim}" if shape is None else f"dim {dim}: {shape[dim]:,}"

    def block(row: Point, column: Point) -> tuple[str, str]:
        if holders is None or None in row or None in column:
            return "", ""
        names = [axis.name for axis in (*axes(down), *axes(across))]
        fixed = dict(zip(names, (position or 0 for position in (*row, *column)), strict=True))
        return holders.of(fixed)

    sheets = [Sheets("summands", hues[name]) for name, _ in layout.partial]
    sheets += [Sheets("own", hues[name]) for name in layout.varying]
    named = set(layout.mesh_dims)
    sheets += [Sheets("copies", hues[name]) for name in sizes if name not in named and sizes[name] > 1]
    whole = (150, 96) if down is not None else (150, 30) if across is not None else (44, 30)
    return Drawing(axes(down), axes(across), block, caption(down), caption(across), sheets, whole).svg()


def _key(
    layout: Layout,
    shape: Sequence[int] | None,
    sizes: Mapping[str, int],
    hues: Mapping[str, int],
    all_dims: bool = False,
) -> str:
    """The effect of each mesh dim on a tensor, in words."""
    rows = []
    for name in sizes if all_dims else dict.fromkeys(layout.mesh_dims):
        placement, size = layout.placement(name), sizes[name]
        label = _named(name, hues[name]) + (f"={size}" if size else "")
        if placement is None:
            words = "each worker along it holds a copy" if size != 1 else "one position"
        elif isinstance(placement, int):
            words = _cut_words(layout, shape, sizes, name, placement)
        elif placement == VARYING:
            words = "each worker along it holds a value of its own"
        else:
            words = f"each worker along it holds a part of the {placement}"
        rows.append(f"{_swatch(placement, hues[name])}<code>{label}</code><span>{escape(words)}</span>")
    if not rows:
        return ""
    return f'<div class="mn-k">{"".join(rows)}</div>'


def _cut_words(layout: Layout, shape: Sequence[int] | None, sizes: Mapping[str, int], name: str, dim: int) -> str:
    names = layout.shards[dim]
    outer = names[: names.index(name)]
    what = f"each block that {' and '.join(outer)} left" if outer else f"dim {dim}"
    if not sizes[name]:
        return f"cuts {what}" + (f" of dim {dim}" if outer else "")
    parts = math.prod(sizes[n] for n in (*outer, name))
    of = f" of {shape[dim] // parts:,}" if shape is not None else ""
    return f"cuts {what}{f' of dim {dim}' if outer else ''} into {sizes[name]:,} blocks{of}"


def _swatch(placement: int | str | None, hue: int) -> str:
    if placement is None:
        inside = rect(0.5, 0.5, 12, 12, None, 'rx="2"')
    elif isinstance(placement, int):
        inside = rect(0.5, 0.5, 12, 12, hue, 'rx="2"')
    else:
        inside = rect(0.5, 0.5, 12, 12, hue, 'fill-opacity=".15"')
        inside += _dotted(-1, -1, 22, 22, hue) if placement == VARYING else _hatched(0.5, 0.5, 12, 12, hue)
    return f'<svg width="13" height="13" viewBox="0 0 13 13">{inside}</svg>'


# -- programs --------------------------------------------------------------------------------------------------------


def program_html(
    name: str,
    parameters: Sequence[tuple[str, TensorType | str]],
    mesh: MeshSpec | None,
    ranks: Sequence[int] | None = None,
    where: str = "",
    notes: Sequence[str] = (),
) -> str:
    """A program: its name, its signature with tensor types in colours, and the mesh that it runs on. A parameter is its
    name and a tensor type, or the text of another annotation ("" for none)."""
    hues = (
        _hues(mesh.names)
        if mesh is not None
        else _hues(
            sorted({dim for _, type_ in parameters if isinstance(type_, TensorType) for dim in type_.layout.mesh_dims})
        )
    )
    rows = []
    for parameter, annotation in parameters:
        shown = (
            type_text(annotation, hues) if isinstance(annotation, TensorType) else f"<code>{escape(annotation)}</code>"
        )
        rows.append(f"<span></span><code>{escape(parameter)}</code><span>{shown}</span>")
    head = _line("program", f"<code><b>{escape(name)}</b></code>", _muted(where))
    parts = [head, f'<div class="mn-k">{"".join(rows)}</div>' if rows else ""]
    if notes:
        parts.append(_line(_muted(" · ".join(notes))))
    if mesh is not None:
        parts += [_line("on", _mesh_text(mesh)), _mesh_drawing(mesh, ranks)]
    return _output(*parts)


def frame_html(page: str, title: str) -> str:
    """A whole page within a notebook's output. It may run its own scripts, and reach nothing of the notebook."""
    return (
        f'<iframe srcdoc="{escape(page)}" title="{escape(title)}" sandbox="allow-scripts allow-downloads allow-popups" '
        f'style="width: 100%; height: 640px; border: 1px solid #8886; border-radius: 6px; box-sizing: border-box" '
        'loading="lazy"></iframe>'
    )
