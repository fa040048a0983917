"""The API of a cluster, as far as a job needs it: objects of one namespace by HTTPS and JSON.

create("pods", manifest)        POST    /api/v1/namespaces/NS/pods?fieldValidation=Strict
find("pods", selector)          GET     …/pods?labelSelector=SELECTOR
delete_all("pods", selector)    DELETE  …/pods?labelSelector=SELECTOR
log("trainers-0", 20)           GET     …/pods/trainers-0/log?tailLines=20
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from monarch.compiler.errors import MonarchError
from monarch.stdlib.jobs.kubernetes.access import Access, KubeConfig

Object = Mapping[str, Any]

_SECONDS = 30.0
"""How long the server may take for an answer."""
_TRIES = 5
_TRY_SECONDS = 1.0
"""Between two of them."""
_HINTS = {
    401: "the token or certificate is not, or no longer, accepted.",
    403: "the job needs a role for pods, pods/log, secrets and services in its namespace:"
    " get, list, create and deletecollection.",
    409: "another job has a mesh of this name in the namespace: kill that job, or give this mesh another name.",
}


class Api:
    """The objects of one namespace. Each request has a connection of its own, for minutes may lie between two."""

    def __init__(self, config: KubeConfig, namespace: str) -> None:
        self._config = config
        self._namespace = namespace
        self._access = config.open()

    def create(self, kind: str, manifest: Object) -> None:
        """Create an object. Raises MonarchError for a name that is taken, and for unknown fields."""
        what = f"create {manifest['kind']} {manifest['metadata']['name']}"
        self._request(what, "POST", f"{kind}?fieldValidation=Strict", json.dumps(manifest).encode())

    def find(self, kind: str, selector: str) -> list[Object]:
        """The objects whose labels the selector matches."""
        said = self._request(f"list {kind}", "GET", f"{kind}?{urlencode({'labelSelector': selector})}")
        return json.loads(said)["items"]

    def delete_all(self, kind: str, selector: str) -> None:
        """Delete the objects whose labels the selector matches, as far as there are any."""
        self._request(f"delete {kind}", "DELETE", f"{kind}?{urlencode({'labelSelector': selector})}")

    def log(self, pod: str, lines: int) -> str:
        """The last lines that a pod has printed, "" where the API does not give them."""
        try:
            said = self._request(f"give the log of {pod}", "GET", f"pods/{quote(pod)}/log?tailLines={lines}")
        except MonarchError:
            return ""
        return said.decode(errors="replace").strip()

    def _request(self, what: str, method: str, path: str, body: bytes | None = None) -> bytes:
        """The answer's body. Raises MonarchError where there is none, and for a refusal, with the reason that it gives.

        A server that is busy is asked again. One that failed, or did not answer, is too, unless it may have created the
        object.
        """
        renewed = False
        for left in reversed(range(_TRIES)):
            try:
                status, said = self._send(method, path, body)
                if status == 401 and not renewed:  # the token has expired
                    renewed = True
                    self._access = self._config.open()
                    status, said = self._send(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                if not left or method == "POST" or isinstance(error, ssl.SSLError):
                    raise MonarchError(f"{self._where()} does not answer: {error}") from None
            else:
                if status < 400:
                    return said
                if not left or not (status == 429 or (status >= 500 and method != "POST")):
                    raise _refusal(f"{self._where()} does not {what}", status, said)
            time.sleep(_TRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        access = self._access
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        if access.token:
            headers["Authorization"] = f"Bearer {access.token}"
        connection = _connection(access)
        try:
            url = f"{access.path}/api/v1/namespaces/{quote(self._namespace)}/{path}"
            connection.request(method, url, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _where(self) -> str:
        return f"the cluster at {self._access.host}:{self._access.port}"


def _connection(access: Access) -> http.client.HTTPConnection:
    if access.context is None:
        return http.client.HTTPConnection(access.host, access.port, timeout=_SECONDS)
    return http.client.HTTPSConnection(access.host, access.port, timeout=_SECONDS, context=access.context)


def _refusal(what: str, code: int, said: bytes) -> MonarchError:
    """An error with the text of the `Status` that the API answers with."""
    try:
        status = json.loads(said)
        message, reason = status["message"], status.get("reason", "")
    except (ValueError, KeyError, TypeError):  # a proxy before it may answer with anything
        message, reason = said.decode(errors="replace").strip(), ""
    return MonarchError(f"{what}: {message} ({' '.join(filter(None, (str(code), reason)))})", hint=_HINTS.get(code, ""))
