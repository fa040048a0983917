"""Users' mistakes: one clear error each, status 2, nothing run, no traceback."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from monarch.compiler.cli.load import PATH
from monarch.compiler.cli.screen import clean
from monarch.compiler.cli.values import read_mesh
from monarch.compiler.errors import MonarchError
from monarch.compiler.plan.container import MEMBERS, PROGRAM, VERSION, unseal
from monarch.compiler.plan.file import load_plan, plan_bytes
from tests.compiler.cli.conftest import Run
from tests.compiler.plan.test_hostile import JSON, places, sealed

MISTAKES = {
    "no such file": (["compile", "trian.py:train_step"], ["trian.py does not exist", "did you mean train.py?"]),
    "a folder": (["compile", "folder.py:f"], ["folder.py is a folder"]),
    "a notebook": (["inspect", "train.ipynb"], ["train.ipynb is a notebook", "program.inspect("]),
    "no such program": (
        ["compile", "train.py:train_stpe"],
        ["train.py has no 'train_stpe'", "did you mean train_step?", "train_step, evaluate, trainer.step"],
    ),
    "several programs": (["compile", "train.py"], ["train.py has 3 programs: name one"]),
    "no program": (["compile", "train.py:model"], ["'model' of train.py is no program: it is a Sequential"]),
    "a factory": (["compile", "train.py:make_step"], ["is no program", "train.py:make_step()"]),
    "a method of a class": (["compile", "train.py:Trainer.step"], ["is a method", "name it, as trainer.step"]),
    "a path that is none": (["compile", "train.py:a b"], ["'a b' is not the name of a program"]),
    "not called": (["compile", "train.py:train_step().x"], ["it is a program, not a function that makes one"]),
    "an argument without a type": (
        ["compile", "plain.py"],
        ["f takes 'x', and its type is unknown", '--arg x="f32[64@data, 1024]"', "f_inputs() in the file"],
    ),
    "a number without a value": (["compile", "numbers_.py"], ["takes 'rate'", "say it: --arg rate=0.1"]),
    "an unknown argument": (["compile", "plain.py", "--arg", "y=1"], ["f has no parameter 'y'", "are x"]),
    "a type that does not parse": (
        ["compile", "plain.py", "--arg", "x=f32[8@data 4]"],
        ["--arg x: tensor type, column 12: expected ',' or ']', not '4'", "f32[8@data 4]\n             ^"],
    ),
    "neither type nor value": (["compile", "plain.py", "--arg", "x=zz"], ["'zz' is neither a tensor type nor a value"]),
    "an annotation that does not parse": (
        ["compile", "annotation.py"],
        ["annotation.py:5:7: error: parameter 'x'", "expected ',', '@' or ']'", "f32[8@data, 4\n               ^"],
    ),
    "a dtype that there is not": (
        ["compile", "dtype.py"],
        ["dtype.py:3:7: error: parameter 'x': 'f33[4]' is no tensor type", "begins with one of f64, f32"],
    ),
    "a layout of an unknown mesh dim": (
        ["compile", "layout.py"],
        ["unknown mesh dim 'tp' in the layout of 'x'", "the mesh is mesh<data=2>"],
    ),
    "a mesh dim that the file has not": (
        ["compile", "mlp.py", "--mesh", "data=2,tp=2"],
        ["--mesh names 'tp'", "mesh<data=2, tp=2>", "the dims data, model"],
    ),
    "no mesh": (["compile", "nomesh.py"], ["f has no mesh", "--mesh data=2,model=2"]),
    "a mesh that does not parse": (
        ["compile", "mlp.py", "--mesh", "data=2,model"],
        ["--mesh: 'model' is not DIM=SIZE", "data=2,model\n         ^^^^^\n"],
    ),
    "a mesh dim twice": (["compile", "mlp.py", "--mesh", "data=2,data=2"], ["mesh dim 'data' stands twice"]),
    "a mesh that is too large": (["compile", "mlp.py", "--mesh", "data=99999999999"], ["99,999,999,999"]),
    "an unknown target": (["compile", "mlp.py", "--target", "cuda:91"], ["unknown target 'cuda:91'", "cuda:90"]),
    "a value at import": (
        ["compile", "value.py"],
        ["value.py:3:", "a tensor's value is needed while the file is loaded", 'if __name__ == "__main__":'],
    ),
    "actors at import": (
        ["compile", "actors.py"],
        ["actors.py:15:", "tensors are exchanged with actors while the file is loaded", 'if __name__ == "__main__":'],
    ),
    "an import that is not there": (["compile", "imports.py"], ["imports.py:1: error: ModuleNotFoundError"]),
    "a file that is not Python": (["compile", "syntax.py"], ["syntax.py:1:", "invalid syntax"]),
    "a file that exits": (["compile", "exits.py"], ["ended the process (sys.exit)"]),
    "a program that raises": (["compile", "raises.py"], ["raises.py:6: error: KeyError: 'a'", 'return {}["a"]']),
    "an example that does not fit": (["compile", "example.py"], ["the result of example_inputs() does not fit"]),
    "an argument without a value": (["compile", "mlp.py", "--arg", "x"], ["--arg 'x' is not NAME=VALUE"]),
    "an argument twice": (
        ["compile", "numbers_.py", "--arg", "rate=1", "--arg", "rate=2"],
        ["--arg rate stands twice"],
    ),
    "an argument of another type": (
        ["compile", "mlp.py", "--arg", "x=f32[8@data, 65]"],
        ["'x' is f32[8@data, 65], and is annotated as f32[8@data, 64]"],
    ),
    "an argument on an unknown mesh dim": (
        ["compile", "plain.py", "--arg", "x=f32[8@tp]"],
        ["--arg x: unknown mesh dim 'tp'", "the mesh is mesh<data=2>"],
    ),
    "a number for a tensor": (
        ["compile", "mlp.py", "--arg", "x=1"],
        ["argument 'x' of mlp has a type that differs from its annotation", "f32[8@data, 64]"],
    ),
    "a plan to compile": (["compile", "mlp.mplan"], ["mlp.mplan names no program", "write FILE.py:PROGRAM"]),
    "a plan that cannot be written": (["compile", "mlp.py", "-o", "none/x.mplan"], ["cannot write none/x.mplan"]),
    "mesh for a plan": (["inspect", "mlp.mplan", "--mesh", "data=2"], ["are for programs, and mlp.mplan is a plan"]),
    "no such value": (
        ["inspect", "mlp.mplan", "--why", "reluu"],
        ["no value, line or module 'reluu'", "did you mean relu?"],
    ),
    "no such worker": (["inspect", "mlp.mplan", "--worker", "data=2"], ["no worker at data=2", "0 to 1"]),
    "no such dim": (["inspect", "mlp.mplan", "--worker", "tp=0"], ["'tp' is no dim of mesh<data=2, model=2>"]),
    "no such pass": (["inspect", "mlp.mplan", "--after", "magic"], ["no pass 'magic'", "partition-by-data"]),
    "a trace without a page": (["inspect", "mlp.mplan", "--trace", "x.json"], ["--html page.html"]),
    "no such plan": (["inspect", "none.mplan"], ["cannot read none.mplan: No such file"]),
    "no plan": (["inspect", "notes.txt"], ["notes.txt is not a plan file"]),
    "a plan of another version": (
        ["inspect", "newer.mplan"],
        [
            f"newer.mplan has plan format {VERSION + 1}, and this version of monarch reads format {VERSION}",
            "again with",
        ],
    ),
    "an edited plan": (["run", "edited.mplan", "--fill", "zeros"], ["edited.mplan", "compile the program again"]),
    "a truncated plan": (["diff", "mlp.mplan", "cut.mplan"], ["cut.mplan is cut short", "compile the program again"]),
    "a page that cannot be written": (["inspect", "mlp.mplan", "--html", "none/p.html"], ["cannot write none/p.html"]),
    "a page of no trace": (
        ["inspect", "mlp.mplan", "--html", "p.html", "--trace", "notes.txt"],
        ["notes.txt is no trace of monarch's", "monarchc profile"],
    ),
    "a page against no plan": (
        ["inspect", "mlp.mplan", "--html", "p.html", "--against", "notes.txt"],
        ["notes.txt is not a plan file"],
    ),
    "a program to run": (["run", "mlp.py"], ["mlp.py is a program, and a plan is wanted", "monarchc compile mlp.py"]),
    "a program to compare": (["diff", "mlp.mplan", "mlp.py:mlp"], ["mlp.py:mlp is a program", "compile it first"]),
    "inputs that are missing": (
        ["run", "mlp.mplan"],
        ["3 values that the plan takes are missing", "input  x     f32[8, 64]", "state  up    f32[64, 256]"],
    ),
    "another mesh": (["run", "mlp.mplan", "--mesh", "data=4,model=2"], ["the plan is for mesh<data=2, model=2>"]),
    "no such scalar": (["run", "mlp.mplan", "--scalar", "lr=1"], ["--scalar lr", "they are none"]),
    "no number": (["run", "mlp.mplan", "--scalar", "lr=x"], ["'x' is not a number"]),
    "no such fill": (["run", "mlp.mplan", "--fill", "ones"], ["zeros, random"]),
    "no safetensors": (["run", "mlp.mplan", "--inputs", "notes.txt"], ["cannot read notes.txt"]),
    "no such inputs": (["run", "mlp.mplan", "--inputs", "none.safetensors"], ["cannot read none.safetensors"]),
    "truncated inputs": (["run", "mlp.mplan", "--inputs", "cut.safetensors"], ["cannot read cut.safetensors"]),
    "inputs of another shape": (
        ["run", "mlp.mplan", "--inputs", "other.safetensors"],
        ["'x' is f64[8, 63], and the plan takes f32[8, 64]"],
    ),
    "outputs that cannot be written": (
        ["run", "mlp.mplan", "--fill", "zeros", "--outputs", "none/y.safetensors"],
        ["cannot write none/y.safetensors: No such file or directory"],
    ),
    "outputs into a folder": (
        ["run", "mlp.mplan", "--fill", "zeros", "--outputs", "folder.py"],
        ["cannot write folder.py: Is a directory"],
    ),
    "no graph": (["opt"], ["opt needs a graph"]),
    "no graph's text": (
        ["opt", "notes.txt", "--passes", "decompose"],
        ["notes.txt:1:1: error: expected the end of the line or 'graph'"],
    ),
    "no such pass to run": (["opt", "graph.txt", "--passes", "decomposed"], ["did you mean decompose?"]),
    "diff with no plan": (["diff", "mlp.mplan", "notes.txt"], ["notes.txt is not a plan file"]),
}

FILES = {
    "plain.py": "import monarch\nmesh = monarch.Mesh(data=2)\n@monarch.program(mesh=mesh)\ndef f(x):\n    return x\n",
    "numbers_.py": (
        "import monarch\nmesh = monarch.Mesh(data=2)\n"
        '@monarch.program(mesh=mesh)\ndef f(x: "f32[2]", rate: float):\n    return x * rate\n'
    ),
    "annotation.py": (
        'import monarch\nmesh = monarch.Mesh(data=2)\n\n@monarch.program\ndef f(x: "f32[8@data, 4"):\n    return x\n'
    ),
    "dtype.py": 'import monarch\n@monarch.program(mesh=monarch.Mesh(data=2))\ndef f(x: "f33[4]"):\n    return x\n',
    "layout.py": 'import monarch\n@monarch.program(mesh=monarch.Mesh(data=2))\ndef f(x: "f32[4@tp]"):\n    return x\n',
    "nomesh.py": 'import monarch\n@monarch.program\ndef f(x: "f32[4@data]"):\n    return x + 1\n',
    "actors.py": (
        "import torch\n"
        "from monarch.actor import Actor, endpoint, this_host\n"
        "from monarch.distributed import Mesh\n"
        "def loader():  # sent by value: the actors' processes do not import this file\n"
        "    class Loader(Actor):\n"
        "        @endpoint\n"
        "        def rows(self):\n"
        "            return torch.ones(2)\n"
        "    return Loader\n"
        "procs = this_host().spawn_procs(per_host={'data': 2})\n"
        "loaders = procs.spawn('loaders', loader())\n"
        "mesh = Mesh(procs=procs)\n"
        "\n"
        "try:\n"
        "    x = mesh.from_shards(loaders.rows.shards(), '[@data]')\n"
        "finally:\n"
        "    procs.stop().get()\n"
    ),
    "value.py": (
        "import monarch, torch\nx = monarch.distribute(torch.ones(4), monarch.Mesh(data=2))\nprint(x.sum().item())\n"
    ),
    "imports.py": "import no_such_module\n",
    "syntax.py": "def f(:\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "raises.py": (
        'import monarch\nmesh = monarch.Mesh(data=2)\n\n@monarch.program(mesh=mesh)\ndef f(x: "f32[4]"):\n'
        '    return {}["a"]\n'
    ),
    "example.py": (
        "import monarch\n@monarch.program(mesh=monarch.Mesh(data=2))\ndef f(x):\n    return x\n"
        "def example_inputs():\n    return 1, 2, 3\n"
    ),
    "notes.txt": "notes\n",
    "graph.txt": "graph @g on mesh<data=2> {\n  %x = input 0 : f32[4]\n  return %x\n}\n",
}


@pytest.fixture
def files(folder: Path, monarchc: Run) -> Path:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "folder.py").mkdir()
    monarchc("compile", "mlp.py")
    whole = (folder / "mlp.mplan").read_bytes()
    (folder / "newer.mplan").write_bytes(whole[:8] + struct.pack("<I", VERSION + 1) + whole[12:])
    (folder / "edited.mplan").write_bytes(whole.replace(b"aten.relu", b"aten.tanh"))
    (folder / "cut.mplan").write_bytes(whole[: len(whole) // 2])
    inputs = save({"x": torch.zeros(8, 63, dtype=torch.float64), "up": torch.zeros(64, 256)})
    (folder / "other.safetensors").write_bytes(inputs)
    (folder / "cut.safetensors").write_bytes(inputs[: len(inputs) // 2])
    return folder


def test_every_mistake_is_told_in_one_message(files: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "monarch.runtime.controller.executor.start_local", lambda mesh: pytest.fail("workers were started")
    )
    before = sorted(files.rglob("*"))
    for what, (arguments, said) in MISTAKES.items():
        result = monarchc(*arguments, code=2)
        assert result.out == "", (what, result.out)
        assert result.err.count("monarchc: error: ") == 1, (what, result.err)
        for text in said:
            assert text in result.err, (what, result.err)
    written = [path.name for path in files.rglob("*") if path not in before and "__pycache__" not in str(path)]
    assert written == []


@pytest.mark.parametrize("arguments", [[], ["inspect"], ["frobnicate"], ["inspect", "--colour", "x"]])
def test_wrong_usage(arguments: list[str], monarchc: Run) -> None:
    result = monarchc(*arguments, code=2)
    assert "Usage: monarchc" in result.out + result.err


def test_debug_shows_the_traceback(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from monarch.compiler.cli import main

    monkeypatch.setattr(sys, "argv", ["monarchc", "compile", "raises.py", "--debug"])
    with pytest.raises(SystemExit) as exit_:
        main()
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert "Traceback" in said and said.rstrip().splitlines()[-1].strip() == "--debug shows the traceback."


def test_a_fault_of_our_own_says_so(files: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("monarch.compiler.cli.sections.comms.data", fail)
    result = monarchc("inspect", "mlp.mplan", "--comms", code=3)
    assert result.err.startswith("monarchc: this is an internal error of monarchc: ZeroDivisionError: oh\n")
    assert "--debug" in result.err


# -- fuzzed ----------------------------------------------------------------------------------------------------------


@given(st.one_of(st.text(max_size=30), st.text(alphabet="ab=,12 ", max_size=12)))
def test_any_text_as_a_mesh_is_a_mesh_or_an_error(text: str) -> None:
    try:
        mesh = read_mesh(text)
    except MonarchError as error:
        assert str(error)
    else:
        assert mesh is not None
        parts = [part.split("=") for part in text.split(",")]
        assert mesh.dims == tuple((name.strip(), int(size)) for name, size in parts)


@given(st.text(alphabet="ab().1_ ", max_size=12))
def test_what_looks_like_a_path_to_a_program_is_made_of_names_and_calls(text: str) -> None:
    if PATH.fullmatch(text):
        assert all(part.removesuffix("()").isidentifier() for part in text.split("."))


@given(st.text(max_size=40))
def test_cleaned_text_cannot_steer_a_terminal(text: str) -> None:
    assert all(c.isprintable() or c == "\n" for c in clean(text))
    assert len(clean(text)) == len(text)


@given(data=st.data())
def test_damaged_plans_are_refused(data: st.DataObject, damaged: tuple[Path, bytes, Run]) -> None:
    path, whole, monarchc = damaged
    at = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "insert"]))
    byte = data.draw(st.integers(1, 255))
    if how == "cut":
        path.write_bytes(whole[:at])
    elif how == "flip":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ byte]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at:])
    result = monarchc("inspect", path, code=2)
    assert result.out == "" and result.err.startswith("monarchc: error: ")


@given(data=st.data())
def test_hostile_plans_are_refused_or_shown(data: st.DataObject, damaged: tuple[Path, bytes, Run]) -> None:
    """Files whose digests fit, and which say something else: refused, or shown as they are, but never a fault."""
    path, whole, monarchc = damaged
    manifest, members = unseal(whole, "", MEMBERS)
    program = [json.loads(line) for line in members[PROGRAM].splitlines()]
    both = {"manifest": manifest, "program": program}
    for _ in range(data.draw(st.integers(1, 2))):
        *inner, last = data.draw(st.sampled_from([place for place in places(both) if len(place) > 1]))
        target: Any = both
        for key in inner:
            target = target[key]
        target[last] = data.draw(JSON)
    path.write_bytes(sealed(manifest, program, members))
    result = monarchc(
        "inspect", path, "--by", "op", "--by", "line", "--comms", "--memory", "--html", f"{path}.html", code=None
    )
    assert result.code in (0, 2), result
    assert not result.code or (result.out == "" and result.err.startswith("monarchc: error: "))


@given(data=st.data())
def test_mangled_graphs_are_refused_or_run(data: st.DataObject, damaged: tuple[Path, bytes, Run]) -> None:
    path, whole, monarchc = damaged
    path.write_bytes(whole)
    text = load_plan(path).traced
    at = data.draw(st.integers(0, len(text) - 1))
    piece = data.draw(st.text(alphabet='01ax%@[](),=: \n"#', max_size=3))
    mangled = path.with_name("mangled.txt")
    mangled.write_text(text[:at] + piece + text[at + data.draw(st.integers(0, 6)) :])
    result = monarchc("opt", mangled, "--passes", "simplify-views,partition-by-mesh", code=None)
    assert result.code in (0, 2)
    assert result.err.startswith("monarchc: error: ") if result.code else result.out.startswith("graph @")


@pytest.fixture(scope="module")
def whole_plan(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from monarch.compiler.cli.load import load_program
    from tests.compiler.cli.conftest import PROGRAMS

    file = tmp_path_factory.mktemp("whole") / "mlp_for_damage.py"
    file.write_text(PROGRAMS["mlp.py"])
    path = list(sys.path)
    try:
        return plan_bytes(load_program(f"{file}:mlp").compile())
    finally:
        sys.path[:] = path
        sys.modules.pop(file.stem).mesh.close()


@pytest.fixture(scope="module")
def damaged(whole_plan: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, Run]:
    import contextlib
    import io

    from monarch.compiler.cli import main
    from tests.compiler.cli.conftest import Result

    path = tmp_path_factory.mktemp("damaged") / "x.mplan"
    path.write_bytes(whole_plan)
    assert load_plan(path).name == "mlp"

    def run(*arguments: object, code: int | None) -> Result:
        before, sys.argv = sys.argv, ["monarchc", *map(str, arguments)]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit_:
                main()
        finally:
            sys.argv = before
        assert code is None or exit_.value.code == code
        return Result(int(exit_.value.code or 0), out.getvalue(), err.getvalue())

    return path, whole_plan, run


def test_a_program_within_a_function_is_told_how_it_can_be_named(folder: Path, monarchc: Run) -> None:
    """Of functions, those are named that return a program, and the advice leads to one."""
    start = "import monarch, torch\nfrom monarch import Mesh\nmesh = Mesh.abstract(data=2)\n\n"
    step = "    @monarch.program(mesh=mesh)\n    def step(x: 'f32[4@data, 2]'):\n        return x + 1\n"
    helper = "def helper():\n    return 3\n\n"
    (folder / "mainy.py").write_text(f"{start}{helper}def main():\n{step}    print(step(torch.ones(4, 2)))\n")
    for spec in ("mainy.py", "mainy.py:main"):
        said = monarchc("inspect", spec, code=2).err
        assert "main()?" not in said and "helper()" not in said and "mainy.py:main()" not in said
        assert "'step' is a program within main()" in said and "mainy.py:make_step()" in said
    (folder / "mainy.py").write_text(f"{start}{helper}def make_step():\n{step}    return step\n")
    assert "can be named with (): make_step()?" in monarchc("inspect", "mainy.py", code=2).err
    assert "step on mesh<data=2>" in monarchc("inspect", "mainy.py:make_step()").out


def test_an_error_of_actors_while_a_file_is_loaded_is_told_with_its_line(monarchc: Run, tmp_path: Path) -> None:
    """A class of errors with arguments of its own."""
    (tmp_path / "dies.py").write_text("from monarch.actor import SupervisionError\n\nraise SupervisionError('gone')\n")
    result = monarchc("compile", tmp_path / "dies.py:step", code=2)
    assert "dies.py:3: error: gone" in result.err
