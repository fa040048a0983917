"""A mixture of experts: the Llama-like decoder with a choice of MLPs for each token.

Tokens go to their experts by products with a mask (Lepikhin et al., "GShard", 2020), so that all sizes are fixed and
the compiler can shard tokens and weights along any mesh dim. With `stdlib.parallel.expert_parallel` they go by
all_to_all to the workers that have the experts (`stdlib.experts`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from monarch.language import DistributedTensor
from monarch.stdlib.experts import Exchange, capacity, places, to_experts
from monarch.stdlib.models.llama import Llama


class Experts(nn.Module):
    """Gated MLPs of which each token takes `chosen`: (batch, time, width) to the same shape.

    An expert has room for `room` times its equal share of the tokens of all sequences, or, with an `exchange`, of each
    worker's tokens; first choices find room before second ones, first tokens before later ones, and what finds none
    passes by. With room = None all find it. `gate`, `up` and `down` are all experts' weights: [experts, in, out].
    """

    def __init__(self, width: int, inner: int, experts: int, chosen: int, room: float | None) -> None:
        super().__init__()
        self.experts, self.chosen, self.room = experts, chosen, room
        self.exchange: Exchange | None = None
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
        weights, choices = F.softmax(self.router(x), -1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.exchange is not None and isinstance(x, DistributedTensor) and self.exchange.suits(x):
            parameters = self.gate, self.up, self.down
            return to_experts(
                x, choices, weights, parameters, mlps, exchange=self.exchange, mesh=x.mesh, room=self.room
            )
        tokens, weights, choices = x.flatten(0, 1), weights.flatten(0, 1), choices.flatten(0, 1)
        most = capacity(tokens.shape[0], self.experts, self.chosen, self.room)
        at = (places(choices, self.experts)[..., None] == torch.arange(most)).to(x.dtype)  # none past the last
        taken = F.one_hot(choices, self.experts).to(x.dtype)  # (token, choice, expert)
        dispatch = torch.einsum("tke,tkp->tep", taken, at)
        combine = torch.einsum("tke,tkp->tep", taken * weights[..., None], at)
        given = torch.einsum("tep,tw->epw", dispatch, tokens)
        return torch.einsum("tep,epw->tw", combine, mlps(given, self.gate, self.up, self.down)).view_as(x)


def mlps(tokens: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Each expert's MLP of its own tokens, (experts, tokens, width) to the same shape."""
    return torch.bmm(F.silu(torch.bmm(tokens, gate)) * torch.bmm(tokens, up), down)


class MixtureOfExperts(Llama):
    """Tokens i64[batch, time] to logits f32[batch, time, vocabulary]; `options` are Llama's."""

    def __init__(
        self, *, experts: int = 4, chosen: int = 2, room: float | None = 2.0, **options: int | float | None
    ) -> None:
        self._experts = experts, chosen, room
        super().__init__(**options)  # type: ignore[arg-type]

    def mlp(self, width: int, inner: int) -> nn.Module:
        """The experts of one block."""
        return Experts(width, inner, *self._experts)
