from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.compiler.execution.factories import executors_by
from monarch.language import Mesh
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, compile_dense


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A mesh whose programs run unpartitioned in this process."""
    with executors_by(DenseExecutor), compiling_with(compile_dense), Mesh(data=2, model=2) as made:
        yield made
