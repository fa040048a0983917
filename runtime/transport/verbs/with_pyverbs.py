"""Verbs through pyverbs, rdma-core's own library for Python."""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path as Folder
from typing import Any

from monarch.runtime.transport.verbs import adapter
from monarch.runtime.transport.verbs.adapter import Completion, NoVerbs, Path, PortState, VerbsFailed

# Where distributions put it, for their own Python. An environment made by venv does not look there.
_FOLDERS = (
    "/usr/lib/python3/dist-packages/pyverbs",
    f"/usr/lib64/python3.{sys.version_info.minor}/site-packages/pyverbs",
    f"/usr/lib/python3.{sys.version_info.minor}/site-packages/pyverbs",
)
_EVENTS = "anon_inode:[infinibandevent]"
_opening = threading.Lock()


def load(folders: Sequence[str] = _FOLDERS) -> Library:
    try:
        with _logging_as_it_is():
            if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
                _take_from_system(folders)
            import pyverbs.cq  # noqa: F401  an extension module: made for this Python or not, and it needs libibverbs
    except ModuleNotFoundError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise NoVerbs(f"the system's is not made for this Python, {version}") from error
    except ImportError as error:
        raise NoVerbs(str(error)) from error
    return Library()


@contextmanager
def _logging_as_it_is() -> Iterator[None]:
    """pyverbs gives the root logger a handler and a level when it is imported: how to log is the user's decision."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)


def _take_from_system(folders: Sequence[str]) -> None:
    """Make `import pyverbs` find the system's package, and nothing else in its folder."""
    for folder in map(Folder, folders):
        start = folder / "__init__.py"
        if start.exists():
            spec = importlib.util.spec_from_file_location("pyverbs", start, submodule_search_locations=[str(folder)])
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = module
            spec.loader.exec_module(module)
            return
    raise NoVerbs("not installed (Debian: apt-get install python3-pyverbs ibverbs-providers)")


def _failed(error: Exception) -> VerbsFailed:
    code = getattr(error, "error_code", None)
    return VerbsFailed(str(error), code if isinstance(code, int) and code > 0 else None)


@contextmanager
def _failures() -> Iterator[None]:
    from pyverbs.pyverbs_error import PyverbsError

    try:
        yield
    except PyverbsError as error:
        raise _failed(error) from error


class Library:
    name = "pyverbs"

    def devices(self) -> list[str]:
        from pyverbs.device import get_device_list

        with _failures():
            return [device.name.decode() for device in get_device_list()]

    def open(self, device: str) -> Device:
        return Device(device)


class Device:
    def __init__(self, name: str) -> None:
        from pyverbs.device import Context
        from pyverbs.pd import PD

        self.name = name
        with _failures(), _opening:
            self._context = Context(name=name)
            self._domain = PD(self._context)
            self.reads: int = self._context.query_device().max_qp_rd_atom

    def port(self, number: int) -> PortState:
        with _failures():
            port = self._context.query_port(number)
        active = port.state == adapter.ACTIVE
        return PortState(number, active, port.link_layer, port.lid, port.active_mtu, port.max_msg_sz)

    def register(self, address: int, size: int, access: int) -> MemoryRegion:
        from pyverbs.mr import MR

        return MemoryRegion(lambda: MR(self._domain, size, access, address=address), address)

    def register_dmabuf(self, fd: int, offset: int, size: int, access: int) -> MemoryRegion:
        from pyverbs.mr import DmaBufMR

        return MemoryRegion(lambda: DmaBufMR(self._domain, size, access, dmabuf=fd, offset=offset), offset)

    def completions(self, depth: int) -> Completions:
        return Completions(self._context, depth)

    def queue_pair(self, completions: Completions, sends: int, receives: int) -> QueuePair:
        return QueuePair(self._domain, completions, sends, receives)

    def close(self) -> None:
        with _failures():
            self._domain.close()
            self._context.close()


class MemoryRegion:
    def __init__(self, register: Callable[[], Any], address: int) -> None:
        with _failures():
            self._region = register()
        self.address = address
        self.local_key: int = self._region.lkey
        self.remote_key: int = self._region.rkey

    def close(self) -> None:
        with _failures():
            self._region.close()


class Completions:
    def __init__(self, context: Any, depth: int) -> None:
        from pyverbs.cq import CQ, CompChannel

        with _failures(), _opening:
            before = _event_files()
            self._channel = CompChannel(context)
            # pyverbs does not tell its file; it is the one that is new.
            (self.fd,) = _event_files() - before
            self._queue = CQ(context, depth, None, self._channel, 0)
            self._queue.req_notify()
        os.set_blocking(self.fd, False)

    def take(self) -> list[Completion]:
        with _failures():
            if select.select([self.fd], [], [], 0)[0]:
                self._channel.get_cq_event(self._queue)
                self._queue.ack_events(1)
            self._queue.req_notify()
            taken = []
            while True:
                count, found = self._queue.poll(64)
                for one in found:
                    received = bool(one.opcode & adapter.RECEIVED)
                    taken.append(Completion(one.wr_id, one.status, received, one.byte_len))
                if count < 64:
                    return taken

    def close(self) -> None:
        with _failures(), _opening:
            self._queue.close()
            self._channel.close()


class QueuePair:
    def __init__(self, domain: Any, completions: Completions, sends: int, receives: int) -> None:
        from pyverbs.qp import QP, QPCap, QPInitAttr
        from pyverbs.wr import SGE, RecvWR, SendWR

        cap = QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        queue = completions._queue
        with _failures():
            self._pair = QP(domain, QPInitAttr(qp_type=adapter.RELIABLE, scq=queue, rcq=queue, cap=cap, sq_sig_all=0))
        self.number: int = self._pair.qp_num
        self._SGE, self._SendWR, self._RecvWR = SGE, SendWR, RecvWR

    def connect(self, path: Path) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        route = None
        if path.gid is not None:
            text = ":".join(path.gid[i : i + 2].hex() for i in range(0, 16, 2))
            route = GlobalRoute(dgid=GID(text), sgid_index=path.gid_index, hop_limit=Path.HOPS)
        attributes = QPAttr(port_num=path.port)
        attributes.qp_access_flags = adapter.LOCAL_WRITE | adapter.REMOTE_WRITE | adapter.REMOTE_READ
        attributes.ah_attr = AHAttr(dlid=path.lid, port_num=path.port, is_global=int(route is not None), gr=route)
        attributes.dest_qp_num, attributes.path_mtu = path.queue_pair, path.mtu
        attributes.rq_psn, attributes.sq_psn = path.receive_number, path.send_number
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = path.reads
        attributes.min_rnr_timer, attributes.timeout = Path.PAUSE, Path.TIMEOUT
        attributes.retry_cnt = attributes.rnr_retry = Path.RETRIES
        with _failures():
            self._pair.to_rts(attributes)

    def write(
        self, number: int, address: int, local_key: int, size: int, remote: int, remote_key: int, signaled: bool
    ) -> None:
        self._post(adapter.WRITE, number, address, local_key, size, signaled, (remote_key, remote))

    def read(
        self, number: int, address: int, local_key: int, size: int, remote: int, remote_key: int, signaled: bool
    ) -> None:
        self._post(adapter.READ, number, address, local_key, size, signaled, (remote_key, remote))

    def send(self, number: int, address: int, local_key: int, size: int, signaled: bool) -> None:
        self._post(adapter.SEND, number, address, local_key, size, signaled, None)

    def _post(
        self, opcode: int, number: int, address: int, local_key: int, size: int, signaled: bool, remote: Any
    ) -> None:
        piece = self._SGE(address, size, local_key)
        flags = adapter.SIGNALED if signaled else 0
        request = self._SendWR(wr_id=number, opcode=opcode, num_sge=1, sg=[piece], send_flags=flags)
        if remote is not None:
            request.set_wr_rdma(*remote)
        try:
            with _failures():
                self._pair.post_send(request)
        finally:
            _free(request, piece)

    def receive(self, number: int, address: int, local_key: int, size: int) -> None:
        piece = self._SGE(address, size, local_key)
        request = self._RecvWR(wr_id=number, num_sge=1, sg=[piece])
        try:
            with _failures():
                self._pair.post_recv(request)
        finally:
            _free(request, piece)

    def close(self) -> None:
        with _failures():
            self._pair.close()


def _free(*requests: Any) -> None:
    """The memory that these point to is not freed with them."""
    for request in requests:
        request.close()


def _event_files() -> set[int]:
    """The files of this process that tell of verbs' events."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENTS:
                found.add(int(name))
        except FileNotFoundError:
            pass  # the listing's own, or closed by another thread meanwhile
    return found
