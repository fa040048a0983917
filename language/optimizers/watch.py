"""Torch's optimizers inside a program: their hyperparameters are read at every call, and their state is on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import _adafactor
from torch.optim import optimizer as torch_optimizer

from monarch.compiler.errors import ProgramError
from monarch.compiler.types import Layout
from monarch.language.placing.distribute import distribute, moved
from monarch.language.recorder.optimizer_state import OptimizerSnapshot, is_plain, parameters
from monarch.language.recorder.recording import Recording, current_program, outside_programs
from monarch.language.recorder.scalar import Scalar
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

Optimizer = torch.optim.Optimizer
_Swap = tuple[dict[str, Any], str, Any, Any]
"""A group, a key, the value outside of the trace, and its stand-in."""


_CAPTURABLE = (torch.optim.RAdam, torch.optim.ASGD)


def unfuse(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """On a mesh `fused=True` means the same arithmetic, which the compiler fuses anyway. A GradScaler then takes the
    optimizer as any other: only fused kernels unscale gradients and leave out steps."""
    for group in optimizer.param_groups:
        if group.get("fused") and any(isinstance(parameter, DistributedTensor) for parameter in group["params"]):
            group["fused"] = False
            vars(optimizer).pop("_step_supports_amp_scaling", None)


torch_optimizer.register_optimizer_step_pre_hook(unfuse)


def _refuse_left_behind(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ProgramError where a step would leave out the parameters that it is to train: the optimizer was made before
    the module was placed, and has the former parameters."""
    for parameter in parameters(optimizer) if moved else ():
        if not isinstance(parameter, DistributedTensor) and parameter.grad is None and parameter in moved:
            raise ProgramError(
                f"the optimizer has not '{moved[parameter]}', but the plain parameter that module_to_mesh has replaced",
                hint=f"model = monarch.module_to_mesh(model, mesh)     # right: first the model\n"
                f"optimizer = torch.optim.{type(optimizer).__name__}(model.parameters(), ...)",
                source=user_source(),
            )


torch_optimizer.register_optimizer_step_pre_hook(_refuse_left_behind)


def _place_state(optimizer: Optimizer, counters: bool) -> None:
    """Place the plain tensors that an optimizer has for parameters on a mesh, after `load_state_dict` or steps before:
    those of the parameter's shape in its layout, all others replicated. Counters, of one element, only with
    `counters`."""
    for parameter in parameters(optimizer):
        if not isinstance(parameter, DistributedTensor):
            continue
        for key, value in (state := optimizer.state.get(parameter, {})).items():
            if not isinstance(value, torch.Tensor) or isinstance(value, DistributedTensor):
                continue
            if not (counters or value.ndim):
                continue
            layout = parameter.tensor_type.layout
            alike = value.shape == parameter.shape and not layout.varying
            with outside_programs():
                state[key] = distribute(value, parameter.mesh, Layout(layout.shards) if alike else None)


def _place_eagerly(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if current_program() is None:
        _place_state(optimizer, counters=False)


torch_optimizer.register_optimizer_step_pre_hook(_place_eagerly)


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
    """Adafactor (Shazeer and Stern, 2018) as `torch.optim` steps it, with tensors for the values that it reads into
    Python."""
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


@dataclass(frozen=True)
class Hyperparameter:
    """One number of an optimizer's parameter group, read at every call: `group[key]`, or `group[key][index]`."""

    group: dict[str, Any]
    key: str
    index: int | None
    value: float
    """Its value in the call that is traced."""


class OptimizerWatch:
    """Follows the optimizers that a trace reaches.

    While the program runs, a float `lr` (and what is known to vary: `varying`, pairs of an optimizer's label and a
    key) is a Scalar, whoever reads it; while `step` runs, a tensor or an int `lr` is one too. All other hyperparameters
    are built into the program, which guards them, as it guards all that it may have read otherwise than as a Scalar.
    """

    def __init__(self, recording: Recording, reached: Mapping[str, Optimizer], varying: set[tuple[str, str]]) -> None:
        self.recording = recording
        self.reached = reached
        self.labels = {id(optimizer): label for label, optimizer in reached.items()}
        self.varying = varying
        self.optimizers: list[Optimizer] = []
        """Those that the program steps."""
        self.scalars: dict[str, Hyperparameter] = {}
        self.read_at_each_call: set[tuple[int, str]] = set()
        """The entries of parameter groups that are Scalars, by the group's id and key."""
        self.fixed: list[tuple[str, dict[str, Any], str]] = []
        """The hyperparameters that are built in: (optimizer's label, group, key)."""
        self._snapshots: dict[int, OptimizerSnapshot] = {}
        self._standing: list[_Swap] = []
        self._stepping: list[_Swap] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        try:
            torch_optimizer.register_optimizer_step_pre_hook(self._before)
            torch_optimizer.register_optimizer_step_post_hook(self._after)
            for optimizer in self.reached.values():
                self._take(optimizer)
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Watch no longer. It may be called again, where Ctrl-C came in the first call."""
        for hooks in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks):
            for number, hook in list(hooks.items()):  # rather than by a handle, which Ctrl-C can lose
                if getattr(hook, "__self__", None) is self:
                    hooks.pop(number, None)
        self._put_back(self._stepping)
        self._put_back(self._standing)

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
        if id(optimizer) not in self._snapshots:
            self._take(optimizer)
        label = self.labels[id(optimizer)]
        if all(optimizer is not known for known in self.optimizers):
            self.optimizers.append(optimizer)
            self.fixed += [
                (label, group, key)
                for group in optimizer.param_groups
                for key, value in group.items()
                if key != "params" and is_plain(value)
            ]
        before = self._snapshots[id(optimizer)].groups
        for number, group in enumerate(optimizer.param_groups):
            if type(optimizer) in _CAPTURABLE and group.get("capturable") is False:
                self._swap(self._stepping, group, "capturable", True)  # they branch on the step's number otherwise
            for key, name in self._changing(optimizer, number):
                if type(group[key]) is int and key != "lr":
                    continue  # which the program may count
                if _is_number(group[key]) and number < len(before) and group[key] is before[number].get(key):
                    self._swap(self._stepping, group, key, self._scalar(name, group, key, None, group[key]))
        _place_state(optimizer, counters=True)

    def _take(self, optimizer: Optimizer) -> None:
        """Have Scalars stand for the floats that are read at each call."""
        reached = id(optimizer) in self.labels
        if not reached:
            label, count = type(optimizer).__name__.lower(), len(self._snapshots)
            self.labels[id(optimizer)] = f"{label}{count}" if label in self.labels.values() else label
        self._snapshots[id(optimizer)] = snapshot = OptimizerSnapshot(optimizer)
        for group, key, value, stand_in in self._standing:  # of groups that it shares, as an optimizer around another
            for now, before in zip(optimizer.param_groups, snapshot.groups, strict=True):
                if now is group and before.get(key) is stand_in:
                    before[key] = value
        for number, group in enumerate(optimizer.param_groups):
            for key, name in self._changing(optimizer, number):
                value, made = group[key], None
                if type(value) is float:
                    made = self._scalar(name, group, key, None, value)
                elif type(value) in (tuple, list) and all(type(entry) is float for entry in value):
                    made = type(value)(self._scalar(f"{name}[{i}]", group, key, i, x) for i, x in enumerate(value))
                if made is not None:
                    self._swap(self._standing, group, key, made)
                    if reached:
                        self.read_at_each_call.add((id(group), key))

    def _changing(self, optimizer: Optimizer, number: int) -> list[tuple[str, str]]:
        """The hyperparameters of a group that are read at each call, with the names of their inputs."""
        label = self.labels[id(optimizer)]
        suffix = f"[{number}]" if len(optimizer.param_groups) > 1 else ""
        keys = [key for key in optimizer.param_groups[number] if key == "lr" or (label, key) in self.varying]
        return [(key, f"{label}.{key}{suffix}") for key in keys if key != "params"]

    def _scalar(self, label: str, group: dict[str, Any], key: str, index: int | None, value: Any) -> Scalar:
        self.scalars[label] = Hyperparameter(group, key, index, float(value))
        return self.recording.scalar(label, float(value))

    @staticmethod
    def _swap(swapped: list[_Swap], group: dict[str, Any], key: str, value: Any) -> None:
        swapped.append((group, key, group[key], value))
        group[key] = value

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back(self._stepping)

    @staticmethod
    def _put_back(swapped: list[_Swap]) -> None:
        """Undo the changes that the program has not changed since."""
        while swapped:
            group, key, value, stand_in = swapped[-1]
            if group.get(key) is stand_in:
                group[key] = value
            swapped.pop()


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, DistributedTensor)
    return isinstance(value, (int, float)) and not isinstance(value, (bool, torch.SymFloat))
