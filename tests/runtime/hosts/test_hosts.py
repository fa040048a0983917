"""What `monarch.hosts` takes, before anything is attached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import monarch
from monarch.compiler.plan import MonarchError
from monarch.distributed import Mesh
from monarch.runtime.control.certificates import make_certificates
from monarch.runtime.control.security import Security
from monarch.runtime.hosts.attach import default_transports, security_from
from monarch.runtime.transport.plug import TRANSPORTS

TOKEN = "a token that both ends of it know"


def test_what_does_not_encrypt_is_not_used_with_tls_unless_it_is_named(tmp_path: Path) -> None:
    (controller, *_) = [folder for folder in make_certificates(tmp_path, ["node1"]) if folder.name == "controller"]
    assert default_transports(Security.tls(controller)) == ["cuda", "shm", "tcp"]
    assert default_transports(Security.token(TOKEN)) == list(TRANSPORTS)


def test_who_authenticates_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MONARCH_TLS", "MONARCH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MonarchError, match="needs TLS or a token, and got neither"):
        security_from(None, None)
    with pytest.raises(MonarchError, match="attaching hosts takes TLS or a token, and got both"):
        security_from(tmp_path, TOKEN)
    monkeypatch.setenv("MONARCH_TOKEN", TOKEN)
    assert not security_from(None, None).uses_tls
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN)
    assert security_from(None, file).secret == security_from(None, str(file)).secret == TOKEN.encode()
    monkeypatch.chdir(tmp_path)
    assert security_from(None, "token").secret == TOKEN.encode()
    assert len(security_from(None, "x" * 4096).secret or b"") == 4096  # longer than the name of any file


def test_a_transport_that_there_is_not() -> None:
    with pytest.raises(MonarchError, match=r"no transport is called 'rdma'\n  there are cuda, shm, verbs, tcp"):
        monarch.hosts(["127.0.0.1:1"], token=TOKEN, transports=["rdma"])


def test_this_host_needs_no_port() -> None:
    with monarch.this_host() as here, Mesh(gpus=2, hosts=here) as mesh:
        assert repr(here) == "HostMesh(this host)" and len(here) == 1
        assert here.addresses == ("",) and dict(here.extent) == {}
        assert monarch.distribute(torch.tensor([1.0, 2.0]), mesh, ["gpus"]).sum().item() == 3
