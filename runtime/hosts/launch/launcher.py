"""The interface of a launcher, and hosts that one has started.

launch(launcher)     launcher.place()            which machines, by their addresses
                     certificates, or a token    made for these agents, known to nobody else
                     launcher.start(...)         an agent on each: where it listens
                     attach(...)                 from here on as hosts that ran already
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from monarch.compiler.execution.executor import Executor
from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime.control.certificates import CONTROLLER, make_certificates
from monarch.runtime.hosts.attach import attach
from monarch.runtime.hosts.attached import AttachedHosts
from monarch.runtime.hosts.launch.folder import private_folder


@dataclass(frozen=True)
class Credentials:
    """The credentials of an agent: the files of a folder of certificates by name, or, on a trusted network, a token.
    The launcher brings them to the agent by its own means, which have to keep them as secret as they are."""

    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)


class Launcher(Protocol):
    """Starts agents somewhere, one a host, and ends them. Used by one thread at a time. Every method but `close` may
    raise MonarchError; `close` is called in the end, whatever came before, at the latest as this process ends."""

    def place(self) -> Sequence[str]:
        """Get machines, and give for each the address, without a port, on which its agent is to listen."""

    def start(self, credentials: Sequence[Credentials]) -> Sequence[str]:
        """Start an agent on each, and give where they listen: "10.0.0.1:4242"."""

    def ended(self) -> Mapping[int, str]:
        """The agents that have ended, by number, and how. Does not wait."""

    def close(self) -> None:
        """End all agents, and give the machines back. Idempotent."""


class LaunchedHosts:
    """`monarch.compiler.plan.Hosts` whose agents end with them."""

    def __init__(self, launcher: Launcher, attached: AttachedHosts, undo: ExitStack) -> None:
        self.launcher = launcher
        self.attached = attached
        self._undo = undo
        self._owner = os.getpid()
        atexit.register(self.close)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.attached.addresses

    def start(self, mesh: MeshSpec) -> Executor:
        for number, how in self.launcher.ended().items():
            raise MonarchError(
                f"host {number} ({self.addresses[number]}) is gone: {how}",
                hint="lost hosts stay lost: launch them again.",
            )
        return self.attached.start(mesh)

    def end(self) -> None:
        """The same as `close`: these hosts end with the program that launched them."""
        self.close()

    def close(self) -> None:
        """End the agents. In a forked child of the process that launched them: nothing."""
        if os.getpid() == self._owner:
            atexit.unregister(self.close)
            self._undo.close()


def launch(
    launcher: Launcher,
    *,
    trusted_network: bool = False,
    transports: Sequence[str] | None = None,
    fan_out: int = 8,
    timeout: float | None = None,
) -> LaunchedHosts:
    """Start agents and attach them. Options as those of `monarch.hosts`; with `trusted_network` a token takes the place
    of certificates, and nothing is encrypted."""
    with ExitStack() as undo:
        undo.callback(launcher.close)
        machines = launcher.place()
        token, folder = None, None
        if trusted_network:
            token = secrets.token_hex(32)
            credentials = [Credentials(token=token)] * len(machines)
        else:
            folder = undo.enter_context(private_folder())
            credentials = certificates(folder, machines)
        addresses = launcher.start(credentials)
        tls = None if folder is None else folder / CONTROLLER
        try:
            attached = attach(addresses, tls, token, trusted_network, transports, fan_out, timeout)
        except MonarchError as error:
            for number, how in launcher.ended().items():
                raise MonarchError(f"host {number} ({addresses[number]}) has ended: {how}") from error
            raise
        undo.callback(attached.close)
        return LaunchedHosts(launcher, attached, undo.pop_all())


def certificates(folder: Path, machines: Sequence[str]) -> list[Credentials]:
    """Certificates for agents on these machines, some of which may be the same one, and one for the controller."""
    names = [f"agent-{number}" for number in range(len(machines))]
    make_certificates(folder, [f"{name},{machine}" for name, machine in zip(names, machines, strict=True)])
    return [Credentials({file.name: file.read_bytes() for file in (folder / name).iterdir()}) for name in names]
