"""`monarch ca`'s certificates."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from monarch.compiler.plan import MonarchError
from monarch.runtime.control.certificates import make_certificates


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(certificate: x509.Certificate) -> list[object]:
    return [name.value for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def usages(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_host_has_its_names_and_a_controller_none(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, ["node1,10.0.0.1", "fd00::2"])
    assert [path.name for path in made] == ["controller", "node1", "fd00::2"]
    assert names(read(tmp_path / "node1" / "cert.pem")) == ["node1", ipaddress.ip_address("10.0.0.1")]
    assert names(read(tmp_path / "fd00::2" / "cert.pem")) == [ipaddress.ip_address("fd00::2")]
    both = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert usages(read(tmp_path / "node1" / "cert.pem")) == both
    assert usages(read(tmp_path / "controller" / "cert.pem")) == {ExtendedKeyUsageOID.CLIENT_AUTH}


def test_certificates_are_signed_and_valid_now_and_for_a_bounded_time(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    authority = read(tmp_path / "ca.pem")
    now = datetime.datetime.now(datetime.UTC)
    for folder in ("controller", "this-host"):
        certificate = read(tmp_path / folder / "cert.pem")
        certificate.verify_directly_issued_by(authority)
        assert certificate.not_valid_before_utc < now < certificate.not_valid_after_utc
        assert certificate.not_valid_after_utc - now <= datetime.timedelta(days=825)
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert (tmp_path / folder / "ca.pem").read_bytes() == (tmp_path / "ca.pem").read_bytes()
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_hosts_are_added_to_the_same_authority(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    assert [path.name for path in make_certificates(tmp_path, ["node2"])] == ["node2"]
    assert {path: path.read_bytes() for path in before} == before
    read(tmp_path / "node2" / "cert.pem").verify_directly_issued_by(read(tmp_path / "ca.pem"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pem")}
    with pytest.raises(MonarchError, match="certificates for node1 .* already"):
        make_certificates(tmp_path, ["node2", "node1"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pem")} == before


@pytest.mark.parametrize("name", ["", "../node1", "a/b", "-x", ".hidden", "node 1", "näme", "controller", "node1:4242"])
def test_what_is_no_name_of_a_host_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(MonarchError):
        make_certificates(tmp_path / "new", [name])
    assert not (tmp_path / "new").exists()


def test_an_authority_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    key = (tmp_path / "ca-key.pem").read_bytes()
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(MonarchError, match="only one is there"):
        make_certificates(tmp_path, ["node2"])
    (tmp_path / "ca-key.pem").write_bytes((tmp_path / "node1" / "key.pem").read_bytes())
    with pytest.raises(MonarchError, match="is not the key of"):
        make_certificates(tmp_path, ["node2"])
    (tmp_path / "ca-key.pem").write_bytes(key[:50])
    with pytest.raises(MonarchError, match="cannot be used"):
        make_certificates(tmp_path, ["node2"])
