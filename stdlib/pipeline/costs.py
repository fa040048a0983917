"""The costs of a model's modules: the seconds of a step on an example, estimated from its ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from monarch.compiler.cost.flops import is_attention, matrix_flops
from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.errors import ProgramError
from monarch.compiler.ops.schema import is_view
from monarch.compiler.types import DTYPE_NAMES
from monarch.language.source import user_source

_MACHINE = MACHINES["cpu"]
_LOOKS_UP = (torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.gather, torch.ops.aten.index)
"""Ops that read as much of their first operand as they give."""


@dataclass(frozen=True)
class Ran:
    """A run on an example: the ids of modules in the order in which they were entered, and the estimated seconds of the
    ops behind each until the next, forward and backward. Ops before all modules have the id 0."""

    entered: tuple[tuple[int, float], ...]

    def seconds(self, keys: Mapping[int, int]) -> dict[int, float]:
        """The seconds by the key of the module that was entered last; `keys` has them by the module's id. Ops before
        all of these have the key 0."""
        found, key = dict.fromkeys(keys.values(), 0.0), 0
        for module, seconds in self.entered:
            key = keys.get(module, key)
            found[key] = found.get(key, 0.0) + seconds
        return found

    def of_each(self, modules: Sequence[nn.Module]) -> list[float]:
        """The seconds of each of some modules, in their order."""
        found = self.seconds({id(each): at for at, each in enumerate(modules)})
        return [found[at] for at in range(len(modules))]


def run_on(model: nn.Module, example: Any, microbatches: int) -> Ran:
    """Run a model forward and backward on a microbatch without data, and estimate what its ops take. `example` is a
    batch, of which shapes and dtypes count: a tensor, a tuple of the model's arguments, or a dict of those with names.
    Raises ProgramError for a model that cannot be run so."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # it loads SymPy: where it is asked for alone

    args = tuple(example) if isinstance(example, (tuple, list)) else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    counted = _Counted()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=()):

            def like(tensor: torch.Tensor, rows: int = 1) -> torch.Tensor:
                first = tensor.shape[:1] if rows == 1 else (max(1, tensor.shape[0] // rows),)
                made = torch.empty((*first, *tensor.shape[1:]), dtype=tensor.dtype)
                return made.requires_grad_(tensor.requires_grad)

            state = dict((*model.named_parameters(), *model.named_buffers()))
            held = {name: like(tensor) for name, tensor in state.items()}
            given = pytree.tree_map_only(torch.Tensor, lambda each: like(each, microbatches), (args, kwargs))
            with counted.counting(), torch.enable_grad():
                outputs = pytree.tree_leaves(torch.func.functional_call(model, held, *given))
                losses = [each.sum() for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
                if losses:
                    torch.autograd.backward(losses)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(
            f"the model does not run on the example: {type(error).__name__}: {error}",
            hint="it is run without data, on the shapes and dtypes of one microbatch: example=(x, …) has the model's "
            "arguments.\nOr name the modules at which stages begin: split_at=[…].",
            source=user_source(),
        ) from error
    return Ran(tuple(zip(counted.modules, counted.seconds, strict=True)))


class _Counted(TorchDispatchMode):
    """Adds up what ops take."""

    def __init__(self) -> None:
        super().__init__()
        self._made_by: dict[int, int] = {}
        """Where each op that autograd goes back through is in `modules`, by the number that autograd gives it."""
        self.modules: list[int] = [0]
        self.seconds: list[float] = [0.0]

    @contextmanager
    def counting(self) -> Iterator[None]:
        with register_module_forward_pre_hook(self._enter), self:
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.modules.append(id(module))
        self.seconds.append(0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is None:
            at = len(self.modules) - 1
            self._made_by[torch._C._autograd._get_sequence_nr() - 1] = at
        else:
            at = self._made_by.get(node._sequence_nr(), len(self.modules) - 1)
        out = func(*args, **(kwargs or {}))
        self.seconds[at] += _seconds(func, (args, kwargs), out)
        return out


def _seconds(func: Any, args: Any, out: Any) -> float:
    packet = func.overloadpacket
    operands = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    results = [each for each in pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
    if not results or is_view(func):
        return 0.0
    shapes = [tuple(each.shape) for each in operands], [tuple(each.shape) for each in results]
    flops = matrix_flops(packet, *shapes) if operands else 0.0
    read = [*operands[1:], *results] if packet in _LOOKS_UP else operands
    moved = sum(each.nbytes for each in (*read, *results))
    peak = _MACHINE.attention if is_attention(packet) else 1.0
    return _MACHINE.op_seconds(DTYPE_NAMES.get(results[0].dtype, "f32"), flops / peak, moved)
