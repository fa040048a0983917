"""Context parallelism: attention over sequences that are sharded over a mesh dim, forward and backward.

Everything else in a decoder works on tokens one by one, and runs as per-worker code on a worker's block of time. For
attention there are two ways, both exact:

    ring         keys and values go around the workers, each of which attends with its queries to one block after the
                 other, and adds the results up by their logsumexps (Liu et al., "Ring Attention", 2023). The backward
                 pass goes around again, with the gradients of keys and values. No worker holds keys of the whole
                 sequence, and none makes scores of more than one block.
    all_to_all   workers exchange blocks of time for heads, and each attends over the whole sequence with some heads
                 (Jacobs et al., "DeepSpeed Ulysses", 2023).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from monarch.compiler.errors import LayoutError, ProgramError
from monarch.compiler.types import Layout
from monarch.language import DistributedTensor, Mesh, all_gather, all_to_all, local, permute, vary
from monarch.language.recorder.varying import active_dims
from monarch.language.source import user_source

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh_dim: str,
    *,
    is_causal: bool = False,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of q f[batch, heads, time, width] over k and v f[batch, groups, time, width], whose time is sharded
    over a mesh dim: a tensor like q, in the same layout.

    Each of the `groups` heads of k and v serves heads / groups heads of q, and goes around the ring once for all of
    them. `documents` i64[batch, time] numbers the documents of packed sequences: a token attends to those of its own
    number alone. Other mesh dims may shard batch and heads. In per-worker code along the mesh dim all of these are a
    worker's blocks. Raises LayoutError where the workers do not divide time.
    """
    return _sharded(_Ring.apply, q, k, v, documents, mesh_dim, is_causal, scale)


def all_to_all_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mesh_dim: str,
    *,
    is_causal: bool = False,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The same as `ring_attention`, shapes included, each worker with some heads of the whole sequence. Raises
    LayoutError where the workers do not divide the heads, or time."""
    return _sharded(_by_heads, q, k, v, documents, mesh_dim, is_causal, scale)


METHODS: dict[str, Callable[..., torch.Tensor]] = {"ring": ring_attention, "all_to_all": all_to_all_attention}


def context_parallel(function: Callable[..., Any], mesh_dim: str, *, method: str = "ring") -> Callable[..., Any]:
    """`function`, a module for example, over sequences that are sharded over `mesh_dim`.

        def losses(tokens, targets, positions):             # each worker calls it with its own block of time
            logits = model(tokens, positions).flatten(0, 1)
            return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)

        losses = context_parallel(losses, "context")

        @monarch.program
        def loss(tokens: "i64[8@data, 4096@context]", targets: "i64[8@data, 4096@context]", documents: …):
            return losses(tokens, targets, documents=documents).mean()

    It is per-worker code along the mesh dim (`monarch.local`): each tensor of two dims or more, given or returned, has
    batch as dim 0 and time as dim 1, of which a worker has its block. In it, `F.scaled_dot_product_attention` is
    attention over the whole sequence, by the `method` "ring" or "all_to_all". A function or forward pass that takes
    `positions` gets i64[1, time], the numbers of the block's tokens in the sequence, unless they are given. `documents`
    i64[batch, time] numbers packed documents, outside of which no token attends.

    Raises ProgramError for a `method` that is none and for a module that takes no `positions`, which would count each
    block from 0; and, when it is called, for attention with a mask or with dropout, or between sequences of different
    lengths, and for a result of another time than the block's. Raises LayoutError where the workers do not divide time.
    """
    if method not in METHODS:
        raise ProgramError(
            f"method={method!r}", hint=f"it is one of {', '.join(map(repr, METHODS))}.", source=user_source()
        )
    module = function if isinstance(function, torch.nn.Module) else None
    numbered = "positions" in inspect.signature(function if module is None else module.forward).parameters
    if module is not None and not numbered:
        raise ProgramError(
            f"the forward pass of {type(module).__name__} takes no positions",
            hint="it would count the tokens of each worker's block from 0. Where it counts none, say so:\n"
            "context_parallel(lambda x: module(x), mesh_dim)",
            source=user_source(),
        )

    def run(*args: Any, documents: torch.Tensor | None = None, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        known = next((x for x in tensors.values() if isinstance(x, DistributedTensor) and x.ndim > 1), None)
        if known is None:
            raise ProgramError(
                "context_parallel of no tensor [batch, time, …] on a mesh",
                hint="x = monarch.distribute(x, mesh, layout) places it on the mesh.",
                source=user_source(),
            )
        block = known.shape[1] // known.mesh.spec.sizes.get(mesh_dim, 1)
        extra = {} if documents is None else {"documents": documents}
        if numbered and "positions" not in kwargs and not _is_given(module or function, args, kwargs):
            extra["positions"] = torch.arange(known.shape[1])[None]

        def own(*blocks: torch.Tensor) -> Any:
            given = iter(blocks)
            found = [next(given) if at in tensors else leaf for at, leaf in enumerate(leaves)]
            named = dict(zip(extra, given, strict=True))
            args, kwargs = pytree.tree_unflatten(found, structure)
            with _Attending(mesh_dim, METHODS[method], named.pop("documents", None)):
                made = function(*args, **kwargs, **named)
            return pytree.tree_map_only(torch.Tensor, joined, made)

        def joined(y: torch.Tensor) -> torch.Tensor:
            if y.ndim > 1 and y.shape[1] != block:
                raise ProgramError(
                    f"context_parallel gets a result {list(y.shape)} of a block of {block} tokens",
                    hint="each worker gives [batch, its block of time, …]. A shift by a token crosses blocks: shift\n"
                    "before, losses(tokens, tokens.roll(-1, 1)), and leave out the last token's loss.",
                    source=user_source(),
                )
            return all_gather(y, mesh_dim, 1) if y.ndim > 1 else y

        given = (*tensors.values(), *extra.values())
        layouts = tuple(
            Layout.replicated(x.ndim).place(mesh_dim, 1) if x.ndim > 1 else Layout.replicated(x.ndim) for x in given
        )
        return local(own, layouts, None, mesh=known.mesh, dims=mesh_dim)(*given)

    return run


def _is_given(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether positions are among the arguments."""
    signature = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    return "positions" in signature.bind_partial(*args, **kwargs).arguments


class _Attending(TorchFunctionMode):
    """Attention of blocks of time is over the whole sequence in this block of code."""

    def __init__(self, mesh_dim: str, attend: Callable[..., torch.Tensor], documents: torch.Tensor | None) -> None:
        super().__init__()
        self._mesh_dim, self._attend, self._documents = mesh_dim, attend, documents

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._attention(*args, **kwargs) if func is F.scaled_dot_product_attention else func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        what, hint = "", "monarch.local is per-worker code in which you write such attention yourself."
        if attn_mask is not None:
            what, hint = "a mask", "mask packed documents by documents=ids, and later tokens by is_causal=True."
        elif dropout_p:
            what = f"dropout_p={dropout_p}"
        elif query.ndim != 4 or query.shape[2] != key.shape[2]:
            what = (
                f"queries {list(query.shape)} and keys {list(key.shape)}, not [batch, heads, time, width] of one time"
            )
        if what:
            raise ProgramError(f"context_parallel of attention with {what}", hint=hint, source=user_source())
        options = {"is_causal": is_causal, "documents": self._documents, "scale": scale}
        return self._attend(query, key, value, self._mesh_dim, **options)


def _sharded(
    attend: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    mesh_dim: str,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention as per-worker code along the mesh dim."""
    if not isinstance(q, DistributedTensor):
        raise ProgramError(
            "attention over a mesh dim of a plain tensor, which is on no mesh",
            hint="q = monarch.distribute(q, mesh, layout) places it on the mesh.",
            source=user_source(),
        )
    mesh = q.mesh
    if mesh_dim in active_dims(mesh):
        q, k, v = (vary(x, mesh_dim) for x in (q, k, v))
        return attend(q, k, v, documents, mesh, mesh_dim, causal, scale)
    blocks = Layout.replicated(4).place(mesh_dim, 2)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, ids[0] if ids else None, mesh, mesh_dim, causal, scale)

    given = () if documents is None else (documents,)
    layouts = (blocks, blocks, blocks, *(Layout.replicated(2).place(mesh_dim, 1) for _ in given))
    return local(run, layouts, blocks, mesh=mesh, dims=mesh_dim)(q, k, v, *given)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Heads of keys or values, each as often as it serves a head of queries."""
    times = heads // x.shape[1]
    return x if times == 1 else x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """bool[batch, 1, queries, keys]: whether both are of one document."""
    return mine[:, None, :, None] == theirs[:, None, None, :]


def _by_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    mesh: Mesh,
    mesh_dim: str,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    workers, heads = mesh.size(mesh_dim), q.shape[1]
    if heads % workers:
        raise LayoutError(
            f"all_to_all attention of {heads} heads, which {workers} workers along '{mesh_dim}' do not divide",
            hint='method="ring" takes any number of heads.',
            source=user_source(),
        )
    if k.shape[1] % workers:  # each worker needs whole heads of keys for its heads of queries
        common = math.lcm(k.shape[1], workers)
        wanted = common if heads % common == 0 else heads
        k, v = _repeated(k, wanted), _repeated(v, wanted)
    # A worker gets every so manieth group of heads, so that another mesh dim may have shards of them.
    groups = k.shape[1] // workers
    q, k, v = (x.unflatten(1, (groups, workers, -1)) for x in (q, k, v))
    q, k, v = (all_to_all(x, mesh_dim, split=2, concat=4).flatten(1, 3) for x in (q, k, v))
    mask = None
    if documents is not None:
        mask = _same(whole := all_gather(documents, mesh_dim, dim=1), whole)
        if causal:
            mask = mask & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
    return all_to_all(y.unflatten(1, (groups, 1, -1)), mesh_dim, split=4, concat=2).flatten(1, 3)


class _Ring(torch.autograd.Function):
    """A worker's block of attention. At turn r it has the keys of the worker r places before it: with `causal` it sees
    all of them from a worker that is before it in the sequence, and none from one behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: torch.Tensor | None,
        mesh: Mesh,
        mesh_dim: str,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        ctx.options = mesh, mesh_dim, causal, scale
        inputs = q, k, v, documents
        me, theirs = mesh.rank(mesh_dim), documents
        out, total = torch.zeros((), dtype=q.dtype), torch.zeros((), dtype=q.dtype)
        for turn in range(mesh.size(mesh_dim)):
            if turn:
                k, v = permute(k, mesh_dim, 1), permute(v, mesh_dim, 1)
                theirs = None if theirs is None else permute(theirs, mesh_dim, 1)
            mask = _mask(documents, theirs, causal and turn == 0)
            keys, values = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
            first = causal and turn == 0 and mask is None
            part, own = _flash(q, keys, values, 0.0, first, attn_mask=_added(mask, q.dtype), scale=scale)
            part = part.to(own.dtype)
            if mask is not None:
                own = torch.where(mask.any(-1), own, -torch.inf)
            if not turn:  # a token sees itself, so this is a number
                out, total = part, own
                continue
            if causal:
                own = torch.where(me >= turn, own, -torch.inf)
            both = torch.logaddexp(total, own)
            out = out * (total - both).exp()[..., None] + part * (own - both).exp()[..., None]
            total = both
        made = out.to(q.dtype)
        ctx.save_for_backward(*(each for each in (*inputs, made, total) if each is not None))
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        mesh, mesh_dim, causal, scale = ctx.options
        q, k, v, *rest, out, total = ctx.saved_tensors
        documents = theirs = rest[0] if rest else None
        gradient, me, heads = vary(gradient, mesh_dim), mesh.rank(mesh_dim), q.shape[1]
        ours = keys_slope = values_slope = torch.zeros((), dtype=total.dtype)
        for turn in range(mesh.size(mesh_dim)):
            if turn:
                k, v = permute(k, mesh_dim, 1), permute(v, mesh_dim, 1)
                theirs = None if theirs is None else permute(theirs, mesh_dim, 1)
                keys_slope, values_slope = permute(keys_slope, mesh_dim, 1), permute(values_slope, mesh_dim, 1)
            mask = _mask(documents, theirs, causal and turn == 0)
            first = causal and turn == 0 and mask is None
            given = gradient, q, _repeated(k, heads), _repeated(v, heads), out, total, 0.0, first
            found = _flash_backward(*given, attn_mask=_added(mask, q.dtype), scale=scale)
            slopes = [each.to(total.dtype) for each in found]
            if causal and turn:  # blocks behind are not seen, and their weights may be infinite here
                slopes = [torch.where(me >= turn, each, 0.0) for each in slopes]
            ours = ours + slopes[0]
            keys_slope, values_slope = (
                before + each.unflatten(1, (k.shape[1], -1)).sum(2)
                for before, each in zip((keys_slope, values_slope), slopes[1:], strict=True)
            )
        if mesh.size(mesh_dim) > 1:  # home
            keys_slope, values_slope = permute(keys_slope, mesh_dim, 1), permute(values_slope, mesh_dim, 1)
        return ours.to(q.dtype), keys_slope.to(k.dtype), values_slope.to(v.dtype), *[None] * 5


def _mask(mine: torch.Tensor | None, theirs: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """bool[batch, 1, queries, keys] of one block, or nothing without documents."""
    if mine is None or theirs is None:
        return None
    same = _same(mine, theirs)
    return same & torch.ones(mine.shape[1], mine.shape[1], dtype=torch.bool).tril() if causal else same


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as a summand of scores, which is the form that the kernel takes."""
    return None if mask is None else torch.where(mask, 0.0, -torch.inf).to(dtype)
