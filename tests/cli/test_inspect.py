"""`monarchc inspect` and `monarchc --version`, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import monarch
from monarch.compiler.cli import main
from monarch.compiler.plan import Instruction, MeshSpec, Plan, Slot, ValueSpec
from monarch.compiler.plan.file import hash_of, save_plan
from monarch.compiler.text import parse_graph, parse_type

GRAPH = """\
graph @step on mesh<data=4, model=2> partitioned<data, model> {
  %x = input 0                                                  : f32[2, 4] of f32[8@data, 4]
  %w = state "fc.weight"                                        : f32[4, 4]
  %loss = aten.sum(%x)                                          : f32[] partial<sum: data>  # train.py:7
  %loss_all_reduce = all_reduce([%loss], ["data"], "sum")       : (f32[])                   # train.py:7
  %whole = getitem(%loss_all_reduce, 0)                         : f32[]
  %new = aten.mul.Tensor(%w, %whole)                            : f32[4, 4]
  update "fc.weight" = %new
  return %whole
}"""


def plan() -> Plan:
    x, w, scalar = parse_type("f32[8@data, 4]"), parse_type("f32[4, 4]"), parse_type("f32[]")
    return Plan(
        name="step",
        mesh=MeshSpec.of(data=4, model=2),
        inputs=(ValueSpec("input", 0, x, 0), ValueSpec("state", "fc.weight", w, 1)),
        outputs=(ValueSpec("return", 0, scalar, 5), ValueSpec("state", "fc.weight", w, 6)),
        instructions=(
            Instruction("aten.sum.default", (Slot(0),), {}, 3),
            Instruction("all_reduce", ([Slot(3)], ["data"], "sum"), {}, 4, (3,)),
            Instruction("getitem", (Slot(4), 0), {}, 5, (4,)),
            Instruction("aten.mul.Tensor", (Slot(1), Slot(5)), {}, 6),
        ),
        slots=7,
        donated=(False, True),
        constants={"table": torch.zeros(300, 2)},
        constant_slots={"table": 2},
        graph=str(parse_graph(GRAPH)),
        costs={
            "ops": 4,
            "collectives": {"data": {"all_reduce": {"count": 1, "tensors": 1, "bytes": 4}}},
            "peak_bytes": 2432,
            "seconds": {"partition-by-data": 0.25, "emit-plan": 0.5},
        },
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_plan(plan(), tmp_path / "step.mplan")
    return tmp_path / "step.mplan"


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Result]


@pytest.fixture
def monarchc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process, for a narrow terminal."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr(sys, "argv", ["monarchc", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Result(exit_.value.code, captured.out, captured.err)  # type: ignore[arg-type]

    return run


def test_as_a_command_of_its_own(file: Path) -> None:
    program = "from monarch.compiler.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = [
        subprocess.run(
            [sys.executable, "-c", program, "inspect", str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        for path in (file, file.with_name("none"))
    ]
    assert [result.returncode for result in ran] == [0, 2]
    assert ran[0].stdout == f"{SHOWN}\n{plan().graph}\n"
    assert ran[1].stderr.startswith("monarchc: error: cannot read ") and "Traceback" not in ran[1].stderr


SHOWN = f"""\
step on mesh<data=4, model=2>: 8 workers
hash {hash_of(plan())}

inputs
  input  0          f32[8@data, 4]  a worker holds [2, 4]
  state  fc.weight  f32[4, 4]                              replaced

outputs
  return  0          f32[]
  state   fc.weight  f32[4, 4]

constants
  table  f32[300, 2]  2.3 KiB

collectives in a step
  mesh dim  collective  count  tensors  bytes a worker
  data      all_reduce      1        1             4 B

in all
  instructions                   4
  different ops                  4
  peak memory of a worker  2.4 KiB

compiled in
  partition-by-data  0.250 s
  emit-plan          0.500 s
  together           0.750 s
"""


def test_a_plan_is_shown_whole_whatever_the_terminal_is(file: Path, monarchc: Run) -> None:
    result = monarchc("inspect", file)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{SHOWN}\n{plan().graph}\n"


def test_the_graph_can_be_left_out(file: Path, monarchc: Run) -> None:
    assert monarchc("inspect", "--no-graph", file).stdout == SHOWN


def test_everything_as_json(file: Path, monarchc: Run) -> None:
    result = monarchc("inspect", "--json", file)
    assert (result.returncode, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert shown["name"] == "step"
    assert shown["mesh"] == {"data": 4, "model": 2}
    assert shown["inputs"][0] == {
        "kind": "input",
        "label": 0,
        "type": "f32[8@data, 4]",
        "local": [2, 4],
        "donated": False,
    }
    assert shown["constants"] == {"table": "f32[300, 2]"}
    assert shown["ops"]["all_reduce"] == 1
    assert shown["costs"] == plan().costs
    assert shown["graph"] == plan().graph


def test_costs_of_another_form_are_left_out_of_what_is_shown(tmp_path: Path, monarchc: Run) -> None:
    costs = {"collectives": [1], "peak_bytes": "much", "seconds": {"a": None, "b": {}}}
    save_plan(replace(plan(), costs=costs), tmp_path / "odd.mplan")
    result = monarchc("inspect", "--no-graph", tmp_path / "odd.mplan")
    assert (result.returncode, result.stderr) == (0, "")
    assert "collectives" not in result.stdout and "compiled in" not in result.stdout and "peak" not in result.stdout


def test_what_a_file_says_cannot_steer_the_terminal(tmp_path: Path, monarchc: Run) -> None:
    hostile = replace(plan(), name="\x1b[31mred[/] [bold]", graph="\x1b]0;title\x07\x9b2J")
    save_plan(hostile, tmp_path / "hostile.mplan")
    result = monarchc("inspect", tmp_path / "hostile.mplan")
    assert result.returncode == 0
    assert result.stdout.startswith("\N{REPLACEMENT CHARACTER}[31mred[/] [bold] on mesh")
    assert all(c.isprintable() or c == "\n" for c in result.stdout)


def test_a_damaged_file_gives_one_message_and_status_2(file: Path, monarchc: Run) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    result = monarchc("inspect", file)
    assert (result.returncode, result.stdout) == (2, "")
    first, hint = result.stderr.splitlines()
    assert first.startswith("monarchc: error: step.mplan is cut short: ")
    assert hint == "  compile the program again, or copy the file again from where it was made."


def test_a_file_that_is_not_there(tmp_path: Path, monarchc: Run) -> None:
    result = monarchc("inspect", tmp_path / "none.mplan")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"monarchc: error: cannot read {tmp_path}/none.mplan: No such file or directory\n"
        "  give a file that plan.save() wrote.\n"
    )


@pytest.mark.parametrize("arguments", [["inspect"], ["frobnicate"], ["inspect", "--colour", "x"]])
def test_wrong_usage_is_status_2(arguments: list[str], monarchc: Run) -> None:
    result = monarchc(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "Usage: monarchc" in result.stderr and "Traceback" not in result.stderr


def test_the_version(monarchc: Run) -> None:
    result = monarchc("--version")
    assert (result.returncode, result.stdout) == (0, f"monarchc {monarch.__version__}\n")
