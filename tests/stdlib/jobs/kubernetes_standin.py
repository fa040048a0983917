"""A stand-in of a Kubernetes cluster's API, over TLS on loopback, that answers as the real one does.

Its pods are processes, each on an address of its own (127.0.0.2 and so on), with the files of its Secrets where they
are mounted. The first question for a pod finds it Pending; with `full` all do.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from monarch.runtime.control.certificates import make_certificates
from tests.stdlib.jobs.kubernetes_schema import faults

NAMESPACE = "training"
ADDRESSES = {"trainers-0": "127.0.0.2", "loaders-0": "127.0.0.3"}
KINDS = {"pods": "Pod", "secrets": "Secret", "services": "Service"}
MESSAGE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


class Cluster:
    """The cluster: what it has, what it was asked, and what it is to answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.asked: list[str] = []
        self.token = "first-token"
        self.full = False
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and kinds that the account may not use."""
        self.busy = 0
        """So many requests are answered with 429."""
        self.seen: set[str] = set()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lock = threading.Lock()
        self.tls = folder / "tls"
        make_certificates(self.tls, ["127.0.0.1"])
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.tls / "ca.pem"))
        context.load_cert_chain(self.tls / "127.0.0.1" / "cert.pem", self.tls / "127.0.0.1" / "key.pem")
        context.verify_mode = ssl.CERT_OPTIONAL
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": self}))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def kubeconfig(self, **user: Any) -> Path:
        """A kubeconfig with this user, and the authority's file beside it."""
        cluster = {"server": self.url, "certificate-authority": "tls/ca.pem"}
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "loopback", "user": "me"}}],
            "clusters": [{"name": "loopback", "cluster": cluster}],
            "users": [{"name": "me", "user": user or {"token": self.token}}],
        }
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def create(self, kind: str, manifest: dict[str, Any]) -> tuple[int, Any]:
        name = manifest["metadata"].get("name", "")
        found = list(faults(KINDS[kind], manifest))
        if unknown := [text for why, text in found if why == "unknown"]:
            return status(400, "BadRequest", f"{KINDS[kind]} in version v1 cannot be handled: strict decoding error: "
                          + ", ".join(unknown))  # fmt: skip
        if found:
            return status(422, "Invalid", f'{KINDS[kind]} "{name}" is invalid: {found[0][1]}')
        if name in self.objects[kind]:
            return status(409, "AlreadyExists", f'{kind} "{name}" already exists')
        self.objects[kind][name] = manifest
        if kind == "pods" and not self.full:
            self.start(name, manifest["spec"])
        return 201, manifest

    def start(self, name: str, spec: dict[str, Any]) -> None:
        """Run a pod's container as a process: with what is mounted in a folder, and its own addresses alone."""
        container, root = spec["containers"][0], self.folder / "pods" / name
        volumes = {each["name"]: each for each in spec.get("volumes", ())}
        paths = {}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            path = root / mount["mountPath"].lstrip("/")
            path.mkdir(parents=True)
            if "secret" in volume:
                for file, data in self.objects["secrets"][volume["secret"]["secretName"]]["data"].items():
                    (path / file).write_bytes(base64.b64decode(data))  # which others may read
            paths[mount["mountPath"]] = str(path)

        def inside(text: str) -> str:
            for path, here in paths.items():
                text = text.replace(path, here)
            return text.replace("0.0.0.0", ADDRESSES[name])

        env = {each["name"]: inside(each.get("value", "")) for each in container.get("env", ())}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with (root / "log").open("wb") as said:
            self.processes[name] = subprocess.Popen(
                [*map(inside, container["command"]), *map(inside, container.get("args", ()))],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": path, **env},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=root,
                start_new_session=True,
            )

    def pod(self, name: str) -> dict[str, Any]:
        """A pod with its status."""
        manifest = self.objects["pods"][name]
        first, process = name not in self.seen, self.processes.get(name)
        self.seen.add(name)
        if process is None:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": MESSAGE}
            return manifest | {"status": {"phase": "Pending", "conditions": [why]}}
        if first:
            waiting = {"waiting": {"reason": "ContainerCreating"}}
            return manifest | {"status": {"phase": "Pending", "containerStatuses": [{"state": waiting}]}}
        if (code := process.poll()) is None:
            running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            return manifest | {
                "status": {
                    "phase": "Running",
                    "podIP": ADDRESSES[name],
                    "containerStatuses": [{"name": "worker", "state": running}],
                }
            }
        ended = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        phase = "Failed" if code else "Succeeded"
        return manifest | {"status": {"phase": phase, "containerStatuses": [{"name": "worker", "state": ended}]}}

    def find(self, kind: str, selector: str) -> list[str]:
        """The names of the objects whose labels a selector matches."""
        wanted = dict(each.split("=", 1) for each in selector.split(","))
        return [
            name
            for name, each in self.objects[kind].items()
            if wanted.items() <= each["metadata"].get("labels", {}).items()
        ]

    def delete(self, kind: str, names: list[str]) -> None:
        for name in names:
            del self.objects[kind][name]
            if kind == "pods" and (process := self.processes.pop(name, None)) is not None:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)


def status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    """A refusal, as the API has it."""
    return code, {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.cluster.lock:
            self.cluster.asked.append(f"{self.command} {self.path}")
            code, said = self._said(json.loads(body) if body else {})
        data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer

    def _said(self, body: dict[str, Any]) -> tuple[int, Any]:
        cluster, url = self.cluster, urlsplit(self.path)
        shown = self.connection.getpeercert()  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != f"Bearer {cluster.token}" and not shown:
            return status(401, "Unauthorized", "Unauthorized")
        if cluster.busy:
            cluster.busy -= 1
            return 429, "Too many requests, please try again later."
        found = re.fullmatch(r"/api/v1/namespaces/([^/]+)/(pods|secrets|services)(?:/([^/]+)/log)?", url.path)
        if found is None:
            return 404, "404 page not found"
        namespace, kind, name = found.groups()
        verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "deletecollection"}[self.command]
        if (verb, kind) in cluster.forbidden:
            user = f'User "system:serviceaccount:{namespace}:default" cannot {verb} resource "{kind}"'
            return status(
                403, "Forbidden", f'{kind} is forbidden: {user} in API group "" in the namespace "{namespace}"'
            )
        if namespace != NAMESPACE and verb == "create":
            return status(404, "NotFound", f'namespaces "{namespace}" not found')
        if verb == "create":
            return cluster.create(kind, body)
        query = parse_qs(url.query)
        if name:
            if name not in cluster.objects[kind]:
                return status(404, "NotFound", f'pods "{name}" not found')
            log = (cluster.folder / "pods" / name / "log").read_text().splitlines(keepends=True)
            return 200, "".join(log[-int(query["tailLines"][0]) :])
        names = cluster.find(kind, query["labelSelector"][0]) if namespace == NAMESPACE else []
        items = [cluster.pod(name) if kind == "pods" else cluster.objects[kind][name] for name in names]
        if verb == "deletecollection":
            cluster.delete(kind, names)
        return 200, {
            "kind": f"{KINDS[kind]}List",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }
