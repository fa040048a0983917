"""`redundancy=1`: what a program's state needs to survive any single loss, arranged when it first runs."""

from __future__ import annotations

from collections.abc import Mapping

from monarch.compiler.errors import MonarchError
from monarch.compiler.plan import Plan
from monarch.compiler.survival import COPY_EVERY, Cluster, copies_for
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh


def keep_copies(plan: Plan, mesh: Mesh, parts: Mapping[str, Mesh]) -> None:
    """Have other workers keep copies of a plan's state (`Mesh.snapshots`) where a single loss would take some of it,
    unless somebody has said otherwise. `parts` has the meshes of the plan's parts. Raises MonarchError where there is
    no other worker, or too little memory."""
    if mesh.is_abstract or mesh._workers.copies is not None:
        return
    if mesh._workers.spec.workers == 1:
        raise MonarchError(
            f"redundancy=1 on {mesh!r}: there is no other worker to keep copies",
            hint="give the mesh more workers, or leave redundancy= out and save checkpoints.",
            source=user_source(),
        )
    each = [(part.plan, parts[part.name]) for part in plan.parts] or [(plan, mesh)]
    if any(copies_for(one.states, Cluster(one.mesh, on._hosts)).tensors for one, on in each):
        mesh.snapshots(COPY_EVERY, copies=1)
