"""`monarch host`: this machine as a host."""

from __future__ import annotations

from pathlib import Path

from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.serving import serve_host
from monarch.runtime.control.security import Security, split_address

_WILDCARDS = ("0.0.0.0", "::")


def host(
    listen: str,
    tls: Path | None,
    token_file: Path | None,
    trusted_network: bool,
    data_bind: str | None,
    advertise: str | None,
) -> None:
    """Serve until the process is ended."""
    if (tls is None) == (token_file is None):
        raise MonarchError(
            "a host listens with --tls or with --token-file, " + ("not both" if tls else "and neither was given"),
            hint="monarch ca DIR makes certificates: monarch host --listen ADDRESS --tls DIR/NAME",
        )
    if trusted_network and tls is not None:
        raise MonarchError("--trusted-network goes with --token-file: with TLS no network has to be trusted")
    if tls is not None:
        security = Security.tls(tls)
    else:
        assert token_file is not None
        security = Security.token(token_file, trusted_network=trusted_network)
    name, _ = split_address(listen)
    bind = data_bind or name
    if advertise is None and bind in _WILDCARDS:
        raise MonarchError(
            f"{bind} is every address of this machine, and workers of other hosts need one",
            hint="say by which they reach it: --data-bind 10.0.0.1, or --advertise node1",
        )
    security.check(listen)
    if data_bind is not None:  # without TLS, what workers send each other is not encrypted either
        security.check(f"[{data_bind}]:0" if ":" in data_bind else f"{data_bind}:0")
    serve_host(listen, security, bind, advertise, tls)
