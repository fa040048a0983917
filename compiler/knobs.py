"""Every switch that the environment sets, read here and nowhere else.

`MONARCH_LOG=passes,plan,commands`  what to print to standard error
`MONARCH_DUMP=dir`                  write the graph before and after each pass, with a diff
`MONARCH_CACHE=dir`                 where built kernels are kept; ~/.cache/monarch without it
`MONARCH_HOSTS=node1:4242,...`      hosts to attach, or the path of a file that lists them
`MONARCH_KERNELS=auto|all|off`      which ops become generated kernels (`compiler.pipeline.compile_graph`)
`MONARCH_TEMPLATES=auto|all|off`    for GPUs, which ops become kernels of templates (`compiler.kernels.products`)
`MONARCH_TLS=dir`                   the certificates with which hosts are attached
`MONARCH_TOKEN=token`               or the token, or the path of the file that holds it
`MONARCH_VERIFY=1`                  run the verifier between passes (on in tests)
"""

from __future__ import annotations

import os
from pathlib import Path

from monarch.compiler.errors import MonarchError


def log_topics() -> frozenset[str]:
    return frozenset(topic.strip() for topic in os.environ.get("MONARCH_LOG", "").split(",") if topic.strip())


def dump_folder() -> Path | None:
    folder = os.environ.get("MONARCH_DUMP", "")
    return Path(folder) if folder else None


def cache_folder() -> Path:
    folder = os.environ.get("MONARCH_CACHE", "")
    return Path(folder) if folder else Path.home() / ".cache" / "monarch"


def kernels() -> str:
    when = os.environ.get("MONARCH_KERNELS", "") or "auto"
    if when not in ("auto", "all", "off"):
        raise MonarchError(f"MONARCH_KERNELS={when!r}: it has to be auto, all or off")
    return when


def templates() -> str:
    when = os.environ.get("MONARCH_TEMPLATES", "") or "auto"
    if when not in ("auto", "all", "off"):
        raise MonarchError(f"MONARCH_TEMPLATES={when!r}: it has to be auto, all or off")
    return when


def hosts_setting() -> str:
    return os.environ.get("MONARCH_HOSTS", "")


def tls_setting() -> str | None:
    return os.environ.get("MONARCH_TLS") or None


def token_setting() -> str | None:
    return os.environ.get("MONARCH_TOKEN") or None


def verify() -> bool:
    return os.environ.get("MONARCH_VERIFY", "") not in ("", "0")
