"""`make demo`: one Python program trains a GPT over a mesh of four workers, and plain PyTorch checks its numbers.

The text is the source of Python's standard library on this machine. The mesh is data=2, model=2: the batch is cut in
two, and so is every attention and MLP layer. Nothing below says what to send where: the compiler derives it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import monarch
import torch
import torch.nn.functional as F
from monarch.compiler.inspect.page import TEMPLATE, page
from monarch.compiler.inspect.trace import load_trace
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus, decode, encode
from monarch.stdlib.models.gpt import GPT, Block
from monarch.stdlib.parallel import tensor_parallel
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

BATCH, SEQUENCE, RATE, WARMUP = 16, 128, 1e-3, 20
PLAN, TRACE, PAGE = "train_step.mplan", "train_step.trace.json", "train_step.html"
Tokens = Annotated[torch.Tensor, "i64[16@data, 128]"]
SPARKS = "▁▂▃▄▅▆▇█"

console = Console()


def make_model(options: argparse.Namespace) -> GPT:
    torch.manual_seed(options.seed)
    return GPT(width=options.width, layers=options.layers, sequence=SEQUENCE)


def make_optimizer(
    model: torch.nn.Module, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, with a rate that rises for a while and then falls as a cosine to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def share(step: int) -> float:
        warm = min(1.0, (step + 1) / WARMUP)
        return warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


class Training:
    """The model and its optimizer on a mesh, and the step that trains it."""

    def __init__(self, mesh: Mesh, options: argparse.Namespace) -> None:
        model = make_model(options)
        self.model = monarch.module_to_mesh(model, mesh, layouts=tensor_parallel(model, mesh, "model"))
        self.optimizer, self.scheduler = make_optimizer(self.model, options.steps)

    @monarch.program
    def step(self, tokens: Tokens, targets: Tokens):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss


def make_training() -> Training:
    """For the command line: monarchc inspect 'examples/train_gpt.py:make_training().step' --mesh data=8,model=2"""
    return Training(Mesh(data=2, model=2), parser().parse_args([]))


def train_on_mesh(options: argparse.Namespace, text: torch.Tensor) -> tuple[list[float], GPT]:
    """Train on the mesh: the loss of each step, and a plain copy of the trained model. Writes the plan and its page."""
    with hosts_of(options) as hosts, Mesh(data=2, model=2, hosts=hosts) as mesh:
        console.print(f"[bold]Training on {mesh}, on {', '.join(hosts.addresses) if options.hosts else 'this host'}[/]")
        training = Training(mesh, options)
        losses, running = [], []
        with progress(options.steps) as show:
            for tokens, targets in data(options, text):
                running.append(training.step(tokens, targets))  # returns at once
                training.scheduler.step()
                if len(running) > 2:  # let the program run two steps ahead of what is shown
                    losses.append(running.pop(0).item())
                    show(losses)
            for loss in running:
                losses.append(loss.item())
                show(losses)
        trained = make_model(options)
        trained.load_state_dict({name: value.full_tensor() for name, value in training.model.state_dict().items()})
        tokens, targets = next(data(options, text))
        write_plan(training, tokens, targets, options.out)
    return losses, trained


def hosts_of(options: argparse.Namespace) -> monarch.HostMesh:
    """Those that were named, with what authenticates them in MONARCH_TLS or MONARCH_TOKEN; or this one."""
    if not options.hosts:
        return monarch.this_host()
    return monarch.hosts(options.hosts, transports=options.transports, timeout=options.timeout)


def write_plan(training: Training, tokens: torch.Tensor, targets: torch.Tensor, out: Path) -> None:
    """The step's plan, what a few steps of it took, and a page that shows both, where the page has been built."""
    out.mkdir(parents=True, exist_ok=True)
    plan = training.step.compile(tokens, targets)
    plan.save(str(out / PLAN))
    with monarch.profile(str(out / TRACE)):
        for _ in range(3):
            training.step(tokens, targets).wait()
    if TEMPLATE.exists():
        (out / PAGE).write_text(page(plan, trace=load_trace(out / TRACE), title="train_gpt.py"), encoding="utf-8")


def train_plainly(options: argparse.Namespace, text: torch.Tensor) -> list[float]:
    """The same training in this process by plain PyTorch: the loss of each step."""
    console.print("[bold]The same by plain PyTorch in one process[/]")
    model = make_model(options)
    optimizer, scheduler = make_optimizer(model, options.steps)
    losses: list[float] = []
    with progress(options.steps) as show:
        for tokens, targets in data(options, text):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            show(losses)
    return losses


def data(options: argparse.Namespace, text: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return batches(text, batch=BATCH, sequence=SEQUENCE, steps=options.steps, seed=options.seed)


def layer_graphs(width: int) -> tuple[str, str]:
    """One layer of the model, forward, before and after partitioning: for this no worker is needed."""
    mesh = Mesh.abstract(data=2, model=2)
    block = Block(width, heads=4)
    block = monarch.module_to_mesh(block, mesh, layouts=tensor_parallel(block, mesh, "model"))

    x = monarch.distribute(torch.zeros(BATCH, SEQUENCE, width), mesh, "[@data, -, -]")

    @monarch.program
    def layer(x: torch.Tensor) -> torch.Tensor:
        return block(x)

    with torch.no_grad():
        traced = layer.trace(x)
    return without_comments(str(traced.graph)), without_comments(str(traced.partition().graph))


# -- what is shown --------------------------------------------------------------------------------------------------


def without_comments(graph: str) -> str:
    """A graph's text without the source lines and reasons at the ends of its lines, so that it fits a terminal."""
    return "\n".join(line.partition("  # ")[0].rstrip() for line in graph.splitlines())


def spark(losses: list[float], width: int = 30) -> str:
    """The losses so far as a line of bars."""
    groups = [losses[i * len(losses) // width : (i + 1) * len(losses) // width] for i in range(width)]
    means = [sum(group) / len(group) for group in groups if group]
    low, high = min(means), max(means)
    return "".join(SPARKS[round((mean - low) / (high - low or 1) * (len(SPARKS) - 1))] for mean in means)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[list[float]], None]]:
    """Gives what shows the losses so far: live on a terminal, ten lines elsewhere."""
    start = time.perf_counter()
    first = 0.0

    def rate(done: int) -> str:
        # The first step, which traces and compiles, is left out of the rate.
        nonlocal first
        now = time.perf_counter()
        if done == 1:
            first = now
            return f"first step after {now - start:.1f} s"
        return f"{(done - 1) * BATCH * SEQUENCE / (now - first):,.0f} tokens/s"

    if not console.is_terminal:

        def line(losses: list[float]) -> None:
            done = len(losses)
            text = rate(done)
            if done in (1, steps) or done % max(1, steps // 10) == 0:
                console.print(f"  step {done:4}/{steps}  loss {losses[-1]:.4f}  {text}")

        yield line
        return

    columns = [MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn()]
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=steps)

        def live(losses: list[float]) -> None:
            description = f"loss [bold]{losses[-1]:.4f}[/] [cyan]{spark(losses)}[/] {rate(len(losses))}"
            bar.update(task, completed=len(losses), description=description)

        yield live


def comparison(ours: list[float], plain: list[float]) -> Table:
    table = Table("step", "monarch", "plain PyTorch", "difference", title="The same losses", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    rows = sorted({*range(0, len(ours), max(1, len(ours) // 10)), len(ours) - 1})
    for step in rows:
        table.add_row(str(step), f"{ours[step]:.6f}", f"{plain[step]:.6f}", f"{ours[step] - plain[step]:+.1e}")
    return table


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--steps", type=int, default=200)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--sample", type=int, default=400, help="how many bytes of text to generate")
    made.add_argument("--hosts", help="hosts to train on (monarch host), with commas between; this one without it")
    made.add_argument("--transports", type=lambda text: text.split(","), help="which to try between hosts: verbs,tcp")
    made.add_argument("--timeout", type=float, default=10, help="seconds that hosts may take to answer")
    made.add_argument("--out", type=Path, default=Path("out"), help="where to write the plan, its trace and its page")
    return made


def main() -> None:
    options = parser().parse_args()
    if options.steps < 1:
        parser().error(f"--steps is {options.steps}, and must be at least 1")

    text = corpus()
    ours, trained = train_on_mesh(options, text)
    plain = train_plainly(options, text)

    before, after = layer_graphs(options.width)
    for title, graph in (("One layer as traced: global types", before), ("Partitioned: what each worker runs", after)):
        console.rule(title, align="left")
        console.print(graph, markup=False, highlight=False, soft_wrap=True)

    console.rule("What the trained model writes", align="left")
    generator = torch.Generator().manual_seed(options.seed)
    prompt = encode("def ").unsqueeze(0)
    console.print(
        decode(trained.generate(prompt, options.sample, temperature=0.7, generator=generator)[0]),
        markup=False,
        highlight=False,
    )
    console.rule("Does it compute the same?", align="left")
    console.print(comparison(ours, plain))
    worst = max(abs(a - b) for a, b in zip(ours, plain, strict=True))
    console.print(f"largest difference over {len(ours)} steps: {worst:.1e}")
    console.print("what became of the training step:")
    inspect = f".venv/bin/monarchc inspect {options.out / PLAN}"
    write_page = f"make setup && {inspect} --trace {options.out / TRACE} --html {options.out / PAGE}"
    for what, name in (
        ("its page, for a browser", f"{options.out / PAGE}" if TEMPLATE.exists() else f"{write_page} writes it"),
        ("its plan", f"{inspect} --comms"),
        ("a trace of three steps, for ui.perfetto.dev", f"{options.out / TRACE}"),
    ):
        console.print(f"    {what}: {name}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
