"""Hosts by the names that PyTorch Monarch's programs know, with our credentials."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

import monarch
from monarch.actor import attach_to_workers, enable_transport, run_worker_loop_forever
from monarch.runtime.control.certificates import CONTROLLER, make_certificates
from tests import python
from tests.runtime.actors.conftest import WAIT

TOKEN = "0123456789abcdef0123456789abcdef"
SERVES = """
import sys
from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(ca=sys.argv[1], address=sys.argv[2])
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["token", "certificates"])
def test_workers_serve_and_are_attached_until_they_are_shut_down(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = here = "trust_all_connections"
    if how == "token":
        monkeypatch.setenv("MONARCH_TOKEN", TOKEN)
    else:
        make_certificates(tmp_path, ["127.0.0.1"])
        there, here = str(tmp_path / "127.0.0.1"), str(tmp_path / CONTROLLER)
    address = f"tcp://127.0.0.1:{free_port()}"
    with python.Popen("-c", SERVES, there, f"{address}@{address}", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if how == "token":  # or else it is attached while it starts
            assert re.search(rf"serving on {address.removeprefix('tcp://')}", process.stdout.readline())
        hosts = attach_to_workers(ca=here, workers=[address], name="workers")
        assert hosts.extent == {"hosts": 1} and hosts.spawn_procs().initialized.get(WAIT)
        hosts.shutdown().get(WAIT)
        assert process.wait(WAIT) == 0


def test_what_proves_nothing_is_refused() -> None:
    with pytest.raises(monarch.MonarchError, match="needs TLS or a token, and got neither"):
        attach_to_workers(ca="trust_all_connections", workers=["tcp://127.0.0.1:4242"])
    with pytest.raises(monarch.MonarchError, match="pass certificates as a folder"):
        run_worker_loop_forever(ca=b"-----BEGIN", address="tcp://127.0.0.1:0")  # type: ignore[arg-type]
    with pytest.raises(monarch.MonarchError, match="pass certificates as a folder"):
        attach_to_workers(private_key="key", ca="trust_all_connections", workers=[])  # type: ignore[arg-type]
    with pytest.raises(monarch.MonarchError, match="'ipc://here' is no address of a host here"):
        attach_to_workers(ca="trust_all_connections", workers=["ipc://here"])


def test_a_worker_that_does_not_come_is_said_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_TOKEN", TOKEN)
    with (
        monarch.config.configured(host_timeout="200ms"),
        pytest.raises(monarch.MonarchError, match="1 of 1 hosts cannot be attached"),
    ):
        attach_to_workers(ca="trust_all_connections", workers=[f"tcp://127.0.0.1:{free_port()}"])


def test_transports_are_named_and_chosen_by_nobody() -> None:
    for name in ("tcp", "tls", "ipc", "tcp://node1:4242"):
        enable_transport(name)
    with pytest.raises(ValueError, match="there is no transport 'metatls': there are tcp, tls, ipc"):
        enable_transport("metatls")
