"""`monarchc diff`: the changes from one plan to another, and their lines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from monarch.compiler.cli.look import seen_plan
from monarch.compiler.cli.screen import amount, console, count, duration, heading, line, plain, print_json, size, table
from monarch.compiler.inspect.differences import UNITS, Differences, differences
from monarch.compiler.plan import Plan

_SHOWN = 30
_AS = {"bytes": size, "flops": amount, "seconds": duration, "": lambda value: f"{value:,.0f}"}


def diff(before: Path, after: Path, exit_code: bool, as_json: bool) -> None:
    """Print what differs between two plans."""
    a, b = seen_plan(before), seen_plan(after)
    found = differences(a, b)
    if as_json:
        print_json({"differ": found.any, "same_program": a.hash == b.hash, **asdict(found)})
    else:
        _show(console(), a, b, found)
    if exit_code and found.any:
        raise typer.Exit(1)


def _show(out: Console, a: Plan, b: Plan, found: Differences) -> None:
    if not found.any:
        same = "the same program" if a.hash == b.hash else "programs that differ in names and line numbers only"
        line(out, f"no difference: both are {same}.")
        return
    line(out, plain(a.name, "bold"), f"on {a.mesh}", plain("→", "bold"), plain(b.name, "bold"), f"on {b.mesh}")
    table(
        out,
        ["", ">before", ">after", ">change"],
        [
            *((name, was, now, "") for name, (was, now) in found.settings.items() if name in ("target", "backend")),
            *((name, *_both(name, was, now), _change(was, now)) for name, (was, now) in found.totals.items()),
        ],
    )
    if found.values:
        heading(out, "inputs, state and results", count(len(found.values), "other type"))
        rows = [(name, was or "none", now or "none") for name, (was, now) in found.values.items()]
        table(out, ["~", "~before", "~after"], rows[:_SHOWN])
        _more(out, len(rows))
    if found.collectives:
        heading(out, "collectives")
        table(
            out,
            ["", ">before", ">bytes", ">after", ">bytes", ">change"],
            [
                (name, was[0], size(was[1]), now[0], size(now[1]), _change(was[1], now[1]))
                for name, (was, now) in found.collectives.items()
            ],
        )
    if found.layouts:
        heading(out, "layouts", f"{count(sum(len(c.values) for c in found.layouts), 'value')} of another type")
        table(
            out,
            [">", "op", "~where", "~module", "~before", "~after"],
            [
                (
                    f"{len(c.values)} ×" if len(c.values) > 1 else "",
                    _op(c.op, c.over),
                    c.where,
                    c.module,
                    c.before,
                    c.after,
                )
                for c in found.layouts[:_SHOWN]
            ],
        )
        _more(out, len(found.layouts))
    if found.ops:
        heading(out, "ops", "- only before, + only after")
        ops = [
            _op_row(
                entry.sign,
                _op(entry.op, entry.over),
                len(entry.values),
                entry.bytes,
                entry.where,
                entry.module,
                entry.why,
            )
            for entry in found.ops[:_SHOWN]
        ]
        table(out, ["", "op", ">", ">bytes", "~where", "~module", "~why"], ops)
        _more(out, len(found.ops))
    if found.kernels:
        heading(out, "kernels", "calls of each")
        rows_ = [(name, was, now, f"{now - was:+}") for name, (was, now) in found.kernels.items()]
        table(out, ["~", ">before", ">after", ">change"], rows_[:_SHOWN])
        _more(out, len(rows_))


def _op_row(sign: str, op: str, number: int, sent: int, where: str, module: str, why: str) -> tuple[object, ...]:
    style = "red" if sign == "-" else "green"
    return Text(sign, style), plain(op, style), f"{number} ×", size(sent) if sent else "", where, module, why


def _op(op: str, over: str) -> str:
    return f"{op} over {over}" if over else op


def _both(name: str, was: float, now: float) -> tuple[str, str]:
    show = _AS[UNITS.get(name, "")]
    return show(was), show(now)


def _change(was: float, now: float) -> Text:
    if was == now:
        return Text("")
    text = f"{(now - was) / was:+.1%}" if was else "new"
    return Text(text, "red" if now > was else "green")


def _more(out: Console, number: int) -> None:
    if number > _SHOWN:
        line(out, plain(f"  and {number - _SHOWN} more: --json has all", "dim"))
