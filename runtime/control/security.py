"""Which peers may talk to a host, and how they prove their identity."""

from __future__ import annotations

import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import limits

if TYPE_CHECKING:
    import grpc


CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True)
class TlsFiles:
    """The content of a folder of certificates when it was read: it may be replaced or removed since."""

    folder: Path
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """For the data between workers: the listening end's context and the other's. Both ends show their certificates,
        which have to be signed by the authority; TLS 1.3."""
        return _context(self, ssl.PROTOCOL_TLS_SERVER), _context(self, ssl.PROTOCOL_TLS_CLIENT)


class Security:
    """Either TLS on both ends (`Security.tls`), or a token that both know (`Security.token`)."""

    def __init__(self, *, secret: bytes = b"", tls: TlsFiles | None = None, trusted: bool = False) -> None:
        self.secret = secret
        self._tls = tls
        self._trusted = trusted

    @property
    def uses_tls(self) -> bool:
        return self._tls is not None

    @property
    def files(self) -> TlsFiles | None:
        """The certificates; None without TLS."""
        return self._tls

    @property
    def folder(self) -> str | None:
        """That of the certificates; None without TLS."""
        return None if self._tls is None else str(self._tls.folder.resolve())

    def __str__(self) -> str:
        return "TLS" if self._tls else "token"

    def __repr__(self) -> str:
        return f"Security({self})"

    @classmethod
    def tls(cls, folder: str | os.PathLike[str]) -> Security:
        """TLS, where each end shows a certificate that the same authority has signed.

        `folder` holds ca.pem, cert.pem and key.pem: one that `monarch ca` has made, or one's own. A host's certificate
        has to name the address by which it is attached, and to be good for servers and clients, for hosts attach others
        beneath them.
        """
        return cls(tls=_read_tls(Path(folder)))

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
            f"{address} is no loopback address, and a token alone does not protect against a listener on the network",
            hint="use TLS (monarch ca makes the certificates), or, where nobody else can listen, --trusted-network\n"
            "for hosts and trusted_network=True for the controller.",
        )

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
        """`TlsFiles.contexts`; None without TLS."""
        return None if self._tls is None else self._tls.contexts()

    # -- gRPC --------------------------------------------------------------------------------------------------------

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Of a listener; None without TLS."""
        import grpc

        if self._tls is None:
            return None
        pair = (self._tls.key, self._tls.certificate)
        return grpc.ssl_server_credentials([pair], root_certificates=self._tls.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Of the end that opens a connection; None without TLS."""
        import grpc

        if self._tls is None:
            return None
        return grpc.ssl_channel_credentials(self._tls.authority, self._tls.key, self._tls.certificate)


def show_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Have connections of this context show a certificate. Raises ssl.SSLError where the two cannot be used."""
    # OpenSSL reads them from a path only; this one ends with the block, and is on no disk.
    with open(os.memfd_create("certificate"), "wb") as file:
        file.write(certificate + b"\n" + key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")


def _context(tls: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    show_certificate(context, tls.certificate, tls.key)
    context.load_verify_locations(cadata=tls.authority.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read_tls(folder: Path) -> TlsFiles:
    try:
        authority, certificate, key = ((folder / name).read_bytes() for name in (CA, CERTIFICATE, KEY))
        mode = (folder / KEY).stat().st_mode
    except OSError as error:
        below = [path.parent.name for path in sorted(folder.glob(f"*/{CERTIFICATE}"))]
        hint = (
            f"certificates are in folders below it: {', '.join(below)}." if below else "monarch ca makes such folders."
        )
        raise MonarchError(
            f"the folder {folder} has to hold {CA}, {CERTIFICATE} and {KEY}: {error}", hint=hint
        ) from None
    if mode & 0o077:
        raise MonarchError(
            f"the key {folder / KEY} can be read or written by others (mode {mode & 0o777:o})",
            hint=f"chmod 600 {folder / KEY}",
        )
    tls = TlsFiles(folder, authority, certificate, key)
    try:
        _context(tls, ssl.PROTOCOL_TLS_SERVER)
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise MonarchError(f"the certificates in {folder} cannot be used: {error}") from None
    return tls


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
