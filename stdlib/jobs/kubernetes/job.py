"""KubernetesJob: hosts that are pods."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.hosts import hosts as attach_hosts
from monarch.runtime.actors.meshes import HostMesh
from monarch.runtime.control.certificates import CA_KEY, CONTROLLER, make_certificates
from monarch.stdlib.jobs.arguments import hosts_of, port_of, seconds_of
from monarch.stdlib.jobs.job import JobState, JobTrait
from monarch.stdlib.jobs.kubernetes.access import KubeConfig
from monarch.stdlib.jobs.kubernetes.api import Api, Object
from monarch.stdlib.jobs.kubernetes.manifests import (
    JOB,
    MESH,
    PORT,
    RANK,
    WORKER,
    ImageSpec,
    MeshOfPods,
    dns_name,
    plain,
    pod,
    secret,
    service,
    worker_of,
)

log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST = 63
_KINDS = ("pods", "secrets", "services")
_LOOK_SECONDS = 2.0
"""Between two questions for the pods: the cluster's one API answers all."""
_TRY_SECONDS = 0.5
_END_SECONDS = 120.0
"""How long `kill` waits for the pods to be gone: they have 30 s for their end, if they do not say otherwise."""
_LOG_LINES = 20
# Why a container waits that will not start by itself.
_STUCK = frozenset(
    ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
    + ("CreateContainerError", "RunContainerError", "CrashLoopBackOff")
)


class KubernetesJob(JobTrait):
    """Pods of a Kubernetes cluster, one host each, as meshes of so many.

        job = KubernetesJob(namespace="training")
        job.add_mesh("trainers", num_replicas=4, image_spec=ImageSpec("example.org/train:1", {"nvidia.com/gpu": 8}))
        procs = job.state().trainers.spawn_procs(per_host={"gpus": 8})

    `namespace`   where everything is created
    `timeout`     seconds for which `state` waits for the pods of a mesh, after which it kills the job; without it there
                  is no limit
    `kubeconfig`  `KubeConfig.from_path(…)`; without it this program is in a pod of the cluster, with a service account

    The job makes an authority and certificates for its own pods as it starts, each in a Secret that only its pod
    mounts, and throws the authority's key away. This program has to reach the pods by their names in the cluster's DNS.
    """

    def __init__(self, namespace: str, timeout: float | None = None, kubeconfig: KubeConfig | None = None) -> None:
        super().__init__()
        self._namespace = namespace
        self._timeout = seconds_of("timeout", timeout)
        self._config = kubeconfig or KubeConfig()
        self._meshes: dict[str, MeshOfPods] = {}
        self._name = ""
        """The label `monarch-job` of all that the job has created. "" before `apply` and after `kill`."""
        self._folder = ""
        """The controller's certificates."""

    def add_mesh(
        self,
        name: str,
        num_replicas: int,
        label_selector: str | None = None,
        pod_rank_label: str = RANK,
        image_spec: ImageSpec | None = None,
        port: int = PORT,
        pod_template: Any = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Ask for a mesh of `num_replicas` pods, in which hosts listen on `port`.

        `image_spec`      create them with one container of this image
        `pod_template`    create them from this PodTemplateSpec: a dict as in YAML, or an object of the package
                          `kubernetes`. Its container `worker`, or its first, is the host: it runs `monarch host`, or
                          its own command, which finds the certificates in the folder MONARCH_TLS
        `labels`, `annotations`
                          more of them for the pods that are created: kueue.x-k8s.io/queue-name
        `label_selector`  without a template or an image, the pods are there already, and this selects them; their rank
                          is the label `pod_rank_label`, and MONARCH_TLS is what this program shows them. Without a
                          selector they are those labelled app.kubernetes.io/name=monarch-worker and
                          monarch.pytorch.org/mesh-name=NAME

        Raises MonarchError for a name that a pod may not have, and for arguments that contradict each other, ValueError
        for numbers that cannot be meant.
        """
        hosts_of("KubernetesJob", name, num_replicas)
        port_of("KubernetesJob", port)
        template = _template(image_spec, pod_template)
        selector = label_selector or f"{','.join(f'{key}={value}' for key, value in WORKER.items())},{MESH}={name}"
        mesh = MeshOfPods(
            name, num_replicas, port, template, selector, pod_rank_label, dict(labels or {}), dict(annotations or {})
        )
        if not _NAME.fullmatch(name) or len(mesh.pod_name(num_replicas - 1)) > _LONGEST:
            raise MonarchError(
                f"a mesh of pods cannot be called {name!r}",
                hint="lower-case letters, digits and '-', a letter first, no '-' last,"
                f" and at most {_LONGEST} with the pod's number.",
            )
        if name in self._meshes:
            raise MonarchError(f"the job has a mesh '{name}' already")
        if template is not None and (label_selector is not None or pod_rank_label != RANK):
            raise MonarchError(
                f"the job creates the pods of mesh '{name}': label_selector and pod_rank_label find others"
            )
        if template is None and (labels or annotations):
            raise MonarchError(f"the pods of mesh '{name}' are there already: labels and annotations are for new ones")
        self._meshes[name] = mesh

    def can_run(self, spec: JobTrait) -> bool:
        if not (isinstance(spec, KubernetesJob) and spec._asked() == self._asked() and self._name):
            return False
        api = Api(self._config, self._namespace)
        for mesh in self._meshes.values():
            ranks = self._ranks(api, mesh)
            if len(ranks) != mesh.count or any(map(_trouble, ranks.values())):
                return False
        return True

    def _asked(self) -> tuple[object, ...]:
        return self._config, self._namespace, self._meshes

    def _created(self) -> Iterator[MeshOfPods]:
        """The meshes whose pods the job creates."""
        return (mesh for mesh in self._meshes.values() if mesh.template is not None)

    def _create(self, client_script: str | None) -> None:
        if not self._meshes:
            raise MonarchError("the job has no meshes", hint="add one: job.add_mesh('trainers', num_replicas=4, …).")
        api = Api(self._config, self._namespace)
        folder = Path(tempfile.mkdtemp(prefix="monarch-job-"))
        self._name, self._folder = token_hex(8), str(folder)
        ranks = [(mesh, rank) for mesh in self._created() for rank in range(mesh.count)]
        try:
            if ranks:
                make_certificates(folder, [self._certified(mesh, rank) for mesh, rank in ranks])
                (folder / CA_KEY).unlink()
            for mesh in self._created():
                api.create("services", service(mesh, self._name))
            for mesh, rank in ranks:
                own = folder / mesh.pod_name(rank)
                api.create("secrets", secret(mesh, rank, self._name, own))
                shutil.rmtree(own)
                api.create("pods", pod(mesh, rank, self._name, self._namespace))
        except BaseException as error:
            try:
                self._kill()
            except MonarchError as left:
                shutil.rmtree(folder, ignore_errors=True)  # keys: nobody will attach these pods
                error.add_note(f"the job's resources remain, with the label {JOB}={self._name}: {left}")
            raise

    def _certified(self, mesh: MeshOfPods, rank: int) -> str:
        """The names in a host's certificate, as `make_certificates` takes them; the first is its folder's."""
        name = mesh.pod_name(rank)
        return f"{name},{dns_name(name, mesh.name, self._namespace)}"

    def _state(self) -> JobState:
        api = Api(self._config, self._namespace)
        return JobState({name: self._attach(api, mesh, self._placed(api, mesh)) for name, mesh in self._meshes.items()})

    def _placed(self, api: Api, mesh: MeshOfPods) -> list[str]:
        """Where the pods of a mesh listen, once all of them run."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            ranks = self._running_or_waiting(api, mesh)
            if len(ranks) == mesh.count and all(each["status"].get("phase") == "Running" for each in ranks.values()):
                return [self._address(mesh, ranks[rank]) for rank in range(mesh.count)]
            if deadline is not None and time.monotonic() >= deadline:
                late = MonarchError(
                    f"the pods of mesh '{mesh.name}' did not run within {self._timeout:g} s: the job is killed",
                    hint="\n".join(f"{each['metadata']['name']}: {_waits(each)}" for _, each in sorted(ranks.items()))
                    or f"no pod matches {self._selector(mesh)} in the namespace {self._namespace}.",
                )
                self.kill()
                raise late
            time.sleep(_LOOK_SECONDS)

    def _selector(self, mesh: MeshOfPods) -> str:
        return mesh.selector if mesh.template is None else f"{JOB}={self._name},{MESH}={mesh.name}"

    def _ranks(self, api: Api, mesh: MeshOfPods) -> dict[int, Object]:
        """The pods of a mesh by rank, as far as they exist."""
        ranks = {}
        for each in api.find("pods", self._selector(mesh)):
            rank = each["metadata"].get("labels", {}).get(mesh.rank_label, "")
            if rank.isdecimal() and int(rank) < mesh.count:
                ranks[int(rank)] = each
        return ranks

    def _running_or_waiting(self, api: Api, mesh: MeshOfPods) -> dict[int, Object]:
        """The pods of a mesh by rank. Raises MonarchError where one will not run any more."""
        ranks = self._ranks(api, mesh)
        for each in ranks.values():
            if trouble := _trouble(each):
                name = each["metadata"]["name"]
                raise MonarchError(f"pod {name} {trouble}", hint=api.log(name, _LOG_LINES))
        if mesh.template is not None and len(ranks) < mesh.count:
            gone = min(set(range(mesh.count)) - set(ranks))
            raise MonarchError(f"pod {mesh.pod_name(gone)} is gone: somebody has deleted it")
        return ranks

    def _address(self, mesh: MeshOfPods, found: Object) -> str:
        """Where a pod is reached: by its name, if the cluster's DNS has it."""
        spec, ip = found["spec"], found["status"].get("podIP", "")
        if spec.get("hostname") and spec.get("subdomain"):
            return f"{dns_name(spec['hostname'], spec['subdomain'], self._namespace)}:{mesh.port}"
        return f"[{ip}]:{mesh.port}" if ":" in ip else f"{ip}:{mesh.port}"

    def _attach(self, api: Api, mesh: MeshOfPods, addresses: list[str]) -> HostMesh:
        """Hosts that have just been started, as soon as all of them serve."""
        deadline = time.monotonic() + settings.host_spawn_ready_timeout
        tls = None if mesh.template is None else Path(self._folder) / CONTROLLER
        while True:
            try:
                return attach_hosts(addresses, tls=tls)
            except MonarchError:
                self._running_or_waiting(api, mesh)
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_TRY_SECONDS)

    def _kill(self) -> None:
        if self._name and any(self._created()):
            api, mine = Api(self._config, self._namespace), f"{JOB}={self._name}"
            for kind in _KINDS:
                api.delete_all(kind, mine)
            deadline = time.monotonic() + _END_SECONDS
            while left := api.find("pods", mine):
                if time.monotonic() >= deadline:
                    names = ", ".join(each["metadata"]["name"] for each in left)
                    log.warning("these pods are deleted, and have not ended within %g s: %s", _END_SECONDS, names)
                    break
                time.sleep(_TRY_SECONDS)
        self._name = ""
        shutil.rmtree(self._folder, ignore_errors=True)


def _template(image: ImageSpec | None, template: Any) -> dict[str, Any] | None:
    """How the pods are made, None where they are not. Raises MonarchError."""
    if image is not None and template is not None:
        raise MonarchError("image_spec and pod_template are two ways to describe the pods: give one of them")
    if image is None and template is None:
        return None
    made = plain(template) if image is None else image.template()
    if not (isinstance(made, dict) and (made.get("spec") or {}).get("containers")):
        raise MonarchError(
            "a pod's template has no containers", hint='{"spec": {"containers": [{"name": "worker", …}]}}'
        )
    worker = worker_of(made["spec"]["containers"])
    if worker.get("args") and not worker.get("command"):
        raise MonarchError(
            f"container {worker.get('name')!r} has args and no command: the image's own command is not run",
            hint="give its command too, or leave the args out, and it runs `monarch host`.",
        )
    return made


def _trouble(found: Object) -> str:
    """Why a pod will not run any more, "" where it runs or may do so."""
    status = found.get("status") or {}
    if found["metadata"].get("deletionTimestamp"):
        return "is being deleted"
    ended = status.get("phase") in ("Failed", "Succeeded")
    for each in _containers(status):
        state = each.get("state") or {}
        if (waiting := state.get("waiting") or {}).get("reason") in _STUCK:
            return f"cannot start: {_reason(waiting)}"
        if ended and (last := state.get("terminated")) and (last.get("exitCode") or status["phase"] == "Succeeded"):
            return f"has ended with status {last.get('exitCode')} ({_reason(last)})"
    return f"has ended ({_reason(status) or status['phase']})" if ended else ""


def _waits(found: Object) -> str:
    """The reason for which a pod waits, in Kubernetes' words."""
    status = found.get("status") or {}
    for each in _containers(status):
        if waiting := (each.get("state") or {}).get("waiting"):
            return _reason(waiting)
    for each in status.get("conditions") or ():
        if each.get("status") == "False" and each.get("message"):
            return _reason(each)
    return str(status.get("phase", "Pending"))


def _containers(status: Object) -> list[Object]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _reason(state: Object) -> str:
    return ": ".join(filter(None, (state.get("reason"), state.get("message"))))
