"""`monarch.save`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from os import PathLike
from pathlib import Path as FilePath
from typing import Any, Literal

from monarch.compiler.config import settings
from monarch.compiler.errors import CheckpointError, MonarchError, ProgramError
from monarch.compiler.execution.ending import finish_first
from monarch.compiler.execution.executor import Writing
from monarch.language.recorder.recording import current_program, turns
from monarch.language.source import user_source
from monarch.runtime.shared.files import explain
from monarch.stdlib.checkpoints import dcp, safetensors_files
from monarch.stdlib.checkpoints.blocks import SavedTensor, key_of, source_of
from monarch.stdlib.checkpoints.catalog import value_bytes
from monarch.stdlib.checkpoints.nest import contents_of
from monarch.stdlib.checkpoints.places import SaveFolder, place_of

logger = logging.getLogger("monarch")

Format = Literal["dcp", "safetensors"]

_OF_TORCH_SAVE = (".pt", ".pth", ".bin")

_LOOK_FIRST, _LOOK_LAST = 0.002, 0.02
"""How many seconds after one look at the workers the next one comes: ever more."""
_LOOK_AT_EXIT = 0.05

_under_way: dict[threading.Lock, tuple[threading.Thread, Saving, Sequence[Writing], SaveFolder]] = {}
"""By what only one of the two that could do the rest has."""


class Saving(Future[FilePath]):
    """A checkpoint that is being written: `result()` waits until it is at its path, and gives that.

    It cannot be cancelled. `result()` raises its error, and it is logged (logger `monarch`, ERROR)."""

    def __init__(self, path: FilePath, total: int) -> None:
        super().__init__()
        self.path = path
        self._total = total
        self._written = 0
        self.set_running_or_notify_cancel()

    @property
    def progress(self) -> tuple[int, int]:
        """How many bytes of tensors on meshes the workers have written so far, and how many there are."""
        return self._written, self._total

    def __repr__(self) -> str:
        state = "failed" if self.done() and self.exception() else "done" if self.done() else "under way"
        return f"<saving {self.path}: {state}, {self._written} of {self._total} bytes>"


def save(state: Any, path: str | PathLike[str], *, format: Format | None = None) -> Saving:
    """Write a checkpoint, in the background:

        monarch.save({"model": model, "optimizer": optimizer, "step": step}, "checkpoints/100")
        monarch.save(model, "model.safetensors")

    `state` is a nest of dicts, lists and tuples of modules, optimizers, tensors on meshes and plain ones, generators
    (`torch.default_generator` has the random numbers of programs too), Python values, and objects with `state_dict` and
    `load_state_dict`. Each worker writes its own blocks, from its own memory; of a block that several have each writes
    a part.

    The call returns a `Saving` at once: the checkpoint has the values as they are now, whatever the next steps do to
    them. A step that replaces a tensor before it has been written takes a copy of it. `result()` waits for the end. At
    the path stands the former checkpoint until the new one is whole, and then the new one.

    `format` is that of `torch.distributed.checkpoint` (a folder), or "safetensors" (tensors alone: a folder with
    Hugging Face's index, or one file, where the path ends in ".safetensors"). Workers on other hosts have to see the
    same file system.

    Raises CheckpointError for what cannot be saved, for a path that cannot be written or is being saved to, and for one
    that ends in .pt, .pth or .bin, as files of torch.save do;
    ProgramError inside a program.
    """
    if current_program() is not None:
        raise ProgramError(
            "monarch.save() inside a program", hint="save between calls of the program.", source=user_source()
        )
    target = place_of(path)
    if format is None:
        format = "safetensors" if safetensors_files.is_file(target) else "dcp"
    if format not in ("dcp", "safetensors"):
        raise CheckpointError(f"no format {format!r}", hint='there are "dcp" and "safetensors".')
    if target.suffix in _OF_TORCH_SAVE:
        raise CheckpointError(
            f"{str(target)!r} is called as a file of torch.save, and monarch.save writes a folder",
            hint=f"for a folder: monarch.save(…, {str(target.with_suffix(''))!r}); for one file of tensors: "
            f"monarch.save(model, {str(target.with_suffix('.safetensors'))!r});\n"
            f"for what torch.load reads: torch.save(model.state_dict(), {str(target)!r}).",
        )
    place = SaveFolder(target, format == "safetensors" and safetensors_files.is_file(target))
    writings: list[Writing] = []
    first = threading.Lock()
    """The one that takes it has the rest to do: the thread or, where an interrupt comes before that runs, this one."""
    try:
        with turns:  # a checkpoint is of one moment: no other thread's step comes between two of its tensors
            writer = _begin(state, place, format, writings)
        total = sum(source.type.nbytes for source, _ in writer.pieces if source.type is not None)
        saving = Saving(target, total)
        arguments = first, saving, writer, writings, place
        thread = threading.Thread(target=_finish, args=arguments, name=f"saving {target.name}", daemon=True)
        _under_way[first] = thread, saving, writings, place
        for writing in writings:
            writing.belongs_to(thread)
        thread.start()
    except BaseException:
        end = threading.Thread(target=_give_up_first, args=(first, place, writings), daemon=True)
        try:
            end.start()  # so that a second interrupt does not keep it from being done
        except BaseException:  # there can be no thread
            _give_up_first(first, place, writings)
            raise
        end.join()
        raise
    return saving


def _begin(state: Any, place: SaveFolder, format: str, writings: list[Writing]) -> Any:
    """Have the workers begin to write their blocks of a state as of now: gives the function that writes the rest.
    `place` and `writings` have each part before it begins, for the caller to end it."""
    contents = contents_of(state)
    if format == "safetensors" and contents.values:
        raise CheckpointError(
            f"safetensors holds tensors alone, and '{next(iter(contents.values))}' is a Python value",
            hint="save the model: monarch.save(model, path); or all of it with format='dcp'.",
        )
    values = {name: value_bytes(name, value) for name, value in contents.values.items()}
    sources: list[SavedTensor] = []
    known: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in contents.tensors.items():
        first = known.setdefault(key_of(tensor), name)
        if first != name:
            ties[name] = first
        else:
            sources.append(
                source_of(name, safetensors_files.laid_in_rows(tensor) if format == "safetensors" else tensor)
            )
    place.begin(dcp.strangers if format == "dcp" else safetensors_files.strangers)
    writer = (
        dcp.DcpWriter(place.folder, sources, ties, values, contents.paths)
        if format == "dcp"
        else safetensors_files.TensorsWriter(place.folder, place.path, sources, ties)
    )
    by_mesh: dict[int, list[tuple[SavedTensor, Sequence[Any]]]] = {}
    for source, each in writer.pieces:
        by_mesh.setdefault(id(source.mesh), []).append((source, each))
    for group in by_mesh.values():
        writing = group[0][0].mesh.executor.writing()
        writings.append(writing)
        writing.start([(source.handle, each) for source, each in group])
    return writer


def _give_up(place: SaveFolder, writings: Sequence[Writing]) -> None:
    """Nobody writes there any more when the next save may: a worker that did would put old values among its."""
    _end(writings)
    place.give_up()


def _give_up_first(first: threading.Lock, place: SaveFolder, writings: Sequence[Writing]) -> None:
    """Unless the thread that finishes the save has begun."""
    if first.acquire(blocking=False):
        _under_way.pop(first, None)
        _give_up(place, writings)


def _end(writings: Sequence[Writing]) -> None:
    for writing in writings:
        writing.end()


def _finish(first: threading.Lock, saving: Saving, writer: Any, writings: Sequence[Writing], place: SaveFolder) -> None:
    if not first.acquire(blocking=False):
        return
    start = time.monotonic()
    try:
        sums = _wait(saving, writings)
        writer.finish(sums)
        place.finish()
    except OSError as error:
        _give_up(place, writings)
        _fail(saving, CheckpointError(f"cannot save to {saving.path}: {explain(error, str(saving.path))}"))
    except MonarchError as error:
        told = CheckpointError(
            f"cannot save to {saving.path}: {error.message}",
            hint=f"{place.stays}. Save again." + (f"\n{error.hint}" if error.hint else ""),
        )
        told.__cause__ = error
        _give_up(place, writings)
        _fail(saving, told)
    except BaseException as error:
        _give_up(place, writings)
        _fail(saving, error)
        raise
    else:
        logger.info("saved %s: %d bytes in %.1f s", saving.path, saving.progress[1], time.monotonic() - start)
        saving.set_result(saving.path)
    finally:
        _end(writings)
        _under_way.pop(first, None)


def _at_exit() -> None:
    """Wait for the saves under way, at the end of the program or of an actor's process, as long as bytes are written or
    steps before it end. Before any handler of `atexit`: these may end the workers that write."""
    for thread, saving, writings, place in list(_under_way.values()):
        seconds = settings.exit_timeout
        before, until = None, 0.0
        while thread.is_alive():
            now = saving.progress, [writing.ahead() for writing in writings]
            if now != before:
                before, until = now, time.monotonic() + seconds
            elif time.monotonic() >= until:
                written, total = saving.progress
                logger.error(
                    "the program ends without the checkpoint %s: nothing was written for %g s (%d of %d bytes are, "
                    "and the workers have %d commands to run); %s",
                    *(saving.path, seconds, written, total, sum(now[1]), place.stays),
                )
                break
            thread.join(_LOOK_AT_EXIT)


# Where Python itself waits for threads, at a program's end; a thread that it knew would be waited for without a bound.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
finish_first(_at_exit)


def _fail(saving: Saving, error: BaseException) -> None:
    logger.error("%s", error)
    saving.set_exception(error)


def _wait(saving: Saving, writings: Sequence[Writing]) -> Mapping[tuple[str, int], list[str]]:
    """Wait until all workers have written; gives the checksums of their parts."""
    pause = _LOOK_FIRST
    while True:
        found = [writing.poll() for writing in writings]
        saving._written = sum(each.bytes for each in found)
        if all(each.done for each in found):
            return {where: sums for each in found for where, sums in each.sums.items()}
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_LAST)


__all__ = ["Format", "Saving", "save"]
