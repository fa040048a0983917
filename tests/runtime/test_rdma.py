"""`monarch.rdma`: buffers used from their own process, from another, and from asyncio."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import monarch.runtime.rdma as rdma
from monarch.compiler.plan import MonarchError
from monarch.rdma import RDMAAction, RDMABuffer, configure, get_rdma_backend, is_ibverbs_available
from monarch.runtime.transport.interface import AccessRefused, LinkLost

PATIENCE = 60.0
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


class Owner:
    """A process that has a buffer, and says what its memory holds."""

    def __init__(self, make: Callable[[], Any], transports: tuple[str, ...] | None = None) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, there = fork.Pipe()
        self.process = fork.Process(target=_own, args=(there, make, transports), daemon=True)
        self.process.start()
        there.close()
        self.buffer: RDMABuffer = pickle.loads(self._pipe.recv_bytes())

    def ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        """In order: what it had sent memory with leaves a folder otherwise."""
        if self.process.is_alive():
            self._pipe.send("end")
            self.process.join(30)
        self.kill()


def _own(pipe: Connection, make: Callable[[], Any], transports: tuple[str, ...] | None) -> None:
    if transports is not None:
        configure(transports=transports)
    memory = make()
    pickled = pickle.dumps(RDMABuffer(memory))  # the object is gone then: the pickle keeps the memory registered
    pipe.send_bytes(pickled)
    while True:
        what = pipe.recv()
        if what == "memory":
            pipe.send(memory)
        elif what == "drop":
            pipe.send(pickle.loads(pickled).drop().get())
        else:
            return


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test has an endpoint of its own: also the first one, where another file's has left one."""
    rdma.close()
    yield
    rdma.close()


@pytest.fixture(params=["shm", "tcp"])
def owned(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Owner]]:
    """Starts owners that are reached over one transport."""
    owners: list[Owner] = []

    def start(make: Callable[[], Any]) -> Owner:
        owners.append(Owner(make, (request.param,)))
        if len(owners) == 1:
            configure(transports=(request.param,))
        return owners[-1]

    start.transport = request.param  # type: ignore[attr-defined]
    yield start
    for owner in owners:
        owner.end()


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so NaNs of all kinds too; True and False are 1 and 0."""
    size = torch.empty(shape, dtype=dtype).nbytes
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- from another process ----------------------------------------------------------------------------------------------


@pytest.mark.sample()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(owned: Any, dtype: torch.dtype) -> None:
    owner = owned(lambda: torch.zeros(3, 5, 7, dtype=dtype))
    source, target = some(dtype, 3, 5, 7), torch.zeros(3, 5, 7, dtype=dtype)
    owner.buffer.write_from(source).get()
    owner.buffer.read_into(target).get()
    assert bits(target) == bits(source) == bits(owner.ask("memory"))
    assert owner.buffer.backend == owned.transport
    assert owner.buffer.size() == source.nbytes
    assert len(owner.buffer.owner) == 32


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (9 << 18,)], ids=str)
def test_tensors_of_every_size(owned: Any, shape: tuple[int, ...]) -> None:
    owner = owned(lambda: torch.zeros(shape))
    source, target = some(torch.float32, *shape), torch.zeros(shape)
    owner.buffer.write_from(source).result()
    owner.buffer.read_into(target).result()
    assert bits(target) == bits(source)


def test_buffers_of_bytes_and_of_views(owned: Any) -> None:
    owner = owned(lambda: bytearray(b"0123456789"))
    target = bytearray(10)
    owner.buffer.read_into(memoryview(target)).get()
    assert target == b"0123456789"
    rows = torch.zeros(4, 10, dtype=torch.uint8)
    owner.buffer.read_into(rows[2]).get()
    assert bits(rows) == bytes(20) + b"0123456789" + bytes(10)


def test_parts_of_a_buffer(owned: Any) -> None:
    owner = owned(lambda: bytearray(b"0123456789"))
    part = bytearray(3)
    owner.buffer.read_into(part, offset=4).get()
    assert part == b"456"
    owner.buffer.write_from(b"ab", offset=8).get()
    owner.buffer.write_from(b"XY").get()
    larger = bytearray(b"-" * 12)
    owner.buffer.read_into(larger).get()
    assert larger == b"XY234567ab--"


def test_what_does_not_fit_is_an_error_here(owned: Any) -> None:
    buffer = owned(lambda: torch.zeros(10)).buffer
    with pytest.raises(MonarchError, match=r"the buffer has 40 bytes, and there is room for 36(.|\n)*offset=0"):
        buffer.read_into(torch.zeros(9))
    with pytest.raises(AccessRefused, match="bytes 0 to 44 are out of the bounds of this buffer, which has 40"):
        buffer.write_from(torch.zeros(11))
    with pytest.raises(AccessRefused, match="bytes 8 to 48 are out of the bounds"):
        buffer.read_into(torch.zeros(10), offset=8)
    with pytest.raises(AccessRefused, match="bytes -4 to 0 are out"):
        buffer.write_from(torch.zeros(1), offset=-4)
    with pytest.raises(AccessRefused, match="bytes 40 to 48 are out"):
        buffer.fetch_add(40, 1)
    with pytest.raises(MonarchError, match=r"this tensor has shape \[5, 2\], strides \[1, 5\](.|\n)*contiguous()"):
        buffer.read_into(torch.zeros(2, 5).T)
    with pytest.raises(MonarchError, match="read-only, and is to be written"):
        buffer.read_into(bytes(40))
    with pytest.raises(MonarchError, match="conjugated"):
        buffer.write_from(torch.zeros(5, dtype=torch.complex64).conj())
    with pytest.raises(MonarchError, match="a list is no memory"):
        buffer.write_from([1, 2])
    with pytest.raises(MonarchError, match="no transport here reaches memory on meta; in use are"):
        RDMABuffer(torch.empty(3, device="meta"))
    with pytest.raises(MonarchError, match="a str is no memory"):
        RDMABuffer("text")


def test_words(owned: Any) -> None:
    owner = owned(lambda: torch.zeros(4, dtype=torch.int64))
    assert owner.buffer.fetch_add(8, 5).get() == 0
    assert owner.buffer.fetch_add(8, -6).get() == 5
    assert owner.buffer.compare_swap(8, -1, 9).get() == -1
    assert owner.buffer.compare_swap(8, -1, 10).get() == 9
    assert owner.ask("memory").tolist() == [0, 9, 0, 0]
    with pytest.raises(AccessRefused, match="no word at byte 4"):
        owner.buffer.fetch_add(4, 1).get()


def test_a_dropped_buffer_is_refused(owned: Any) -> None:
    owner = owned(lambda: torch.ones(10))
    owner.buffer.read_into(torch.zeros(10)).get()
    with pytest.raises(MonarchError, match=r"is in process [0-9a-f]{8}, which alone can drop it"):
        owner.buffer.drop()
    owner.ask("drop")
    owner.ask("drop")
    with pytest.raises(AccessRefused, match="there is no region"):
        owner.buffer.read_into(torch.zeros(10)).get()
    with pytest.raises(AccessRefused, match="there is no region"):
        owner.buffer.fetch_add(0, 1).get()


def test_an_owner_that_has_died(owned: Any) -> None:
    owner = owned(lambda: torch.ones(10))
    target = torch.zeros(10)
    owner.buffer.read_into(target).get()
    owner.kill()
    for _ in range(3):
        with pytest.raises(LinkLost):
            owner.buffer.read_into(target).get(PATIENCE)
    with pytest.raises(LinkLost, match="cannot connect to"):
        owner.buffer.write_from(target).get(PATIENCE)
    assert target.tolist() == [1.0] * 10


def test_links_are_kept(owned: Any) -> None:
    owner, other = owned(lambda: torch.ones(10)), owned(lambda: torch.ones(10))
    copy = pickle.loads(pickle.dumps(owner.buffer))
    for buffer in (owner.buffer, copy, other.buffer, copy):
        buffer.read_into(torch.zeros(10)).get()
    assert len(rdma.endpoint().links) == 2


def test_a_batch(owned: Any) -> None:
    first, second = owned(lambda: torch.arange(1000.0)), owned(lambda: torch.zeros(1000, dtype=torch.int64))
    here, word = torch.zeros(1000), torch.full((999,), 7)
    batch = RDMAAction()
    batch.read_into(first.buffer, here).write_from(second.buffer, word, offset=8).fetch_add(second.buffer, 0, 3)
    assert len(batch) == 3
    assert batch.submit(timeout=PATIENCE).get() == [None, None, 0]
    assert batch.compare_swap(second.buffer, 0, 0, 1).submit().get()[:3] == [None, None, 3]
    assert torch.equal(here, torch.arange(1000.0))
    assert second.ask("memory").tolist() == [6] + [7] * 999
    assert RDMAAction().submit().get() == []
    with pytest.raises(MonarchError, match="two actions of this batch use the same 80 bytes here"):
        RDMAAction().write_from(first.buffer, here[:30]).read_into(first.buffer, here[10:40], offset=0)
    RDMAAction().write_from(first.buffer, here[:30]).write_from(first.buffer, here[10:40], offset=2000).submit().get()


def test_a_batch_by_pytorch_monarchs_names(owned: Any) -> None:
    first, second = owned(lambda: torch.arange(1000.0)), owned(lambda: torch.zeros(1000, dtype=torch.int64))
    here = torch.zeros(1000)
    batch = RDMAAction().read_remote(here, first.buffer).write_remote(second.buffer, torch.tensor([5]))
    assert batch.submit(timeout=PATIENCE).get() == [None, None]
    assert torch.equal(here, torch.arange(1000.0))
    assert second.ask("memory").tolist() == [5] + [0] * 999


def test_a_batch_fails_when_one_of_its_actions_does(owned: Any) -> None:
    first, second = owned(lambda: torch.ones(10)), owned(lambda: torch.ones(10))
    second.ask("drop")
    here = torch.zeros(10)
    submitted = RDMAAction().read_into(second.buffer, torch.zeros(10)).read_into(first.buffer, here).submit()
    with pytest.raises(AccessRefused, match="there is no region"):
        submitted.get()
    assert here.tolist() == [1.0] * 10


def test_waiting_has_an_end(owned: Any) -> None:
    owner = owned(lambda: torch.ones(10, dtype=torch.int64))
    owner.buffer.fetch_add(0, 1).get()
    assert owner.process.pid is not None
    os.kill(owner.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED | os.WNOWAIT)
    slow = owner.buffer.fetch_add(0, 1, timeout=0.02)
    with pytest.raises(TimeoutError, match=r"the transfer has not finished within 0\.02 s"):
        slow.get()

    async def awaited() -> None:
        with pytest.raises(TimeoutError, match=r"the transfer has not finished within 0\.02 s"):
            await owner.buffer.fetch_add(0, 1, timeout=0.02)

    asyncio.run(awaited())
    os.kill(owner.process.pid, signal.SIGCONT)
    assert slow.get(PATIENCE) == 2


def test_a_tensor_in_shared_memory_is_mapped() -> None:
    """On the same host, what `share_memory_()` has moved to a file is copied straight from and to that file."""
    owner = Owner(lambda: torch.arange(10_000).share_memory_()[100:])
    here = torch.zeros(9900, dtype=torch.int64)
    owner.buffer.read_into(here).get()
    owner.buffer.write_from(torch.tensor([7]), offset=8).get()
    (link,) = rdma.endpoint().links
    assert [reach.kind for reach in link.reaches.values()] == ["file"]  # type: ignore[attr-defined]
    assert torch.equal(here, torch.arange(100, 10_000))
    assert owner.ask("memory")[:3].tolist() == [100, 7, 102]
    owner.ask("drop")
    with pytest.raises(AccessRefused, match="there is no region"):
        owner.buffer.read_into(here).get()
    owner.kill()


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_transfers_are_awaited(owned: Any) -> None:
    owners = [owned(lambda at=at: torch.full((1000,), float(at))) for at in range(3)]

    async def gather() -> list[torch.Tensor]:
        here = [torch.zeros(1000) for _ in owners]
        await asyncio.gather(
            *[_awaited(owner.buffer.read_into(each)) for owner, each in zip(owners, here, strict=True)]
        )
        await owners[0].buffer.write_from(here[2])
        assert await owners[1].buffer.compare_swap(0, 0, 1) != 0
        with pytest.raises(AccessRefused):
            await owners[1].buffer.fetch_add(4, 1)
        return here

    async def _awaited(transfer: Any) -> None:
        await transfer

    assert [each[0].item() for each in asyncio.run(gather())] == [0.0, 1.0, 2.0]
    assert owners[0].ask("memory")[0].item() == 2.0


def test_what_is_little_and_near_is_there_at_once() -> None:
    owner = Owner(lambda: torch.arange(1000.0), ("shm",))
    here = torch.zeros(1000)

    async def move() -> None:
        await owner.buffer.read_into(here)  # which makes the link
        here.zero_()
        read = owner.buffer.read_into(here)
        assert read.done() and here[-1] == 999
        await read
        written = owner.buffer.write_from(-here[:10], offset=0)
        assert written.done()
        await written
        with pytest.raises(AccessRefused):
            owner.buffer.write_from(here, offset=8)
        threads = threading.active_count()
        await owner.buffer.read_into(here[:10], offset=0)
        assert threading.active_count() == threads and here[9] == -9
        owner.ask("drop")
        with pytest.raises(AccessRefused):
            await owner.buffer.read_into(here)
        owner.kill()
        with pytest.raises((AccessRefused, LinkLost)):
            await owner.buffer.read_into(here)

    try:
        asyncio.run(move())
    finally:
        owner.end()


def test_who_waits_for_one_after_the_other_lets_others_run() -> None:
    owner = Owner(lambda: torch.zeros(10), ("shm",))
    here = torch.zeros(10)
    stop = False

    async def poll() -> bool:
        for _ in range(1000):
            await owner.buffer.read_into(here)
            if stop:
                return True
        return False

    async def end() -> None:
        nonlocal stop
        stop = True

    async def both() -> bool:
        await owner.buffer.read_into(here)
        polled, _ = await asyncio.gather(poll(), end())
        return polled

    try:
        assert asyncio.run(both())
    finally:
        owner.end()


# -- in the process that has the memory --------------------------------------------------------------------------------


def test_a_buffer_works_where_its_memory_is() -> None:
    weights = torch.arange(10, dtype=torch.int64)
    buffer = pickle.loads(pickle.dumps(RDMABuffer(weights)))
    assert buffer.backend == "local"
    here = torch.zeros(10, dtype=torch.int64)
    buffer.read_into(here).get()
    assert torch.equal(here, weights)
    buffer.write_from(torch.full((2,), 5), offset=16).get()
    assert buffer.fetch_add(16, 2).get() == 5
    assert buffer.compare_swap(24, 5, -1).get() == 5
    assert weights.tolist() == [0, 1, 7, -1, 4, 5, 6, 7, 8, 9]
    large = torch.rand(1 << 20)
    copy = torch.zeros(1 << 20)
    RDMABuffer(large).read_into(copy).get()
    assert torch.equal(large, copy)
    buffer.drop().get()
    buffer.drop().get()
    with pytest.raises(AccessRefused, match="there is no region"):
        buffer.read_into(here).get()


def test_memory_lives_as_long_as_its_buffer() -> None:
    kept, pickled = bytearray(10), bytearray(10)

    class Memory(bytearray):
        pass

    kept, pickled = Memory(10), Memory(10)
    alive, exported = weakref.ref(kept), weakref.ref(pickled)
    buffer, other = RDMABuffer(kept), RDMABuffer(pickled)
    text = pickle.dumps(other)
    del kept, pickled
    gc.collect()
    assert alive() is not None
    del buffer, other
    gc.collect()
    rdma.endpoint().loop.run(lambda: None)  # the I/O thread drops it
    gc.collect()
    assert alive() is None
    assert exported() is not None
    pickle.loads(text).drop().get()
    gc.collect()
    assert exported() is None


def test_it_is_too_late_to_configure() -> None:
    RDMABuffer(bytearray(8))
    with pytest.raises(MonarchError, match="this process's endpoint exists already"):
        configure(transports=("tcp",))


def test_a_fork_is_another_process() -> None:
    """The child reaches its parent's buffer by a link, and makes buffers of its own."""
    memory = torch.zeros(4, dtype=torch.int64)
    buffer = RDMABuffer(memory)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def child() -> None:
        assert buffer.backend == "shm"
        buffer.fetch_add(8, 5).get()
        own = torch.arange(4)
        theirs.send(RDMABuffer(own))
        theirs.recv()

    process = fork.Process(target=child, daemon=True)
    process.start()
    back = ours.recv()
    here = torch.zeros(4, dtype=torch.int64)
    back.read_into(here).get()
    assert here.tolist() == [0, 1, 2, 3]
    assert memory.tolist() == [0, 5, 0, 0]
    ours.send(None)
    process.join(PATIENCE)
    assert process.exitcode == 0


def test_threads_make_one_link(owned: Any) -> None:
    owner = owned(lambda: torch.zeros(1, dtype=torch.int64))
    threads = [threading.Thread(target=lambda: owner.buffer.fetch_add(0, 1).get(PATIENCE)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert owner.ask("memory").tolist() == [8]
    assert len(rdma.endpoint().links) == 1


def test_the_backend_is_that_of_the_endpoint() -> None:
    available = rdma.endpoint().transports["verbs"] == ""
    assert is_ibverbs_available() is available
    assert get_rdma_backend() == ("ibverbs" if available else "tcp")
