"""The arguments of jobs, checked before they reach a scheduler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_OF_STATES = ("meshes", "dashboard_url", "query_engine_client")


def meshes_of(job: str, meshes: Any) -> dict[str, int]:
    """How many hosts each mesh has. ValueError for other values."""
    if not isinstance(meshes, Mapping) or not meshes:
        raise ValueError(f"{job}({meshes!r}): it takes how many hosts each mesh has, {{'trainers': 2}}")
    return {name: hosts_of(job, name, count) for name, count in meshes.items()}


def hosts_of(job: str, name: str, count: Any) -> int:
    """The number of hosts of a mesh. ValueError for anything but a number, and for a name that states use otherwise."""
    if name in _OF_STATES:
        raise ValueError(f"a mesh of a {job} cannot be called '{name}': job.state().{name} is something else")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"the mesh '{name}' of a {job} has {count!r} hosts: give a whole number from 1")
    return count


def port_of(job: str, port: Any) -> int:
    """The port that a job's hosts listen on. ValueError for anything but a number from 1 to 65535."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
        raise ValueError(f"the hosts of a {job} cannot listen on port {port!r}: give a number from 1 to 65535")
    return port


def seconds_of(name: str, seconds: Any) -> float | None:
    """The seconds of the argument `name`, or None. ValueError for anything but None or a number from 0."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (number and math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{name}={seconds!r}: give a number of seconds from 0, or None")
    return None if seconds is None else float(seconds)
