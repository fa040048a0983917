"""Linear algebra: the matrices of a batch are apart, so batch dims shard; rows and columns stay whole, but for those of
what a matrix is solved for."""

from __future__ import annotations

from monarch.compiler.rules.call import Call, dim_of
from monarch.compiler.rules.line import Line, LineError, factor_names, line
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text

_MATRIX, _VECTOR, _NUMBER = "... _ _", "... _", "..."
_COLUMNS, _ROWS = "... _ n", "... n _"  # of a right side, which are apart: to the right of the matrix, or to its left

for _names, _line in (
    ("cholesky cholesky_inverse linalg_matrix_exp", f"{_MATRIX} -> {_MATRIX}"),
    ("linalg_inv_ex linalg_cholesky_ex", f"{_MATRIX} -> {_MATRIX}, {_NUMBER}"),
    ("linalg_qr", f"{_MATRIX} -> {_MATRIX}, {_MATRIX}"),
    ("geqrf", f"{_MATRIX} -> {_MATRIX}, {_VECTOR}"),
    ("linalg_lu", f"{_MATRIX} -> {_MATRIX}, {_MATRIX}, {_MATRIX}"),
    ("linalg_lu_factor_ex linalg_ldl_factor_ex", f"{_MATRIX} -> {_MATRIX}, {_VECTOR}, {_NUMBER}"),
    ("_linalg_eigh", f"{_MATRIX} -> {_VECTOR}, {_MATRIX}"),
    ("_linalg_svd", f"{_MATRIX} -> {_MATRIX}, {_VECTOR}, {_MATRIX}"),
    ("_linalg_det", f"{_MATRIX} -> {_NUMBER}, {_MATRIX}, {_VECTOR}"),
    ("_linalg_slogdet", f"{_MATRIX} -> {_NUMBER}, {_NUMBER}, {_MATRIX}, {_VECTOR}"),
    ("linalg_eig", f"{_MATRIX} -> {_VECTOR}, {_MATRIX}"),
    ("linalg_pinv", f"{_MATRIX}, {_NUMBER}, {_NUMBER} -> {_MATRIX}"),
    ("triangular_solve", f"{_MATRIX}, {_MATRIX} -> {_MATRIX}, {_MATRIX}"),
    ("linalg_householder_product", f"{_MATRIX}, {_VECTOR} -> {_MATRIX}"),
    ("ormqr", f"{_MATRIX}, {_VECTOR}, {_MATRIX} -> {_MATRIX}"),
):
    sharding_rule(" ".join(f"aten.{name}" for name in _names.split()), _line)

sharding_rule("aten._cdist_forward", "... p _, ... r _ -> ... p r")
sharding_rule("aten._cdist_backward", "... p r, ... p _, ... r _, ... p r -> ... p _", linear=[{0}])
sharding_rule("aten.cholesky_solve", f"{_COLUMNS}, {_MATRIX} -> {_COLUMNS}", linear=[{0}])
sharding_rule("aten.linalg_ldl_solve", f"{_MATRIX}, {_VECTOR}, {_COLUMNS} -> {_COLUMNS}", linear=[{2}])


@sharding_rule("aten.linalg_solve_triangular")
def _solve_triangular(call: Call) -> Line:
    right = _COLUMNS if call["left"] else _ROWS
    return line(f"{_MATRIX}, {right} -> {right}", linear=[{1}])


@sharding_rule("aten.linalg_lu_solve")
def _lu_solve(call: Call) -> Line:
    right = _COLUMNS if call["left"] else _ROWS
    return line(f"{_MATRIX}, {_VECTOR}, {right} -> {right}", linear=[{2}])


@sharding_rule("aten.linalg_cross")
def _cross(call: Call) -> Line:
    names = factor_names(len(call.result))
    names[dim_of(call["dim"], len(names))] = "_"
    return line(f"{tensor_text(names)}, {tensor_text(names)} -> {tensor_text(names)}", linear=({0}, {1}))


@sharding_rule("aten.lu_unpack")
def _lu_unpack(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]) - 2)
    matrix, vector = tensor_text([*names, "_", "_"]), tensor_text([*names, "_"])
    # What it is told not to unpack is empty, and the same on every worker.
    empty = [at for at, shape in enumerate(call.results) if shape == (0,)]
    made = ", ".join("_" if at in empty else matrix for at in range(3))
    return line(f"{matrix}, {vector} -> {made}", kept=[(name, at) for name in names for at in empty])


@sharding_rule("aten._linalg_solve_ex")
def _solve(call: Call) -> Line:
    matrix, right = call.shapes
    batch = matrix[:-2]
    if right[: len(batch)] != batch or len(right) not in (len(batch) + 1, len(batch) + 2):
        raise LineError("the right side is broadcast over a batch of matrices")
    side = _VECTOR if len(right) == len(batch) + 1 else _MATRIX
    return line(f"{_MATRIX}, {side} -> {side}, {_MATRIX}, {_VECTOR}, {_NUMBER}")
