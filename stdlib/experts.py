"""Expert parallelism: tokens go by all_to_all to the workers that have their experts, and back.

Each worker of a mesh dim has some of the experts, whole, and some of the tokens. A token's `chosen` experts may be on
any worker. How many tokens go where is known only when a step runs, and sizes are fixed when it is compiled: so what a
worker sends has room for `capacity` tokens for each expert, and zeros where no token takes it (Lepikhin et al.,
"GShard", 2020; Fedus et al., "Switch Transformers", 2021). With room for all of a worker's tokens none is ever dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from monarch.compiler.types import Layout
from monarch.language import DistributedTensor, Mesh, all_to_all, local

Compute = Callable[..., torch.Tensor]
"""The computation of experts: tokens f[experts, tokens, width] and weights f[experts, …] to f[experts, tokens,
width]."""


def capacity(tokens: int, experts: int, chosen: int, room: float | None) -> int:
    """How many of `tokens` an expert has room for: `room` times its equal share, or all of them."""
    return tokens if room is None else min(tokens, math.ceil(tokens * chosen / experts * room))


def places(choices: torch.Tensor, experts: int) -> torch.Tensor:
    """Which of an expert's places each choice takes, i64[tokens, chosen] of choices of the same shape: first choices
    come before second ones, and among these first tokens. Choices whose place is the capacity or above are dropped."""
    count, chosen = choices.shape
    taken = F.one_hot(choices, experts)  # [tokens, chosen, experts]
    order = taken.transpose(0, 1).flatten(0, 1).cumsum(0) - 1
    return (order.unflatten(0, (chosen, count)).transpose(0, 1) * taken).sum(-1)


@dataclass(frozen=True)
class Exchange:
    """How tokens go to their experts: over `dim`, from workers that have them in the layout `tokens` (of batch and
    time)."""

    dim: str
    tokens: Layout

    def suits(self, x: torch.Tensor) -> bool:
        """Whether `x` [batch, time, width] is on a mesh with these dims, whose workers divide its sizes."""
        if not isinstance(x, DistributedTensor) or not set(self.tokens.mesh_dims) <= x.mesh.spec.sizes.keys():
            return False
        return not any(
            size % x.mesh.size(names) for size, names in zip(x.shape, self.tokens.shards, strict=False) if names
        )


def to_experts(
    x: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    compute: Compute,
    *,
    exchange: Exchange,
    mesh: Mesh,
    room: float | None = None,
) -> torch.Tensor:
    """Each token's experts of it, weighted and added: f[batch, time, width] to the same shape.

    `choices` i64[batch, time, chosen] are the experts of each token, all different, and `weights` of the same shape
    their weights. `compute(tokens, *parameters)` is called on each worker with the tokens that came for its experts,
    f[experts / workers, tokens, width], and with its blocks of `parameters` f[experts, …]. Each worker sends an expert
    at most `capacity` tokens; with `room=None` no token is dropped.

    Raises LayoutError where the workers along the mesh dim do not divide the number of experts.
    """
    experts = parameters[0].shape[0]

    def run(x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        tokens, chosen = x.flatten(0, 1), choices.flatten(0, 1)
        most = capacity(chosen.shape[0], experts, chosen.shape[1], room)
        place = places(chosen, experts)
        slots = torch.where(place < most, chosen * most + place, experts * most).flatten()  # the last is for none
        copies = tokens[:, None].expand(-1, chosen.shape[1], -1).flatten(0, 1)
        sent = torch.zeros(experts * most + 1, tokens.shape[1], dtype=x.dtype).index_add(0, slots, copies)
        came = all_to_all(sent[:-1].unflatten(0, (experts, most)), exchange.dim, split=0, concat=1)
        back = all_to_all(compute(came, *parameters), exchange.dim, split=1, concat=0).flatten(0, 1)
        made = F.pad(back, (0, 0, 0, 1)).index_select(0, slots).unflatten(0, chosen.shape)
        return (made * weights.flatten(0, 1)[..., None]).sum(1).view_as(x)

    own = [Layout.replicated(each.ndim).place(exchange.dim, 0) for each in parameters]
    tokens = exchange.tokens
    return local(run, (tokens, tokens, tokens, *own), tokens, mesh=mesh, dims=tokens.mesh_dims)(
        x, choices, weights, *parameters
    )


# -- losses ------------------------------------------------------------------------------------------------------------


@contextmanager
def router_logits(module: nn.Module, name: str = "router") -> Iterator[list[torch.Tensor]]:
    """The outputs of a model's routers in this block, f[batch, time, experts] of each layer, in order: of its
    submodules whose names end in `name`."""
    found: list[torch.Tensor] = []
    routers = [each for path, each in module.named_modules() if path.rpartition(".")[2] == name]

    def note(module: nn.Module, given: object, made: torch.Tensor) -> None:
        found.append(made)

    try:
        for each in routers:
            each.register_forward_hook(note)
        yield found
    finally:
        for each in routers:
            for number, hook in list(each._forward_hooks.items()):  # rather than by a handle, which Ctrl-C can lose
                if hook is note:
                    del each._forward_hooks[number]


def load_balancing_loss(logits: Sequence[torch.Tensor], chosen: int) -> torch.Tensor:
    """A scalar of the `logits` of some layers, f[…, experts] each, as `router_logits` gives them: `chosen` where tokens
    of all these layers are spread evenly over experts, and more where not: experts times the sum over experts of how
    often each is chosen by a token, times its mean probability (Fedus et al., 2021, equation 4; the same number as
    `transformers`' for Mixtral)."""
    all_logits = torch.cat([each.flatten(0, -2) for each in logits])
    probabilities = F.softmax(all_logits.float(), -1)
    experts = probabilities.shape[-1]
    taken = F.one_hot(probabilities.topk(chosen, -1).indices, experts).float().sum(1)
    return experts * (taken.mean(0) * probabilities.mean(0)).sum()


def router_z_loss(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar of the `logits` of some layers, f[…, experts] each: the mean over all tokens of the squared logarithm of
    the sum of exponentials, which keeps routers' logits small (Zoph et al., "ST-MoE", 2022, equation 5)."""
    return torch.cat([each.flatten(0, -2) for each in logits]).float().logsumexp(-1).square().mean()
