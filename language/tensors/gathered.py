"""`get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))` and its kin of
`torch.distributed.checkpoint.state_dict` give whole plain tensors. PyTorch gathers DTensors there, and what is none it
leaves as it is: tensors on meshes are gathered before."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch.utils import _pytree as pytree

from monarch.language.tensors.tensor import DistributedTensor

_MODULE = "torch.distributed._state_dict_utils"
_NAME = "_gather_state_dict"


def _of_meshes_too(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gathered(state_dict: Any, **options: Any) -> Any:
        plain = pytree.tree_map_only(DistributedTensor, lambda x: x.detach().full_tensor(), state_dict)
        return gather(plain, **options)

    return gathered


def _mend(module: ModuleType) -> None:
    setattr(module, _NAME, _of_meshes_too(getattr(module, _NAME)))


class _OnImport(MetaPathFinder):
    """The module is imported by the code that uses it: `import monarch` does not wait for it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _mend(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _MODULE in sys.modules:
    for _name in (_MODULE, "torch.distributed.checkpoint.state_dict"):
        if _name in sys.modules:
            _mend(sys.modules[_name])
else:
    sys.meta_path.insert(0, _OnImport())
