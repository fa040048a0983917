"""The live page over HTTP: on loopback only, read only, for users who have the token.

The token is in the address that the user gets, as Jupyter has it; the page sends it with each request. A request whose
Host is no name of this machine's loopback is refused, whatever it has: so another site's name that is made to lead here
(DNS rebinding) reads nothing. The port may be another one in front of an SSH tunnel. The page loads nothing but itself
and may talk to nobody but this server.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from monarch.compiler.errors import MonarchError

PAGE = Path(__file__).with_name("page.html")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_SECONDS = 10.0


@cache
def _page() -> tuple[bytes, str]:
    """The page, and the policy under which a browser runs it: only its own code and data."""
    text = PAGE.read_text()

    def allowed(tag: str) -> str:
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'self' http://localhost:* http://127.0.0.1:*"
    )
    return text.encode(), policy


class Server:
    """Serves the page and its data until it is closed. `url` has the token."""

    def __init__(self, answers: Mapping[str, Callable[[], Any]], port: int = 0) -> None:
        """`answers` are "snapshot" and "stacks"; a `port` of 0 takes one that is free. Raises MonarchError where the
        port is taken."""
        self.token = secrets.token_urlsafe(24)
        handler = type("Handler", (_Handler,), {"answers": answers, "token": self.token})
        try:
            self._server = _Http(("127.0.0.1", port), handler)
        except OSError as error:
            raise MonarchError(
                f"cannot listen on port {port}: {error.strerror}", hint="port 0 takes one that is free."
            ) from error
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/?token={self.token}"
        threading.Thread(target=self._server.serve_forever, name="monarch dashboard", daemon=True).start()

    def close(self) -> None:
        """Serve nothing more. Idempotent."""
        self._server.shutdown()
        self._server.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the midst of an answer is no news either."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    answers: Mapping[str, Callable[[], Any]]
    token: str
    timeout = _SECONDS  # of a connection that says nothing
    server_version, sys_version = "monarch", ""

    def do_GET(self) -> None:
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        address = urlsplit(self.path)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if address.path == "/":
            given = (parse_qs(address.query).get("token") or [""])[0]
        if host not in _LOOPBACK:
            self._send(HTTPStatus.FORBIDDEN, b"this server answers to localhost and 127.0.0.1 only\n")
        elif not hmac.compare_digest(given.encode(), self.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, b"the address has to end with ?token=..., as it was printed\n")
        elif address.path == "/":
            page, policy = _page()
            self._send(HTTPStatus.OK, page, "text/html; charset=utf-8", policy)
        elif (answer := self.answers.get(address.path[1:])) is not None:
            try:
                self._send(HTTPStatus.OK, json.dumps(answer()).encode(), "application/json")
            except MonarchError as error:  # the program has ended
                self._send(HTTPStatus.GONE, f"{error.message}\n".encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n")

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", policy: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy or "default-src 'none'")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""
