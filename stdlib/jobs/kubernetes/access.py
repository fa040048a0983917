"""How a program reaches a cluster's API: as a pod of the cluster does, or by a kubeconfig file.

in a pod            https://kubernetes.default.svc, the service account's token and authority
KubeConfig(path)    the file's current context: a token, a certificate, or a command that gives either
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from monarch.compiler.errors import MonarchError
from monarch.runtime.control.security import is_loopback, show_certificate

if TYPE_CHECKING:
    from typing import Self

IN_CLUSTER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The files that Kubernetes mounts into a pod."""
_PLUGIN_SECONDS = 60.0
_UNKNOWN = ("proxy-url", "tls-server-name", "auth-provider", "as", "username")
"""Entries of a kubeconfig that change the target or the identity of requests, and are not understood here."""


@dataclass(frozen=True)
class Access:
    """The address of the API, and the credentials of a request. `context` is None for plain HTTP, `token` "" without
    one."""

    host: str
    port: int
    path: str
    context: ssl.SSLContext | None
    token: str


@dataclass(frozen=True)
class KubeConfig:
    """A kubeconfig file, as `kubectl` has it; without one, the service account of the pod that the program runs in.

    The file's credentials may be a token, a certificate, or a command (`exec`), which is run; they are read again when
    the cluster does not accept them any more. Reading a file that is not JSON needs PyYAML.
    """

    local: Path | None = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Self:
        """The kubeconfig in this file, of which the current context counts."""
        return cls(Path(path).expanduser().absolute())

    def open(self) -> Access:
        """The present content of the file, or of the pod's service account. Raises MonarchError where it cannot be
        used."""
        return _from_pod() if self.local is None else _from_file(self.local)


def _from_pod() -> Access:
    try:
        token = (ACCOUNT / "token").read_text().strip()
        authority = (ACCOUNT / "ca.crt").read_text()
    except OSError as error:
        raise MonarchError(
            f"this program does not run in a pod with a service account: {error}",
            hint="elsewhere give a kubeconfig: KubernetesJob(…, kubeconfig=KubeConfig.from_path('~/.kube/config')).",
        ) from None
    return _access(IN_CLUSTER, ssl.create_default_context(cadata=authority), token)


def _from_file(file: Path) -> Access:
    config = _parsed(file)
    context = _named(config, "contexts", "context", config.get("current-context"), file)
    cluster = _named(config, "clusters", "cluster", context.get("cluster"), file)
    user = _named(config, "users", "user", context.get("user"), file)
    if asked := [key for key in _UNKNOWN if cluster.get(key) or user.get(key)]:
        raise MonarchError(f"{file} has {' and '.join(asked)}, which KubernetesJob does not support")
    if plugin := user.get("exec"):
        given = _run(plugin, cluster, file)
        user = {
            "token": given.get("token"),
            "client-certificate-data": _encoded(given.get("clientCertificateData")),
            "client-key-data": _encoded(given.get("clientKeyData")),
        }
    try:
        tls = ssl.create_default_context()
        if authority := _bytes(cluster, "certificate-authority", file):
            tls = ssl.create_default_context(cadata=authority.decode())
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        if certificate := _bytes(user, "client-certificate", file):
            show_certificate(tls, certificate, _bytes(user, "client-key", file) or b"")
        token = user.get("token") or (_bytes(user, "tokenFile", file) or b"").decode().strip()
    except (OSError, ValueError) as error:  # ssl.SSLError, binascii.Error and UnicodeDecodeError are among them
        raise MonarchError(f"{file}: its certificates and keys cannot be used: {error}") from None
    return _access(str(cluster.get("server", "")), tls, token)


def _access(server: str, context: ssl.SSLContext, token: str) -> Access:
    url = urlsplit(server)
    plain = url.scheme == "http" and is_loopback(url.hostname or "")  # that of `kubectl proxy`
    if not (url.scheme == "https" or plain) or not url.hostname:
        raise MonarchError(f"{server!r} is no address of a cluster's API: https://HOST:PORT")
    port = url.port or (80 if plain else 443)
    return Access(url.hostname, port, url.path.rstrip("/"), None if plain else context, token)


def _parsed(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text()
    except OSError as error:
        raise MonarchError(f"the kubeconfig {file} cannot be read: {error.strerror}") from None
    try:
        found = json.loads(text)
    except ValueError:
        found = _yaml(text, file)
    if not isinstance(found, Mapping):
        raise MonarchError(f"{file} is no kubeconfig")
    return found


def _yaml(text: str, file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MonarchError(f"reading {file} needs PyYAML", hint="pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise MonarchError(f"{file} is no YAML: {error}") from None


def _named(config: Mapping[str, Any], kind: str, key: str, name: object, file: Path) -> Mapping[str, Any]:
    """The entry of a list of a kubeconfig with that name."""
    entries = config.get(kind) or []
    for entry in entries:
        if entry.get("name") == name:
            return entry.get(key) or {}
    names = ", ".join(str(entry.get("name")) for entry in entries) or "none"
    raise MonarchError(f"{file} has no {key} called {name!r} (its {kind} are {names})")


def _bytes(entry: Mapping[str, Any], key: str, file: Path) -> bytes | None:
    """The entry's base64 data, or what its file has; the file's path is relative to the kubeconfig's folder."""
    if text := entry.get(f"{key}-data"):
        return base64.b64decode(text)
    return (file.parent / entry[key]).read_bytes() if entry.get(key) else None


def _run(plugin: Mapping[str, Any], cluster: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The status that a credential plugin prints (client.authentication.k8s.io)."""
    version = str(plugin.get("apiVersion", "client.authentication.k8s.io/v1"))
    asked: dict[str, Any] = {"interactive": False}
    if plugin.get("provideClusterInfo"):
        asked["cluster"] = {key: cluster[key] for key in ("server", "certificate-authority-data") if key in cluster}
    about = {"apiVersion": version, "kind": "ExecCredential", "spec": asked}
    named = {each["name"]: each["value"] for each in plugin.get("env") or ()}
    command = str(plugin.get("command", ""))
    if "/" in command:
        command = str(file.parent / command)
    try:
        done = subprocess.run(
            [command, *(plugin.get("args") or ())],
            env={**os.environ, **named, "KUBERNETES_EXEC_INFO": json.dumps(about)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PLUGIN_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MonarchError(
            f"{file}: the command {command} for credentials failed: {error}", hint=str(plugin.get("installHint") or "")
        ) from None
    if done.returncode:
        raise MonarchError(f"{file}: {command} failed with status {done.returncode}: {done.stderr.strip()}")
    try:
        status = json.loads(done.stdout)["status"]
        if status.get("token") or status.get("clientCertificateData"):
            return status
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise MonarchError(f"{file}: {command} printed no credentials")


def _encoded(pem: str | None) -> str | None:
    return base64.b64encode(pem.encode()).decode() if pem else None
