"""`monarchc inspect`, first: what a plan's file answers without torch, and where it is not enough, all else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from monarch.compiler.cli.screen import print_json
from monarch.compiler.cli.sections import by as by_group
from monarch.compiler.cli.sections import why as of_value
from monarch.compiler.cli.sections.printing import Sections, print_sections
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.loading import load
from monarch.compiler.plan.look import look_at

_QUICK = {"plan", "by", "sort", "why", "text", "as_json"}


def inspect(**options: Any) -> None:
    """Print what is asked for (see `cli.inspect`)."""
    asked = {name for name, value in options.items() if value}
    plain = asked <= _QUICK and asked & {"by", "why", "text"} and ("by" in asked or "sort" not in asked)
    seen: Any = None
    if plain and not Path(options["plan"].partition(":")[0]).suffix == ".py":
        seen = look_at(Path(options["plan"]))
    if seen is None:
        load("monarch.compiler.cli.inspect:inspect")(**options)
        return
    sort, why = options["sort"] or "time", options["why"]
    sections: Sections = {
        f"by {group}": (partial(costs_by, seen, group, sort), partial(by_group.show, plan=seen, by=group, sort=sort))
        for group in options["by"] or ()
    }
    if why is not None:
        sections["why"] = partial(of_value.data, seen, why), partial(of_value.show, plan=seen, name=why)
    texts = {"text": seen.graph} if options["text"] else {}
    if options["as_json"]:
        data = {name: data() for name, (data, _) in sections.items()}
        print_json({"name": seen.name, "hash": seen.hash} | data | texts)
    else:
        print_sections(sections, texts)
