"""A snapshot as a program of some size gives it."""

from __future__ import annotations

from typing import Any

PROGRAM = {"name": "train.py", "pid": 4711, "host": "node1", "seconds": 3725.0, "memory": 3 << 29}
MESH = {
    "name": "mesh<data=2, model=2>",
    "shape": {"data": 2, "model": 2},
    "running": True,
    "program": "train_step",
    "steps": 12_345,
    "rate": 8.25,
    "rates": [0, 4, 8, 8],
    "queue": 3,
    "memory": [1 << 30, 1 << 30, 1 << 29, 1 << 30],
}
NOTHING: dict[str, Any] = {"program": "", "memory": [], "rates": [], "queue": 0, "steps": 0}
ENDED = {**MESH, **NOTHING, "name": "mesh<data=8>", "running": False}
SAMPLER = {"name": "samplers[0]", "class_name": "app.Sampler", "queued": 17, "running": ["sample", "score"]}
PROCESS = {"name": "procs gpus=0", "pid": 99, "host": "node2", "memory": 5 << 20, "answers": True, "actors": [SAMPLER]}
SILENT = {"name": "procs gpus=1", "pid": 0, "host": "", "memory": 0, "answers": False, "actors": []}
FAILURE = {
    "time": 1_700_000_000.0,
    "what": "samplers[1]",
    "summary": "ValueError: <b>no data</b>",
    "text": "sample raised:\nValueError: <b>no data</b>",
}


def snapshot(**changes: Any) -> dict[str, Any]:
    return {
        "time": 1_700_000_000.0,
        "program": PROGRAM,
        "meshes": [MESH, ENDED],
        "processes": [PROCESS, SILENT],
        "logs": {"loss": [(0, 4.0), (1, None), (2, 2.0), (3, 1.0)], "<i>rate": [(7, 0.001)]},
        "failures": [FAILURE],
        "failed": 1,
    } | changes
