"""What users write: no complaint, and these types."""

from __future__ import annotations

import operator
from typing import reveal_type

import monarch
from monarch.actor import (
    Accumulator,
    Actor,
    Channel,
    MeshFailure,
    Port,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    get_or_spawn_controller,
    send,
    this_host,
)


class Trainer(Actor):
    def __init__(self, width: int, *, rate: float = 0.1) -> None:
        self.width = width

    @endpoint
    def step(self, batch: int, lr: float = 0.1) -> float:
        return batch * lr

    @endpoint()
    def names(self) -> list[str]:
        return []

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[str], question: str) -> None:
        port.send(question)

    def debug(self, level: int) -> str:
        return str(level)

    def __supervise__(self, failure: MeshFailure) -> bool:
        return failure.status == -9


class Server(Actor):
    @endpoint
    async def get(self, key: str) -> int:
        return len(key)

    @concurrent_endpoint
    async def wait(self, key: str) -> bool:
        return True

    @endpoint(explicit_response_port=True)
    async def later(self, port: Port[bytes]) -> None:
        port.send(b"")

    @concurrent_endpoint(explicit_response_port=True)
    async def latest(self, port: Port[bytes], n: int) -> None:
        port.send(b"" * n)

    async def __cleanup__(self, exc: Exception | None) -> None: ...


procs = this_host().spawn_procs(per_host={"gpus": 8}, name="trainers")
trainers = procs.spawn("trainers", Trainer, 128, rate=0.3)
reveal_type(procs)  # ProcMesh
reveal_type(trainers)  # Trainer
reveal_type(trainers.slice(gpus=slice(0, 2)))  # Trainer
reveal_type(trainers.step.call(1, lr=0.1))  # Future[ValueMesh[float]]
reveal_type(trainers.slice(gpus=0).step.call_one(1).get())  # float
reveal_type(trainers.step.choose(batch=1).get(timeout=3))  # float
reveal_type([reply.get() for reply in trainers.step.stream(1, 2)])  # list[float]
reveal_type(trainers.step.broadcast(1))  # None
reveal_type(trainers.step.shards(1))  # Shards[float]
reveal_type(trainers.names.call().get().item(gpus=0))  # list[str]
reveal_type(trainers.names.call().get().slice(gpus=0).values())  # list[list[str]]
reveal_type(trainers.later.call_one("why?").get())  # str
reveal_type(as_endpoint(trainers.debug).call_one(3).get())  # str
reveal_type(trainers.size("gpus"))  # int
reveal_type(trainers.initialized)  # Future[bool]
reveal_type(trainers.stop("enough"))  # Future[None]
reveal_type(Accumulator(trainers.step, 0.0, operator.add).accumulate(1, lr=0.1).get())  # float

port, receiver = Channel[str].open()
send(trainers.later, ("why?",), {}, port)
reveal_type(receiver.recv())  # Future[str]

servers = procs.spawn("servers", Server)
controller = get_or_spawn_controller("server", Server)
reveal_type(controller.get())  # Server


reveal_type(monarch.hosts("hosts.txt").spawn_procs())  # ProcMesh


async def main() -> None:
    reveal_type(await servers.get.call_one("x"))  # int
    reveal_type(await servers.wait.choose("x"))  # bool
    reveal_type(await servers.later.call_one())  # bytes
    reveal_type(await servers.latest.call_one(3))  # bytes
    async with this_host().spawn_procs(per_host={"gpus": 2}) as others:
        reveal_type(others)  # ProcMesh
        await others.initialized
        async with others.spawn("more", Server) as more:
            reveal_type(more)  # Server
