"""`heal_mesh`: a mesh that has lost workers goes on, by one of several policies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from monarch.compiler.errors import DeviceMeshError, LostError, MonarchError
from monarch.compiler.execution.executor import Loss, Resizable
from monarch.compiler.mesh import Shape
from monarch.language.placing.resizing import reshape, sized
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh

_TRIES = 8
"""So often the mesh is healed in one call where further workers end meanwhile."""

logger = logging.getLogger("monarch")


@dataclass(frozen=True)
class Shrink:
    """A policy of `heal_mesh`: the mesh goes on without the slices along this mesh dim that have lost a worker."""

    dim: str


@dataclass(frozen=True)
class MeshFailure:
    """A mesh's losses, for a policy of the user's own."""

    mesh: Mesh
    workers: tuple[int, ...]
    """The numbers, in the mesh, of those that have ended."""
    coordinates: tuple[Mapping[str, int], ...]
    """Where along each mesh dim each of them was."""
    how: tuple[str, ...]
    """How each has ended: "was killed by SIGKILL"."""
    hosts: tuple[str, ...]
    """The address of the host of each; empty for this machine."""
    lost: tuple[str, ...]
    """The state that cannot be restored from other workers or snapshots: for each tensor a line with name, type, and
    size on a worker."""


Policy = Literal["respawn", "spare", "shrink"] | Shrink | Mapping[str, int]
"""A policy of `heal_mesh`. A mapping has the sizes of mesh dims with which the mesh is to go on."""


def heal_mesh(
    mesh: Mesh,
    policy: Policy | Callable[[MeshFailure], Policy] = "respawn",
    restore: Callable[[], object] | None = None,
) -> Mesh:
    """Go on with a mesh that has lost workers (`DeviceMeshError` with `mesh_lost`):

        for batch in loader:
            try:
                loss = train_step(*batch)
            except monarch.exceptions.DeviceMeshError as error:
                print(error)
                mesh = monarch.heal_mesh(mesh)
                loss = train_step(*batch)

    Gives the same mesh: programs, models and optimizers go on with it. Waits until that is done; a mesh that has lost
    no worker is not changed. New processes take the places of those that have ended. Their values come from workers
    that hold the same, along mesh dims that replicate it, or from snapshots (`Mesh.snapshots`); where it came from is
    logged (logger `monarch`, INFO). Then `policy` says how the mesh goes on:

    - `"respawn"`: as it was, with the same bits as without the failure; each host starts the workers that it lost, so
      a host that is lost itself is an error;
    - `"spare"`: likewise, and a spare host (`monarch.hosts(..., spares=1)`) takes the place of one that is lost;
    - `"shrink"`: smaller, without the slices that have lost a worker along one mesh dim: of those along which not all
      have, the one that loses the fewest, the first of several; as it was, where each slice of all dims has lost one.
      `Shrink("data")` names the dim. Where the slices that are left do not stand at equal distances, the first so many
      are taken, with new workers among them. In the places of a lost host, spare or other hosts have workers that
      hold and run nothing behind it;
    - `{"data": 3}`: with these sizes (`resize_mesh`);
    - a function, which gets a `MeshFailure` before anything is healed, and returns one of these.

    A smaller mesh computes the same, on fewer workers: the batch of an annotation is the same global batch, programs
    are partitioned anew, and sizes that do not divide are padded. So numbers differ in rounding alone. Its values are
    resharded from worker to worker; survivors keep their processes, and the workers that it goes on without hold and
    run nothing, until `monarch.resize_mesh(mesh, data=4)` has it grow again.

    The step whose call or result raised, and those called after it, are not applied, and their results raise; all
    before it are. What these leave in Python and the random numbers that they drew are undone.

    Where state was on the lost workers alone and there is no snapshot of it, all of it has to go back to one time. Then
    `restore` is called, on the healed mesh, and loads a checkpoint into what has state:

        state = {"model": model, "optimizer": optimizer, "step": step, "loader": stream}
        mesh = monarch.heal_mesh(mesh, restore=lambda: monarch.load("checkpoints/last", into=state))

    It is not called where nothing is lost. No step is applied that had not ended on all workers, and the loop goes on
    where the checkpoint says: `state["step"]` and the stream's position are those of the checkpoint. What is lost, and
    what `restore` has not given a value, is logged by name (WARNING); the latter raises LostError when it is used.

    Raises LostError, and leaves the mesh as it is, where state is lost and there is no `restore`; MonarchError where
    new workers cannot be started (their host is out of reach, or the mesh's workers are in processes of actors), and
    for a policy that cannot be.
    """
    shape: Shape | None = None
    elsewhere = ""
    if policy != "respawn":
        failure = _failure(mesh)
        if failure is not None:
            chosen = policy(failure) if callable(policy) else policy
            shape = _shape(mesh, chosen, failure)
            elsewhere = {"respawn": "", "spare": "spare"}.get(chosen if isinstance(chosen, str) else "", "any host")
    gave_up = False
    for _ in range(_TRIES):
        gave_up = mesh.heal(restore is not None, elsewhere) or gave_up
        try:
            if shape is not None:
                reshape(mesh, shape)
            if gave_up and restore is not None:
                restore()
                _name_lost(mesh)
            return mesh
        except DeviceMeshError as error:  # another worker has ended
            if not error.mesh_lost:
                raise
            last = error
    raise last


def _name_lost(mesh: Mesh) -> None:
    """Say which state is lost that has got no other value."""
    lost = []
    for each in mesh._family:
        for cell in list(each._states):
            try:
                if cell.handle is not None:
                    each.executor.wait(cell.handle)
            except LostError:
                lost.append(mesh._workers.names.get(cell, "a state"))
    if lost:
        logger.warning("%r: no value was restored for %s", mesh, ", ".join(lost))


def _failure(mesh: Mesh) -> MeshFailure | None:
    """The known facts of a mesh that has lost workers."""
    executor = mesh.executor
    if not isinstance(executor, Resizable):
        return None
    loss: Loss | None = executor.loss(mesh._named_handles())
    if loss is None:
        return None
    ranks = mesh.ranks
    gone = [number for number, rank in enumerate(ranks) if rank in loss.ended]
    points = mesh.coordinates()
    return MeshFailure(
        mesh,
        tuple(gone),
        tuple(points[number] for number in gone),
        tuple(loss.ended[ranks[number]] for number in gone),
        tuple(loss.hosts[ranks[number]] for number in gone),
        loss.lost,
    )


def _shape(mesh: Mesh, policy: object, failure: MeshFailure) -> Shape | None:
    """The workers of the mesh behind the healing; None for all that it has now."""
    if isinstance(policy, Mapping):
        return sized(mesh, policy)
    if policy in ("respawn", "spare"):
        return None
    if policy != "shrink" and not isinstance(policy, Shrink):
        raise MonarchError(
            f"no policy {policy!r} to heal a mesh",
            hint='there are "respawn", "spare", "shrink", monarch.Shrink("data"), {"data": 3}, and functions that\n'
            "return one of these.",
            source=user_source(),
        )
    sizes = mesh.spec.sizes
    gone = {name: {point[name] for point in failure.coordinates} for name in sizes}
    able = [name for name in sizes if len(gone[name]) < sizes[name]]
    if isinstance(policy, Shrink) and policy.dim not in able:
        raise MonarchError(
            f"{mesh!r} cannot shrink along '{policy.dim}': "
            + ("each slice has lost a worker" if policy.dim in sizes else "it has no such dim"),
            hint=f"it can along {', '.join(able)}." if able else 'policy="respawn" starts new workers.',
            source=user_source(),
        )
    if not failure.workers or not able:  # the dead held nothing of it; or nothing would be left
        return None
    dim = policy.dim if isinstance(policy, Shrink) else min(able, key=lambda name: len(gone[name]))
    kept = [at for at in range(sizes[dim]) if at not in gone[dim]]
    steps = {after - before for before, after in zip(kept, kept[1:], strict=False)}
    if len(steps) > 1:
        return mesh._shape.select(dim, slice(0, len(kept)))
    return mesh._shape.select(dim, slice(kept[0], kept[-1] + 1, next(iter(steps), 1)))
