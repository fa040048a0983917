"""The live page over HTTP is for who has the token, on this machine, and only reads."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from monarch.compiler.errors import MonarchError
from monarch.stdlib.live.serving import Server


def gone() -> object:
    raise MonarchError("process 5 does not answer: it may have ended")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server({"snapshot": lambda: {"steps": 3}, "stacks": gone})
    yield made
    made.close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, body, response


def bearer(server: Server) -> str:
    return f"Bearer {server.token}"


def test_the_page_and_its_data_are_for_who_has_the_token(server: Server) -> None:
    status, body, _ = ask(server, f"/?token={server.token}")
    assert status == 200 and "<title>Monarch</title>" in body
    status, body, response = ask(server, "/snapshot", Authorization=bearer(server))
    assert (status, json.loads(body)) == (200, {"steps": 3})
    assert response.headers["Content-Type"] == "application/json"
    assert server.url == f"http://127.0.0.1:{server.port}/?token={server.token}" and len(server.token) >= 32


@pytest.mark.parametrize("path", ["/", "/?token=", "/?token=wrong", "/snapshot", "/stacks", "/nothing"])
def test_who_has_no_token_gets_nothing(server: Server, path: str) -> None:
    for authorization in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
        status, body, _ = ask(server, path, **authorization)
        assert status == 403 and "steps" not in body and "<" not in body


def test_data_is_not_given_for_a_token_in_the_address(server: Server) -> None:
    """Such an address may be in histories and logs."""
    assert ask(server, f"/snapshot?token={server.token}")[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil:1", ""])
def test_another_name_is_refused_whatever_it_has(server: Server, host: str) -> None:
    for path in (f"/?token={server.token}", "/snapshot"):
        assert ask(server, path, Host=host, Authorization=bearer(server))[0] == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:9000"])
def test_a_tunnel_may_have_another_port(server: Server, host: str) -> None:
    assert ask(server, "/snapshot", Host=host, Authorization=bearer(server))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
def test_it_only_reads(server: Server, method: str) -> None:
    assert ask(server, "/snapshot", method, Authorization=bearer(server))[0] == 501


def test_what_goes_wrong_is_said(server: Server) -> None:
    assert ask(server, "/nothing", Authorization=bearer(server))[0] == 404
    status, body, _ = ask(server, "/stacks", Authorization=bearer(server))
    assert status == 410 and "may have ended" in body
    with pytest.raises(MonarchError, match=f"cannot listen on port {server.port}"):
        Server({}, server.port)


def test_headers_keep_others_out(server: Server) -> None:
    headers = ask(server, f"/?token={server.token}")[2].headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers


def test_it_listens_on_loopback_only(server: Server) -> None:
    with socket.socket() as other, pytest.raises(OSError):
        other.settimeout(5)
        other.connect(("127.0.0.2", server.port))
