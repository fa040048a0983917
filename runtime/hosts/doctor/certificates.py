"""Facts of the certificates with which a host listens: whether they would be taken, for which names, until when."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from monarch.compiler.plan import MonarchError
from monarch.runtime.control.security import CA, CERTIFICATE, Security
from monarch.runtime.hosts.doctor.facts import Certificates


def look_at(folder: Path | None) -> Certificates:
    """The certificates in a folder; None stands for no folder at all."""
    if folder is None:
        return Certificates("", found=False)
    try:
        Security.tls(folder)
        authorities = x509.load_pem_x509_certificates((folder / CA).read_bytes())
        own = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    except MonarchError as error:
        return Certificates(str(folder), found=True, error=error.message, remedy=error.hint)
    except ValueError as error:
        return Certificates(str(folder), found=True, error=f"{folder}: {error}")
    until = min(certificate.not_valid_after_utc for certificate in (own, *authorities))
    objection = _objection(folder, own, authorities)
    return Certificates(str(folder), True, objection, names=names_of(own), expires=until)


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return (*names.get_values_for_type(x509.DNSName), *addresses)


def _objection(folder: Path, own: x509.Certificate, authorities: list[x509.Certificate]) -> str:
    """Why a host cannot listen with a certificate that can be read, or ""."""
    if not any(_signed(own, authority) for authority in authorities):
        return f"{folder / CERTIFICATE} was not signed by the authority in {CA} beside it"
    try:
        usages = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    if ExtendedKeyUsageOID.SERVER_AUTH not in usages:
        return f"{folder / CERTIFICATE} is a controller's: a host cannot listen with it"
    return ""


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):  # by another key, by a key of another kind, of another name
        return False
    return True
