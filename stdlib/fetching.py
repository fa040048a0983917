"""`fetch_shard` and `inspect`: one worker's blocks of tensors. PyTorch Monarch's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch.utils import _pytree

from monarch.compiler.errors import LayoutError
from monarch.language import DistributedTensor
from monarch.language.source import user_source
from monarch.runtime.future import Future

T = TypeVar("T")


def fetch_shard(obj: T, shard: Mapping[str, int] | None = None, **coordinates: int) -> Future[T]:
    """The tensors of a nest as one worker has them, plain: of a tensor that varies its own, else its block.

        monarch.fetch_shard((loss, weights), data=1).result()

    The worker is named by its coordinates, in a dict or by keyword; mesh dims that are left out are 0. The tensors are
    fetched when the future's value is asked for. Raises MeshDimError for an unknown mesh dim, LayoutError where all
    tensors are plain: no worker has one of its own.
    """
    where = {**(shard or {}), **coordinates}
    leaves = _pytree.tree_leaves(obj)
    tensors = [each for each in leaves if isinstance(each, DistributedTensor)]
    if not tensors and any(isinstance(each, torch.Tensor) for each in leaves):
        raise LayoutError(
            "this tensor is plain: it is here, and on no mesh",
            hint="mesh = monarch.distributed.Mesh(procs=procs)\nwith mesh.activate():    # procs.activate() is for "
            "remote functions\n    x = torch.rand(3)    # each worker's own",
            source=user_source(),
        )
    for tensor in tensors:
        for dim in where:
            tensor.mesh.extent.position(dim)
    future: Future[T] = Future.pending()
    future.resolve(lambda: _pytree.tree_map_only(DistributedTensor, lambda x: x.to_local(**where), obj))
    return future


def inspect(obj: T, shard: Mapping[str, int] | None = None, **coordinates: int) -> T:
    """The same, waited for: `print(monarch.inspect(x, data=1))`."""
    return fetch_shard(obj, shard, **coordinates).result()
