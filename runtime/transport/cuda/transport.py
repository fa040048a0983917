"""The transport `cuda`: processes of one host of which both have NVIDIA's driver, and their memory on GPUs."""

from __future__ import annotations

import logging
from typing import Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import buffers
from monarch.runtime.transport.cuda import driver
from monarch.runtime.transport.cuda.driver import CudaFailed
from monarch.runtime.transport.cuda.lane import Lane
from monarch.runtime.transport.cuda.link import CudaLink
from monarch.runtime.transport.plug import EndpointContext, Owned
from monarch.runtime.transport.shm import ShmTransport
from monarch.runtime.transport.streams import Stream

_log = logging.getLogger("monarch.transport")

_CLOSING = 4.0


class CudaTransport(ShmTransport):
    """Uses no GPU before there is memory on one to register, or to put or get."""

    name = "cuda"

    def __init__(self, context: EndpointContext) -> None:
        super().__init__(context)
        self.lanes: set[Lane] = set()
        self._exported: dict[int, dict[str, Any]] = {}

    def available(self) -> str | None:
        return super().available() or driver.missing()

    def register(self, owned: Owned) -> dict[str, Any] | None:
        """Peers learn the handle when they open the region with its key, so the region itself only says where it is."""
        if owned.view is not None:
            return None
        gpu = buffers.gpu_of(owned.device)
        try:
            libcuda = driver.here()
            uuid = libcuda.uuids()[gpu]
        except CudaFailed as error:
            raise MonarchError(f"memory on {owned.device} cannot be registered: {error}") from error
        if owned.size:
            try:
                exported = libcuda.export(gpu, owned.address)
            except CudaFailed as error:
                _log.warning("region %d goes through host memory, a copy more: %s", owned.number, error)
                return {"device": uuid}
            self._exported[owned.number] = {
                "handle": exported.handle.hex(),
                "offset": exported.offset,
                "address": owned.address,
                "device": uuid,
            }
        return {"device": uuid}

    def exported(self, number: int) -> dict[str, Any] | None:
        return self._exported.get(number)

    def drop(self, owned: Owned) -> None:
        super().drop(owned)
        self._exported.pop(owned.number, None)

    def close(self) -> None:
        super().close()
        for lane in list(self.lanes):
            lane.join(_CLOSING)

    def _join(self, stream: Stream, pid: int, obstacle: str | None) -> CudaLink:
        return CudaLink(stream, self, pid, obstacle)
