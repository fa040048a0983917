"""The part of Kubernetes' API that jobs use: fields of v1 objects and their types, after the published reference
(kubernetes.io/docs/reference/kubernetes-api). A `!` marks a required field; `[]` a list, `{}` a map."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

FIELDS = {
    "Pod": "apiVersion:str kind:str metadata:ObjectMeta! spec:PodSpec!",
    "Secret": "apiVersion:str kind:str metadata:ObjectMeta! type:str data:{bytes} stringData:{str} immutable:bool",
    "Service": "apiVersion:str kind:str metadata:ObjectMeta! spec:ServiceSpec!",
    "ObjectMeta": "name:label! namespace:str labels:{labelValue} annotations:{str}",
    "PodSpec": "containers:[Container]! initContainers:[Container] volumes:[Volume] hostname:label subdomain:label"
    " restartPolicy:Always|OnFailure|Never nodeSelector:{str} tolerations:[Toleration] serviceAccountName:str"
    " automountServiceAccountToken:bool terminationGracePeriodSeconds:int hostNetwork:bool priorityClassName:str"
    " schedulerName:str",
    "Container": "name:label! image:str! command:[str] args:[str] env:[EnvVar] ports:[ContainerPort]"
    " resources:ResourceRequirements volumeMounts:[VolumeMount] workingDir:str"
    " imagePullPolicy:Always|IfNotPresent|Never",
    "EnvVar": "name:str! value:str",
    "ContainerPort": "name:portName containerPort:port! protocol:TCP|UDP|SCTP",
    "ResourceRequirements": "requests:{quantity} limits:{quantity}",
    "VolumeMount": "name:str! mountPath:str! readOnly:bool subPath:str",
    "Volume": "name:label! secret:SecretVolumeSource emptyDir:EmptyDirVolumeSource",
    "SecretVolumeSource": "secretName:str defaultMode:int optional:bool",
    "EmptyDirVolumeSource": "medium:str sizeLimit:quantity",
    "Toleration": "key:str operator:Exists|Equal value:str effect:NoSchedule|PreferNoSchedule|NoExecute",
    "ServiceSpec": "clusterIP:str selector:{labelValue} ports:[ServicePort] publishNotReadyAddresses:bool"
    " type:ClusterIP|NodePort|LoadBalancer|ExternalName",
    "ServicePort": "name:portName port:port! protocol:TCP|UDP|SCTP targetPort:port",
}
PATTERNS = {
    "str": r"(?s).*",
    "label": r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    "labelValue": r"(?=.{0,63}$)([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?",
    "portName": r"(?=.{1,15}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?",
    "bytes": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "quantity": r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?",
}


def faults(kind: str, found: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """What is wrong with an object: ("unknown", 'unknown field "spec.imagee"'), or ("invalid", "spec.x: …")."""
    if kind[0] in "[{":
        inner = kind[1:-1]
        items = enumerate(found) if isinstance(found, list) else found.items() if isinstance(found, dict) else ()
        if not isinstance(found, list if kind[0] == "[" else dict):
            yield "invalid", f"{path}: Invalid value: {found!r}"
        for key, each in items:
            yield from faults(inner, each, f"{path}[{key}]")
    elif kind in FIELDS:
        if not isinstance(found, dict):
            yield "invalid", f"{path}: Invalid value: {found!r}"
            return
        fields = dict(field.split(":") for field in FIELDS[kind].split())
        for name in found.keys() - fields.keys():
            yield "unknown", f'unknown field "{path}{path and "."}{name}"'
        for name, type_ in fields.items():
            where = f"{path}{path and '.'}{name}"
            if name in found:
                yield from faults(type_.rstrip("!"), found[name], where)
            elif type_.endswith("!"):
                yield "invalid", f"{where}: Required value"
    elif kind in ("bool", "int", "port"):
        wanted = bool if kind == "bool" else int
        if type(found) is not wanted or (kind == "port" and not 0 < found < 1 << 16):
            yield "invalid", f"{path}: Invalid value: {found!r}"
    elif not isinstance(found, str) or not re.fullmatch(PATTERNS.get(kind, kind), found):
        yield "invalid", f'{path}: Invalid value: "{found}"'
