"""NCCL: how its process groups are made and ended, and the settings for that.

Not yet run: the tests have Gloo stand in for it (`tests/runtime/collectives/nccl.py`), which has the same interface.

NCCL connects over sockets that accept any peer that reaches them, and does not encrypt. So it listens where it is told
to and nowhere else: on loopback for the workers of one host; between hosts on the one interface of a network that was
called trusted. NCCL reads its settings once in a process, when its first communicator is made, so they are the mesh's
and not the group's, and they overrule what the environment says. Its monitor for operators (RAS), which listens as
well, is off.

torch's threads around NCCL are told not to end the process: who waits is told of failures by `communicator`.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any, Protocol

import torch

from monarch.compiler.plan import MonarchError, PlanError
from monarch.runtime.collectives.listening import LOOPBACK
from monarch.runtime.collectives.rendezvous import Rendezvous

_FOR_EVER = timedelta(days=365)
_ID_BYTES = 128  # of the message by which the other workers of a group find the first
_SETTINGS = {
    "NCCL_RAS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicators of which one has failed, and go on
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
_SIOCGIFADDR = 0x8915


class Library(Protocol):
    """Makes process groups whose works are asynchronous."""

    name: str

    def listen_on(self, address: str) -> None:
        """From the first group on, and for all of them, listen on this address of the host's alone."""

    def gpu(self, device: torch.device) -> str:
        """The device's name, which no other has on any host; "" for a device that many may use."""

    def rendezvous(self, me: int) -> Rendezvous:
        """A store for worker `me` of a group, with which it connects."""

    def connect(self, store: Rendezvous, me: int, size: int, device: torch.device) -> Any:
        """The `torch.distributed` backend of a group, connected. Waits for its other workers, for ever."""

    def failed(self, work: Any) -> Exception | None:
        """Why a work that is over has failed, if it has."""

    def abort(self, backend: Any) -> None:
        """End a group here. Works of it that wait are over, with whatever is in their tensors."""


class Nccl:
    """NCCL by way of torch's ProcessGroupNCCL."""

    name = "NCCL"

    def __init__(self) -> None:
        if not torch.distributed.is_nccl_available():
            raise PlanError(
                f"torch {torch.__version__} is built without NCCL",
                hint="leave out collectives='nccl', or install a torch that is built for CUDA.",
            )

    def listen_on(self, address: str) -> None:
        os.environ.update(_SETTINGS, NCCL_SOCKET_IFNAME=f"={interface_of(address)}")

    def gpu(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def rendezvous(self, me: int) -> Rendezvous:
        return Rendezvous(says_least=_ID_BYTES if me == 0 else None)

    def connect(self, store: Rendezvous, me: int, size: int, device: torch.device) -> Any:
        made: Any = torch.distributed.ProcessGroupNCCL  # in builds that have it
        options = made.Options()
        options._timeout = _FOR_EVER
        options.is_high_priority_stream = True  # its kernels are few, and what computes waits for them
        torch.cuda.set_device(device)  # of this thread
        backend = made(store, me, size, options)
        backend.eager_connect_single_device(device)
        return backend

    def failed(self, work: Any) -> Exception | None:
        return work.exception()

    def abort(self, backend: Any) -> None:
        backend.abort()


def interface_of(address: str) -> str:
    """The name of the network interface that has an address of this host's. Raises MonarchError where none has."""
    if address == LOOPBACK:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = array.array("B", struct.pack("256s", name.encode()))
            try:
                fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(asked[20:24].tobytes()) == address:
                return name
    raise MonarchError(
        f"no network interface of this host has the address {address}, on which NCCL is to listen",
        hint="leave out collectives='nccl', or start hosts on IPv4 addresses of their own interfaces.",
    )
