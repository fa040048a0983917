"""`monarch.elastic`: a training loop that goes on where workers die."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch.utils import _pytree as pytree

from monarch.compiler.errors import DeviceMeshError, MonarchError
from monarch.language import DistributedTensor, Mesh, MeshFailure, heal_mesh, resize_mesh
from monarch.language.placing.healing import Policy

R = TypeVar("R")

logger = logging.getLogger("monarch")


def elastic(
    mesh: Mesh,
    step: Callable[..., R],
    batches: Iterable[Any],
    *,
    policy: Policy | Callable[[MeshFailure], Policy] = "respawn",
    restore: Callable[[], object] | None = None,
    failures: int = 8,
    within: float = 600.0,
    grow_after: int | None = None,
    resize: Callable[[], Mapping[str, int]] | None = None,
) -> Iterator[R]:
    """Call `step` with each batch, one after the other, and give its results; where workers of the mesh die, heal it
    and call the failed step again:

        for loss in monarch.elastic(mesh, train_step, loader, policy="shrink", grow_after=100):
            print(loss.item())

    A batch that is a tuple or a list is spread over the step's arguments. Each step is waited for before the loop gets
    its result, so the values that its body reads are computed. A step is one call of a program, or a function that may
    run twice.

    `policy` and `restore` are those of `heal_mesh`. Behind `restore` the batch is not tried again: `batches` is asked
    for an iterator anew, so a stream that `restore` loads too goes on at its place in the checkpoint.

    With `grow_after` a mesh that has shrunk gets the size back with which the loop began, so many steps later, between
    two steps.

    `resize` is called between two steps, and gives sizes of mesh dims (`resize_mesh`) for the steps that follow: so the
    loop goes on with the hosts that have joined.

        def size():
            for address in arrived():                # your scheduler's
                hosts.join(address)
            return {"data": 4 * number_of_hosts()}

    Raises the DeviceMeshError of a step that fails though no worker has died, and that of a death after `failures`
    others in `within` seconds; and what `heal_mesh` raises. MonarchError for `failures` and `grow_after` below 1, and a
    `within` that is not above 0.
    """
    if failures < 1 or within <= 0 or (grow_after is not None and grow_after < 1):
        raise MonarchError(
            f"failures={failures}, within={within}, grow_after={grow_after}",
            hint="failures and grow_after are whole numbers from 1, and within is a number of seconds.",
        )
    return _Loop(mesh, step, batches, policy, restore, failures, within, grow_after, resize).run()


_END = object()


class _Loop:
    def __init__(
        self,
        mesh: Mesh,
        step: Callable[..., Any],
        batches: Iterable[Any],
        policy: Policy | Callable[[MeshFailure], Policy],
        restore: Callable[[], object] | None,
        failures: int,
        within: float,
        grow_after: int | None,
        resize: Callable[[], Mapping[str, int]] | None,
    ) -> None:
        self._mesh, self._step, self._batches = mesh, step, batches
        self._policy, self._restore = policy, restore
        self._failures, self._within, self._grow_after = failures, within, grow_after
        self._resize = resize
        self._full = dict(mesh.spec.sizes)
        self._deaths = deque[float]()
        self._since = 0  # steps since the mesh was healed
        self._restored = False

    def run(self) -> Iterator[Any]:
        iterator = iter(self._batches)
        while True:
            if self._restored:  # the place in the batches has gone back too
                self._restored, iterator = False, iter(self._batches)
            batch = self._healing(partial(next, iterator, _END))
            if batch is _END:
                return
            result = None if self._restored else self._healing(partial(self._done, batch))
            if self._restored:
                continue
            yield result
            self._since += 1
            if self._grow_after is not None and self._since >= self._grow_after:
                self._healing(lambda: resize_mesh(self._mesh, **self._full))
            if self._resize is not None:
                self._healing(partial(self._change, self._resize()))

    def _change(self, sizes: Mapping[str, int]) -> None:
        resize_mesh(self._mesh, **sizes)
        self._full = dict(self._mesh.spec.sizes)

    def _done(self, batch: Any) -> Any:
        """The step's result, once workers have it."""
        result = self._step(*batch) if isinstance(batch, (tuple, list)) else self._step(batch)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, DistributedTensor):
                leaf.wait()
        return result

    def _healing(self, act: Callable[[], Any]) -> Any:
        """The result of an action, which runs again after a death; None where all has gone back to a checkpoint."""
        while True:
            try:
                return act()
            except DeviceMeshError as error:
                if not error.mesh_lost:
                    raise
                self._count(error)
                restore = None if self._restore is None else self._go_back
                heal_mesh(self._mesh, self._policy, restore)
                self._since = 0
            if self._restored:
                return None

    def _count(self, error: DeviceMeshError) -> None:
        """Note a death. Raises its error where there were too many."""
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > self._within:
            self._deaths.popleft()
        if len(self._deaths) == self._failures:
            raise error
        self._deaths.append(now)
        logger.warning("death %d of %d within %g s: %s", len(self._deaths), self._failures, self._within, error.message)

    def _go_back(self) -> None:
        assert self._restore is not None
        self._restore()
        self._restored = True


__all__ = ["elastic"]
