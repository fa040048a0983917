"""The two libraries, each with itself and with the other, on a real device; and what is said where there is none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from monarch.runtime.transport.verbs import adapter, ports, with_ibverbs, with_pyverbs
from monarch.runtime.transport.verbs.adapter import Completion, NoVerbs, VerbsFailed

ACCESS = adapter.LOCAL_WRITE | adapter.REMOTE_WRITE | adapter.REMOTE_READ
SIZE = 1 << 16


class End:
    """Everything for one end of a connection, on the first device."""

    def __init__(self, name: str) -> None:
        try:
            library = adapter.library([name])
        except NoVerbs as error:
            pytest.skip(str(error))
        self.device = library.open(library.devices()[0])
        number = ports.port_numbers(self.device.name)[0]
        way = ports.choose(ports.ways(self.device.port(number), ports.gids(self.device.name, number)))
        assert way is not None
        self.way = way
        self.bytes = mmap.mmap(-1, SIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.memory = self.device.register(self.address, SIZE, ACCESS)
        self.completions = self.device.completions(64)
        self.pair = self.device.queue_pair(self.completions, 16, 16)

    def connect(self, peer: End) -> None:
        gid, theirs = self.way.gid, peer.way.gid
        path = adapter.Path(
            port=self.way.port.number,
            queue_pair=peer.pair.number,
            mtu=self.way.port.mtu,
            send_number=77,
            receive_number=77,
            reads=4,
            lid=peer.way.port.lid,
            gid=None if theirs is None else theirs.raw,
            gid_index=0 if gid is None else gid.index,
        )
        self.pair.connect(path)

    def wait(self) -> list[Completion]:
        """Sleep until something is finished."""
        while True:
            if taken := self.completions.take():
                return taken
            assert select.select([self.completions.fd], [], [], 30)[0], "nothing was finished within 30 s"

    def close(self) -> None:
        for part in (self.pair, self.completions, self.memory, self.device):
            part.close()


@pytest.fixture(params=["pyverbs", "ibverbs", "pyverbs-ibverbs", "ibverbs-pyverbs"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    names = request.param.split("-")
    first, second = End(names[0]), End(names[-1])
    first.connect(second)
    second.connect(first)
    yield first, second
    first.close()
    second.close()


def finished(end: End) -> list[tuple[int, int, bool]]:
    return [(one.number, one.status, one.received) for one in end.wait()]


def test_bytes_are_written_sent_and_read(ends: tuple[End, End]) -> None:
    here, there = ends
    key, remote = here.memory.local_key, there.memory.remote_key
    here.bytes[:5] = b"bytes"
    here.pair.write(1, here.address, key, 5, there.address + 4096, remote, True)
    assert finished(here) == [(1, adapter.SUCCESS, False)] and there.bytes[4096:4101] == b"bytes"

    there.pair.receive(9, there.address + 64, there.memory.local_key, 64)
    here.pair.send(2, here.address, key, 5, False)
    assert there.wait() == [Completion(9, adapter.SUCCESS, True, 5)] and there.bytes[64:69] == b"bytes"

    there.bytes[:4] = b"back"
    here.pair.read(3, here.address + 100, key, 4, there.address, remote, True)
    assert finished(here) == [(3, adapter.SUCCESS, False)] and here.bytes[100:104] == b"back"


def test_a_write_of_nothing_to_nowhere_completes_all_before_it(ends: tuple[End, End]) -> None:
    here, there = ends
    here.bytes[:1] = b"x"
    here.pair.write(1, here.address, here.memory.local_key, 1, there.address, there.memory.remote_key, False)
    here.pair.write(2, here.address, here.memory.local_key, 0, 0, 0, True)
    assert finished(here) == [(2, adapter.SUCCESS, False)] and there.bytes[:1] == b"x"


def test_a_wrong_key_is_refused_and_ends_the_connection(ends: tuple[End, End]) -> None:
    here, there = ends
    here.pair.write(1, here.address, here.memory.local_key, 1, there.address, there.memory.remote_key ^ 0xFF, True)
    assert finished(here) == [(1, 10, False)]
    here.pair.write(2, here.address, here.memory.local_key, 1, there.address, there.memory.remote_key, True)
    assert finished(here) == [(2, adapter.FLUSHED, False)]
    assert there.bytes[:1] == b"\0"


def test_memory_that_is_not_registered_any_more_is_refused(ends: tuple[End, End]) -> None:
    here, there = ends
    again = there.device.register(there.address, SIZE, ACCESS)
    again.close()
    here.pair.write(1, here.address, here.memory.local_key, 1, there.address, again.remote_key, True)
    assert finished(here) == [(1, 10, False)]


def test_read_only_memory_is_registered_to_be_read(ends: tuple[End, End]) -> None:
    here, there = ends
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    with pytest.raises(VerbsFailed):
        here.device.register(address, mmap.PAGESIZE, ACCESS)
    source = here.device.register(address, mmap.PAGESIZE, 0)
    there.bytes[:4] = b"full"
    here.pair.write(1, address, source.local_key, 4, there.address, there.memory.remote_key, True)
    assert finished(here) == [(1, adapter.SUCCESS, False)] and there.bytes[:4] == bytes(4)
    source.close()


def test_what_cannot_be_registered_says_why(ends: tuple[End, End]) -> None:
    device = ends[0].device
    with pytest.raises(VerbsFailed) as failed:
        device.register(mmap.PAGESIZE, mmap.PAGESIZE, ACCESS)  # nothing is mapped there
    assert failed.value.errno == errno.EFAULT
    if device.name.startswith("rxe"):
        with pytest.raises(VerbsFailed) as failed:
            device.register_dmabuf(0, 0, mmap.PAGESIZE, ACCESS)
        assert failed.value.errno == errno.EOPNOTSUPP


# -- without a device --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("no_pyverbs")
def test_pyverbs_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(NoVerbs, match="not installed .*python3-pyverbs"):
        with_pyverbs.load([str(tmp_path)])


@pytest.mark.usefixtures("no_pyverbs")
def test_pyverbs_for_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there, and its modules are not for this Python: they are not found."""
    (tmp_path / "__init__.py").touch()
    (tmp_path / "cq.cpython-399-x86_64-linux-gnu.so").touch()
    path = list(sys.path)
    with pytest.raises(NoVerbs, match="not made for this Python"):
        with_pyverbs.load([str(tmp_path)])
    monkeypatch.delitem(sys.modules, "pyverbs")
    assert sys.path == path


def test_ibverbs_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ibverbs", None)
    with pytest.raises(NoVerbs, match=r"pip install 'monarchc\[rdma\]'"):
        with_ibverbs.load()


def stand_ins(monkeypatch: pytest.MonkeyPatch, **loads: Callable[[], object]) -> list[str]:
    """Libraries by these names."""
    for name, load in loads.items():
        module = ModuleType(f"monarch.runtime.transport.verbs.with_{name}")
        module.load = load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return list(loads)


class Sees:
    """A library that sees these devices, or fails to look."""

    name = "sees"

    def __init__(self, *names: str, error: VerbsFailed | None = None) -> None:
        self.names = names
        self.error = error

    def devices(self) -> tuple[str, ...]:
        if self.error is not None:
            raise self.error
        return self.names


def missing() -> object:
    raise NoVerbs("libibverbs.so.1 is missing")


def test_the_first_library_that_can_be_used_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = stand_ins(monkeypatch, first=missing, second=lambda: Sees("mlx5_0"))
    assert adapter.library(names).devices() == ("mlx5_0",)


def test_without_any_it_is_said_what_each_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoVerbs, match="first: libibverbs.so.1 is missing; second: libibverbs.so.1 is missing"):
        adapter.library(stand_ins(monkeypatch, first=missing, second=missing))


def test_where_one_sees_no_device_no_other_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = stand_ins(monkeypatch, first=Sees, second=lambda: Sees("mlx5_0"))
    with pytest.raises(NoVerbs, match=r"^no RDMA device: ibv_get_device_list\(\) is empty$"):
        adapter.library(names)
    names = stand_ins(monkeypatch, first=lambda: Sees(error=VerbsFailed("Function not implemented")))
    with pytest.raises(NoVerbs, match="no RDMA device: .*Function not implemented"):
        adapter.library(names)
