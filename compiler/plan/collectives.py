"""What can move tensors between the workers of a plan."""

from __future__ import annotations

import difflib

from monarch.compiler.errors import MonarchError

BACKENDS: dict[str, str] = {
    "monarch": "the mesh's own memory, and one-sided transports between hosts",
    "gloo": "process groups of torch.distributed with Gloo, for CPUs",
    "nccl": "process groups of torch.distributed with NCCL, for GPUs, one for each worker",
}


def check_backend(collectives: object, target: str | None = None) -> None:
    """Raise MonarchError for an unknown backend, or one that cannot move the tensors of workers of a target."""
    if collectives not in BACKENDS:
        close = difflib.get_close_matches(str(collectives), BACKENDS, n=1)
        known = "\n".join(f"{name:<9} {what}" for name, what in BACKENDS.items())
        raise MonarchError(
            f"unknown collectives {str(collectives)[:60]!r}",
            hint=(f"did you mean {close[0]}? " if close else "") + f"There are\n{known}",
        )
    if target is None:
        return
    on_cpu = target == "cpu"
    if collectives == ("nccl" if on_cpu else "gloo"):
        where, other = ("CPUs", "gloo") if on_cpu else ("GPUs", "nccl")
        raise MonarchError(
            f"collectives='{collectives}' does not move tensors of {where}, and the plan is for {target}",
            hint=f"collectives='{other}' does, and so does 'monarch', which is what there is without it.",
        )
