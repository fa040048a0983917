"""Torch's optimizers inside a program: their hyperparameters are read at every call, and their state lies on the
mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import _adafactor
from torch.optim import optimizer as torch_optimizer

from monarch.compiler.errors import ProgramError
from monarch.language.placing.distribute import distribute
from monarch.language.recorder.optimizer_state import OptimizerSnapshot, is_plain, parameters
from monarch.language.recorder.recording import Recording, current_program, outside_programs
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

Optimizer = torch.optim.Optimizer


_CAPTURABLE = (torch.optim.RAdam, torch.optim.ASGD)


def _unfuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """On a mesh `fused=True` means the same arithmetic, which the compiler fuses anyway."""
    for group in optimizer.param_groups:
        if group.get("fused") and any(isinstance(parameter, DistributedTensor) for parameter in group["params"]):
            group["fused"] = False


torch_optimizer.register_optimizer_step_pre_hook(_unfuse)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Note what an optimizer of the eager door had before a step, to go back to if an op recorded before it fails."""
    if current_program() is None:
        meshes = {p.mesh for p in parameters(optimizer) if isinstance(p, DistributedTensor)}
        for pending in filter(None, (mesh.pending for mesh in meshes)):
            pending.steps.append((len(pending.tape.ops), OptimizerSnapshot(optimizer)))


torch_optimizer.register_optimizer_step_pre_hook(_note)


def _adafactor_step(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    row_vars: list[torch.Tensor | None],
    col_vars: list[torch.Tensor | None],
    variances: list[torch.Tensor | None],
    state_steps: list[torch.Tensor],
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    d: float,
    lr: Any,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    has_complex: bool,
) -> None:
    """Adafactor (Shazeer and Stern, 2018) as `torch.optim` steps it, with tensors for what it reads into Python."""
    for param, grad, row, col, variance, step in zip(
        params, grads, row_vars, col_vars, variances, state_steps, strict=True
    ):
        grad = -grad if maximize else grad
        least = torch.finfo(param.dtype).eps if eps1 is None else eps1
        root = param.numel() ** 0.5
        step += 1
        count = step.to(torch.float64)
        decay = (count**beta2_decay).to(param.dtype)
        rate = torch.minimum(torch.full_like(count, lr), count.rsqrt()).to(param.dtype)
        rate = (param.norm(2) / root).clamp(min=eps2) * rate
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        if row is not None and col is not None:
            row.lerp_(grad.square().mean(-1, keepdim=True), decay)
            col.lerp_(grad.square().mean(-2, keepdim=True), decay)
            estimate = row @ col / row.mean(-2, keepdim=True).clamp(min=least)
        else:
            assert variance is not None
            variance.lerp_(grad * grad, decay)
            estimate = variance
        update = estimate.clamp(min=least * least).rsqrt() * grad
        param.sub_(update * (rate / (update.norm(2) / (root * d)).clamp(min=1.0)))


def _on_meshes(original: Callable[..., None]) -> Callable[..., None]:
    def step(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        distributed = any(isinstance(param, DistributedTensor) for param in params)
        (_adafactor_step if distributed else original)(params, *args, **kwargs)

    return step


for _name in ("_single_tensor_adafactor", "_multi_tensor_adafactor"):
    setattr(_adafactor, _name, _on_meshes(getattr(_adafactor, _name)))


class Hyperparameter:
    """One number of an optimizer's parameter group, read at every call: `group[key]`, or `group[key][index]`."""

    __slots__ = ("group", "index", "key")

    def __init__(self, group: dict[str, Any], key: str, index: int | None = None) -> None:
        self.group = group
        self.key = key
        self.index = index

    def __call__(self) -> float:
        value = self.group[self.key]
        return float(value if self.index is None else value[self.index])


class OptimizerWatch:
    """Follows the optimizers that a trace steps.

    While `step` runs, `lr` (and what is known to vary: `varying`, pairs of an optimizer's label and a key) is a
    Scalar; all other hyperparameters are built into the program, and guarded as all that it reads.
    """

    def __init__(self, recording: Recording, labels: Mapping[int, str], varying: set[tuple[str, str]]) -> None:
        self.recording = recording
        self.labels = labels
        self.varying = varying
        self.optimizers: list[Optimizer] = []
        self.scalars: dict[str, Hyperparameter] = {}
        self.read_at_each_call: set[tuple[int, str]] = set()
        """The entries of parameter groups that are Scalars, by the group's id and key."""
        self.fixed: list[tuple[str, dict[str, Any], str]] = []
        """The hyperparameters that are built in: (optimizer's label, group, key)."""
        self._snapshots: dict[int, OptimizerSnapshot] = {}
        self._swapped: list[tuple[dict[str, Any], str, Any, Any]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = torch_optimizer.register_optimizer_step_pre_hook(self._before)
        after = torch_optimizer.register_optimizer_step_post_hook(self._after)
        try:
            yield
            self._check_schedules()
        finally:
            before.remove()
            after.remove()
            self._put_back()

    def label(self, optimizer: Optimizer) -> str:
        return self.labels.get(id(optimizer), type(optimizer).__name__.lower())

    def restore(self) -> None:
        """Give the optimizers that were met the state that they had."""
        for snapshot in self._snapshots.values():
            snapshot.restore()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ProgramError(
                "LBFGS decides by values how often it calls its closure, which a program cannot",
                hint="make the closure a program, and step outside of it:\n"
                "optimizer.step(lambda: closure(x))   # closure: a @monarch.program that ends in loss.backward()",
                source=user_source(),
            )
        label = self.label(optimizer)
        first = id(optimizer) not in self._snapshots
        if first:
            self._snapshots[id(optimizer)] = OptimizerSnapshot(optimizer)
            self.optimizers.append(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            suffix = f"[{number}]" if len(optimizer.param_groups) > 1 else ""
            for key, value in list(group.items()):
                if key == "params":
                    continue
                if key == "capturable" and value is False and type(optimizer) in _CAPTURABLE:
                    group[key] = True  # they branch on the step's number otherwise
                    self._swapped.append((group, key, value, True))
                elif key == "lr" or (label, key) in self.varying:
                    self._swap(group, key, value, f"{label}.{key}{suffix}")
                elif first and is_plain(value):
                    self.fixed.append((label, group, key))
        self._place_state(optimizer)

    def _swap(self, group: dict[str, Any], key: str, value: Any, label: str) -> None:
        if _is_number(value):
            group[key] = self._scalar(label, Hyperparameter(group, key), value)
        elif isinstance(value, (tuple, list)) and all(_is_number(entry) for entry in value):
            entries = (
                self._scalar(f"{label}[{i}]", Hyperparameter(group, key, i), entry) for i, entry in enumerate(value)
            )
            group[key] = type(value)(entries)
        else:
            return
        self._swapped.append((group, key, value, group[key]))
        self.read_at_each_call.add((id(group), key))

    def _scalar(self, label: str, source: Hyperparameter, value: Any) -> Any:
        self.scalars.setdefault(label, source)
        return self.recording.scalar(label, float(value))

    def _place_state(self, optimizer: Optimizer) -> None:
        """State made by eager steps (a step counter) is placed on the mesh, replicated."""
        for parameter in parameters(optimizer):
            if not isinstance(parameter, DistributedTensor):
                continue
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, DistributedTensor):
                    state[key] = _outside(self.recording, value)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()

    def _put_back(self) -> None:
        changed = next((key for group, key, _, scalar in self._swapped if group[key] is not scalar), None)
        for group, key, value, _ in self._swapped:
            group[key] = value
        self._swapped.clear()
        if changed is not None:
            raise ProgramError(
                f"the optimizer's step changes its own hyperparameter '{changed}'",
                hint="inside a program it would change once, when the program is traced: change it between calls.",
                source=user_source(),
            )

    def _check_schedules(self) -> None:
        for snapshot in self._snapshots.values():
            key = snapshot.changed_hyperparameter()
            if key is not None:
                raise ProgramError(
                    f"the program changes an optimizer's '{key}' (a learning-rate scheduler's step?)",
                    hint="inside the program that happens only when it is traced. Step the scheduler between calls: "
                    "the program reads the learning rate at every call.",
                    source=user_source(),
                )


def _outside(recording: Recording, value: torch.Tensor) -> DistributedTensor:
    with outside_programs():
        return distribute(value, recording.mesh)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, DistributedTensor)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
