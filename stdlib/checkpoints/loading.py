"""`monarch.load`."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path as FilePath
from typing import Any, TypeVar

import torch

from monarch.compiler.errors import CheckpointError, DeviceMeshError, ProgramError
from monarch.compiler.types import Layout, TensorType
from monarch.language import DistributedTensor
from monarch.language.placing.replacing import from_handle, replace_values
from monarch.language.programs.handlers import HandlersLater
from monarch.language.recorder.recording import current_program
from monarch.language.source import user_source
from monarch.runtime.shared.files import CorruptError, Reader, explain
from monarch.runtime.shared.large import new_block
from monarch.stdlib.checkpoints import dcp, safetensors_files
from monarch.stdlib.checkpoints.catalog import Catalog, Entry
from monarch.stdlib.checkpoints.filling import Filling, Wanted
from monarch.stdlib.checkpoints.places import place_of, put_back, unfinished

T = TypeVar("T")

logger = logging.getLogger("monarch")


def load(path: str | PathLike[str], into: T, *, strict: bool = True) -> T:
    """Give a nest of Python objects the values of a checkpoint:

        state = {"model": model, "optimizer": optimizer, "step": 0}
        monarch.load("checkpoints/100", into=state)

    `into` is a nest as `monarch.save` takes it; what the checkpoint holds besides is passed over. Tensors are filled in
    place, whatever mesh, layout and dtype they have: each worker reads what it is to hold. An optimizer that has made
    no state yet gets it laid out as its parameters are. Python values in dicts and lists are replaced. Returns `into`.

    Reads what `monarch.save`, `torch.distributed.checkpoint` and safetensors have written. With `strict`, modules and
    checkpoint have to have the same names. Nothing changes before all is read: until then workers hold both.

    Raises CheckpointError for a checkpoint that does not fit, with names and sizes, and for one that is corrupt, with
    file, tensor and bytes; ProgramError inside a program.
    """
    if current_program() is not None:
        raise ProgramError(
            "monarch.load() inside a program", hint="load between calls of the program.", source=user_source()
        )
    place = place_of(path)
    put_back(place)
    for _ in range(_TRIES):
        with _pinned(place) as still_there:
            try:
                filling = Filling(_open(place), strict)
                filling.find(into)
                read = _read(filling)
            except (CheckpointError, OSError):
                if still_there():
                    raise
                continue  # the values are partly of one checkpoint, and partly of the next
            if still_there():
                break
    else:
        raise CheckpointError(
            f"{place} was replaced {_TRIES} times while it was read: another save was done each time",
            hint="load between saves, or save each checkpoint to a path of its own.",
        )
    for mesh in {id(tensor.mesh): tensor.mesh for tensor, _ in read.placed}.values():
        mesh.flush()  # calls that may take long, and raise, come first
    with HandlersLater(ctrl_c=1), torch.no_grad():
        replace_values(read.placed)
        for target, value in read.copied:
            target.copy_(value)
        filled: T = filling.fill((), into)
    return filled


_TRIES = 5
"""So often a checkpoint is read anew that a save has replaced meanwhile."""


@contextmanager
def _pinned(path: FilePath) -> Iterator[Callable[[], bool]]:
    """Whether the file at the path is still the one of now. It is kept open until then, so that no other can get the
    number by which the file system knows it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the reader gets this error
        yield lambda: True
        return

    def still_there() -> bool:
        try:
            return os.path.samestat(os.fstat(fd), path.stat())
        except OSError:
            return False

    try:
        yield still_there
    finally:
        os.close(fd)


_PICKLED = "pytorch_model.bin"
"""The format of older models of Hugging Face's."""


def _open(path: FilePath) -> Catalog:
    left = unfinished(path)
    if left is not None and path.exists():
        logger.warning("a save to %s was not finished, or is under way: loading the one before it", path)
    try:
        if (path / dcp.METADATA).exists():
            return dcp.catalog(path)
        for file in (path, path / _PICKLED):
            if file.is_file() and zipfile.is_zipfile(file):
                raise CheckpointError(
                    f"{file} is a file of torch.save, and monarch.load runs no pickle",
                    hint=f'model.load_state_dict(torch.load("{file}", weights_only=True))   # also on a mesh',
                )
        if path.is_file() or any((path / name).exists() for name in (safetensors_files.INDEX, safetensors_files.ALONE)):
            return safetensors_files.catalog(path)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {explain(error, str(path))}") from None
    raise CheckpointError(
        f"there is no checkpoint at {path}" + ("" if left is None else f": a save to it was not finished ({left})"),
        hint="a checkpoint is a folder with .metadata or model.safetensors, or a file of safetensors."
        if left is None
        else "wait for a save that is under way: monarch.save(state, path).result().",
    )


@dataclass
class _Read:
    """Values read for tensors, which do not have them yet."""

    placed: list[tuple[DistributedTensor, Any]] = field(default_factory=list)
    """Those that are whole values on meshes, with their new ones."""
    copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


def _read(filling: Filling) -> _Read:
    """Read the wanted entries."""
    catalog, read = filling.catalog, _Read()
    placed: dict[int, list[tuple[str, Any, Wanted, TensorType]]] = {}
    with Reader() as reader:
        for name, wanted in filling.wanted.items():
            entry = catalog.tensors[name]
            on_mesh = _on_mesh(wanted, entry)
            if on_mesh is not None:
                mesh, type_ = on_mesh
                placed.setdefault(id(mesh), []).append((name, mesh, wanted, type_))
                continue
            made = new_block(entry.shape, entry.dtype)
            try:
                reader.fill(made, (0,) * len(entry.shape), entry.blocks, name)
            except OSError as error:
                raise CheckpointError(f"cannot read '{name}': {explain(error, str(catalog.path))}") from None
            except (CorruptError, ValueError) as error:
                raise CheckpointError(str(error), hint="load another checkpoint.") from None
            filling.tensors[name] = made if wanted.target is None else wanted.target
            if wanted.target is not None:
                read.copied.append((wanted.target, made))
    for group in placed.values():
        mesh = group[0][1]
        handles = mesh.executor.read([(type_, name, catalog.tensors[name].blocks) for name, _, _, type_ in group])
        try:
            for handle in handles:
                mesh.executor.wait(handle)
        except DeviceMeshError as error:
            if error.mesh_lost:
                raise
            raise CheckpointError(error.message, hint="nothing was changed. Load another checkpoint.") from error
        for (name, _, wanted, type_), handle in zip(group, handles, strict=True):
            if wanted.target is None:
                filling.tensors[name] = from_handle(mesh, type_, handle)
            else:
                assert isinstance(wanted.target, DistributedTensor)
                filling.tensors[name] = wanted.target
                read.placed.append((wanted.target, handle))
    return read


def _on_mesh(wanted: Wanted, entry: Entry) -> tuple[Any, TensorType] | None:
    """The mesh of a tensor, and its type there; None for a plain one."""
    if isinstance(target := wanted.target, DistributedTensor):
        type_ = target.tensor_type
        shards = Layout.replicated(type_.ndim) if type_.layout.varying else Layout(type_.layout.shards)
        return target.mesh, type_.with_layout(shards)
    if (
        wanted.target is None
        and isinstance(like := wanted.like, DistributedTensor)
        and entry.shape == tuple(like.shape)
    ):
        return like.mesh, TensorType(entry.dtype, entry.shape, Layout(like.tensor_type.layout.shards))
    return None


__all__ = ["load"]
