"""Causal attention over a sequence that is cut into blocks: keys and values go around a ring of workers."""

import monarch
import torch
import torch.nn.functional as F
from monarch.distributed import Mesh

mesh = Mesh(seq=4)
HEADS, LENGTH, WIDTH = 4, 64, 16


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A worker's block of the result from its blocks of queries, keys and values, [heads, block, width]."""
    workers, me, block = mesh.size("seq"), mesh.rank("seq"), q.shape[1]
    rows = me * block + torch.arange(block)
    out, total, top = torch.zeros_like(q), torch.zeros_like(q[..., :1]), torch.full_like(q[..., :1], -torch.inf)
    for turn in range(workers):
        columns = (me - turn) % workers * block + torch.arange(block)  # whose keys are here now
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(columns > rows[:, None], -torch.inf)
        largest = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        weights, factor = (scores - largest).exp(), (top - largest).exp()
        out, total, top = out * factor + weights @ v, total * factor + weights.sum(-1, keepdim=True), largest
        if turn < workers - 1:
            k, v = monarch.permute(k, "seq", 1), monarch.permute(v, "seq", 1)
    return out / total


attend = monarch.local(ring_attention, in_layouts="[-, @seq, -]", out_layouts="[-, @seq, -]", mesh=mesh)


def with_all_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same with the heads divided among the workers meanwhile (DeepSpeed Ulysses)."""
    q, k, v = (monarch.all_to_all(x, "seq", split=0, concat=1) for x in (q, k, v))  # [heads / 4, length, width]
    return monarch.all_to_all(F.scaled_dot_product_attention(q, k, v, is_causal=True), "seq", split=1, concat=0)


attend_by_heads = monarch.local(with_all_to_all, in_layouts="[-, @seq, -]", out_layouts="[-, @seq, -]", mesh=mesh)

inputs = [torch.randn(HEADS, LENGTH, WIDTH) for _ in range(3)]
weight = torch.randn(HEADS, LENGTH, WIDTH)
dense = [x.clone().requires_grad_() for x in inputs]
expected = F.scaled_dot_product_attention(dense[0], dense[1], dense[2], is_causal=True)
(expected * weight).sum().backward()
for attention in (attend, attend_by_heads):
    placed = [monarch.distribute(x, mesh, "[-, @seq, -]").requires_grad_() for x in inputs]
    y = attention(*placed)
    (y * monarch.distribute(weight, mesh, "[-, @seq, -]")).sum().backward()
    torch.testing.assert_close(y.detach().full_tensor(), expected.detach())
    for found, wanted in zip(placed, dense, strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad)
print("both as dense attention, gradients included")
