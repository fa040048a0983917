"""`monarch ca`: a certificate authority of one's own, and certificates for hosts and the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def ca(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put them. What is there is not overwritten.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A host, by the name or address under which it is attached; several of one host with commas between. "
            "Can be given several times. [this machine]",
        ),
    ] = None,
) -> None:
    """Make certificates: an authority, one for the controller, and one for each host.

    Run it again with more hosts to add them. Each host needs its own folder and nothing else; whoever has ca-key.pem
    can make certificates that all of them accept.
    """
    from monarch.runtime.control.certificates import CONTROLLER, make_certificates

    for made in make_certificates(folder, host or ()):
        use = f'monarch.hosts(..., tls="{made}")' if made.name == CONTROLLER else f"monarch host --tls {made}"
        typer.echo(f"{made}: for {use}")
