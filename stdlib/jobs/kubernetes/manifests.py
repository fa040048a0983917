"""The objects of a job: for each host a Pod with a Secret of its own, for each mesh a Service that names the pods.

Service trainers      headless: the pod trainers-0 is trainers-0.trainers.NAMESPACE.svc
Secret  trainers-0    the certificates of this host, and of no other
Pod     trainers-0    copies them to memory, where only its user reads them, and runs `monarch host`
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.compiler.errors import MonarchError
from monarch.stdlib.jobs.local import COMMAND

MESH = "monarch.pytorch.org/mesh-name"
"""By this label the pods of a mesh are found, as PyTorch Monarch's are."""
WORKER = {"app.kubernetes.io/name": "monarch-worker"}
JOB = "monarch-job"
"""The label of everything that one job has created: a random name."""
RANK = "apps.kubernetes.io/pod-index"
PORT = 26600

_MOUNTED, _COPIED = "/etc/monarch/tls", "/run/monarch"
# Others than the container's user may read the files of a mounted Secret, and a host refuses such a key.
_COPY = f'umask 077 && mkdir -p {_COPIED}/tls && cp -fL {_MOUNTED}/*.pem {_COPIED}/tls && exec "$@"'
_CERTIFICATES, _MEMORY = "monarch-certificates", "monarch-memory"


@dataclass(frozen=True)
class ImageSpec:
    """An image to make pods of: one that has `python` with Monarch, in the program's version.

    `resources`           what each pod gets, as requests and limits: {"nvidia.com/gpu": 8, "memory": "64Gi"}
    `shared_memory_size`  of the pod's /dev/shm, "16Gi"; without it the pod's memory is the limit
    """

    image: str
    resources: Mapping[str, str | int] | None = None
    shared_memory_size: str | None = None

    def template(self) -> dict[str, Any]:
        """A pod's template with one container."""
        amounts = {name: str(amount) for name, amount in (self.resources or {}).items()}
        container: dict[str, Any] = {
            "name": "worker",
            "image": self.image,
            "volumeMounts": [{"name": "dshm", "mountPath": "/dev/shm"}],
        }
        if amounts:
            container["resources"] = {"requests": amounts, "limits": amounts}
        shared = {"medium": "Memory"}
        if self.shared_memory_size is not None:
            shared["sizeLimit"] = self.shared_memory_size
        volumes = [{"name": "dshm", "emptyDir": shared}]
        return {"spec": {"automountServiceAccountToken": False, "containers": [container], "volumes": volumes}}


@dataclass(frozen=True)
class MeshOfPods:
    """A mesh of a job, of pods that it creates from `template`, or of those that `selector` finds."""

    name: str
    count: int
    port: int
    template: Mapping[str, Any] | None
    selector: str
    rank_label: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    def pod_name(self, rank: int) -> str:
        """The name of the pod that the job creates for a rank."""
        return f"{self.name}-{rank}"


def plain(value: Any) -> Any:
    """A manifest as JSON has it: dicts and lists as they are, and objects of the package `kubernetes` by the names
    that their `attribute_map` gives. Raises MonarchError for anything else."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if names := getattr(value, "attribute_map", None):
        found = {key: plain(getattr(value, name)) for name, key in names.items()}
        return {key: each for key, each in found.items() if each is not None}
    if value is None or isinstance(value, str | int | float):
        return value
    raise MonarchError(f"a pod's manifest has a {type(value).__name__}, which is nothing of JSON: {value!r}")


def dns_name(hostname: str, subdomain: str, namespace: str) -> str:
    """The name of a pod in the cluster's DNS, whatever the cluster's domain is."""
    return f"{hostname}.{subdomain}.{namespace}.svc"


def service(mesh: MeshOfPods, job: str) -> dict[str, Any]:
    """The Service that gives the pods of a mesh their names, whether they are ready or not."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": mesh.name, "labels": _labels(mesh, job)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB: job, MESH: mesh.name},
            "ports": [{"name": "monarch", "port": mesh.port, "protocol": "TCP"}],
        },
    }


def secret(mesh: MeshOfPods, rank: int, job: str, folder: Path) -> dict[str, Any]:
    """The Secret with the certificates of one host."""
    files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in sorted(folder.iterdir())}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": mesh.pod_name(rank), "labels": _labels(mesh, job)},
        "data": files,
    }


def pod(mesh: MeshOfPods, rank: int, job: str, namespace: str) -> dict[str, Any]:
    """The Pod of one host. A container that has a command keeps it, and finds the certificates by MONARCH_TLS."""
    made = copy.deepcopy(dict(mesh.template or {}))
    metadata, spec = made.get("metadata") or {}, made["spec"]
    name = mesh.pod_name(rank)
    worker = worker_of(spec["containers"])
    serve = [
        *("python", "-c", COMMAND, "host", "--listen", f"0.0.0.0:{mesh.port}"),
        *("--advertise", dns_name(name, mesh.name, namespace), "--tls", f"{_COPIED}/tls"),
    ]
    worker["command"] = ["sh", "-c", _COPY, "sh", *(worker.get("command") or serve)]
    worker["env"] = [*(worker.get("env") or ()), {"name": "MONARCH_TLS", "value": f"{_COPIED}/tls"}]
    worker["ports"] = [*(worker.get("ports") or ()), {"name": "monarch", "containerPort": mesh.port}]
    worker["volumeMounts"] = [
        *(worker.get("volumeMounts") or ()),
        {"name": _CERTIFICATES, "mountPath": _MOUNTED, "readOnly": True},
        {"name": _MEMORY, "mountPath": _COPIED},
    ]
    volumes = [
        {"name": _CERTIFICATES, "secret": {"secretName": name}},
        {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**(metadata.get("labels") or {}), **_labels(mesh, job), RANK: str(rank)},
            "annotations": {**(metadata.get("annotations") or {}), **mesh.annotations},
        },
        "spec": {
            "restartPolicy": "Never",  # a host that is lost stays lost
            **spec,
            "hostname": name,
            "subdomain": mesh.name,
            "volumes": [*(spec.get("volumes") or ()), *volumes],
        },
    }


def _labels(mesh: MeshOfPods, job: str) -> dict[str, str]:
    return {**mesh.labels, **WORKER, MESH: mesh.name, JOB: job}


def worker_of(containers: list[dict[str, Any]]) -> dict[str, Any]:
    """The container that is the host: the one called `worker`, or the first."""
    return next((each for each in containers if each.get("name") == "worker"), containers[0])
