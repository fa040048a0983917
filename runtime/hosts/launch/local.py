"""Agents on this machine, to try out what runs over several hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch.compiler.config import settings
from monarch.compiler.plan import MonarchError
from monarch.runtime.hosts.launch.agent import AgentEnded, AgentProcess
from monarch.runtime.hosts.launch.launcher import Credentials


class LocalLauncher:
    """`launcher.Launcher` on loopback."""

    def __init__(self, hosts: int, imports: Sequence[str] = ()) -> None:
        if hosts < 1:
            raise MonarchError(f"{hosts} hosts: it has to be one at least")
        self._hosts = hosts
        self._imports = imports
        self._agents: list[AgentProcess] = []

    def place(self) -> Sequence[str]:
        return ["127.0.0.1"] * self._hosts

    def start(self, credentials: Sequence[Credentials]) -> Sequence[str]:
        self._agents = [AgentProcess("127.0.0.1", each, self._imports) for each in credentials]
        addresses = []
        for number, agent in enumerate(self._agents):
            try:
                addresses.append(agent.serving(settings.host_spawn_ready_timeout))
            except AgentEnded as error:
                raise MonarchError(f"host {number} did not start: {error}") from None
        return addresses

    def ended(self) -> Mapping[int, str]:
        return {number: how for number, agent in enumerate(self._agents) if (how := agent.ended())}

    def close(self) -> None:
        while self._agents:
            self._agents.pop().end()
