"""What the modules of a model cost: the seconds of a step on an example, estimated from its ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


def seconds_of(model: nn.Module, keys: Mapping[int, int], example: Any, microbatches: int) -> dict[int, float]:
    """Estimated seconds of the forward and backward pass of a microbatch, by the key of the module that ran last:
    `keys` has them by the module's id. `example` is a batch, of which shapes and dtypes count: a tensor, a tuple of the
    model's arguments, or a dict of those with names. Raises ProgramError for a model that cannot be run so."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # it loads SymPy: where it is asked for alone

    args = tuple(example) if isinstance(example, (tuple, list)) else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    counted = _Counted(keys)
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
    return counted.seconds


class _Counted(TorchDispatchMode):
    """Adds up what ops take."""

    def __init__(self, keys: Mapping[int, int]) -> None:
        super().__init__()
        self._keys = keys
        self._key = 0
        self._made_by: dict[int, int] = {}
        """The key of each op that autograd goes back through, by the number that autograd gives it."""
        self.seconds = dict.fromkeys(keys.values(), 0.0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        with register_module_forward_pre_hook(self._enter), self:
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._key = self._keys.get(id(module), self._key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is None:
            key = self._key
            self._made_by[torch._C._autograd._get_sequence_nr() - 1] = key
        else:
            key = self._made_by.get(node._sequence_nr(), self._key)
        out = func(*args, **(kwargs or {}))
        self.seconds[key] = self.seconds.get(key, 0.0) + _seconds(func, (args, kwargs), out)
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
