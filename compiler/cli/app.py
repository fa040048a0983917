"""The app: its commands, and what becomes of errors.

Exit status: 0 fine; 1 it found something (`check`'s findings, differing plans, a step that failed on a worker); 2 the
user's input is wrong; 3 an internal error of monarchc.

`monarchc --help` must be quick: the commands' options are declared here, without torch, and what a command runs is
loaded when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monarch.compiler.cli import entry
from monarch.compiler.cli.completion import complete_program
from monarch.compiler.cli.options import (
    BY,
    GROUPS,
    LANGUAGES,
    SORTS,
    STEPS,
    Arguments,
    Debug,
    FirstCall,
    Format,
    Imports,
    Json,
    MemoryLimit,
    Mesh,
    PlanOrProgram,
    ProgramSpec,
    Strict,
    Target,
    Verbose,
    Version,
)

app = typer.Typer(name="monarchc", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
command = entry.commands(app)


def main() -> None:
    """Run the command line, and exit."""
    entry.run(app, "monarchc")


@app.callback()
def monarchc(
    version: Version = False,
    debug: Debug = False,
    imports: Imports = None,
) -> None:
    """Compile a distributed program, inspect its plan, and run it.

    Exit status: 0 fine, 1 it found something, 2 the input is wrong, 3 an internal error of monarchc.
    """


@command("monarch.compiler.cli.compile:compile_", "compile")
def compile_(
    program: ProgramSpec,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Where to write the plan. [PROGRAM.mplan]")
    ] = None,
    mesh: Mesh = None,
    target: Target = None,
    arg: Arguments = None,
    first_call: FirstCall = False,
    memory_limit: MemoryLimit = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", metavar="NAME|FILE.toml", help="Say whether it fits this machine: h100-8, or a file."
        ),
    ] = None,
    strict: Strict = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compile a program ahead of time: no worker starts, and no GPU is needed."""


@command("monarch.compiler.cli.run:run")
def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's file.", autocompletion=complete_program)],
    mesh: Mesh = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="Inputs and state by name, safetensors.")
    ] = None,
    outputs: Annotated[
        Path | None,
        typer.Option("--outputs", metavar="FILE", help="Where to write results and new state, safetensors."),
    ] = None,
    scalar: Annotated[
        list[str] | None, typer.Option("--scalar", metavar="NAME=VALUE", help="A number that the plan takes: lr=0.1.")
    ] = None,
    named: Annotated[
        list[str] | None, typer.Option("--size", metavar="NAME=VALUE", help="What a named size is: t=128.")
    ] = None,
    fill: Annotated[str | None, typer.Option("--fill", metavar="zeros|random", help="Fill missing values.")] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="How often to run it: each step takes the last's state.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Where its random numbers start.")] = 0,
    as_json: Json = False,
) -> None:
    """Run a plan on workers of this machine, without the program that it was made of."""


@command("monarch.compiler.cli.profile:profile")
def profile(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|FILE.py[:FUNCTION]",
            help="A plan's file; a script, which runs as __main__; or a function of a file, to call without arguments.",
            autocompletion=complete_program,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARG…]", help="The script's own arguments, after --.")
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the trace; .gz compresses it.")
    ] = Path("trace.json"),
    by: Annotated[str, typer.Option("--by", metavar="|".join(GROUPS), help="What the table of times is by.")] = "value",
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help=f"Of a plan: how often to run it ({STEPS} if not given).")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option("--inputs", metavar="FILE", help="Of a plan: inputs and state by name, safetensors.")
    ] = None,
    scalar: Annotated[
        list[str] | None, typer.Option("--scalar", metavar="NAME=VALUE", help="Of a plan: a number that it takes.")
    ] = None,
    fill: Annotated[
        str, typer.Option("--fill", metavar="zeros|random", help="Of a plan: fill missing values.")
    ] = "random",
    as_json: Json = False,
) -> None:
    """Run a script or a plan, measure every worker, and write a trace that ui.perfetto.dev opens."""


@command("monarch.compiler.cli.inspect:inspect")
def inspect(
    plan: PlanOrProgram,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="|".join(BY),
            help="What a step costs a worker, by your lines, by module, op, mesh dim, phase or stage.",
            autocompletion=lambda incomplete: [name for name in BY if name.startswith(incomplete)],
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="|".join(SORTS), help="With --by: the most expensive first. [time]"),
    ] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="What runs on a worker, by kernel.")] = False,
    comms: Annotated[bool, typer.Option("--comms", help="The collectives, by bytes.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="What a worker holds, over the schedule.")] = False,
    survives: Annotated[
        bool, typer.Option("--survives", help="Which losses of workers and hosts the state survives.")
    ] = False,
    hosts: Annotated[
        int | None, typer.Option("--hosts", metavar="N", help="With --survives: on how many hosts the workers are.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option("--part", metavar="NAME", help="Of a program of several meshes: only the part of one of them."),
    ] = None,
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="DIM=I,…", help="What one worker holds: data=0,model=1.")
    ] = None,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="VALUE|FILE.py:LINE|MODULE",
            help="Why a value has its layout, or the collectives of a line or module are there.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page to explore the plan in a browser.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Show measured times on the page.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="PLAN", help="Show another plan beside it on the page.")
    ] = None,
    dot: Annotated[bool, typer.Option("--dot", help="The graph in Graphviz's language.")] = False,
    text: Annotated[bool, typer.Option("--text", help="The graph's text.")] = False,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="PASS", help="The graph's text after a pass; 'trace' for before all."),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            "--emit",
            metavar="cpp|triton|ptx",
            help="The generated kernels' sources, with your lines that they come from.",
            autocompletion=lambda incomplete: [name for name in LANGUAGES if name.startswith(incomplete)],
        ),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="NAME", help="With --emit: only the kernels of this name.")
    ] = None,
    mesh: Mesh = None,
    target: Target = None,
    arg: Arguments = None,
    first_call: FirstCall = False,
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Show a plan: a plan's file, or the plan of a program in a Python file. Runs nothing."""


@command("monarch.compiler.cli.sweep:sweep")
def sweep(
    program: ProgramSpec,
    mesh: Annotated[
        list[str] | None, typer.Option("--mesh", metavar="DIM=N,…", help="A mesh to ask about. Several times.")
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine", metavar="NAME|FILE.toml", help="A machine to ask about: h100-8, or a file. Several times."
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="'NAME=LAYOUT; …'",
            help="Other layouts of parameters to ask about: 'blocks.*.up.weight=[-, @model]'. Several times.",
        ),
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto", help="Find the cheapest layouts, and say why; those of --layout bind. Compares with usual ones."
        ),
    ] = False,
    memory_limit: MemoryLimit = None,
    arg: Arguments = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Write each plan there, for inspect and diff.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Estimate a program on other meshes, machines and layouts. Nothing runs, no kernel is built.

    Exit status 1 where none fits.
    """


@command("monarch.compiler.cli.opt:opt")
def opt(
    file: Annotated[
        Path | None, typer.Argument(metavar="GRAPH", help="A file with a graph's text, or - for standard input.")
    ] = None,
    passes: Annotated[str, typer.Option("--passes", metavar="A,B,…", help="The passes to run, in this order.")] = "",
    list_passes: Annotated[bool, typer.Option("--list", help="List the passes there are.")] = False,
    as_json: Json = False,
) -> None:
    """Run compiler passes on a graph's text, and print the graph that comes out."""


@command("monarch.compiler.cli.diff:diff")
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan's file.", autocompletion=complete_program)],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another's.", autocompletion=complete_program)],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with status 1 where the plans differ.")] = False,
    as_json: Json = False,
) -> None:
    """Print the differences between two plans: layouts, collectives, bytes, memory, kernels, and the lines involved."""


@command("monarch.compiler.cli.check:check")
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Python files, and folders of them. They are read, not run.")
    ],
    format_: Annotated[Format, typer.Option("--format", help="The format of the findings.")] = Format.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 for warnings too.")] = False,
) -> None:
    """Find code that tracing a program would refuse, and lines that are slow or have no effect.

    Exit status 1 where there is an error (with --strict, also a warning), 2 where a file cannot be read or parsed.
    """


@command("monarch.compiler.cli.tune:tune")
def tune(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's file, compiled for the GPU of this machine.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Where to write the plan. [the same file]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the variants of a plan's kernels, and have the plan run the fastest. This needs a GPU."""
