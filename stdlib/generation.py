"""Generation: tokens after prompts, one by one, as one compiled program on a model's own state and mesh.

The program runs the model once over the prompts, which are padded on the left, and keeps each layer's keys and values
in a cache of the final length; then it loops: a token, its place in the cache, the next token. The loop is the workers'
(`monarch.while_loop`): they decide when all sequences have ended, and the controller sends one command in all.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from numbers import Integral
from typing import Annotated, Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError
from monarch.language import DistributedTensor, Mesh, layout, program, while_loop
from monarch.language.layouts import LayoutLike
from monarch.language.source import user_source
from monarch.stdlib.models.cache import Cache

Logits = torch.Tensor
Tokens = Annotated[torch.Tensor, "i64[batch, prompt]"]
Seen = Annotated[torch.Tensor, "bool[batch, prompt]"]


class Decodes(Protocol):
    """A model that `generate` can use: its forward pass takes tokens i64[batch, time], their positions, a mask
    bool[batch, 1, time, keys] that says which keys each token looks at, and a cache."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache) -> Logits: ...


_COLDEST = 1e-6
"""The least temperature: logits divided by it are far from infinite."""


@dataclass(frozen=True)
class Sampling:
    """How a token is taken from its logits. `temperature` 0 takes the likeliest; `top_k` keeps so many, and `top_p` the
    likeliest whose probabilities first reach it (Holtzman et al., "The Curious Case of Neural Text Degeneration",
    2019)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Raises ProgramError for a number out of its range."""
        if self.temperature != 0 and not _COLDEST <= self.temperature < math.inf:
            raise ProgramError(
                f"temperature={self.temperature}", hint=f"give 0, for the likeliest token, or a number from {_COLDEST}."
            )
        if self.top_k is not None:
            _check_count("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ProgramError(f"top_p={self.top_p}", hint="give a probability above 0, and 1 at most.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ProgramError("top_k and top_p without a temperature", hint="give temperature=1.0.")

    def __call__(self, logits: Logits) -> torch.Tensor:
        """f[batch, vocabulary] to i64[batch]."""
        logits = logits.float()
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1)[:, 0]

    def probabilities(self, logits: Logits) -> torch.Tensor:
        """The logits that a token is drawn from: f32[batch, vocabulary]."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(-1)
            dropped = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            dropped = dropped & (torch.arange(dropped.shape[-1]) < dropped.shape[-1] - 1)  # one stays
            logits = logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
        return logits.softmax(-1)


def generate(
    model: nn.Module,
    prompts: torch.Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] = (),
    pad: int = 0,
    batch_layout: LayoutLike | None = None,
) -> torch.Tensor:
    """Tokens after prompts, by a model on a mesh: a plain i64[batch, prompt + new].

        tokens = monarch.generate(model, [[5, 8, 2], [7]], max_new_tokens=20, stop=[2], pad=0)

    `prompts` are lists of tokens, of any lengths, or a tensor i64[batch, prompt]; shorter ones are padded on the left
    with `pad`, any number, which the model does not see. A sequence ends behind its first token of `stop`, and has
    `pad` from there; when all have ended, generation does. See `Sampling` for `temperature`, `top_k` and `top_p`; drawn
    tokens follow `monarch.manual_seed`. `batch_layout`, such as "[@data, -]", shards the batch; tokens do not depend
    on it.

    The model is one of `monarch.stdlib.models`, one of `transformers` with a decoder alone, or any whose forward pass
    is as in `Decodes`; it runs in evaluation mode, with its state as it is. Each set of options is compiled once, for
    prompts of all lengths, and of all numbers where no tokens are drawn. Raises ProgramError for a model that cannot be
    run so, for what are no prompts or options, and where the model has too few positions.
    """
    sampling = Sampling(temperature, top_k, top_p)
    sampling.check()
    _check_count("max_new_tokens", max_new_tokens, 0)
    stops = tuple(_tokens("stop", stop).tolist())
    parameter = next(model.parameters(), None)
    if not isinstance(parameter, DistributedTensor):
        raise ProgramError(
            f"{type(model).__name__} is not on a mesh",
            hint="place it first: monarch.module_to_mesh(model, mesh).",
            source=user_source(),
        )
    if any(each.mesh is not parameter.mesh for each in model.parameters() if isinstance(each, DistributedTensor)):
        raise ProgramError(
            f"{type(model).__name__} is on several meshes, as a pipeline's stages are",
            hint="generate with a copy on other workers of the same root:\n"
            "root = Mesh(role=2, pipe=2)                                       # the stages are on root.slice(role=0)\n"
            "copy = monarch.module_to_mesh(make_model(), root.slice(role=1))\n"
            "monarch.sync(pipe.model, copy)                                    # and again after training\n"
            "monarch.generate(copy, …)",
            source=user_source(),
        )
    tokens, seen = _padded(prompts, pad)
    if max_new_tokens == 0:
        return tokens
    _check_positions(model, tokens.shape[1], max_new_tokens)
    options = (sampling, max_new_tokens, stops, pad, str(batch_layout))
    trained = [vars(module) for module in model.modules() if module.training]
    train = map(dict.update, trained, repeat({"training": True}))
    try:
        model.eval()
        known = _programs.setdefault(model, {})
        if options not in known:
            forward = _forward_of(model)
            shard = (lambda x: layout(x, batch_layout)) if batch_layout is not None else (lambda x: x)
            known[options] = _program(forward, parameter.mesh, sampling, max_new_tokens, stops, pad, shard)
        made, count = known[options](torch.where(seen, tokens, 0), seen)
        found = torch.cat([tokens, made.full_tensor()[:, : int(count.item())]], 1)
    finally:
        deque(train, 0)  # one call without Python's code in it: Ctrl-C comes before it or behind
    return found


_programs: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _program(
    forward: Any,
    mesh: Mesh,
    sampling: Sampling,
    count: int,
    stop: tuple[int, ...],
    pad: int,
    shard: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    def ended(token: torch.Tensor) -> torch.Tensor:
        return torch.isin(token, torch.tensor(stop)) if stop else torch.zeros_like(token, dtype=torch.bool)

    def generate(tokens: Tokens, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, seen = shard(tokens), shard(seen)
        prompt = tokens.shape[1]
        cache = Cache(prompt + count)
        with torch.no_grad():
            # Padding looks at itself, for a softmax over nothing is no number; nothing else looks at it.
            before = torch.ones(prompt, prompt, dtype=torch.bool).tril() & seen[:, None, None, :]
            mask = before | torch.eye(prompt, dtype=torch.bool)
            positions = (seen.cumsum(-1) - 1).clamp(min=0)
            token = sampling(forward(tokens, positions, mask, cache)[:, -1])
            structure = pytree.tree_structure(cache.layers)
            visible = torch.cat([seen, torch.zeros(seen.shape[0], count, dtype=torch.bool)], 1)
            places = torch.arange(prompt + count)
            made = torch.where(torch.arange(count) == 0, token[:, None], pad)

            def unfinished(i: torch.Tensor, done: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                return (i < count) & ~done.all()

            def more(i: torch.Tensor, done: torch.Tensor, token: torch.Tensor, made: torch.Tensor, *held: Any) -> Any:
                place = prompt + i - 1
                mask = (visible | ((places >= prompt) & (places <= place)))[:, None, None, :]
                cache = Cache(prompt + count, place, pytree.tree_unflatten(list(held), structure))
                position = (positions[:, -1] + i)[:, None]
                fed = torch.where(done, 0, token)[:, None]  # `pad` is any number, and need be no token of the model's
                token = torch.where(done, pad, sampling(forward(fed, position, mask, cache)[:, -1]))
                made = torch.where(torch.arange(count) == i, token[:, None], made)
                return i + 1, done | ended(token), token, made, *pytree.tree_leaves(cache.layers)

            carried = (torch.ones((), dtype=torch.int64), ended(token), token, made, *pytree.tree_leaves(cache.layers))
            done = while_loop(unfinished, more, carried)
        return done[3], done[0]

    return program(generate, mesh=mesh)


def _check_count(name: str, count: Any, least: int) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < least:
        raise ProgramError(f"{name}={count!r}", hint=f"give a whole number from {least}.", source=user_source())


def _check_positions(model: nn.Module, prompt: int, count: int) -> None:
    """Raise ProgramError where the model has a table of positions that is too short. Rotations have no end."""
    config = getattr(model, "config", None)
    if getattr(config, "rope_parameters", None):
        return
    positions = getattr(model, "sequence", None) if config is None else getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and prompt + count - 1 > positions:  # the last token is not given to the model
        room = positions + 1 - prompt
        raise ProgramError(
            f"{type(model).__name__} has {positions} positions, too few for a prompt of {prompt} tokens and {count} "
            "new ones",
            hint=(f"give max_new_tokens={room} at most, or " if room > 0 else "give ")
            + f"the end of each prompt: prompt[-{max(1, positions + 1 - count)}:]"
            + ("." if count <= positions else f", and max_new_tokens={positions} at most."),
            source=user_source(),
        )


def _tokens(what: str, given: Any) -> torch.Tensor:
    """i64[n]. Raises ProgramError for anything but tokens."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0, 0)
    if found.ndim != 1 or (found.numel() and (found.is_floating_point() or found.is_complex())):
        shown = f"{given!r:.60}"
        raise ProgramError(
            f"{what} is no list of tokens: {shown}",
            hint="give whole numbers, as a tokenizer makes them: generate(model, [[5, 8, 2], [7]], …, stop=[2]).",
            source=user_source(),
        )
    return found.long()


def _padded(prompts: torch.Tensor | Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts as i64[batch, longest], padded on the left, and which of these are no padding."""
    if isinstance(prompts, (str, Mapping)) or not hasattr(prompts, "__iter__"):
        raise ProgramError(
            f"prompts is a {type(prompts).__qualname__}",
            hint='pass lists of tokens; with a tokenizer, tokenizer(texts)["input_ids"].',
            source=user_source(),
        )
    if not isinstance(pad, Integral):
        raise ProgramError(f"pad={pad!r}", hint="give a whole number: pad=0.", source=user_source())
    whole = prompts.full_tensor() if isinstance(prompts, DistributedTensor) else prompts
    rows = [_tokens(f"prompt {number}", row) for number, row in enumerate(whole)]
    if not rows or any(len(row) == 0 for row in rows):
        raise ProgramError("an empty prompt", hint="give at least one token in each.", source=user_source())
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), pad, dtype=torch.int64)
    seen = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, at, tokens_seen in zip(rows, tokens, seen, strict=True):
        at[longest - len(row) :] = row
        tokens_seen[longest - len(row) :] = True
    return tokens, seen


def _forward_of(model: nn.Module) -> Any:
    """The model's forward pass as `Decodes` has it."""
    parameters = inspect.signature(model.forward).parameters
    if {"positions", "mask", "cache"} <= parameters.keys():
        return model
    config: Any = getattr(model, "config", None)

    def refuse(what: str) -> ProgramError:
        return ProgramError(
            f"generate cannot run {type(model).__name__}: {what}",
            hint="transformers' own call runs on a mesh too, op by op: model.generate(tokens, attention_mask=mask, "
            "max_new_tokens=…)."
            if hasattr(model, "generate")
            else "",
            source=user_source(),
        )

    if config is None or not {"position_ids", "past_key_values", "attention_mask"} <= parameters.keys():
        raise refuse("its forward pass takes no positions, mask and cache, as monarch.stdlib.generation.Decodes says")
    if config.is_encoder_decoder:
        raise refuse("it has an encoder")
    if getattr(config, "alibi", False):
        raise refuse("its attention is biased by distance")
    if not getattr(model, "_can_compile_fullgraph", True):
        raise refuse("its attention needs a cache that grows, according to transformers")
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := kinds - _ATTENTION:
        raise refuse(f"it has layers with {' and '.join(sorted(other))}")
    slides = getattr(config, "use_sliding_window", True) and kinds != {"full_attention"}
    if config._attn_implementation not in ("sdpa", "eager"):
        raise refuse(f"its attention is {config._attn_implementation}, and not sdpa or eager")
    only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def as_taken(mask: torch.Tensor) -> torch.Tensor:
        if config._attn_implementation == "sdpa":
            return mask
        dtype = next(model.parameters()).dtype
        return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)

    def forward(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache) -> Logits:
        masks: Any = as_taken(mask)
        window = getattr(config, "sliding_window", None) if slides else None
        if window is not None and window < cache.length:
            near = as_taken(mask & _within(window, mask, cache))
            masks = {"full_attention": masks, "sliding_attention": near} if kinds else near
        found: Any = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            past_key_values=cache,
            use_cache=True,
            **only,
        )
        return found.logits

    return forward


_ATTENTION = {"full_attention", "sliding_attention"}
"""The kinds of layers, as configurations of `transformers` call them, that can be given a mask and this cache."""


def _within(window: int, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Which of the last `window` places each token looks at, its own among them: bool[time, keys]."""
    time, keys = mask.shape[-2:]
    places = torch.arange(time) + (0 if cache.place is None else cache.place)
    return torch.arange(keys) > places[:, None] - window
