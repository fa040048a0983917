"""Plans as the compiler would report them for a transformer's training step, of any size, without compiling anything.

`training_plan(layers)` has 112 values a layer, 94 of them ops: parameters, forward, backward and AdamW's update, over a
mesh with data and tensor parallelism.
"""

from __future__ import annotations

import hashlib
import math

import torch

from monarch.compiler.errors import Source
from monarch.compiler.plan.plan import Instruction, Plan, Slot, ValueSpec
from monarch.compiler.plan.report import Alternative, Decision, Report, ReportedValue
from monarch.compiler.plan.trace import Command, Span, Step, Trace, TracedPlan
from monarch.compiler.types import Layout, MeshSpec, TensorType

MESH = MeshSpec.of(data=2, model=2)
LINES = {
    10: "        x = x + self.attn(self.norm1(x))",
    11: "        x = x + self.mlp(self.norm2(x))",
    17: "        q, k, v = (self.qkv(x)).chunk(3, dim=-1)",
    18: "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    19: "        return self.out(y)",
    27: "        return self.down(F.gelu(self.up(x)))",
    40: "def train_step(tokens, targets):",
    41: "    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())",
    42: "    loss.backward()",
    43: "    optimizer.step()",
}
WHOLE_WHY = "{name} is replicated on '{dim}': its operands give no way to shard it"


class PlanBuilder:
    """Values one after the other, with what follows of each: bytes, seconds, frees and causes."""

    def __init__(self, name: str, mesh: MeshSpec = MESH) -> None:
        self.name, self.mesh = name, mesh
        self.values: list[ReportedValue] = []
        self.taken: dict[str, int] = {}
        self.lines = list(LINES)
        self.module, self.phase, self.line = "", "forward", 40

    def local_bytes(self, type_: TensorType | None) -> int:
        return 0 if type_ is None else math.prod(type_.local_shape(self.mesh)) * type_.dtype.itemsize

    def add(
        self, op: str, type_: TensorType, reads: tuple[int, ...] = (), *, call: str = "", name: str = "",
        flops: float = 0.0, rule: str = "", why: str = "", mesh_dims: tuple[str, ...] = (), inplace: bool = False,
    ) -> int:  # fmt: skip
        stem = name or op.split(".")[-1]
        count = self.taken[stem] = self.taken.get(stem, -1) + 1
        name = f"{stem}_{count}" if count else stem
        nbytes, is_input = self.local_bytes(type_), bool(call)
        sent = self.local_bytes(self.values[reads[0]].types[0]) if mesh_dims else 0
        moved = nbytes + sum(self.local_bytes(self.values[read].types[0]) for read in reads)
        decisions = () if mesh_dims else tuple(self.decision(name, dim, type_, reads, rule) for dim in self.mesh.names)
        self.values.append(
            ReportedValue(
                name=name,
                op=op,
                call=call or f"{op}({', '.join('%' + self.values[read].name for read in reads)})",
                reads=tuple(dict.fromkeys(reads)),
                types=(type_,),
                instruction=-1 if is_input else 0,
                source=-1 if is_input else self.lines.index(self.line),
                module=self.module,
                phase=self.phase,
                traced="" if mesh_dims else name,
                why=why,
                decisions=decisions,
                mesh_dims=mesh_dims,
                sent=sent,
                flops=flops,
                moved=0 if is_input else moved,
                allocates=0 if inplace else nbytes,
                seconds=0.0 if is_input else 2e-6 + sent / 4e9 + moved / 2e10 + flops / 2e11,
            )
        )
        return len(self.values) - 1

    def decision(self, name: str, dim: str, type_: TensorType, reads: tuple[int, ...], rule: str) -> Decision:
        if not reads:
            return Decision(dim, "", "", f"you said so: {type_.layout}")
        at = type_.layout.placement(dim)
        causes = tuple(read for read in reads if self.values[read].types[0].layout.placement(dim) is not None)[:2]
        if at is None and not causes:
            return Decision(dim, rule, "", WHOLE_WHY.format(name=f"%{name}", dim=dim))
        here, other = Layout.replicated(type_.ndim).place(dim, at), Layout.replicated(type_.ndim)
        why = (
            f"%{self.values[causes[0]].name} has this layout on '{dim}' already, and resharding it would cost more"
            if causes
            else ""
        )
        options = (
            Alternative(f"-> {here}", 0.0),
            Alternative(f"-> {other}", float(self.local_bytes(type_))),
            Alternative(f"-> {other} then {here}", 2.0 * self.local_bytes(type_)),
        )
        return Decision(dim, rule, "n" if dim == "model" else "m", why, causes, options, exact=type_.ndim < 3)

    def plan(self) -> Plan:
        """Numbers the instructions, drops every value behind its last reader, and makes the plan of it."""
        values = self.values
        last: dict[int, int] = {}
        for number, value in enumerate(values):
            for read in value.reads:
                last[read] = number
        frees = [0] * len(values)
        free: list[list[int]] = [[] for _ in values]
        for number, reader in last.items():
            if values[number].op not in ("input", "state"):
                frees[reader] += values[number].allocates
                free[reader].append(number)
        instructions: list[Instruction] = []
        finished: list[ReportedValue] = []
        for number, value in enumerate(values):
            at = -1
            if value.op not in ("input", "state"):
                at = len(instructions)
                reads = [Slot(read) for read in value.reads]
                args = (reads, list(value.mesh_dims), "sum") if value.mesh_dims else tuple(reads)
                instructions.append(Instruction(value.op, args, {}, number, tuple(free[number]), value.source))
            finished.append(ReportedValue(**{**vars(value), "instruction": at, "frees": frees[number]}))
        inputs = [number for number, value in enumerate(values) if value.op in ("input", "state")]
        specs = tuple(
            ValueSpec(values[n].op, values[n].call.split(" ", 1)[1].strip('"'), values[n].types[0], n) for n in inputs
        )
        loss = max((n for n, value in enumerate(values) if value.name == "loss"), default=len(values) - 1)
        digest = hashlib.sha256("".join(value.call for value in finished).encode()).hexdigest()
        return Plan(
            self.name,
            self.mesh,
            specs,
            (ValueSpec("return", 0, values[loss].types[0], loss),),
            tuple(instructions),
            len(values),
            (False,) * len(specs),
            sources=tuple(Source("/home/user/train.py", line, 9, len(LINES[line]) + 1) for line in self.lines),
            report=Report(tuple(finished), tuple(LINES.values())),
            costs={"seconds": {"trace": 0.11, "partition-by-data": 0.21, "partition-by-model": 0.28, "emit": 0.03}},
            hash=digest,
        )


def f32(shape: tuple[int, ...], shards: tuple[tuple[str, ...], ...], partial: str = "") -> TensorType:
    return TensorType(torch.float32, shape, Layout(shards, ((partial, "sum"),) if partial else ()))


B, S, D, V = 16, 128, 256, 512
ROWS: tuple[tuple[str, ...], ...] = (("data",), ())
HIDDEN = f32((B * S, D), ROWS)
PENDING = f32((B * S, D), ROWS, "model")
PARAMETERS = {
    "norm1.weight": f32((D,), ((),)),
    "attn.qkv.weight": f32((D, 3 * D), ((), ("model",))),
    "attn.out.weight": f32((D, D), (("model",), ())),
    "norm2.weight": f32((D,), ((),)),
    "mlp.up.weight": f32((D, 4 * D), ((), ("model",))),
    "mlp.down.weight": f32((4 * D, D), (("model",), ())),
}


def over(type_: TensorType, dim: str) -> TensorType:
    return type_.place(dim, "sum")


def training_plan(layers: int, name: str = "train_step", *, reduce_at_once: bool = False) -> Plan:
    """`reduce_at_once` sums the gradients of a layer in one collective instead of one each: another plan to compare."""
    b = PlanBuilder(name)
    tokens = b.add("input", TensorType(torch.int64, (B, S), Layout((("data",), ()))), call="input 0", name="tokens")
    targets = b.add("input", TensorType(torch.int64, (B, S), Layout((("data",), ()))), call="input 1", name="targets")
    b.module = "embed"
    table = b.add("state", f32((V, D), ((), ())), call='state "embed.weight"', name="embed_weight")
    weights: list[dict[str, int]] = []
    for layer in range(layers):
        held = {}
        for parameter, type_ in PARAMETERS.items():
            b.module = (
                f"blocks.{layer}.{parameter.rsplit('.', 2)[0] if parameter.count('.') > 1 else parameter.split('.')[0]}"
            )
            label = f"blocks.{layer}.{parameter}"
            held[parameter] = b.add("state", type_, call=f'state "{label}"', name=label.replace(".", "_"))
        weights.append(held)
    b.module, b.line = "embed", 41
    x = b.add("aten.embedding", HIDDEN, (table, tokens), rule="v d, n -> n d")
    saved: list[dict[str, int]] = []
    for layer in range(layers):
        x, keep = _forward(b, f"blocks.{layer}", x, weights[layer])
        saved.append(keep)
    b.module, b.line = "", 41
    logits = b.add("aten.mm", f32((B * S, V), ROWS), (x, table), flops=2.0 * B * S * D * V / 2, rule="m k, k n -> m n")
    partial = b.add("aten.nll_loss", over(f32((), ()), "data"), (logits, targets), name="nll_loss")
    why = "%nll_loss is a pending sum over 'data', and it is returned whole"
    b.add("all_reduce", f32((), ()), (partial,), name="loss", mesh_dims=("data",), why=why)
    b.phase, b.line = "backward", 42
    grad = b.add("aten.nll_loss_backward", f32((B * S, V), ROWS), (logits, targets))
    g = b.add("aten.mm", HIDDEN, (grad, table), flops=2.0 * B * S * D * V / 2, rule="m k, k n -> m n")
    grads: list[dict[str, int]] = [{} for _ in range(layers)]
    for layer in reversed(range(layers)):
        g = _backward(b, f"blocks.{layer}", g, weights[layer], saved[layer], grads[layer], reduce_at_once)
    b.phase, b.line = "update", 43
    for layer in range(layers):
        for parameter, weight in weights[layer].items():
            _update(b, f"blocks.{layer}.{parameter.rsplit('.', 1)[0]}", weight, grads[layer][parameter])
    return b.plan()


def _forward(b: PlanBuilder, path: str, x: int, w: dict[str, int]) -> tuple[int, dict[str, int]]:
    rows = B * S // 2
    wide, tall = f32((B * S, 3 * D), (("data",), ("model",))), f32((B * S, D), (("data",), ("model",)))
    up = f32((B * S, 4 * D), (("data",), ("model",)))
    keep = {"x": x}
    b.module, b.line = f"{path}.norm1", 10
    n = keep["n1"] = b.add("aten.native_layer_norm", HIDDEN, (x, w["norm1.weight"]), rule="... d, d -> ... d")
    b.module, b.line = f"{path}.attn.qkv", 17
    qkv = b.add("aten.mm", wide, (n, w["attn.qkv.weight"]), flops=2.0 * rows * D * 3 * D / 2, rule="m k, k n -> m n")
    b.module = f"{path}.attn"
    q, k, v = (b.add("aten.slice", tall, (qkv,), name=part, inplace=True) for part in "qkv")
    b.line = 18
    keep["q"], keep["k"], keep["v"] = q, k, v
    y = keep["y"] = b.add("aten.scaled_dot_product_attention", tall, (q, k, v), flops=4.0 * rows * S * D / 2)
    b.module, b.line = f"{path}.attn.out", 19
    o = b.add("aten.mm", PENDING, (y, w["attn.out.weight"]), flops=2.0 * rows * D * D / 2, rule="m k, k n -> m n")
    why = f"%{b.values[o].name} is a pending sum over 'model', and its users need it replicated on 'model'"
    o = b.add("all_reduce", HIDDEN, (o,), mesh_dims=("model",), why=why)
    b.module, b.line = path, 10
    x = keep["x2"] = b.add("aten.add", HIDDEN, (x, o), rule="..., ... -> ...")
    b.module, b.line = f"{path}.norm2", 11
    n = keep["n2"] = b.add("aten.native_layer_norm", HIDDEN, (x, w["norm2.weight"]), rule="... d, d -> ... d")
    b.module, b.line = f"{path}.mlp.up", 27
    u = keep["u"] = b.add(
        "aten.mm", up, (n, w["mlp.up.weight"]), flops=2.0 * rows * D * 4 * D / 2, rule="m k, k n -> m n"
    )
    b.module = f"{path}.mlp"
    a = keep["a"] = b.add("aten.gelu", up, (u,), rule="... -> ...")
    b.module = f"{path}.mlp.down"
    o = b.add("aten.mm", PENDING, (a, w["mlp.down.weight"]), flops=2.0 * rows * D * 4 * D / 2, rule="m k, k n -> m n")
    why = f"%{b.values[o].name} is a pending sum over 'model', and its users need it replicated on 'model'"
    o = b.add("all_reduce", HIDDEN, (o,), mesh_dims=("model",), why=why)
    b.module, b.line = path, 11
    return b.add("aten.add", HIDDEN, (x, o), rule="..., ... -> ..."), keep


def _backward(
    b: PlanBuilder, path: str, g: int, w: dict[str, int], keep: dict[str, int], grads: dict[str, int], at_once: bool
) -> int:  # fmt: skip
    pending: list[tuple[str, int]] = []

    def linear(module: str, parameter: str, grad: int, taken: int) -> int:
        b.module = f"{path}.{module}"
        weight, weight_type = w[parameter], PARAMETERS[parameter]
        taken_type = b.values[taken].types[0]
        flops = 2.0 * B * S / 2 * weight_type.numel / 2
        turned = b.add("aten.t", taken_type, (taken,), inplace=True)
        pending.append(
            (
                parameter,
                b.add(
                    "aten.mm",
                    over(weight_type, "data"),
                    (turned, grad),
                    flops=flops,
                    name=f"{module.split('.')[-1]}_grad",
                ),
            )
        )
        turned = b.add("aten.t", weight_type, (weight,), inplace=True)
        result = taken_type if taken_type.layout.placement("model") is not None else PENDING
        back = b.add("aten.mm", result, (grad, turned), flops=flops, rule="m k, k n -> m n")
        if result is PENDING:
            why = f"%{b.values[back].name} is a pending sum over 'model', and its users need it replicated on 'model'"
            back = b.add("all_reduce", HIDDEN, (back,), mesh_dims=("model",), why=why)
        return back

    def norm(module: str, parameter: str, grad: int, taken: int) -> int:
        b.module = f"{path}.{module}"
        back = b.add("aten.native_layer_norm_backward", HIDDEN, (grad, taken, w[parameter]))
        squared = b.add("aten.mul", HIDDEN, (grad, taken))
        pending.append(
            (parameter, b.add("aten.sum", over(PARAMETERS[parameter], "data"), (squared,), name=f"{module}_grad"))
        )
        return back

    h = linear("mlp.down", "mlp.down.weight", g, keep["a"])
    b.module = f"{path}.mlp"
    h = b.add("aten.gelu_backward", b.values[keep["u"]].types[0], (h, keep["u"]))
    h = linear("mlp.up", "mlp.up.weight", h, keep["n2"])
    h = norm("norm2", "norm2.weight", h, keep["x2"])
    b.module = path
    g = b.add("aten.add", HIDDEN, (g, h))
    h = linear("attn.out", "attn.out.weight", g, keep["y"])
    b.module = f"{path}.attn"
    tall = b.values[keep["q"]].types[0]
    dq, dk, dv = (b.add("aten.sdpa_backward", tall, (h, keep["q"], keep["k"], keep["v"])) for _ in "qkv")
    h = b.add("aten.cat", f32((B * S, 3 * D), (("data",), ("model",))), (dq, dk, dv))
    h = linear("attn.qkv", "attn.qkv.weight", h, keep["n1"])
    h = norm("norm1", "norm1.weight", h, keep["x"])
    b.module = path
    g = b.add("aten.add", HIDDEN, (g, h))
    if at_once:
        flat = f32((sum(PARAMETERS[p].numel for p, _ in pending),), ((),), "data")
        joined = b.add("aten.cat", flat, tuple(n for _, n in pending))
        why = "the gradients of the layer are pending sums over 'data', and are summed at once"
        whole = b.add("all_reduce", f32(flat.shape, ((),)), (joined,), mesh_dims=("data",), why=why)
        for parameter, _ in pending:
            grads[parameter] = b.add("aten.slice", PARAMETERS[parameter], (whole,), inplace=True)
    else:
        for parameter, number in pending:
            b.module = f"{path}.{parameter.rsplit('.', 1)[0]}"
            why = f"%{b.values[number].name} is a pending sum over 'data', and its users need it replicated on 'data'"
            grads[parameter] = b.add("all_reduce", PARAMETERS[parameter], (number,), mesh_dims=("data",), why=why)
    return g


def _update(b: PlanBuilder, path: str, weight: int, grad: int) -> None:
    """AdamW of one parameter."""
    b.module = path
    type_ = b.values[weight].types[0]
    stem = b.values[weight].name
    m = b.add("state", type_, call=f'state "optimizer.{stem}.exp_avg"', name=f"{stem}_exp_avg")
    v = b.add("state", type_, call=f'state "optimizer.{stem}.exp_avg_sq"', name=f"{stem}_exp_avg_sq")
    decayed = b.add("aten.mul_", type_, (weight,), inplace=True)
    m = b.add("aten.lerp_", type_, (m, grad), inplace=True)
    v = b.add("aten.mul_", type_, (v,), inplace=True)
    v = b.add("aten.addcmul_", type_, (v, grad), inplace=True)
    root = b.add("aten.sqrt", type_, (v,))
    root = b.add("aten.add_", type_, (root,), inplace=True)
    b.add("aten.addcdiv_", type_, (decayed, m, root), inplace=True)


def small_plan(name: str = "mlp") -> Plan:
    """Ten values: two products, an activation and the collective that they need."""
    b = PlanBuilder(name)
    b.line = 41
    x = b.add("input", f32((64, 256), ROWS), call="input 0", name="x")
    b.module = "up"
    up = b.add("state", f32((256, 1024), ((), ("model",))), call='state "up.weight"', name="up_weight")
    b.module = "down"
    down = b.add("state", f32((1024, 256), (("model",), ())), call='state "down.weight"', name="down_weight")
    b.module, b.line = "up", 27
    h = b.add(
        "aten.mm", f32((64, 1024), (("data",), ("model",))), (x, up), flops=2.0 * 32 * 256 * 512, rule="m k, k n -> m n"
    )
    b.module = ""
    h = b.add("aten.relu", f32((64, 1024), (("data",), ("model",))), (h,), rule="... -> ...")
    b.module = "down"
    y = b.add("aten.mm", f32((64, 256), ROWS, "model"), (h, down), flops=2.0 * 32 * 512 * 256, rule="m k, k n -> m n")
    why = f"%{b.values[y].name} is a pending sum over 'model', and its users need it replicated on 'model'"
    y = b.add("all_reduce", f32((64, 256), ROWS), (y,), mesh_dims=("model",), why=why)
    b.module = ""
    y = b.add("aten.add", f32((64, 256), ROWS), (y, x), rule="..., ... -> ...")
    total = b.add("aten.sum", over(f32((), ()), "data"), (y,))
    b.add(
        "all_reduce", f32((), ()), (total,), name="loss", mesh_dims=("data",), why="%sum is a pending sum over 'data'"
    )
    return b.plan()


def trace_of(plan: Plan, runs: int = 2) -> Trace:
    """A trace of the plan in which every instruction takes about its estimate, and workers wait for each other at
    collectives. The numbers are made up, and the same each time."""
    assert plan.report is not None
    values = [value for value in plan.report.values if value.instruction >= 0]
    clocks = [0.0] * plan.mesh.workers
    held = sum(value.allocates for value in plan.report.values if value.instruction < 0)
    steps: list[Step] = []
    for run in range(runs):
        begin = max(clocks) + 40_000
        clocks = [begin + 1_000.0 * rank for rank in range(plan.mesh.workers)]
        spans: list[list[Span]] = [[] for _ in clocks]
        starts = list(clocks)
        holding = held
        for value in values:
            holding += value.allocates
            before = list(clocks)
            for rank in range(plan.mesh.workers):
                group = plan.mesh.group(rank, value.mesh_dims)
                ready = max(before[peer] for peer in group) if value.mesh_dims else before[rank]
                jitter = 0.85 + 0.3 * (hash((value.instruction, rank, run)) % 97) / 97
                clocks[rank] = ready + value.seconds * 1e9 * jitter
                waited = int(ready - before[rank])
                spans[rank].append(Span(value.instruction, int(before[rank]), int(clocks[rank]), holding, waited))
            holding -= value.frees
        steps += [
            Step(0, run, rank, int(starts[rank]), int(clocks[rank]), tuple(spans[rank])) for rank in range(len(clocks))
        ]
    commands = tuple(Command("run", plan.name, step.start - 30_000, step.start) for step in steps if step.worker == 0)
    return Trace(plan.mesh, (TracedPlan(plan.name, plan.hash),), tuple(steps), commands)
