"""`torch.amp.GradScaler` on a mesh: outside of programs it runs as in PyTorch; in a program the loss is scaled, and the
step, which depends on values, is refused with the right code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from monarch.compiler.errors import ProgramError
from monarch.compiler.ops.record import enter
from monarch.language.optimizers.watch import unfuse
from monarch.language.recorder.recording import current_program
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide gradients by the scale, and note in `found_inf` whether one of them is not finite."""
    grads, found_inf, inverse = args
    if current_program() is not None:
        raise ProgramError(
            "GradScaler steps only where all gradients are finite, and a program cannot branch on a value",
            hint="scaler.scale(loss).backward()             # right: in the program\n"
            "scaler.step(optimizer); scaler.update()   # right: after the call, outside of the program\n"
            "Or train in bf16, which needs no scale: GradScaler(enabled=False).",
            source=user_source(),
        )
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.mesh if isinstance(grad, DistributedTensor) else None, []).append(grad)
    finite = []
    for mesh, own in by_mesh.items():
        finite.append(torch.stack([grad.isfinite().all() for grad in own]).all())
        here = inverse.to(mesh) if mesh is not None and isinstance(inverse, DistributedTensor) else inverse
        for grad in own:
            grad.mul_(here)
    if not all(finite):
        found_inf.fill_(1.0)


def _update_scale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Less after gradients that were not finite, more after `interval` steps in a row whose gradients were."""
    scale, tracker, found_inf, growth, backoff, interval = args
    bad = found_inf > 0
    steps = tracker + 1
    grow = (steps == interval) & ~bad
    larger = scale * growth
    larger = torch.where(larger.isfinite(), larger, scale)
    scale.copy_(torch.where(bad, scale * backoff, torch.where(grow, larger, scale)))
    tracker.copy_(torch.where(bad | grow, torch.zeros_like(steps), steps))
    return scale


def _unfused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            unfuse(optimizer)
        return original(self, optimizer, *args, **kwargs)

    return step


GradScaler.step = _unfused(GradScaler.step)  # type: ignore[method-assign]
enter((aten._amp_foreach_non_finite_check_and_unscale_,), record=_unscale)
enter((aten._amp_update_scale_,), record=_update_scale)
