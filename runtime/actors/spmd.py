"""Scripts for torchrun, on a mesh of processes: each process gets the environment that torchrun would give it."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from typing import Literal

from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.endpoint import endpoint
from monarch.runtime.actors.meshes import ProcMesh
from monarch.runtime.actors.messages.address import host_of, port_of
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.current import current_rank

Family = Literal["IPv4", "IPv6"]
_FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6, "Default": socket.AF_UNSPEC}


class SPMDActor(Actor):
    """One of the processes that torchrun would start. The last dim of the mesh counts the processes of a host.

    spmd = procs.spawn("spmd", SPMDActor)
    address, port = spmd.flatten("rank").slice(rank=0).get_host_port.call_one().get()
    spmd.main.call(address, port, ["train.py", "--lr", "0.1"]).get()
    """

    def __init__(self) -> None:
        place = current_rank()
        sizes = place.extent.sizes or [1]
        self.rank = place.rank
        self.world_size = place.extent.nelements
        self.local_world_size = sizes[-1]
        self.local_rank = place.rank % self.local_world_size

    @endpoint
    def get_host_port(self, use_ipaddr: Family | None = None) -> tuple[str, int]:
        """The name or address of this host, and a port that nobody uses now, for the processes to meet at. With
        "IPv4" or "IPv6" it is an address of that kind. Raises ValueError where the host's name has none."""
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        here = current.process().address
        name = port_of(here)[0] if host_of(here) else socket.gethostname()
        kind: str | None = getattr(use_ipaddr, "name", use_ipaddr)  # theirs is a member of an Enum
        if kind is not None and kind not in _FAMILIES:
            raise ValueError(f"use_ipaddr={use_ipaddr!r}: it is 'IPv4' or 'IPv6', or None for the host's name")
        try:
            found = socket.getaddrinfo(name, port, _FAMILIES[kind or "Default"], socket.SOCK_STREAM)
        except socket.gaierror as error:
            if kind is not None:
                raise ValueError(f"use_ipaddr={kind!r}: {name} has no such address ({error.strerror})") from None
            return name if host_of(here) else "127.0.0.1", port  # a host that does not know its own name
        return name if kind is None else str(found[0][4][0]), port

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set what `torch.distributed.init_process_group` reads."""
        self._set(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: list[str]) -> bool:
        """Run a script, `["train.py", "--lr", "0.1"]`, or a module, `["-m", "train", "--lr", "0.1"]`, to its end: True.

        Raises its error; `sys.exit(0)` is a good end, and any other SystemExit a RuntimeError.
        """
        module = script_args[:1] == ["-m"]
        what = script_args[1:] if module else script_args
        if not what:
            raise ValueError(f"no script or module to run: {script_args}")
        self._set(master_addr, master_port)
        sys.argv = list(what)
        try:
            if module:
                runpy.run_module(what[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(what[0])))
                runpy.run_path(what[0], run_name="__main__")
        except SystemExit as exit:
            if exit.code:
                raise RuntimeError(f"{what[0]} exited with {exit.code!r}") from exit
        return True

    def _set(self, master_addr: str, master_port: int) -> None:
        hosts = self.world_size // self.local_world_size
        os.environ.update(
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            GROUP_RANK=str(self.rank // self.local_world_size),
            GROUP_WORLD_SIZE=str(hosts),
            ROLE_RANK=str(self.rank),
            ROLE_WORLD_SIZE=str(self.world_size),
            ROLE_NAME="default",
        )


def setup_torch_elastic_env(
    procs: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: Family | None = None,
) -> None:
    """Give the processes of a mesh the environment that torchrun would: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …

    Without address and port, the processes meet at the first one's host, at a port that is free there: by its name, or
    by an address of the kind `use_ipaddr`, "IPv4" or "IPv6". ValueError for one without the other.
    """
    if (master_addr is None) != (master_port is None):
        raise ValueError(f"master_addr={master_addr!r}, master_port={master_port!r}: give both, or neither")
    actors = procs.spawn("spmd", SPMDActor)
    if master_addr is None or master_port is None:
        first = dict.fromkeys(procs.extent.labels, 0)
        master_addr, master_port = actors.slice(**first).get_host_port.call_one(use_ipaddr).get()
    actors.setup_env.call(master_addr, master_port).get()
    actors.stop("the environment is set").get()


async def setup_torch_elastic_env_async(
    procs: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: Family | None = None,
) -> None:
    """`setup_torch_elastic_env` in a coroutine. ValueError for an address without a port, or the reverse."""
    if (master_addr is None) != (master_port is None):
        raise ValueError(f"master_addr={master_addr!r}, master_port={master_port!r}: give both, or neither")
    actors = procs.spawn("spmd", SPMDActor)
    if master_addr is None or master_port is None:
        first = dict.fromkeys(procs.extent.labels, 0)
        master_addr, master_port = await actors.slice(**first).get_host_port.call_one(use_ipaddr)
    await actors.setup_env.call(master_addr, master_port)
    await actors.stop("the environment is set")
