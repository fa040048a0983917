"""Jobs: hosts that a program asks a scheduler for, and finds again: `monarch.job.SlurmJob({"trainers": 4}).state()`."""

from __future__ import annotations

from monarch.stdlib.jobs.forwarding import PortForwarder, forward
from monarch.stdlib.jobs.job import DEFAULT_JOB_PATH, JobState, JobTrait, job_load, job_loads
from monarch.stdlib.jobs.kubernetes.job import KubernetesJob
from monarch.stdlib.jobs.local import LocalJob, ProcessJob
from monarch.stdlib.jobs.shell import shell
from monarch.stdlib.jobs.slurm import SlurmJob
from monarch.stdlib.telemetry.session import TelemetryConfig

__all__ = [
    "DEFAULT_JOB_PATH",
    "JobState",
    "JobTrait",
    "KubernetesJob",
    "LocalJob",
    "PortForwarder",
    "ProcessJob",
    "SlurmJob",
    "TelemetryConfig",
    "forward",
    "job_load",
    "job_loads",
    "shell",
]
