"""Kubernetes' jobs, against a stand-in of a cluster's API that answers as the real one does."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch
from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
from monarch.stdlib.jobs.kubernetes import access, api, job, manifests
from tests.stdlib.jobs.kubernetes_schema import faults
from tests.stdlib.jobs.kubernetes_standin import ADDRESSES, MESSAGE, NAMESPACE, Cluster

WAIT = 60.0
PORT = 22437


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for module, names in ((job, ("_LOOK_SECONDS", "_TRY_SECONDS")), (api, ("_TRY_SECONDS",))):
        for name in names:
            monkeypatch.setattr(module, name, 0.02)
    for module in (job, manifests):  # the cluster's DNS

        def address(hostname: str, subdomain: str, namespace: str) -> str:
            assert hostname.startswith(f"{subdomain}-") and namespace
            return ADDRESSES[hostname]

        monkeypatch.setattr(module, "dns_name", address)
    found = Cluster(tmp_path)
    yield found
    found.close()


def asked(cluster: Cluster, resources: Any = None, **options: Any) -> KubernetesJob:
    """A job of two meshes with a pod each."""
    given = {"namespace": NAMESPACE, "kubeconfig": KubeConfig.from_path(cluster.kubeconfig())} | options
    mine = KubernetesJob(**given)
    for name in ("trainers", "loaders"):
        mine.add_mesh(name, 1, image_spec=ImageSpec("example.org/train:1", resources), port=PORT)
    return mine


def one(cluster: Cluster, spec: Any, **options: Any) -> KubernetesJob:
    """A job of one pod with this specification."""
    mine = KubernetesJob(NAMESPACE, kubeconfig=KubeConfig.from_path(cluster.kubeconfig()), **options)
    mine.add_mesh("trainers", 1, pod_template={"spec": spec})
    return mine


def worker(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "worker", "image": "example.org/train:1", **fields}]}


def host() -> str | None:
    return os.environ.get("MONARCH_TLS")


def test_the_pods_of_a_job_are_hosts_with_certificates_of_their_own(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = asked(cluster, {"memory": "1Gi"})
    try:
        state = mine.state(tmp_path / "state")
        assert state.trainers.addresses == (f"127.0.0.2:{PORT}",) and state.loaders.addresses == (f"127.0.0.3:{PORT}",)
        with state.loaders.spawn_procs().activate():
            assert monarch.remote(host).call().get(WAIT).values() == [f"{tmp_path}/pods/loaders-0/run/monarch/tls"]
        secrets = cluster.objects["secrets"]
        assert [sorted(each["data"]) for each in secrets.values()] == [["ca.pem", "cert.pem", "key.pem"]] * 2
        keys = {base64.b64decode(each["data"]["key.pem"]) for each in secrets.values()}
        folder = Path(mine._folder)
        assert len(keys) == 2 and sorted(path.name for path in folder.iterdir()) == ["ca.pem", "controller"]
        remembered = monarch.job.job_load(tmp_path / "state")
        assert remembered.can_run(asked(cluster, {"memory": "1Gi"}))
        assert not remembered.can_run(asked(cluster, {"memory": "2Gi"}))

        found = KubernetesJob(NAMESPACE, kubeconfig=KubeConfig.from_path(cluster.kubeconfig()))
        found.add_mesh("anyone", 1, label_selector="monarch.pytorch.org/mesh-name=trainers", port=PORT)
        monkeypatch.setenv("MONARCH_TLS", str(folder / "controller"))
        hosts = found.state(None).anyone
        assert hosts.addresses == (f"127.0.0.2:{PORT}",)
        hosts.stop().get(WAIT)
        found.kill()
        assert list(cluster.objects["pods"]) == ["trainers-0", "loaders-0"]  # others have made them
    finally:
        mine.kill()
    assert cluster.objects == {"pods": {}, "secrets": {}, "services": {}} and not folder.exists()
    assert not remembered.can_run(mine)


def test_manifests_have_the_published_fields() -> None:
    mine = KubernetesJob(NAMESPACE)
    resources = {"nvidia.com/gpu": 8, "memory": "64Gi"}
    mine.add_mesh("trainers", 2, image_spec=ImageSpec("example.org/train:1", resources, shared_memory_size="16Gi"))
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    sidecar = {"name": "sidecar", "image": "example.org/side:1"}
    own = {"name": "worker", "image": "example.org/train:1", "command": ["serve"], "env": [{"name": "A", "value": "b"}]}
    spec = {"containers": [sidecar, own], "tolerations": tolerations, "restartPolicy": "OnFailure"}
    template = {"metadata": {"labels": {"team": "red"}}, "spec": spec}
    mine.add_mesh("loaders", 1, pod_template=template, labels={"queue": "q"}, annotations={"note": "n"})
    trainers, loaders = mine._meshes.values()
    first = manifests.pod(trainers, 1, "name", NAMESPACE)
    other = manifests.pod(loaders, 0, "name", NAMESPACE)
    for kind, manifest in (
        ("Pod", first),
        ("Pod", other),
        ("Service", manifests.service(trainers, "name")),
    ):
        assert manifest["kind"] == kind and json.loads(json.dumps(manifest)) == manifest
        assert list(faults(kind, manifest)) == []
    assert (first["spec"]["hostname"], first["spec"]["subdomain"]) == ("trainers-1", "trainers")
    (container,) = first["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "64Gi"}
    assert container["command"][-4:] == ["--advertise", "trainers-1.trainers.training.svc", "--tls", "/run/monarch/tls"]
    assert mine._certified(trainers, 1) == "trainers-1,trainers-1.trainers.training.svc"
    assert {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in first["spec"]["volumes"]
    labels, wanted = first["metadata"]["labels"], manifests.service(trainers, "name")["spec"]["selector"]
    assert wanted.items() <= labels.items() and labels["apps.kubernetes.io/pod-index"] == "1"
    assert other["metadata"]["labels"].items() >= {"team": "red", "queue": "q"}.items()
    assert other["metadata"]["annotations"] == {"note": "n"}
    assert other["spec"]["tolerations"] == tolerations and other["spec"]["restartPolicy"] == "OnFailure"
    assert other["spec"]["containers"][0] == sidecar and other["spec"]["containers"][1]["command"][-1] == "serve"
    assert other["spec"]["containers"][1]["env"][0] == {"name": "A", "value": "b"}
    assert template["spec"]["containers"][1] == own  # the template is as it was


def test_templates_may_be_objects_of_the_package_kubernetes() -> None:
    class Container:
        attribute_map = {"name": "name", "volume_mounts": "volumeMounts", "image": "image"}
        name, volume_mounts, image = "worker", [{"name": "data", "mountPath": "/data"}], None

    class Template:
        attribute_map = {"spec": "spec"}
        spec = {"containers": [Container()]}

    plain = {"containers": [{"name": "worker", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}
    assert manifests.plain(Template()) == {"spec": plain}
    with pytest.raises(monarch.MonarchError, match="has a set, which is nothing of JSON"):
        manifests.plain({"spec": {1}})


def test_a_pod_that_fails_says_what_it_printed(cluster: Cluster) -> None:
    mine = one(cluster, worker(command=["sh", "-c", "echo no luck today; exit 3"]))
    with pytest.raises(monarch.MonarchError, match=r"pod trainers-0 has ended with status 3 \(Error\)") as raised:
        mine.state(None)
    assert "no luck today" in str(raised.value)
    del cluster.objects["pods"]["trainers-0"]
    with pytest.raises(monarch.MonarchError, match="pod trainers-0 is gone: somebody has deleted it"):
        mine.state(None)
    mine.kill()
    assert cluster.objects == {"pods": {}, "secrets": {}, "services": {}}


def test_a_job_that_waits_too_long_is_killed_and_says_for_what(cluster: Cluster) -> None:
    cluster.full = True
    mine = asked(cluster, timeout=0.1)
    with pytest.raises(
        monarch.MonarchError, match="mesh 'trainers' did not run within 0.1 s: the job is killed"
    ) as late:
        mine.state(None)
    assert f"trainers-0: Unschedulable: {MESSAGE}" in str(late.value) and not mine.active
    assert cluster.objects == {"pods": {}, "secrets": {}, "services": {}}
    others = KubernetesJob(NAMESPACE, timeout=0.0, kubeconfig=KubeConfig.from_path(cluster.kubeconfig()))
    others.add_mesh("anyone", 1)
    with pytest.raises(monarch.MonarchError, match="no pod matches app.kubernetes.io/name=monarch-worker,.*anyone"):
        others.state(None)


def test_what_the_cluster_refuses_is_an_error_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.full = True
    for spec, said in (
        (worker() | {"restartPolicy": "Sometimes"}, r'Pod "trainers-0" is invalid: .*"Sometimes" \(422 Invalid\)'),
        (worker(imagee="a"), r'unknown field "spec.containers\[0\].imagee" \(400 BadRequest\)'),
        ({"containers": [{"name": "worker"}]}, r"spec.containers\[0\].image: Required value"),
    ):
        with pytest.raises(monarch.MonarchError, match=said):
            one(cluster, spec).state(None)
        assert cluster.objects == {"pods": {}, "secrets": {}, "services": {}}
    with pytest.raises(monarch.MonarchError, match='namespaces "nowhere" not found'):
        nowhere = KubernetesJob("nowhere", kubeconfig=KubeConfig.from_path(cluster.kubeconfig()))
        nowhere.add_mesh("trainers", 1, image_spec=ImageSpec("example.org/train:1"))
        nowhere.apply()
    first = asked(cluster)
    first.apply()
    with pytest.raises(monarch.MonarchError, match='services "trainers" already exists .*AlreadyExists') as raised:
        asked(cluster).apply()
    assert "another job has a mesh of this name" in str(raised.value)
    assert sorted(cluster.objects["pods"]) == ["loaders-0", "trainers-0"]  # the first one's are left alone
    first.kill()
    cluster.forbidden = {("create", "pods"), ("deletecollection", "secrets")}
    with pytest.raises(monarch.MonarchError, match="cannot create resource .pods. in API group") as raised:
        (refused := asked(cluster)).apply()
    assert not Path(refused._folder).exists()  # with its keys
    assert "needs a role for pods" in str(raised.value)
    (note,) = raised.value.__notes__
    assert "remain, with the label monarch-job=" in note and 'cannot deletecollection resource "secrets"' in note


def test_a_busy_cluster_is_asked_again(cluster: Cluster) -> None:
    found = api.Api(KubeConfig.from_path(cluster.kubeconfig()), NAMESPACE)
    cluster.busy = 3
    assert found.find("pods", "a=b") == [] and len(cluster.asked) == 4
    cluster.busy = 100
    with pytest.raises(monarch.MonarchError, match=r"does not list pods: Too many requests.* \(429\)"):
        found.find("pods", "a=b")


def test_a_token_that_has_expired_is_read_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "IN_CLUSTER", cluster.url)
    monkeypatch.setattr(access, "ACCOUNT", tmp_path / "account")
    with pytest.raises(monarch.MonarchError, match="does not run in a pod with a service account"):
        asked(cluster, kubeconfig=None).state(None)
    (tmp_path / "account").mkdir()
    (tmp_path / "account" / "ca.crt").write_text((cluster.tls / "ca.pem").read_text())
    (tmp_path / "account" / "token").write_text(f"{cluster.token}\n")
    found = api.Api(KubeConfig(), NAMESPACE)
    assert found.find("pods", "a=b") == []
    cluster.token = "second-token"
    with pytest.raises(monarch.MonarchError, match=r"Unauthorized \(401 Unauthorized\)"):
        found.find("pods", "a=b")
    (tmp_path / "account" / "token").write_text("second-token")
    assert found.find("pods", "a=b") == []


PLUGIN = """
import json, os, sys
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert asked["kind"] == "ExecCredential" and asked["spec"]["cluster"]["server"].startswith("https://")
token = os.environ["TOKEN"]
if not token:
    sys.exit("log in first")
print(json.dumps({"apiVersion": asked["apiVersion"], "kind": "ExecCredential", "status": {"token": token}}))
"""


def test_kubeconfigs_have_tokens_certificates_and_commands(cluster: Cluster) -> None:
    def pods(**user: Any) -> list[Any]:
        return api.Api(KubeConfig.from_path(cluster.kubeconfig(**user)), NAMESPACE).find("pods", "a=b")

    def plugin(token: str) -> dict[str, Any]:
        env = [{"name": "TOKEN", "value": token}]
        version = "client.authentication.k8s.io/v1"
        command = {"command": sys.executable, "args": ["-I", "-S", "-c", PLUGIN]}
        return {"apiVersion": version, "env": env, "provideClusterInfo": True, **command}

    mine = {"client-certificate": "tls/controller/cert.pem"}
    key = base64.b64encode((cluster.tls / "controller" / "key.pem").read_bytes()).decode()
    (cluster.folder / "token").write_text(cluster.token)
    assert pods(token=cluster.token) == pods(**mine, **{"client-key-data": key}) == pods(tokenFile="token") == []
    assert pods(exec=plugin(cluster.token)) == []
    for user, said in (
        ({"token": "another"}, r"Unauthorized \(401"),
        ({"exec": plugin("")}, "failed with status 1: log in first"),
        ({"exec": {"command": "no-such-plugin"}}, "the command no-such-plugin for credentials failed"),
        ({"exec": {"command": "true"}}, "true printed no credentials"),
        ({"as": "somebody"}, "has as, which KubernetesJob does not support"),
        (mine, "its certificates and keys cannot be used"),
        ({"tokenFile": "missing"}, "its certificates and keys cannot be used.*missing"),
    ):
        with pytest.raises(monarch.MonarchError, match=said):
            pods(**user)


def test_kubeconfigs_are_yaml(cluster: Cluster) -> None:
    yaml = pytest.importorskip("yaml")
    path = cluster.kubeconfig()
    config = json.loads(path.read_text())
    path.write_text(yaml.safe_dump(config))
    assert api.Api(KubeConfig.from_path(path), NAMESPACE).find("pods", "a=b") == []
    for text, said in (
        (yaml.safe_dump(config | {"current-context": "there"}), r"no context called 'there' \(its contexts are here\)"),
        ("a: [", "is no YAML"),
        ("text", "is no kubeconfig"),
        (json.dumps(config).replace("https", "http").replace("127.0.0.1", "example.org"), "is no address of a cluster"),
    ):
        path.write_text(text)
        with pytest.raises(monarch.MonarchError, match=said):
            KubeConfig.from_path(path).open()
    with pytest.raises(monarch.MonarchError, match="cannot be read: No such file"):
        KubeConfig.from_path(path.with_name("missing")).open()


def test_meshes_that_cannot_be_are_refused() -> None:
    mine = KubernetesJob(NAMESPACE)
    image = ImageSpec("example.org/train:1")
    with pytest.raises(monarch.MonarchError, match="the job has no meshes"):
        mine.apply()
    mine.add_mesh("trainers", 1, image_spec=image)
    for name, options, said in (
        ("trainers", {"image_spec": image}, "has a mesh 'trainers' already"),
        ("Loaders", {"image_spec": image}, "cannot be called 'Loaders'"),
        ("a" * 62, {"image_spec": image}, "cannot be called"),
        ("loaders", {"image_spec": image, "pod_template": {}}, "two ways"),
        ("loaders", {"image_spec": image, "label_selector": "a=b"}, "find others"),
        ("loaders", {"labels": {"a": "b"}}, "are for new ones"),
        ("loaders", {"pod_template": {"spec": {}}}, "no containers"),
        ("loaders", {"pod_template": {"spec": worker(args=["--all"])}}, "has args and no command"),
    ):
        with pytest.raises(monarch.MonarchError, match=said):
            mine.add_mesh(name, **{"num_replicas": 1, **options})
    for options, said in (
        ({"num_replicas": 0}, "has 0 hosts: give a whole number from 1"),
        ({"num_replicas": 1.5}, "has 1.5 hosts"),
        ({"num_replicas": 1, "port": 99999}, "give a number from 1 to 65535"),
    ):
        with pytest.raises(ValueError, match=said):
            mine.add_mesh("loaders", image_spec=image, **options)
    with pytest.raises(ValueError, match="timeout='5m': give a number of seconds"):
        KubernetesJob(NAMESPACE, timeout="5m")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}}]},
         "cannot start: ImagePullBackOff: no such tag"),
        ({"initContainerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]},
         "cannot start: CrashLoopBackOff"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "has ended (Evicted: low on memory)"),
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        ({"phase": "Running"}, ""),
    ],
)  # fmt: skip
def test_a_pod_that_will_not_run_is_told_from_one_that_waits(status: dict[str, Any], said: str) -> None:
    assert job._trouble({"metadata": {}, "status": status}) == said
