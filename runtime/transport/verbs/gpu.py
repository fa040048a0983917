"""Memory of GPUs, for devices that reach it over PCI (GPUDirect RDMA), and a way around for those that do not.

A GPU's memory is registered through a dma-buf, which the CUDA driver makes of it and the kernel hands to the device
(Linux 5.12, CUDA 11.7, the driver's open kernel modules); or else by its address alone, which works where the module
nvidia-peermem is loaded; or else not at all, and this process's side of a transfer goes through pinned host memory.

Nothing here knows of the GPU's streams, and a device waits for none: a send waits for all that runs on the GPU, and the
device's writes are flushed before their work ends.

Tested with stand-ins for the CUDA driver and for the device; **not run on a GPU yet**.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from monarch.runtime.transport.cuda.driver import CudaFailed, Driver
from monarch.runtime.transport.verbs.adapter import Device, MemoryRegion, VerbsFailed


def register(driver: Driver, device: Device, where: str, address: int, size: int, access: int) -> MemoryRegion:
    """Register memory of a GPU ("cuda:0"), one way or the other. Raises VerbsFailed, with the error of each way."""
    kind, _, number = where.partition(":")
    if kind != "cuda":
        raise VerbsFailed(f"it is not known how devices reach memory on {where}")
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    whole = -(-(address + size - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        file = driver.dmabuf(int(number or 0), start, whole)
        try:
            return device.register_dmabuf(file, address - start, size, access)
        finally:
            os.close(file)
    except (CudaFailed, VerbsFailed) as error:
        no_dmabuf = str(error)
    try:
        return device.register(address, size, access)
    except VerbsFailed as error:
        raise VerbsFailed(f"no dma-buf ({no_dmabuf}), and no nvidia-peermem ({error})", error.errno) from error


def wait_for_streams(tensor: Any) -> None:
    """Until all that was launched on the tensor's GPU is finished."""
    import torch

    torch.cuda.synchronize(tensor.device)


def pinned(tensor: Any, fill: bool) -> Any:
    """Host memory of the tensor's size, which holds its bytes if it is to be `fill`ed."""
    import torch

    copy = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
    if fill:
        copy.copy_(tensor.detach().reshape(-1).view(torch.uint8))
    return copy


def fill(tensor: Any, staged: Any) -> None:
    """The other way: staged bytes into the tensor."""
    import torch

    tensor.detach().view(-1).view(torch.uint8).copy_(staged)
