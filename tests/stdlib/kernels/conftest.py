"""The templates' tests run on a GPU where there is one, and in Triton's interpreter elsewhere, on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _device_and_seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield
