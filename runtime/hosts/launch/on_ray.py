"""Agents on the nodes of a Ray cluster.

Each agent belongs to a Ray actor. A placement group spreads the actors over as many nodes, and holds the CPUs and GPUs
that the workers are to use; scheduling, waiting for nodes and restarts stay Ray's. Credentials go to the actors as
arguments of a call, and are as secret there as all that Ray carries. An actor that ends takes its agent with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.hosts.launch.agent import AgentEnded, AgentProcess
from monarch.runtime.hosts.launch.launcher import Credentials

LONGER = 10.0
"""Seconds for Ray's own part of a call, and for an agent to end."""


class HostActor:
    """An agent's keeper, as a Ray actor. Its methods are coroutines, so that one that waits keeps no other waiting."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None

    async def machine(self) -> str:
        """The address by which other nodes reach this one."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def serve(
        self, machine: str, credentials: Credentials, imports: Sequence[str], timeout: float
    ) -> tuple[str, str]:
        """Start the agent. Gives where it listens and "", or "" and how it ended."""
        self._agent = AgentProcess(machine, credentials, imports, show=lambda line: print(line, end="", flush=True))
        try:
            return await asyncio.to_thread(self._agent.serving, timeout), ""
        except AgentEnded as error:
            return "", str(error)

    async def wait(self) -> str:
        """Wait until the agent has ended; how it did."""
        assert self._agent is not None
        return await asyncio.to_thread(self._agent.wait)

    async def end(self) -> None:
        if self._agent is not None:
            await asyncio.to_thread(self._agent.end)


class RayLauncher:
    """`launcher.Launcher` on Ray.

    `nodes`        how many, each with `cpus` and `gpus` free
    `resources`    what else each has to have free, as Ray calls it: {"accelerator_type:H100": 1}
    `options`      of the actors, as Ray's `.options(...)` takes them: a runtime environment, a name, restarts
    `imports`      modules that the agents import first
    `timeout`      seconds to wait for nodes, and for agents to start
    """

    def __init__(
        self,
        nodes: int,
        cpus: float,
        gpus: float,
        resources: Mapping[str, float] | None,
        options: Mapping[str, Any] | None,
        imports: Sequence[str],
        timeout: float,
    ) -> None:
        if nodes < 1:
            raise MonarchError(f"{nodes} nodes: it has to be one at least")
        try:
            import ray
        except ImportError as error:
            raise MonarchError(f"Ray cannot be imported: {error}", hint="pip install ray") from None
        self._ray = ray
        self._nodes = nodes
        self._bundle = {"CPU": float(cpus), "GPU": float(gpus), **(resources or {})}
        self._bundle = {name: amount for name, amount in self._bundle.items() if amount}
        self._options = dict(options or {})
        self._imports = tuple(imports)
        self._timeout = timeout
        self.group: Any = None
        self.actors: list[Any] = []
        self._machines: Sequence[str] = ()
        self.waiting: dict[Any, int] = {}
        self._ended: dict[int, str] = {}

    def place(self) -> Sequence[str]:
        ray = self._ray
        if not ray.is_initialized():
            try:
                ray.init(address="auto")
            except ConnectionError as error:
                raise MonarchError(
                    f"no Ray cluster is found from here: {error}",
                    hint="call ray.init(address=...) before, or start one: ray start --head",
                ) from None
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.group = placement_group([self._bundle] * self._nodes, strategy="STRICT_SPREAD")
        if not self.group.wait(self._timeout):
            wanted = f"{self._nodes} nodes with {_amounts(self._bundle)} free on each"
            raise MonarchError(
                f"Ray has not found {wanted} within {self._timeout:g} s", hint=f"its nodes are\n{self._described()}"
            )
        actor = ray.remote(HostActor)
        cpus, gpus = self._bundle.get("CPU", 0), self._bundle.get("GPU", 0)
        for number in range(self._nodes):
            where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
            options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": where, **self._options}
            self.actors.append(actor.options(**options).remote())
        self._machines = self._all("have its actor started", [actor.machine.remote() for actor in self.actors])
        return self._machines

    def start(self, credentials: Sequence[Credentials]) -> Sequence[str]:
        pairs = zip(self.actors, self._machines, credentials, strict=True)
        calls = [actor.serve.remote(machine, each, self._imports, self._timeout) for actor, machine, each in pairs]
        served = self._all("start its agent", calls)
        for number, (address, how) in enumerate(served):
            if not address:
                raise MonarchError(f"host {number}, on Ray's node {self._machines[number]}, did not start: {how}")
        self.waiting = {actor.wait.remote(): number for number, actor in enumerate(self.actors)}
        return [address for address, _ in served]

    def ended(self) -> Mapping[int, str]:
        if not self.waiting:
            return self._ended
        ready, _ = self._ray.wait(list(self.waiting), num_returns=len(self.waiting), timeout=0)
        for reference in ready:
            try:
                how = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                how = f"its Ray actor ended: {error}"
            self._ended[self.waiting.pop(reference)] = how
        return dict(sorted(self._ended.items()))

    def close(self) -> None:
        ray = self._ray
        actors, self.actors = self.actors, []
        group, self.group = self.group, None
        if not ray.is_initialized():  # then Ray has ended the actors, and these their agents
            return
        if actors:
            ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=LONGER)
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)

    def _all(self, what: str, references: list[Any]) -> list[Any]:
        """All results. Raises MonarchError that names the hosts of those that are not there in time."""
        ray = self._ray
        try:
            return list(ray.get(references, timeout=self._timeout + LONGER))
        except ray.exceptions.GetTimeoutError:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = ", ".join(str(number) for number, each in enumerate(references) if each not in done)
            raise MonarchError(f"Ray did not {what} within {self._timeout:g} s on the node of host {late}") from None
        except ray.exceptions.RayError as error:
            raise MonarchError(f"a Ray actor that should {what} has failed: {error}") from None

    def _described(self) -> str:
        """The resources of each living node, and the free ones of all."""
        nodes = [
            f"{node['NodeManagerAddress']}: {_amounts(node['Resources'])}"
            for node in self._ray.nodes()
            if node["Alive"]
        ]
        return "\n".join([*sorted(nodes), f"free in all: {_amounts(self._ray.available_resources())}"])


def _amounts(resources: Mapping[str, float]) -> str:
    """Without the names by which Ray tells nodes and groups apart, and memory, which nobody asks for here."""
    left = {
        name: n for name, n in resources.items() if "memory" not in name and ":" not in name and "group" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(left.items())) or "nothing"
