"""A mixture of experts: the Llama-like decoder with a choice of MLPs for each token.

Tokens go to their experts by products with a mask (Lepikhin et al., "GShard", 2020), so that all sizes are fixed and
the experts may be sharded: `{"blocks.*.mlp.*": "[@model, -, -]", "blocks.*.mlp.router.weight": None}` gives each worker
whole experts, and the compiler finds the exchange. examples/expert_dispatch.py writes the exchange out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from monarch.stdlib.models.llama import Llama


class Experts(nn.Module):
    """Gated MLPs of which each token takes `chosen`: (batch, time, width) to the same shape.

    An expert has room for `room` times its equal share of the tokens of all sequences; what finds no room there passes
    by. With room = experts / chosen all find it. `gate`, `up` and `down` are all experts' weights: [experts, in, out].
    """

    def __init__(self, width: int, inner: int, experts: int, chosen: int, room: float) -> None:
        super().__init__()
        self.experts, self.chosen, self.room = experts, chosen, room
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, width, inner))
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, of deviation 0.02."""
        for parameter in (self.gate, self.up, self.down):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        count = tokens.shape[0]
        places = math.ceil(count * self.chosen / self.experts * self.room)
        weights, choices = F.softmax(self.router(tokens), -1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        taken = F.one_hot(choices, self.experts)  # (token, choice, expert)
        # First choices have places first, and among these the first tokens.
        order = taken.transpose(0, 1).flatten(0, 1).cumsum(0) - 1
        place = (order.unflatten(0, (self.chosen, count)).transpose(0, 1) * taken).sum(-1)  # (token, choice)
        at = (place[..., None] == torch.arange(places)).to(x.dtype)  # (token, choice, place): none past the last
        taken = taken.to(x.dtype)
        dispatch = torch.einsum("tke,tkp->tep", taken, at)
        combine = torch.einsum("tke,tkp->tep", taken * weights[..., None], at)
        given = torch.einsum("tep,tw->epw", dispatch, tokens)
        hidden = F.silu(torch.bmm(given, self.gate)) * torch.bmm(given, self.up)
        return torch.einsum("tep,epw->tw", combine, torch.bmm(hidden, self.down)).view_as(x)


class MixtureOfExperts(Llama):
    """Tokens i64[batch, time] to logits f32[batch, time, vocabulary]; `options` are Llama's."""

    def __init__(self, *, experts: int = 4, chosen: int = 2, room: float = 2.0, **options: int | float | None) -> None:
        self._experts = experts, chosen, room
        super().__init__(**options)  # type: ignore[arg-type]

    def mlp(self, width: int, inner: int) -> nn.Module:
        """The experts of one block."""
        return Experts(width, inner, *self._experts)
