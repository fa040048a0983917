"""`monarch ca`: a certificate authority of one's own, and certificates for hosts and the controller."""

from __future__ import annotations

from pathlib import Path

import typer

from monarch.runtime.control.certificates import CONTROLLER, make_certificates


def ca(folder: Path, host: list[str] | None) -> None:
    """Write the certificates, and print the use of each."""
    for made in make_certificates(folder, host or ()):
        use = f'monarch.hosts(..., tls="{made}")' if made.name == CONTROLLER else f"monarch host --tls {made}"
        typer.echo(f"{made}: for {use}")
