from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.compiler.execution.factories import executors_by
from monarch.language.compile import compiling_with
from tests.language.dense import compile_dense
from tests.stdlib.checkpoints.files import FileExecutor


@pytest.fixture
def here() -> Iterator[None]:
    """Meshes run their programs, and write and read files, in this process."""
    with executors_by(FileExecutor), compiling_with(compile_dense):
        yield
