"""What holds for programs on workers holds with ATen's ops and with generated kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module", params=["off", "all"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_KERNELS", request.param)
        yield request.param
