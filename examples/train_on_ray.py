"""`make demo-ray`: the training of train_gpt.py on a Ray cluster of two nodes, compared with plain PyTorch.

Without --address, Ray starts a cluster of two nodes on this machine; with it, the hosts are on nodes of that cluster,
and this script is what you would submit to it.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import monarch
import ray
from monarch.distributed import Mesh
from monarch.stdlib.data import corpus
from ray.cluster_utils import Cluster

from train_gpt import Training, comparison, console, data, parser, train_plainly


def train(hosts: monarch.HostMesh, options: Namespace) -> list[float]:
    with Mesh(data=2, model=2, hosts=hosts) as mesh:
        console.print(f"[bold]Training on {mesh}, on Ray's nodes {', '.join(hosts.addresses)}[/]")
        training = Training(mesh, options)
        losses = []
        for tokens, targets in data(options, corpus()):
            losses.append(training.step(tokens, targets))
            training.scheduler.step()
        return [loss.item() for loss in losses]


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connected to a cluster: the one at an address, or two nodes on this machine, which report nothing to anybody."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)  # of what another cluster here has left, for one
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        with ray.init(address=address, **quiet):
            yield
        return
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.2"})
    try:
        cluster.add_node(**node, node_ip_address="127.0.0.3")
        with ray.init(address=cluster.address, _node_ip_address="127.0.0.2", **quiet):
            yield
    finally:
        cluster.shutdown()


def main() -> None:
    made = parser()
    made.description = __doc__
    made.add_argument("--address", help="the Ray cluster, as ray.init takes it: auto, 10.0.0.1:6379")
    made.set_defaults(steps=30)
    options = made.parse_args()
    with connected(options.address), monarch.launch.ray(nodes=2, cpus_per_node=2) as hosts:
        ours = train(hosts, options)
    plain = train_plainly(options, corpus())
    console.print(comparison(ours, plain))
    worst = max(abs(a - b) for a, b in zip(ours, plain, strict=True))
    console.print(f"largest difference over {len(ours)} steps: {worst:.1e}")


if __name__ == "__main__":
    main()
