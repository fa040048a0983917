"""The facts that lowering reads of a group of ops, as a key: groups that are alike, such as those of equal layers, have
one."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import fx

from monarch.compiler.alike import Memo, frozen
from monarch.compiler.graph import args_of
from monarch.compiler.kernels.lower.values import LoweringContext, is_transparent, line_of

_SIGNS: Memo[int] = Memo(1 << 16)
_NUMBERS = itertools.count()


class Pattern:
    """Its members, the views and constants behind these, through which lowering looks, and the types on a worker of the
    values behind them. `nodes` are all of these as they are met, so that nodes which stand at one place of two groups
    that are alike have one number. Raises TypeError where an argument has no hash."""

    def __init__(self, members: Collection[fx.Node], context: LoweringContext) -> None:
        self.numbers: dict[fx.Node, int] = {}
        self.nodes: list[fx.Node] = []
        for node in (*context.places.values(), *members):
            self.number(node)
        first, looked_through = len(self.nodes), set(members)
        read: list[Hashable] = []
        for node in self.nodes:  # which grows
            if node in looked_through or is_transparent(context.key(node)):
                sign, operands = _call(node, context)
                read.append((sign, *map(self.number, operands)))
                if node.target is operator.getitem:
                    looked_through.update(operands)
            else:
                read.append((context.tensors.get(node), line_of(node)))
        facts = context.rounding, context.sums, tuple(context.places), tuple(context.sizes.items())
        self.key: Hashable = (first, facts, torch.get_default_dtype(), tuple(read))

    def number(self, node: fx.Node) -> int:
        found = self.numbers.get(node)
        if found is None:
            found = self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return found


def _call(node: fx.Node, context: LoweringContext) -> tuple[int, list[fx.Node]]:
    """A number for the facts that lowering reads of a call besides its operands, and these."""
    found = context.calls.get(node)
    if found is None:
        operands: list[fx.Node] = []

        def place(operand: Any) -> Hashable:
            operands.append(operand)
            return fx.Node

        arguments = frozen((args_of(node), node.kwargs), place)
        sign = context.key(node), node.target, arguments, context.tensors.get(node), line_of(node)
        number = _SIGNS.get(sign)
        found = context.calls[node] = number if number is not None else _SIGNS.keep(sign, next(_NUMBERS)), operands
    return found
