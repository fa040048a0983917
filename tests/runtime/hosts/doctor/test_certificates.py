"""Certificates are looked at as a host would take them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from monarch.runtime.control.certificates import make_certificates
from monarch.runtime.hosts.doctor.certificates import look_at


def test_a_hosts_certificates(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1,10.0.0.1", "node2"])
    files = look_at(tmp_path / "node1")
    assert (files.found, files.error, files.names) == (True, "", ("node1", "10.0.0.1"))
    assert files.expires is not None and files.expires > datetime.now(UTC) + timedelta(days=300)


def test_no_folder_named() -> None:
    assert not look_at(None).found


def test_a_folder_without_them(tmp_path: Path) -> None:
    files = look_at(tmp_path)
    assert files.remedy == "monarch ca makes such folders."
    assert files.found and "has to hold ca.pem, cert.pem and key.pem" in files.error


def test_a_key_that_others_can_read(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    (tmp_path / "node1" / "key.pem").chmod(0o644)
    files = look_at(tmp_path / "node1")
    assert "can be read or written by others" in files.error and files.remedy.startswith("chmod 600 ")


def test_what_is_no_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    (tmp_path / "node1" / "cert.pem").write_text("rubbish")
    assert "cannot be used" in look_at(tmp_path / "node1").error


def test_a_controllers_certificate_does_not_make_a_host(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    assert "a controller's" in look_at(tmp_path / "controller").error


def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_certificates(tmp_path / name, ["node1"])
    (tmp_path / "a/node1/ca.pem").write_bytes((tmp_path / "b/ca.pem").read_bytes())
    assert "was not signed" in look_at(tmp_path / "a/node1").error
