"""GPUs for tests: those of a stand-in of the driver (`driver.c`), and real ones where there are any.

`GPUS` is what this process tests with: `install` puts a stand-in there, and into `cuda.driver`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from monarch.runtime.transport.cuda import driver

SOURCE = Path(__file__).with_name("driver.c")


def missing() -> str | None:
    """Why the stand-in cannot be built here."""
    return None if shutil.which("gcc") else "no C compiler: gcc is not on the path"


def build(folder: Path) -> Path:
    """The stand-in as a library in the folder, which also gets its memory."""
    library = folder / "libcuda.so"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["gcc", *flags, "-o", library, SOURCE], check=True, timeout=120)
    return library


class Gpus(Protocol):
    """Makes memory on a GPU, as objects that transports take for tensors."""

    def make(self, size: int, gpu: int = 0) -> Any: ...

    def read(self, tensor: Any) -> bytes: ...

    def write(self, tensor: Any, data: bytes) -> None: ...

    def free(self, tensor: Any) -> None: ...


@dataclass(frozen=True)
class Tensor:
    """Bytes on a GPU of the stand-in: what transports look at in a tensor."""

    address: int
    size: int
    gpu: int

    @property
    def device(self) -> str:
        return f"cuda:{self.gpu}"

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.size)
        return Tensor(self.address + start, stop - start, self.gpu)


class StandIn:
    """The stand-in, and the part that PyTorch plays: it makes memory, and has a current stream on each GPU."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.standin_release.argtypes = [ctypes.c_void_p]
        self.library.standin_hold.argtypes = [ctypes.c_void_p]
        self.library.standin_fill.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t]
        self.library.standin_peek.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
        self.library.standin_poke.argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
        self._streams: dict[tuple[int, bool], int] = {}

    def on(self, gpu: int, name: str, *arguments: Any) -> int:
        """Call a function of the driver with a GPU's context; gives its status."""
        with driver.here().on(gpu):
            status: int = getattr(self.library, name)(*arguments)
        return status

    def current_stream(self, gpu: int) -> int:
        """Tests launch on the main thread, where the current stream is another than for all other threads: who asks on
        the wrong thread does not wait."""
        which = gpu, threading.current_thread() is threading.main_thread()
        if which not in self._streams:
            made = (ctypes.c_void_p * 1)()
            assert self.on(gpu, "cuStreamCreate", made, ctypes.c_uint(0)) == 0
            self._streams[which] = int(made[0] or 0)
        return self._streams[which]

    def make(self, size: int, gpu: int = 0, kind: str = "cuMemAlloc_v2") -> Tensor:
        if not size:
            return Tensor(0, 0, gpu)
        found = (ctypes.c_uint64 * 1)()
        assert self.on(gpu, kind, found, ctypes.c_size_t(size)) == 0
        return Tensor(int(found[0]), size, gpu)

    def free(self, tensor: Tensor) -> None:
        if tensor.size:
            assert self.on(tensor.gpu, "cuMemFree_v2", ctypes.c_uint64(tensor.address)) == 0

    def read(self, tensor: Tensor) -> bytes:
        found = ctypes.create_string_buffer(tensor.size)
        assert not tensor.size or self.library.standin_peek(tensor.address, found, tensor.size)
        return found.raw

    def write(self, tensor: Tensor, data: bytes) -> None:
        assert not data or self.library.standin_poke(tensor.address, data, len(data))

    # -- a stream of PyTorch's ---------------------------------------------------------------------------------------

    def launch_fill(self, tensor: Tensor, value: int) -> None:
        self.library.standin_fill(self.current_stream(tensor.gpu), tensor.address, value, tensor.size)

    def hold(self, gpu: int) -> None:
        self.library.standin_hold(self.current_stream(gpu))

    def release(self, gpu: int) -> None:
        self.library.standin_release(self.current_stream(gpu))

    def settle(self) -> None:
        """Return when no stream can do more: what could have been done too early has been."""
        self.library.standin_settle()

    def count(self, what: str) -> int:
        """ "opens", "closes", "copies", "launched" (copies) or "spins" so far, or the "events" that there are."""
        number: int = getattr(self.library, f"standin_{what}")()
        return number


class Real:
    """Those of torch."""

    def make(self, size: int, gpu: int = 0) -> Any:
        import torch

        return torch.zeros(size, dtype=torch.uint8, device=f"cuda:{gpu}")

    def read(self, tensor: Any) -> bytes:
        return bytes(tensor.cpu().numpy().tobytes())

    def write(self, tensor: Any, data: bytes) -> None:
        import torch

        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else tensor)
        torch.cuda.synchronize()

    def free(self, tensor: Any) -> None:
        pass  # PyTorch keeps its memory


def real_missing() -> str | None:
    """Why there is no GPU to test with."""
    return driver.missing()


def install(library: Path, count: int = 2, first: int = 0, peers: bool = True, late: int = 20) -> Callable[[], None]:
    """Have this process use a stand-in with so many GPUs, of which it sees those from number `first` on; gives what
    puts back how it was. A stream of the stand-in takes `late` microseconds longer for everything."""
    global GPUS
    standin = StandIn(library)
    folder = ctypes.c_char_p(str(library.parent).encode())
    standin.library.standin_setup(folder, count, first, int(peers), ctypes.c_uint(late))
    before = driver.without_gpus, driver.current_stream, driver.loaded
    driver.without_gpus = lambda: None
    driver.current_stream = standin.current_stream
    driver.loaded = driver.Driver(standin.library)
    GPUS = standin

    def undo() -> None:
        driver.without_gpus, driver.current_stream, driver.loaded = before

    return undo


GPUS: Any = None
