"""What the shell is offered after a TAB, asked for as the scripts of `--show-completion` ask for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compiler.cli.conftest import Run

Tab = Callable[..., list[str]]


@pytest.fixture
def tab(monarchc: Run, monkeypatch: pytest.MonkeyPatch) -> Tab:
    def offered(*words: str, shell: str = "bash") -> list[str]:
        line = " ".join(["monarchc", *words])
        for name, value in {
            "_MONARCHC_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words)),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }.items():
            monkeypatch.setenv(name, value)
        return monarchc().out.split("\n" if shell == "bash" else None)

    return offered


def test_commands_options_files_programs_and_targets(folder: Path, tab: Tab) -> None:
    assert set(tab("")) >= {"compile", "run", "inspect", "opt", "diff", "check", "profile"}
    assert tab("inspect", "--me")[:2] == ["--memory", "--mesh"]
    assert tab("inspect", "ml")[:2] == ["mlp.py", "mlp.py:"]
    assert tab("compile", "train.py:e")[:1] == ["train.py:evaluate"]
    assert tab("profile", "train.py:e")[:1] == ["train.py:evaluate"]
    assert tab("compile", "mlp.py", "--target", "cuda:")[:3] == ["cuda:80", "cuda:90", "cuda:100"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(folder: Path, tab: Tab, shell: str) -> None:
    (offered,) = [word for word in tab("compile", "train.py:e", shell=shell) if "evaluate" in word]
    assert "train.py:evaluate" in offered.replace("\\", "")  # zsh keeps the colon for itself


def test_nothing_is_loaded_or_run_for_it(folder: Path, tab: Tab) -> None:
    (folder / "loud.py").write_text("raise SystemExit('loaded')\n@monarch.program\ndef f(x): ...\n")
    assert tab("compile", "loud.py:")[:1] == ["loud.py:f"]
