"""A worker's place in a process group whose works are asynchronous: NCCL's, on a stream of its own.

A work is started, and later the stream that computes waits for it; this process waits for the device only before it
commits, and at a step's end. In between this process does not look whether peers still come, and a kernel of NCCL's
waits for them for ever. So a thread looks, twice a second while a step has works: where a peer has failed, or the mesh
is lost, it aborts the communicators, which ends those kernels and with them every wait for the device. What they have
left in memory is nobody's: the step fails, with the error that the peer has told, before it commits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.plan import PlanError
from monarch.runtime.collectives.membership import LOOK_SECONDS, Membership
from monarch.runtime.collectives.nccl import Library
from monarch.runtime.shared.signals import Aborted

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives


class Communicator(Membership):
    """This worker's place in the group of the workers along some mesh dims."""

    joining = 4  # which worker has which GPU, and the library's version

    def __init__(self, collectives: Collectives, mesh_dims: Sequence[str], library: Library, watch: Watch) -> None:
        super().__init__(collectives, mesh_dims)
        self._library = library
        self.watch = watch
        self._device = torch.device("cpu")
        self.backend: Any = None
        self._ended: Aborted | None = None
        """Why the watch has ended the group, if it has."""
        self._ending = threading.Lock()
        self._last: Any = None
        """The last work of the step: one that is over has those before it behind it."""

    # -- works -----------------------------------------------------------------------------------------------------

    def start(self, device: torch.device, work: Callable[[Any], Any]) -> Any:
        """Start a work; gives what `wait` takes."""
        if self.step != self._at.step:
            self._device = device
            self._agree()
        self.watch.over(self)
        try:
            self._last = work(self.backend)
        except RuntimeError as error:
            raise self.explained(error) from error
        return self._last

    def wait(self, work: Any) -> None:
        """Have the stream that computes wait for a work, or this worker where there is no stream."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self.explained(error) from error

    def finish(self) -> None:
        """Wait until all works of the step are over. Raises the error that has ended them before their time."""
        work, self._last = self._last, None
        if work is None:
            return
        self.wait(work)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self._ended is not None:
            raise self._ended
        if (error := self._library.failed(work)) is not None:
            raise self.explained(error) from error

    # -- making and leaving ----------------------------------------------------------------------------------------

    def end(self, why: Aborted) -> None:
        """One look of the watch, in its thread. The worker leaves the group when it next comes to it."""
        with self._ending:
            if self.backend is not None:
                self._ended = why
                self._library.abort(self.backend)

    def _agree(self) -> None:
        if self._ended is not None:
            self.leave()
        super()._agree()

    def _cut(self) -> None:
        self.watch.no_more(self)
        with self._ending:
            if self.backend is not None and self._ended is None:
                self._library.abort(self.backend)
            self.backend = self._last = self._ended = None

    def _join(self) -> None:
        told = self._tell_all(self._library.gpu(self._device))
        self._check_gpus(told)
        store = self._library.rendezvous(self.me)

        def connect() -> Any:
            return self._library.connect(store, self.me, self.size, self._device)

        self.backend, _ = self._connected(store, connect, {}, lambda told: None)

    def _check_gpus(self, told: Sequence[str]) -> None:
        for one, gpu in enumerate(told):
            if gpu and gpu in told[:one]:
                first, second = (self._name_of(self._group.ranks[at]) for at in (told.index(gpu), one))
                raise PlanError(
                    f"worker {first} and worker {second} have one GPU ({gpu}), and {self._library.name} needs one for "
                    "each worker",
                    hint="make a mesh of no more workers than there are GPUs, or leave out collectives='nccl'.",
                )


class Watch:
    """Looks, while there are works, whether those that they wait for still come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Communicator] = set()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def over(self, communicator: Communicator) -> None:
        if communicator in self._watched:
            return
        with self._changed:
            self._watched = self._watched | {communicator}
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="monarch-watch", daemon=True)
                self._thread.start()

    def no_more(self, *communicators: Communicator) -> None:
        """Of these, or of all."""
        with self._changed:
            self._watched = self._watched.difference(communicators) if communicators else set()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._watched = set()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopped)
                if self._changed.wait_for(lambda: self._stopped, LOOK_SECONDS):
                    return
                watched = self._watched
            for communicator in watched:
                try:
                    communicator.look()
                except Aborted as why:
                    communicator.end(why)
                    self.no_more(communicator)
