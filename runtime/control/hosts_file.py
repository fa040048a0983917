"""Which hosts to attach: a list, a file, or the environment's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.control.security import split_address

_FORMS = (
    "give a list of addresses, ['node1:4242', 'node2:4242'], the path of a file with one address a line,\n"
    "or set MONARCH_HOSTS to either (addresses separated by commas)."
)


def parse_hosts(value: Sequence[str] | str | os.PathLike[str] | None = None) -> list[str]:
    """The addresses, in order. `value` is a list of them; a text with commas between them; the path of a hosts file
    (one address a line; a # begins a comment); or None, for the value of MONARCH_HOSTS. Raises MonarchError."""
    if value is None:
        value = settings.hosts
        if not value.strip():
            raise MonarchError("no hosts to attach: pass addresses, or set MONARCH_HOSTS", hint=_FORMS)
        return parse_hosts(value)
    if isinstance(value, os.PathLike) or (isinstance(value, str) and _is_path(value)):
        return _read(Path(value))
    given = value.split(",") if isinstance(value, str) else list(value)
    return _checked([(address, "") for address in (str(each).strip() for each in given) if address], "")


def _is_path(text: str) -> bool:
    """A text with a port at its end is an address, unless there is such a file."""
    return "," not in text and ("/" in text or Path(text).is_file() or not text.rpartition(":")[2].strip().isdecimal())


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MonarchError(f"the hosts file {path} cannot be read: {error}", hint=_FORMS) from None
    found = [(line.partition("#")[0].strip(), f"{path}:{number}: ") for number, line in enumerate(lines, start=1)]
    return _checked([(address, where) for address, where in found if address], f"{path}: ")


def _checked(found: Sequence[tuple[str, str]], where: str) -> list[str]:
    if not found:
        raise MonarchError(f"{where}no hosts are named", hint=_FORMS)
    seen: dict[str, str] = {}
    for address, place in found:
        try:
            _, port = split_address(address)
        except MonarchError as error:
            raise MonarchError(f"{place}{error.message}", hint=error.hint) from None
        if port == 0:
            raise MonarchError(f"{place}{address} has no port", hint="a host prints its port when it starts.")
        if address in seen:
            raise MonarchError(f"{place}{address} is named twice")
        seen[address] = place
    return list(seen)
