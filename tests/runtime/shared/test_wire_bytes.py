"""Tensors as rows of bytes."""

from __future__ import annotations

import torch

from monarch.runtime.shared import wire
from monarch.runtime.shared.files import stretches


def test_one_element_is_sent_and_written_whatever_its_strides_are() -> None:
    one = torch.tensor([7.0, 3.0])[1:].expand(1, 1).as_strided((1, 1), (0, 0), 1)
    assert one.is_contiguous() and one.stride() == (0, 0)
    assert wire.raw(one).tolist() == list(one.numpy().tobytes())
    assert b"".join(stretches(one)) == one.numpy().tobytes()
