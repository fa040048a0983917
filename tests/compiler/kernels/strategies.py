"""Random kernels, for Hypothesis."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Index,
    Kernel,
    Load,
    Nest,
    Op,
    Position,
    Reduce,
    Statement,
    Store,
    row_major,
)
from monarch.compiler.loops.signatures import BOOL, FLOATS, POINTWISE, REDUCTIONS

F32, I64 = torch.float32, torch.int64


@st.composite
def kernels(draw: st.DrawFn, sums: bool = False) -> Kernel:
    """Kernels that `check_kernel` takes, without gathers, whose results are no matter of rounding: what is compared,
    rounded or cast to a whole number is loaded or made of whole numbers. With `sums`, stores may add up."""
    nests, inputs, outputs = [], [], []
    for _ in range(draw(st.integers(1, 2))):
        dims = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17, 40]), max_size=4)))
        reduced = draw(st.integers(0, len(dims)))
        made = _Nest(draw, dims, reduced, inputs, outputs, sums)
        nests.append(made.nest())
    # Outputs are numbered behind all inputs, of which there are more now than when their stores were made.
    count = len(inputs)
    nests = [
        replace(n, body=tuple(replace(s, buffer=s.buffer + count) if isinstance(s, Store) else s for s in n.body))
        for n in nests
    ]
    kernel = Kernel("random", tuple(inputs), tuple(outputs), tuple(nests))
    check_kernel(kernel)
    return kernel


class _Nest:
    def __init__(
        self,
        draw: st.DrawFn,
        dims: tuple[int, ...],
        reduced: int,
        inputs: list[Buffer],
        outputs: list[Buffer],
        sums: bool,
    ) -> None:
        self.draw, self.dims, self.reduced, self.inputs, self.outputs = draw, dims, reduced, inputs, outputs
        self.sums = sums
        self.body: list[Statement] = []
        self.dtypes: list[torch.dtype | None] = []

    def nest(self) -> Nest:
        self._add(self._load(F32), F32)
        for _ in range(self.draw(st.integers(1, 12))):
            self._statement()
        for _ in range(self.draw(st.integers(1, 2))):
            self._store()
        return Nest(self.dims, self.reduced, tuple(self.body))

    def _add(self, statement: Statement, dtype: torch.dtype | None) -> int:
        self.body.append(statement)
        self.dtypes.append(dtype)
        return len(self.body) - 1

    def _load(self, dtype: torch.dtype) -> Load:
        """Of a buffer whose dims are some of the nest's, in some order, perhaps padded and behind an offset."""
        chosen = self.draw(st.lists(st.sampled_from(range(len(self.dims))), unique=True)) if self.dims else []
        pad, offset = self.draw(st.sampled_from([0, 0, 3])), self.draw(st.sampled_from([0, 0, 2]))
        shape = [self.dims[dim] for dim in chosen]
        steps = row_major((*shape[:-1], shape[-1] + pad)) if shape else ()
        strides = [0] * len(self.dims)
        for dim, step in zip(chosen, steps, strict=True):
            strides[dim] = step
        index = Index(offset, tuple(strides))
        size = index.last(self.dims) + 1
        self.inputs.append(Buffer.contiguous(dtype, (size,)))
        return Load(len(self.inputs) - 1, index)

    def _of(self, dtype: torch.dtype) -> int:
        """A value of a dtype, perhaps a new one."""
        found = [at for at, known in enumerate(self.dtypes) if known == dtype]
        if found and self.draw(st.booleans()):
            return self.draw(st.sampled_from(found))
        kinds = ["load"]
        if dtype in (F32, torch.float64, I64, torch.int32):
            kinds.append("constant")
        if dtype == I64 and self.dims:
            kinds.append("position")
        match self.draw(st.sampled_from(kinds)):
            case "constant":
                value = self.draw(st.sampled_from([0, 1, -2, 3]))
                return self._add(Constant(float(value) if dtype in FLOATS else value, dtype), dtype)
            case "position":
                return self._add(Position(self.draw(st.integers(0, len(self.dims) - 1))), I64)
        return self._add(self._load(dtype), dtype)

    def _statement(self) -> None:
        if self.draw(st.integers(0, 4)) == 0:
            name = self.draw(st.sampled_from(["sum", "max", "min"]))
            dtype = self.draw(st.sampled_from([F32, F32, torch.float64, I64, torch.int32]))
            self._add(Reduce(name, self._of(dtype)), dtype)
            return
        # Neither steep nor of a result that overflows when it goes in again.
        name = self.draw(st.sampled_from(_TAME))
        dtype = self.draw(st.sampled_from([d for d in POINTWISE[name].dtypes if d in _TAME_DTYPES]))
        if name == "cast":
            sources = [F32, torch.float64, I64, torch.int32, torch.bfloat16, torch.uint8, BOOL]
            target = self.draw(st.sampled_from([F32, torch.float64]))
            self._add(Op("cast", (self._of(self.draw(st.sampled_from(sources))),), target), target)
            return
        if POINTWISE[name].gives_bool:
            args = tuple(self._add(self._load(dtype), dtype) for _ in range(POINTWISE[name].operands))
            self._add(Op(name, args, BOOL), BOOL)
            return
        dtypes = [BOOL, dtype, dtype] if name == "where" else [dtype] * POINTWISE[name].operands
        args = tuple(self._of(d) for d in dtypes)
        self._add(Op(name, args, dtype), dtype)

    def _store(self) -> None:
        found = [at for at, dtype in enumerate(self.dtypes) if dtype is not None]
        value = self.draw(st.sampled_from(found))
        nest = Nest(self.dims, self.reduced, tuple(self.body))
        sums = self.sums and self.dtypes[value] in REDUCTIONS["sum"] and self.draw(st.booleans())
        if sums:
            kept = set(range(len(nest.kept)))
            over = self.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else set()
            along = [dim for dim in range(len(self.dims)) if dim not in over]
        else:
            along = [dim for dim in range(len(self.dims)) if dim in nest.varies[value] or self.dims[dim] == 1]
        along = list(self.draw(st.permutations(along)))
        shape = tuple(self.dims[dim] for dim in along)
        strides = [0] * len(self.dims)
        for dim, step in zip(along, row_major(shape), strict=True):
            strides[dim] = step
        dtype = self.dtypes[value]
        assert dtype is not None
        self.outputs.append(Buffer.contiguous(dtype, shape))
        self._add(Store(len(self.outputs) - 1, Index(0, tuple(strides)), value, sums), None)


_TAME = "neg abs add sub mul max min tanh sigmoid sin erf where eq lt ge isnan and xor not cast cast sign".split()
_TAME_DTYPES = (F32, torch.float64, I64, torch.int32, BOOL)
