"""The registry of kernels written by hand that run whole ops of ATen's in plans for GPUs.

The library has them (`monarch.stdlib.kernels.calls`), which the compiler does not know: `monarch` registers it on
import, before torch is loaded, so this module loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from monarch.compiler.kernels.triton.crosscompile import Compiled


class TemplateLaunch(Protocol):
    """One launch of a template's kernel: on a grid, of tensors by the kernel's names for them."""

    @property
    def tiles(self) -> Mapping[str, int]: ...

    @property
    def programs(self) -> tuple[int, int, int]: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    def compile_fixed(self, target: str) -> Compiled:
        """The kernel for just these sizes: it takes the tensors' addresses and nothing else."""

    def source(self) -> str:
        """The kernel's text."""

    @property
    def fingerprint(self) -> str:
        """A hash over all that its machine code and its grid depend on: that text and its callees, the tiles, and the
        arguments but the tensors."""


@dataclass(frozen=True)
class CallCost:
    """The cost of a call: floating-point operations, the bytes that its tensors hold, launches, and what part of the
    peak the template is assumed to reach; and the operations and bytes of the same op in `parts` of ATen's."""

    flops: float
    moved: int
    launches: int
    reached: float
    parts_flops: float
    parts_moved: int
    parts: int


@dataclass(frozen=True)
class Template:
    """A template for an op. All functions take the op's own arguments, with tensors on the meta device.

    `refuses`   why it does not take such a call; "" where it does
    `variants`  the ways to build it, the best first
    `launches`  the op's results, and the launches that compute them, from a variant and the op's arguments
    `work`      for the estimate
    """

    name: str
    refuses: Callable[..., str]
    variants: Callable[..., Sequence[Any]]
    launches: Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[Sequence[torch.Tensor], Sequence[TemplateLaunch]]]
    work: Callable[..., CallCost]


Load = Callable[[], Mapping[str, Template]]

_load: Load | None = None


def set_templates(load: Load) -> None:
    """Set the function that loads the templates, by the names of ATen's ops; `monarch` itself does so on import."""
    global _load
    _load = load


def templates() -> Mapping[str, Template]:
    """The templates by op, such as "aten.mm.default"; none where nobody has said so."""
    return {} if _load is None else _load()
