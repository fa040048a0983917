"""The compiler's door."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from monarch.compiler.execution.factories import executors_by
from monarch.compiler.graph import Graph
from monarch.compiler.plan import Plan
from monarch.language import Mesh, distribute, program
from monarch.language.compile import compiling_with, full_collections_later
from monarch.language.programs.variant import Compiled
from tests.language.dense import DenseExecutor, compile_dense


def test_full_collections_wait_until_a_program_is_compiled() -> None:
    before = gc.get_threshold()
    with full_collections_later():
        assert gc.isenabled()
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 1 << 20
    assert gc.get_threshold() == before


def test_thresholds_that_the_users_function_sets_stay() -> None:
    before = gc.get_threshold()
    try:
        with full_collections_later():
            gc.set_threshold(600, 5, 5)
        assert gc.get_threshold() == (600, 5, 5)
    finally:
        gc.set_threshold(*before)


def test_full_collections_wait_until_the_first_step_is_given(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    before, within, run = gc.get_threshold(), [], Compiled.run

    def noting(compiled: Compiled, *given: Any) -> Any:
        within.append(gc.get_threshold()[2])
        return run(compiled, *given)

    monkeypatch.setattr(Compiled, "run", noting)
    double = program(lambda x: x * 2)
    x = distribute(torch.ones(3), mesh)
    for _ in range(2):
        assert double(x).tolist() == [2.0] * 3
        assert gc.get_threshold() == before
    assert within == [1 << 30, before[2]]


def test_plans_of_ops_outside_of_programs_are_of_one_compiler() -> None:
    """A plan of a test's compiler, run on workers, would give other values."""
    made: list[int] = []
    for number in range(2):

        def compiler(graph: Graph, number: int = number) -> Plan:
            made.append(number)
            return compile_dense(graph)

        with executors_by(DenseExecutor), compiling_with(compiler), Mesh(data=2) as mesh:
            for _ in range(2):
                assert (distribute(torch.ones(3), mesh) * 5).tolist() == [5.0] * 3
    assert made == [0, 1]
