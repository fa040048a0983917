"""The page's HTML text: the built template (`web/`), filled with a plan's data.

Everything in a plan is untrusted text. It goes into the page as JSON only, in which `<`, `>` and `&` are escaped, so
that no text can end the element that it stands in; the page's script puts it on the screen as text, never as markup.
The content security policy allows the one script and the one style sheet by their hashes, and nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect import palette
from monarch.compiler.inspect.page.data import comparison_data, plan_data, several_data, trace_data
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.trace import Trace

TEMPLATE = Path(__file__).with_name("page.html")
"""Exists where npm has built the page: in every installed package, and in a clone after `make setup`."""

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(plan: Plan, *, trace: Trace | None = None, against: Plan | None = None, title: str = "") -> str:
    """`plan` as a page: HTML text, to be written to a file or shown in an iframe's `srcdoc`.

    trace    measured times of the plan, which the page sets beside the estimates and shows as a timeline
    against  another plan, with which this one is compared (this one is the new, `against` the old)
    title    the page's heading; the plan's name if it is ""

    Of a plan of several meshes it shows what each runs, and what they send one another. Raises MonarchError where a
    plan has no report, for a trace of several meshes, and where the page has not been built.
    """
    try:
        template = TEMPLATE.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MonarchError(
            f"the inspector's page has not been built: there is no {TEMPLATE.name} in monarch/compiler/inspect/page",
            hint="in a clone of the repository, run 'make setup': it builds the page with npm.",
        ) from error
    title = title or plan.name
    if plan.parts and (trace is not None or against is not None):
        raise MonarchError(
            "a trace and another plan stand beside what one mesh runs",
            hint=f"show one of them: --part {plan.parts[0].name}.",
        )
    data = {
        "title": title,
        "plan": None if plan.parts else plan_data(plan),
        "several": several_data(plan) if plan.parts else None,
        "trace": None if trace is None else trace_data(trace, plan),
        "comparison": None if against is None else comparison_data(against, plan),
    }
    for theme in ("light", "dark"):
        template = re.sub(rf"--palette-{theme}:\s*0;?", palette.variables(theme), template)
    head, body = template.split("{{plan}}")
    head = head.replace("{{policy}}", _policy(template)).replace("{{title}}", html.escape(title))
    # Lone surrogates are allowed in a Python string, but not in a file.
    return re.sub("[\ud800-\udfff]", "\ufffd", f"{head}{_inline(data)}{body}")


def _inline(data: object) -> str:
    """`data` as JSON that can stand in a script element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)


def _policy(template: str) -> str:
    """Nothing may be loaded, and nothing run but the template's own script and style."""
    parts = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data:"]
    for name in ("script", "style"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", template, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        parts.append(f"{name}-src 'sha256-{digest}'")
    return "; ".join(parts)
