"""Scripts for torchrun, on a mesh of processes: each process gets the environment that torchrun would give it."""

from __future__ import annotations

import os
import runpy
import socket
import sys

from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.endpoint import endpoint
from monarch.runtime.actors.meshes import ProcMesh
from monarch.runtime.actors.messages.address import host_of, port_of
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.current import current_rank


class SPMDActor(Actor):
    """One process of what torchrun would start. The last dim of the mesh counts the processes of a host.

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
    def get_host_port(self) -> tuple[str, int]:
        """The name or address of this host, and a port that nobody uses now, for the processes to meet at."""
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        here = current.process().address
        if host_of(here):
            return port_of(here)[0], port
        name = socket.gethostname()
        try:
            socket.getaddrinfo(name, port)
        except socket.gaierror:  # a host that does not know its own name
            name = "127.0.0.1"
        return name, port

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set what `torch.distributed.init_process_group` reads."""
        self._set(master_addr, master_port)

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: list[str]) -> bool:
        """Run a script, `["train.py", "--lr", "0.1"]`, or a module, `["-m", "train", "--lr", "0.1"]`, to its end: True.

        Raises what it raises; `sys.exit(0)` is a good end, and any other SystemExit a RuntimeError.
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


def setup_torch_elastic_env(procs: ProcMesh, master_addr: str | None = None, master_port: int | None = None) -> None:
    """Give the processes of a mesh the environment that torchrun would: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …

    Where no address and port are given, the processes meet at the first one's host, at a port that is free there.
    """
    if (master_addr is None) != (master_port is None):
        raise ValueError(f"master_addr={master_addr!r}, master_port={master_port!r}: give both, or neither")
    actors = procs.spawn("spmd", SPMDActor)
    if master_addr is None or master_port is None:
        first = dict.fromkeys(procs.extent.labels, 0)
        master_addr, master_port = actors.slice(**first).get_host_port.call_one().get()
    actors.setup_env.call(master_addr, master_port).get()
    actors.stop("the environment is set").get()


async def setup_torch_elastic_env_async(
    procs: ProcMesh, master_addr: str | None = None, master_port: int | None = None
) -> None:
    """The same, in a coroutine."""
    if (master_addr is None) != (master_port is None):
        raise ValueError(f"master_addr={master_addr!r}, master_port={master_port!r}: give both, or neither")
    actors = procs.spawn("spmd", SPMDActor)
    if master_addr is None or master_port is None:
        first = dict.fromkeys(procs.extent.labels, 0)
        master_addr, master_port = await actors.slice(**first).get_host_port.call_one()
    await actors.setup_env.call(master_addr, master_port)
    await actors.stop("the environment is set")
