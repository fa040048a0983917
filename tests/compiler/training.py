"""Training steps as graphs, traced without the language: what the compiler's tests partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from monarch.compiler.graph import Graph, Provenance
from monarch.compiler.text import parse_layout
from monarch.compiler.types import Layout, MeshSpec, TensorType

DROPPED = ("device", "layout", "pin_memory", "memory_format")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, d // self.heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int = 64, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)
        self.head = nn.Linear(8 * 4 * 4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.a(x))), 2)
        return self.head(F.max_pool2d(F.relu(self.b(x)), 2).flatten(1))


def adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, lr: float = 1e-2) -> list[torch.Tensor]:
    p = p * (1 - lr * 0.01)
    m = torch.lerp(m, g, 0.1)
    v = (v * 0.99).addcmul(g, g, value=0.01)
    return [torch.addcdiv(p, m, v.sqrt() + 1e-8, value=-lr), m, v]


class Step:
    """One training step of `model` as a graph, the values to run it on, and what dense PyTorch makes of them."""

    def __init__(
        self,
        model: nn.Module,
        mesh: MeshSpec,
        inputs: tuple[torch.Tensor, ...],
        input_layouts: tuple[str, ...],
        layout_of: Callable[[str, torch.Tensor], str | None],
        loss: Callable[..., torch.Tensor] | None = None,
        optimizer: str = "adamw",
    ) -> None:
        names = [name for name, _ in model.named_parameters()]
        params = [p.detach().clone() for p in model.parameters()]
        loss = loss or (lambda out, target: F.cross_entropy(out.flatten(0, -2), target.flatten()))
        moments = 2 if optimizer == "adamw" else 0
        states = [*params, *(torch.rand_like(p) * 0.01 for _ in range(moments) for p in params)]
        labels = [*names, *(f"adamw.{m}[{n}]" for m in ("exp_avg", "exp_avg_sq")[:moments] for n in names)]
        count = len(params)

        def step(*flat: torch.Tensor) -> list[torch.Tensor]:
            *state, x, y = flat
            leaves = [p.detach().requires_grad_(True) for p in state[:count]]
            value = loss(torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), (x,)), y)
            grads = torch.autograd.grad(value, leaves)
            if not moments:
                return [value.detach(), *(p.detach() - 0.1 * g for p, g in zip(leaves, grads, strict=True))]
            new = [
                adamw(p.detach(), g, m, v)
                for p, g, m, v in zip(leaves, grads, state[count : 2 * count], state[2 * count :], strict=True)
            ]
            return [value.detach(), *(each[i] for i in range(3) for each in new)]

        flat = [*states, *inputs]
        self.dense = step(*flat)
        self.labels = labels
        self.values: dict[str | int, torch.Tensor] = {
            **dict(zip(labels, states, strict=True)),
            **dict(enumerate(inputs)),
        }
        traced = make_fx(step, tracing_mode="fake")(*flat)
        with torch.no_grad():
            self._pure = make_fx(torch.func.functionalize(traced, remove="mutations"), tracing_mode="fake")(*flat)
        self._pure.graph.eliminate_dead_code()
        self.graph = self.on(mesh, input_layouts, layout_of)

    def on(
        self,
        mesh: MeshSpec,
        input_layouts: tuple[str, ...],
        layout_of: Callable[[str, torch.Tensor], str | None],
    ) -> Graph:
        """The same step on a mesh, in layouts."""
        pure = self._pure
        graph = Graph("step", mesh)
        env: dict[fx.Node, fx.Node] = {}
        seen_loss = False
        placeholders = [n for n in pure.graph.nodes if n.op == "placeholder"]
        for i, node in enumerate(placeholders):
            value = node.meta["val"]
            if i < len(self.labels):
                name = self.labels[i]
                parameter = name.split("[")[-1].rstrip("]")
                text = layout_of(parameter, value)
                kind, label = "state", name
            else:
                text, kind, label = input_layouts[i - len(self.labels)], "input", i - len(self.labels)
            layout = parse_layout(text) if text else Layout.replicated(value.ndim)
            env[node] = graph.placeholder(kind, label, TensorType(value.dtype, tuple(value.shape), layout))
        for node in pure.graph.nodes:
            if node.op == "get_attr":
                label = f"c{len(graph.constants)}"
                value = getattr(pure, node.target)
                graph.constants[label] = value.detach().clone()
                with graph.fx.inserting_after(list(env.values())[len(placeholders) - 1]):
                    env[node] = graph.placeholder("constant", label, TensorType(value.dtype, tuple(value.shape)))
            elif node.op == "call_function":
                if node.target in (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh_copy.default):
                    env[node] = env[node.args[0]]
                    continue
                args = fx.node.map_arg(node.args, lambda n: env[n])
                kwargs = {k: v for k, v in fx.node.map_arg(node.kwargs, lambda n: env[n]).items() if k not in DROPPED}
                types = pytree.tree_map(
                    lambda v: TensorType(v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else None,
                    node.meta["val"],
                )
                env[node] = graph.call(
                    node.target,
                    *args,
                    type=tuple(types) if isinstance(types, list) else types,
                    name=node.name,
                    **kwargs,
                )
                seen_loss = seen_loss or "loss_backward" in str(node.target)
                env[node].meta["provenance"] = Provenance(backward=seen_loss)
        results = [env[r] for r in pure.graph.output_node().args[0]]
        graph.output([results[0]], dict(zip(self.labels, results[1:], strict=True)))
        return graph


def check(
    step: Step, returns: list[torch.Tensor], updates: Mapping[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Compare a run with what dense PyTorch gave."""
    torch.testing.assert_close(returns[0], step.dense[0], rtol=tolerance, atol=tolerance)
    for label, expected in zip(step.labels, step.dense[1:], strict=True):
        torch.testing.assert_close(
            updates[label], expected, rtol=1e-3, atol=10 * tolerance, msg=lambda m, at=label: f"{at}: {m}"
        )
