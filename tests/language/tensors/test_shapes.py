"""Results of ops on tensors without data."""

from __future__ import annotations

import torch

from monarch.language.tensors.shapes import make_fake, run_fake

aten = torch.ops.aten


def fake(*shape: int) -> torch.Tensor:
    return make_fake(shape, torch.float32)


def test_calls_that_are_alike_give_tensors_of_their_own() -> None:
    first, second = (run_fake(aten.lerp.Scalar, [fake(3, 4), fake(3, 4), 0.5], {}) for _ in range(2))
    assert first is not second
    assert first.shape == second.shape == (3, 4) and second.device.type == "meta"


def test_an_op_in_place_gives_its_own_operand_each_time() -> None:
    for _ in range(2):
        x = fake(3, 4)
        assert run_fake(aten.lerp_.Scalar, [x, fake(3, 4), 0.5], {}) is x


def test_an_op_that_changes_the_shape_of_its_operand_does_so_each_time() -> None:
    for _ in range(2):
        x = fake(3, 1)
        assert run_fake(aten.squeeze_.default, [x], {}) is x
        assert x.shape == (3,)


def test_results_follow_the_strides_of_operands() -> None:
    rows = run_fake(aten.lerp.Scalar, [fake(3, 4), fake(3, 4), 0.5], {})
    columns = run_fake(aten.lerp.Scalar, [fake(4, 3).t(), fake(4, 3).t(), 0.5], {})
    assert (rows.stride(), columns.stride()) == ((4, 1), (1, 3))


def test_a_view_shares_its_operands_memory_each_time() -> None:
    x = fake(3, 4)
    for _ in range(2):
        view = run_fake(aten.diagonal.default, [x], {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_memory_of_another_tensors_size_has_it_each_time() -> None:
    """As derivatives forward ask for, of a row of a matrix."""
    row = fake(2, 3)[1]
    for _ in range(2):
        made = run_fake(aten._new_zeros_with_same_feature_meta.default, [row, row], {})
        assert run_fake(aten._has_same_storage_numel.default, [made, row], {})


def test_a_result_follows_the_default_dtype() -> None:
    numbers = torch.empty(3, dtype=torch.int64, device="meta")
    found = [run_fake(aten.mul.Scalar, [numbers, 0.5], {}).dtype]
    torch.set_default_dtype(torch.float64)
    try:
        found.append(run_fake(aten.mul.Scalar, [numbers, 0.5], {}).dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]
