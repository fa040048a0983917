"""Processes at the other end: each has an endpoint and does what it is asked over a pipe. And the ways to be joined.

A `Way` is a transport with the circumstances under which the one suite runs over it. Free of torch.
"""

from __future__ import annotations

import ctypes
import datetime
import ipaddress
import mmap
import multiprocessing
import os
import pickle
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from monarch.runtime.shared import futex
from monarch.runtime.transport import process_vm, stream
from monarch.runtime.transport.endpoint import Endpoint, Registration
from monarch.runtime.transport.interface import AccessRefused, Address, Region, Signal
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.verbs import adapter
from tests.runtime.transport.libcuda import standin

SECRET = b"the secret of these tests, 32 B."
PATIENCE = 60.0


def nothing() -> None:
    """Nothing is missing."""


@dataclass(frozen=True)
class Way:
    """`transport` is what both sides use; with `tls` under certificates; with `file` memory is registered with the
    memfd that holds it; with `staged` processes cannot reach each other's memory; `library` is the one that verbs are
    called through; with `rounds` a peer's I/O thread reads so often at most before others have their turn. With `gpu`
    peers register memory of GPUs, but for words: of a stand-in ("stand-in"), which is in `folder`, or real ones
    ("real"). `missing` says why it cannot be tried here."""

    name: str
    transport: str
    tls: bool = False
    file: bool = False
    staged: bool = False
    library: str = ""
    rounds: int = 0
    gpu: str = ""
    missing: Callable[[], str | None] = nothing
    folder: Path | None = None

    def __str__(self) -> str:
        return self.name

    def endpoint(self, **options: Any) -> Endpoint:
        tls = contexts(self.folder) if self.tls and self.folder is not None else None
        return Endpoint(SECRET, transports=(self.transport,), tls=tls, **options)

    def within(self, folder: Path) -> Way:
        return replace(self, folder=folder)

    def begin(self) -> Callable[[], None]:
        """Let this process have the GPUs that the way wants; gives what ends that."""
        if self.gpu == "stand-in":
            assert self.folder is not None
            return standin.install(self.folder / "libcuda.so")
        if self.gpu:
            standin.GPUS = standin.Real()
        return nothing


def without_verbs(library: str) -> str | None:
    """Why there is no RDMA by this library."""
    try:
        adapter.library([library])
    except adapter.NoVerbs as error:
        return str(error)
    return None


WAYS = [
    Way("tcp", "tcp"),
    Way("tls", "tcp", tls=True),
    Way("shm-file", "shm", file=True),
    Way("shm-memory", "shm"),
    Way("shm-staged", "shm", staged=True),
    Way("cuda", "cuda", gpu="stand-in", missing=standin.missing),
    Way("cuda-real", "cuda", gpu="real", missing=standin.real_missing),
    Way("tcp-gpu", "tcp", gpu="stand-in", missing=standin.missing),
    Way("verbs-pyverbs", "verbs", library="pyverbs", missing=lambda: without_verbs("pyverbs")),
    Way("verbs-ibverbs", "verbs", library="ibverbs", missing=lambda: without_verbs("ibverbs")),
]


# -- certificates ------------------------------------------------------------------------------------------------------


def write_certificates(folder: Path) -> None:
    """A key and a certificate for 127.0.0.1 that signs itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "monarch tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server and of a client; each wants the other's certificate."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        context.load_verify_locations(folder / "certificate.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    return server, client


# -- memory ------------------------------------------------------------------------------------------------------------


class Block:
    """Some memory, registered the way that the way wants."""

    def __init__(self, endpoint: Endpoint, size: int, file: bool) -> None:
        self.file = os.memfd_create("test", os.MFD_CLOEXEC) if file else None
        if self.file is None:
            self.memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            os.ftruncate(self.file, max(size, 1))
            self.memory = mmap.mmap(self.file, max(size, 1))
        self.view = memoryview(self.memory)[:size]
        self.registration: Registration = endpoint.register(self.view, file=self.file)
        self.region: Region = self.registration.region

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view))

    def read(self) -> bytes:
        return bytes(self.view)

    def fill(self, fill: int) -> None:
        self.view[:] = bytes([fill]) * self.view.nbytes

    def wait_word(self, offset: int, value: int) -> None:
        """Sleep until the word is `value`."""
        words = self.view[: self.view.nbytes // 8 * 8].cast("q")
        address = self.address() + offset
        end = time.monotonic() + PATIENCE
        while (seen := words[offset // 8]) != value:
            assert time.monotonic() < end, f"the word at byte {offset} is still {seen}, and not {value}"
            futex.wait(address, seen, PATIENCE)
        if not futex.ORDERED:
            futex.fence()


class GpuBlock:
    """Memory of a GPU, registered: new, or a part of some."""

    def __init__(self, endpoint: Endpoint, size: int, memory: Any = None) -> None:
        self.memory = standin.GPUS.make(size) if memory is None else memory
        self.size = size
        self.registration: Registration = endpoint.register(self.memory)
        self.region: Region = self.registration.region

    def read(self) -> bytes:
        data: bytes = standin.GPUS.read(self.memory)
        return data

    def fill(self, fill: int) -> None:
        standin.GPUS.write(self.memory, bytes([fill]) * self.size)


# -- the process -------------------------------------------------------------------------------------------------------


class Server:
    """What the other process does. Every method that `Peer` calls is one of these."""

    def __init__(self, way: Way) -> None:
        if way.staged:
            process_vm.probe = lambda pid, address, expected: "not permitted in this test"
        if way.library:
            adapter.LIBRARIES = (way.library,)
        if way.rounds:
            stream.ROUNDS = way.rounds
        way.begin()
        self.way = way
        self.lost: list[str] = []
        self.joined = threading.Semaphore(0)
        self.endpoint = way.endpoint(
            lost=lambda link, error: self.lost.append(str(error)), joined=lambda link: self.joined.release()
        )
        self.blocks: dict[int, Block | GpuBlock] = {}
        self.made: dict[str, StreamLink] = {}

    def address(self) -> Address:
        return self.endpoint.address

    def register(self, size: int, fill: int = 0, file: bool | None = None) -> Region:
        if self.way.gpu:
            return self._added(GpuBlock(self.endpoint, size), fill)
        return self._added(Block(self.endpoint, size, self.way.file if file is None else file), fill)

    def register_on(self, gpu: int, size: int) -> Region:
        return self._added(GpuBlock(self.endpoint, size, standin.GPUS.make(size, gpu)), 0)

    def register_parts(self, size: int, count: int) -> list[Region]:
        """Of one allocation on a GPU."""
        whole = standin.GPUS.make(size * count)
        parts = [whole[at * size : (at + 1) * size] for at in range(count)]
        return [self._added(GpuBlock(self.endpoint, size, part), 0) for part in parts]

    def buffer(self, size: int, fill: int) -> bytes:
        """A pickled RDMABuffer of memory on a GPU."""
        from monarch.runtime import rdma

        rdma.configure(transports=(self.way.transport,))
        memory = standin.GPUS.make(size)
        standin.GPUS.write(memory, bytes([fill]) * size)
        return pickle.dumps(rdma.RDMABuffer(memory))

    def words(self, size: int, fill: int = 0) -> Region:
        """Memory of the host."""
        return self._added(Block(self.endpoint, size, self.way.file), fill)

    def _added(self, block: Block | GpuBlock, fill: int) -> Region:
        if fill:
            block.fill(fill)
        self.blocks[block.region.number] = block
        return block.region

    def read(self, number: int, offset: int = 0, size: int | None = None) -> bytes:
        data = self.blocks[number].read()[offset:]
        return data if size is None else data[:size]

    def fill(self, number: int, fill: int) -> None:
        self.blocks[number].fill(fill)

    def drop(self, number: int) -> None:
        self.blocks[number].registration.drop()

    def drop_and_fill(self, number: int, fill: int) -> None:
        self.drop(number)
        self.fill(number, fill)

    def wait_word(self, number: int, offset: int, value: int) -> None:
        self._words(number).wait_word(offset, value)

    def _words(self, number: int) -> Block:
        block = self.blocks[number]
        assert isinstance(block, Block)
        return block

    def echo(self, number: int, words: int, back: Region, rounds: int) -> None:
        """Answer each signal, in order, with one of the same value; check that the payload has come before it."""
        link = self.link()
        for value in range(1, rounds + 1):
            self._words(words).wait_word(0, value)
            assert self.read(number, 8, 56) == bytes([value % 251]) * 56, value
            link.post(b"", back, 0, Signal(back, 0, value))

    def connect(self, address: Address) -> None:
        self.made[address.process] = self.endpoint.connect(address, timeout=PATIENCE)

    def link(self) -> StreamLink:
        """The link that somebody else has made."""
        if not self.endpoint.links:
            assert self.joined.acquire(timeout=PATIENCE)
        return self.endpoint.links[0]

    def put_many(self, region: Region, size: int, count: int) -> None:
        """Over the link that was made to this process: `count` puts side by side."""
        link = self.link()
        works = [link.put(bytes([1 + at % 255]) * size, region, at * size) for at in range(count)]
        for work in works:
            work.wait(PATIENCE)

    def put_until_refused(self, region: Region, size: int) -> str:
        """Over the link that was made to this process; gives what is said in the end."""
        while True:
            try:
                self.link().put(bytes(size), region).wait(PATIENCE)
            except AccessRefused as error:
                return error.message

    def get(self, process: str, region: Region, size: int) -> bytes:
        data = bytearray(size)
        self.made[process].get(data, region).wait(PATIENCE)
        return bytes(data)

    def add_many(self, process: str, region: Region, offset: int, count: int) -> list[int]:
        link = self.made[process]
        works = [link.fetch_add(region, offset, 1) for _ in range(count)]
        return [int(work.wait(PATIENCE) or 0) for work in works]

    def count_under_lock(self, process: str, region: Region, count: int) -> None:
        """`count` times: take a spin lock in the first word, add one to the second by reading and writing it."""
        link = self.made[process]
        word = memoryview(bytearray(8))
        for _ in range(count):
            while link.compare_swap(region, 0, 0, 1).wait(PATIENCE) != 0:
                pass
            link.get(word, region, 8).wait(PATIENCE)
            word.cast("q")[0] += 1
            link.put(word, region, 8).wait(PATIENCE)
            assert link.compare_swap(region, 0, 1, 0).wait(PATIENCE) == 1

    def links(self) -> int:
        return len(self.endpoint.links)

    def errors(self) -> list[str]:
        return self.lost

    def close_links(self) -> None:
        for link in self.endpoint.links:
            link.close()

    def close(self) -> None:
        self.endpoint.close()

    def pid(self) -> int:
        return os.getpid()


def _serve(pipe: Connection, way: Way) -> None:
    server = Server(way)
    pipe.send(None)
    while True:
        name, arguments = pipe.recv()
        if name == "end":
            server.endpoint.close()
            return
        try:
            pipe.send((True, getattr(server, name)(*arguments)))
        except Exception as error:
            pipe.send((False, error))


class Peer:
    """Another process, as this one sees it: `peer.register(16)` runs `Server.register(16)` there."""

    def __init__(self, way: Way) -> None:
        # A third process forks the peers: it has not used CUDA, which does not survive a fork, and it is small, so that
        # a fork takes milliseconds.
        context: Any = multiprocessing.get_context("forkserver")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, replace(way, missing=nothing)), daemon=True)
        self._process.start()
        there.close()
        self._pipe.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.begin(name, *arguments)
            return self.result()

        return call

    def begin(self, name: str, *arguments: Any) -> None:
        """Ask for something, and do not wait for it."""
        self._pipe.send((name, arguments))

    def result(self) -> Any:
        fine, value = self._pipe.recv()
        if not fine:
            raise value
        return value

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def stop(self) -> None:
        """It does nothing more, and is not gone: nothing is answered until `go_on`."""
        pid = self._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        # Not by waitid: it may be the child of another process.
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()

    def go_on(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("end", ()))
        self._process.join(PATIENCE)
        self._pipe.close()


multiprocessing.set_forkserver_preload([__name__])


@contextmanager
def peers(way: Way, count: int = 1) -> Iterator[list[Peer]]:
    started: list[Peer] = []
    try:
        for _ in range(count):
            started.append(Peer(way))
        yield started
    finally:
        for peer in started:
            peer.end()
