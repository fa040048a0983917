"""What holds for programs on workers holds with ATen's ops and with generated kernels. Files whose tests are about
processes and not about numbers run each test with one of the two (`sample(1, of="kernels")`), and with both in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module", params=["off", "all"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_KERNELS", request.param)
        yield request.param
