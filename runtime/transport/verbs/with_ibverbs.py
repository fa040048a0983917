"""Verbs through the package `ibverbs`, which opens the system's libibverbs."""

from __future__ import annotations

import os
import select
from typing import Any

from monarch.runtime.transport.verbs import adapter
from monarch.runtime.transport.verbs.adapter import Completion, NoVerbs, Path, PortState, VerbsFailed


def load() -> Library:
    try:
        import ibverbs
    except ModuleNotFoundError as error:
        raise NoVerbs("not installed (pip install 'monarchc[rdma]')") from error
    except ImportError as error:
        raise NoVerbs(str(error)) from error
    return Library(ibverbs)


def _failed(error: OSError) -> VerbsFailed:
    return VerbsFailed(str(error), error.errno)


class Library:
    name = "ibverbs"

    def __init__(self, module: Any) -> None:
        self._module = module

    def devices(self) -> list[str]:
        try:
            return [device.name for device in self._module.get_device_list()]
        except OSError as error:
            raise _failed(error) from error

    def open(self, device: str) -> Device:
        return Device(self._module, device)


class Device:
    def __init__(self, module: Any, name: str) -> None:
        self.name = name
        self._module = module
        try:
            self._context = next(one for one in module.get_device_list() if one.name == name).open()
            self._domain = self._context.alloc_pd()
            self.reads: int = self._context.query_device().max_qp_rd_atom
        except OSError as error:
            raise _failed(error) from error

    def port(self, number: int) -> PortState:
        try:
            port = self._context.query_port(number)
        except OSError as error:
            raise _failed(error) from error
        active = port.state == adapter.ACTIVE
        return PortState(number, active, port.link_layer, port.lid, port.active_mtu, port.max_msg_sz)

    def register(self, address: int, size: int, access: int) -> MemoryRegion:
        try:
            return MemoryRegion(self._domain.reg_mr(address, size, access), address)
        except OSError as error:
            raise _failed(error) from error

    def register_dmabuf(self, fd: int, offset: int, size: int, access: int) -> MemoryRegion:
        try:
            return MemoryRegion(self._domain.reg_dmabuf_mr(offset, size, offset, fd, access), offset)
        except OSError as error:
            raise _failed(error) from error

    def completions(self, depth: int) -> Completions:
        try:
            return Completions(self._context, depth)
        except OSError as error:
            raise _failed(error) from error

    def queue_pair(self, completions: Completions, sends: int, receives: int) -> QueuePair:
        try:
            return QueuePair(self._module, self._domain, completions, sends, receives)
        except OSError as error:
            raise _failed(error) from error

    def close(self) -> None:
        try:
            self._domain.close()
            self._context.close()
        except OSError as error:
            raise _failed(error) from error


class MemoryRegion:
    def __init__(self, region: Any, address: int) -> None:
        self._region = region
        self.address = address
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        try:
            self._region.close()
        except OSError as error:
            raise _failed(error) from error


class Completions:
    def __init__(self, context: Any, depth: int) -> None:
        self._channel = context.create_comp_channel()
        self._queue = context.create_cq(depth, self._channel)
        self._queue.req_notify()
        self.fd: int = self._channel.fd
        os.set_blocking(self.fd, False)

    def take(self) -> list[Completion]:
        try:
            if select.select([self.fd], [], [], 0)[0]:
                self._channel.get_cq_event().ack_events()
            self._queue.req_notify()
            taken = []
            while True:
                found = self._queue.poll(64)
                for one in found:
                    received = bool(one.opcode & adapter.RECEIVED)
                    taken.append(Completion(one.wr_id, int(one.status), received, one.byte_len))
                if len(found) < 64:
                    return taken
        except OSError as error:
            raise _failed(error) from error

    def close(self) -> None:
        try:
            self._queue.close()
            self._channel.close()
        except OSError as error:
            raise _failed(error) from error


class QueuePair:
    def __init__(self, module: Any, domain: Any, completions: Completions, sends: int, receives: int) -> None:
        queue = completions._queue
        self._module = module
        self._pair = domain.create_qp(
            module.QPInitAttr(send_cq=queue, recv_cq=queue, max_send_wr=sends, max_recv_wr=receives)
        )
        self.number: int = self._pair.qp_num

    def connect(self, path: Path) -> None:
        mask = self._module.QPAttrMask
        route: dict[str, Any] = {"is_global": 0}
        if path.gid is not None:
            route = {"is_global": 1, "dgid": path.gid, "sgid_index": path.gid_index, "hop_limit": Path.HOPS}
        to_peer = self._module.AHAttr(dlid=path.lid, port_num=path.port, **route)
        access = adapter.LOCAL_WRITE | adapter.REMOTE_WRITE | adapter.REMOTE_READ
        try:
            self._pair.to_init(path.port, access)
            self._pair.modify(
                mask.STATE
                | mask.AV
                | mask.PATH_MTU
                | mask.DEST_QPN
                | mask.RQ_PSN
                | mask.MAX_DEST_RD_ATOMIC
                | mask.MIN_RNR_TIMER,
                ah_attr=to_peer,
                qp_state=self._module.QPState.RTR,
                path_mtu=path.mtu,
                dest_qp_num=path.queue_pair,
                rq_psn=path.receive_number,
                max_dest_rd_atomic=path.reads,
                min_rnr_timer=Path.PAUSE,
            )
            self._pair.to_rts(path.send_number, Path.TIMEOUT, Path.RETRIES, Path.RETRIES, path.reads)
        except OSError as error:
            raise _failed(error) from error

    def write(
        self, number: int, address: int, local_key: int, size: int, remote: int, remote_key: int, signaled: bool
    ) -> None:
        self._post(adapter.WRITE, number, address, local_key, size, signaled, remote, remote_key)

    def read(
        self, number: int, address: int, local_key: int, size: int, remote: int, remote_key: int, signaled: bool
    ) -> None:
        self._post(adapter.READ, number, address, local_key, size, signaled, remote, remote_key)

    def send(self, number: int, address: int, local_key: int, size: int, signaled: bool) -> None:
        self._post(adapter.SEND, number, address, local_key, size, signaled)

    def _post(
        self,
        opcode: int,
        number: int,
        address: int,
        local_key: int,
        size: int,
        signaled: bool,
        remote: int = 0,
        remote_key: int = 0,
    ) -> None:
        piece = self._module.SGE(address, size, local_key)
        flags = adapter.SIGNALED if signaled else 0
        try:
            self._pair.post_send(self._module.SendWR(number, [piece], opcode, flags, remote, remote_key))
        except OSError as error:
            raise _failed(error) from error

    def receive(self, number: int, address: int, local_key: int, size: int) -> None:
        try:
            self._pair.post_recv(self._module.RecvWR(number, [self._module.SGE(address, size, local_key)]))
        except OSError as error:
            raise _failed(error) from error

    def close(self) -> None:
        try:
            self._pair.close()
        except OSError as error:
            raise _failed(error) from error
