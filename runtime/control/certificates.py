"""A certificate authority of one's own, and certificates for hosts and controllers.

    DIR/ca.pem  DIR/ca-key.pem          the authority; its key is needed only to make more certificates
    DIR/NAME/ca.pem  cert.pem  key.pem  the files of the host NAME, or of the controller

A host shows its certificate to the controller that attaches it, and to the hosts beneath it, so it serves for both ends
of a connection; a controller's serves for the opening end only.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from monarch.compiler.plan import MonarchError
from monarch.runtime.control.security import CA, CERTIFICATE, KEY

CA_KEY = "ca-key.pem"
CONTROLLER, THIS_HOST = "controller", "this-host"
CA_DAYS, DAYS = 3650, 825
"""How long an authority and a certificate are valid; the latter is the most that common software takes."""
_EARLIER = datetime.timedelta(hours=1)  # clocks differ


def make_certificates(folder: Path, hosts: Sequence[str] = ()) -> list[Path]:
    """Make certificates for these hosts (names and addresses by which they are attached, of one host separated by
    commas), or without any for this machine; and, where there is none yet, the authority and the controller's. Gives
    the folders made. Overwrites nothing: raises MonarchError before it writes anything where a file exists already."""
    named = {each.split(",")[0].strip(): [name.strip() for name in each.split(",")] for each in hosts}
    if not hosts:
        named = {THIS_HOST: ["localhost", socket.gethostname(), "127.0.0.1", "::1"]}
    for name, alternatives in named.items():
        for alternative in alternatives:
            _check_name(alternative)
        if name == CONTROLLER:
            raise MonarchError(f"no host can be called '{CONTROLLER}' here: that folder is the controller's")
    present = [name for name in named if (folder / name).exists()]
    if present:
        raise MonarchError(
            f"there are certificates for {', '.join(present)} in {folder} already",
            hint="nothing was overwritten: remove their folders first, or make new ones in another folder.",
        )
    if (folder / CA).exists() != (folder / CA_KEY).exists():
        raise MonarchError(f"of {folder / CA} and {folder / CA_KEY} only one is there")
    made = []
    if (folder / CA).exists():
        authority, key = _load(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CONTROLLER).exists():
            raise MonarchError(f"{folder / CONTROLLER} is there already, and {folder / CA} is not")
        authority, key = _make_authority(folder)
        made.append(_issue(folder, CONTROLLER, [], [ExtendedKeyUsageOID.CLIENT_AUTH], authority, key))
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return made + [_issue(folder, name, alternatives, usages, authority, key) for name, alternatives in named.items()]


def _make_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Monarch CA of {socket.gethostname()}"[:64])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        _certificate(name, name, key, now, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / CA_KEY, key)
    _write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return certificate, key


def _issue(
    folder: Path,
    name: str,
    alternatives: Sequence[str],
    usages: Sequence[x509.ObjectIdentifier],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    own = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    builder = (
        _certificate(_name(name[:64]), authority.subject, key, now, DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
    )
    if alternatives:
        names = [_general_name(alternative) for alternative in dict.fromkeys(alternatives)]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority_key, hashes.SHA256())
    target = folder / name
    target.mkdir(mode=0o700)
    _write_key(target / KEY, key)
    _write(target / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(target / CA, authority.public_bytes(serialization.Encoding.PEM), 0o644)
    return target


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _check_name(name: str) -> None:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        allowed = all(letter.isascii() and (letter.isalnum() or letter in "-._") for letter in name)
        if not name or not allowed or name[0] in "-." or len(name) > 253:
            raise MonarchError(
                f"{name!r} is neither a host's name nor an address", hint="without a port: node1, or 10.0.0.1."
            ) from None


def _load(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise MonarchError(f"the authority in {folder} cannot be used: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise MonarchError(f"{folder / CA_KEY} is not the key of {folder / CA}")
    return certificate, key


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(path, pem, 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Never over an existing file, and never for a moment readable by more than `mode` says."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
