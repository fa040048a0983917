"""What sees each op of PyTorch that Python runs. Where there is such, a program is the function itself: a plan that
runs without Python would have it see nothing, or change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from monarch.language.placing.distribute import distribute
from monarch.language.programs.call import ProgramCall
from monarch.language.programs.results import with_sizes
from monarch.language.tensors.mesh import Mesh

_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def is_watched() -> bool:
    """Whether something of the caller's sees each op that this thread runs: a TorchFunctionMode or TorchDispatchMode, a
    transform of `torch.func`, or hooks of all tensors that autograd saves."""
    if _transform() is not None or _hooks(False) is not None:
        return True
    if not (_function_modes() or _dispatch_modes()):
        return False
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    # A default device is no matter: what a program makes is on its mesh. Monarch's own are per-worker code's.
    return any(
        not isinstance(mode, DeviceContext) and not type(mode).__module__.startswith("monarch.") for mode in modes
    )


def run_itself(call: ProgramCall, mesh: Mesh) -> Any:
    """Run a program's function on the call's arguments, its plain tensors on the mesh as their annotations say."""
    types = call.types(mesh, None)

    def placed(number: int, leaf: Any) -> Any:
        if number not in types or torch._C._functorch.is_functorch_wrapped_tensor(leaf):
            return leaf
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return distribute(leaf, call.meshes.get(number, mesh), types[number].layout)

    leaves = [placed(number, leaf) for number, leaf in enumerate(call.leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, with_sizes(call.spec))
    return call.function(*args, **kwargs)
