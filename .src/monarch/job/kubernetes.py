"""Jobs on Kubernetes: `KubernetesJob(namespace="training")`."""

from __future__ import annotations

from monarch.stdlib.jobs.kubernetes.access import KubeConfig
from monarch.stdlib.jobs.kubernetes.job import KubernetesJob
from monarch.stdlib.jobs.kubernetes.manifests import ImageSpec

__all__ = ["ImageSpec", "KubeConfig", "KubernetesJob"]
