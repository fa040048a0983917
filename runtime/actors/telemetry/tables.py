"""The tables of telemetry, and their columns with Arrow's types. `docs/guide/telemetry.md` describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = tuple[Any, ...]
Rows = Mapping[str, Sequence[Row]]
"""By table, in the order of its columns, without those of `WHERE`."""

WHERE = {"process": "string", "pid": "int64", "host": "string"}
"""The last columns of each table: which process says so."""

TABLES: dict[str, dict[str, str]] = {
    "meshes": {
        "timestamp_us": "int64",
        "id": "string",
        "kind": "string",
        "name": "string",
        "shape": "string",
        "size": "int64",
    },
    "actors": {
        "timestamp_us": "int64",
        "id": "string",
        "mesh_id": "string",
        "rank": "int64",
        "full_name": "string",
        "class_name": "string",
    },
    "status_events": {
        "timestamp_us": "int64",
        "kind": "string",
        "id": "string",
        "name": "string",
        "new_status": "string",
        "reason": "string",
    },
    "messages": {
        "timestamp_us": "int64",
        "actor_id": "string",
        "endpoint": "string",
        "sender": "string",
        "duration_us": "double",
        "queued": "int64",
        "status": "string",
    },
    "spans": {
        "timestamp_us": "int64",
        "id": "int64",
        "parent_id": "int64",
        "kind": "string",
        "name": "string",
        "actor": "string",
        "duration_us": "double",
    },
    "metrics": {
        "timestamp_us": "int64",
        "kind": "string",
        "name": "string",
        "value": "double",
        "unit": "string",
        "attributes": "string",
        "step": "int64",
    },
    "steps": {
        "timestamp_us": "int64",
        "mesh_id": "string",
        "program": "string",
        "number": "int64",
        "call_us": "double",
    },
}


def columns(table: str) -> dict[str, str]:
    """All columns of a table, by name."""
    return TABLES[table] | WHERE
