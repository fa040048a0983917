"""What a tensor among a program's arguments has of its own beside its value: attributes, hooks, a gradient. What stands
for it while the program is traced has none of these; where the program needs one, it is given the tensor itself if that
is on the mesh (`ArgumentWritten`), and is refused otherwise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from monarch.compiler.errors import ArgumentWritten
from monarch.language.programs.entered import Entered
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

INTERNAL = frozenset(("_ref", "_source", "_history", "_stands_in", "_is_param", "_own"))


class Belongings(NamedTuple):
    """What one tensor has."""

    attributes: tuple[str, ...] = ()
    hooks: bool = False
    grad: bool = False
    parameter: bool = False
    """Whether it is a parameter to `isinstance`. (Plain ones' classes are in the key of a signature, too.)"""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Belongings:
        attributes = tuple([name for name in tensor.__dict__ if name not in INTERNAL])
        parameter = isinstance(tensor, torch.nn.Parameter)
        if not tensor.requires_grad:
            return cls(attributes, parameter=parameter)
        leaf = tensor.is_leaf
        hooks = bool(tensor._backward_hooks) or bool(leaf and tensor._post_accumulate_grad_hooks)
        return cls(attributes, hooks, leaf and tensor.grad is not None, parameter)


def check_own(
    given: list[Any], symbols: list[Any], as_made: list[dict[str, Any]], entered: Entered, backward: bool
) -> None:
    """Raise ArgumentWritten where the program gives an argument an attribute or a hook, differentiates (`backward`)
    with one that has hooks, or may read the gradient of one that is plain, or ask for the history of one that has
    one."""
    for number, (symbol, own) in enumerate(zip(symbols, given, strict=False)):
        if not isinstance(symbol, DistributedTensor) or symbol is own:
            continue
        now, was, has = vars(symbol), as_made[number], Belongings.of(own)
        name = next((key for key in {**was, **now} if key != "_ref" and now.get(key) is not was.get(key)), None)
        what, hint, source = "", "its caller would not see it: place it on the mesh,", None
        if name is not None:
            what, source = f"is given an attribute '{name}'", entered.line(name)
        elif symbol._backward_hooks:
            what, source = "is given a hook", entered.line("register_hook")
        elif backward and has.hooks:
            what, hint = "has hooks, and the program differentiates", "they would not run: place it on the mesh,"
        elif has.grad and not isinstance(own, DistributedTensor) and (source := entered.attribute("grad")) is not None:
            what, hint = "is a plain tensor with a gradient, which the program may read", "place it on the mesh,"
        elif own.requires_grad and not own.is_leaf:
            source = entered.attribute("is_leaf") or entered.attribute("grad_fn")
            if source is not None:
                what, hint = "has a history of autograd's, which the program may ask for", "place it on the mesh,"
        if what:
            raise ArgumentWritten(
                f"argument {number} of the program {what}",
                hint=f"{hint} x = monarch.distribute(x, mesh), and pass that.",
                source=source or user_source(),
            )
