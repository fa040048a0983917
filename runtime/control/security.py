"""Who may talk to a host, and how it is known who talks."""

from __future__ import annotations

import ipaddress
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import limits

if TYPE_CHECKING:
    import grpc


class Security:
    """Either TLS on both ends (`Security.tls`), or a token that both know (`Security.token`)."""

    def __init__(
        self, *, secret: bytes = b"", files: tuple[Path, Path, Path] | None = None, trusted: bool = False
    ) -> None:
        self.secret = secret
        self._files = files
        self._trusted = trusted

    @property
    def uses_tls(self) -> bool:
        return self._files is not None

    def __str__(self) -> str:
        return "TLS" if self._files else "token"

    def __repr__(self) -> str:
        return f"Security({self})"

    @classmethod
    def token(cls, token: str | os.PathLike[str], *, trusted_network: bool = False) -> Security:
        """A token that controllers and hosts share, or the path of a file that holds it.

        What is sent is authenticated, and not encrypted. So it is for loopback only, unless `trusted_network` says that
        nobody else listens on the network between the hosts.
        """
        text = token if isinstance(token, str) else _read_token(Path(token))
        secret = text.strip().encode()
        least, most = limits.TOKEN_BYTES
        if not least <= len(secret) <= most:
            raise MonarchError(
                f"a token of {len(secret)} bytes: it has to have {least} to {most:,}",
                hint="make one: python -c 'import secrets; print(secrets.token_hex(32))'",
            )
        return cls(secret=secret, trusted=trusted_network)

    def check(self, address: str) -> None:
        """Refuse what would be reached without TLS over a network that nobody called trusted."""
        if self.uses_tls or self._trusted or is_loopback(split_address(address)[0]):
            return
        raise MonarchError(
            f"{address} is no loopback address, and a token alone protects nothing from who listens on the network",
            hint="use TLS (monarch ca makes the certificates), or, where nobody else can listen, --trusted-network\n"
            "for hosts and trusted_network=True for the controller.",
        )

    # -- gRPC --------------------------------------------------------------------------------------------------------

    def server_credentials(self) -> grpc.ServerCredentials | None:
        return None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        return None

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """For the data between workers: the server's context and the client's, each showing its own certificate and
        asking for the other's. None without TLS."""
        return None


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, where an IPv6 address stands in brackets."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or any(c.isspace() or c == "/" for c in host):
        raise MonarchError(
            f"{address!r} is no address of a host", hint="write it as node1:4242, 10.0.0.1:4242 or [fd00::1]:4242."
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise MonarchError(f"the token file {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise MonarchError(
            f"the token file {path} can be read or written by others (mode {mode & 0o777:o})", hint=f"chmod 600 {path}"
        )
    return text
