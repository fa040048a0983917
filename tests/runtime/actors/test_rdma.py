"""RDMA buffers in messages: memory that is used where its name arrives."""

from __future__ import annotations

import pytest
import torch

from monarch.actor import Actor, ActorError, endpoint, this_host
from monarch.rdma import RDMABuffer
from tests.runtime.actors.conftest import WAIT


class Keeper(Actor):
    """Has memory."""

    def __init__(self) -> None:
        self.memory = torch.arange(8, dtype=torch.float32)
        self.buffer = RDMABuffer(self.memory)

    @endpoint
    def lend(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def content(self) -> list[float]:
        return self.memory.tolist()

    @endpoint
    def drop(self) -> None:
        self.buffer.drop().get()


class User(Actor):
    """Is given a buffer, or asks for one, and uses it."""

    @endpoint
    async def double(self, keeper: Keeper) -> str:
        buffer = await keeper.lend.call_one()
        here = torch.zeros(8)
        await buffer.read_into(here)
        await buffer.write_from(here * 2)
        return buffer.backend

    @endpoint
    async def read(self, buffer: RDMABuffer) -> list[float]:
        here = torch.zeros(8)
        await buffer.read_into(here)
        return here.tolist()


def test_a_buffer_goes_from_worker_to_worker_and_back() -> None:
    procs = this_host().spawn_procs(per_host={"procs": 2})
    keeper = procs.slice(procs=0).spawn("keeper", Keeper)
    user = procs.slice(procs=1).spawn("user", User)
    assert user.double.call_one(keeper).get(WAIT) == "shm"
    doubled = [2.0 * n for n in range(8)]
    assert keeper.content.call_one().get(WAIT) == doubled
    buffer = keeper.lend.call_one().get(WAIT)  # here, in the program
    assert user.read.call_one(buffer).get(WAIT) == doubled
    here = torch.zeros(8)
    buffer.read_into(here).get()
    assert here.tolist() == doubled


def test_what_was_dropped_is_refused_where_it_is_used() -> None:
    procs = this_host().spawn_procs(per_host={"procs": 2})
    keeper = procs.slice(procs=0).spawn("keeper", Keeper)
    user = procs.slice(procs=1).spawn("user", User)
    buffer = keeper.lend.call_one().get(WAIT)
    keeper.drop.call_one().get(WAIT)
    with pytest.raises(ActorError, match="AccessRefused"):
        user.read.call_one(buffer).get(WAIT)
