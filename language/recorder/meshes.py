"""Programs of several meshes: which value is on which, and how one comes to another.

A program has one mesh until it meets a tensor of another: then each value so far gets its place from its operands. A
value that was computed from no tensor of a mesh (`torch.zeros(3)`, a constant, random numbers, a plain argument) is on
none: it is computed on each mesh where it is read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.ops.schema import memory_of
from monarch.compiler.tape import Expr, Input, Op, Tape, Value
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh


class Places:
    """On which of its meshes each value of a tape is."""

    def __init__(self, tape: Tape, first: Mesh, plain: Container[int]) -> None:
        """`first` is the mesh of the inputs and states so far, but for plain arguments, whose values have these
        numbers."""
        self.meshes: dict[str, Mesh] = {}
        self._at: dict[int, str] = {}
        """By the number of a storage's value, the name of its mesh."""
        self._read: dict[int, str] = {}
        """The same for storages that are on no mesh: the first mesh on which they, or values computed from them, were
        read."""
        self._from: dict[int, set[int]] = {}
        """The storages from which one that is on no mesh was computed."""
        for entry in tape.inputs:
            if entry.value.index not in plain:
                self.take(entry, first)
        for op in tape.ops:
            self.note(op)

    def name(self, mesh: Mesh) -> str:
        """A mesh's name in the program's graph. Raises ProgramError for one that was made apart from the others, or has
        some of their workers."""
        for name, known in self.meshes.items():
            if known is mesh:
                return name
        for known in self.meshes.values():
            if known._root is not mesh._root:
                raise apart_error(known, mesh)
            if common := sorted(set(known.ranks) & set(mesh.ranks)):
                raise ProgramError(
                    f"a program on two meshes that share workers: {known!r} and {mesh!r}",
                    hint=f"both have worker {common[0]}, and the meshes of one program have none in common. Slice them "
                    "apart,\na, b = mesh.slice(stage=0), mesh.slice(stage=1)\nor, outside of programs, bring a tensor "
                    "there by way of this process: monarch.distribute(x, mesh, layout).",
                    source=user_source(),
                )
        name = _name(mesh, self.meshes)
        self.meshes[name] = mesh
        return name

    def take(self, entry: Input, mesh: Mesh) -> None:
        """Note where an input or a state of the tape is."""
        if entry.kind in ("input", "state"):
            entry.mesh = self.name(mesh)
            self._at[entry.value.index] = entry.mesh

    def note(self, op: Op) -> None:
        """Note the place of a call's results, and of the tensors that it writes."""
        here = op.args[1] if op.func is ops.transfer else self.of((op.args, op.kwargs))
        changed = {value.root.index for value in _values(op.out)}
        if isinstance(op.func, torch._ops.OpOverload) and op.func._schema.is_mutable:
            changed.update(v.root.index for name in memory_of(op.func).writes for v in _values(op.argument(name)))
        if here is None:
            read = {value.root.index for value in _values((op.args, op.kwargs))}
            for index in changed:
                self._from.setdefault(index, set()).update(read - {index})
                if index in self._read:  # and written after it was read: an average's weight, from the number of steps
                    self._note_read(read, self._read[index])
        else:
            for index in changed:
                self._at.setdefault(index, here)

    def of(self, arguments: Any) -> str | None:
        """Where a call with these arguments runs; None for one that runs on any mesh. Raises ProgramError where they
        are on two."""
        here: str | None = None
        free: list[int] = []
        for value in _values(arguments):
            at = self._at.get(value.root.index)
            if at is None:
                free.append(value.root.index)
            elif here is None:
                here = at
            elif here != at:
                raise mesh_error(self.meshes[here], self.meshes[at])
        if here is not None:
            self._note_read(free, here)
        return here

    def _note_read(self, indices: Iterable[int], here: str) -> None:
        """Note on which mesh storages that are on none, and those from which they were computed, were read first."""
        free = list(indices)
        while free:
            if (index := free.pop()) not in self._read:
                self._read[index] = here
                free += self._from.get(index, ())

    def where(self, value: Value) -> str | None:
        """The mesh of a value, by name; None for one that is on none."""
        return self._at.get(value.root.index)

    def home(self, value: Value) -> str:
        """The mesh on which a value is kept that outlives the program: its own, else the first that has read it."""
        index = value.root.index
        return self._at.get(index) or self._read.get(index) or next(iter(self.meshes))


def _values(entry: Any) -> Iterator[Value]:
    """The values among arguments, and those whose numbers stand in expressions."""
    stack = [entry]
    while stack:
        entry = stack.pop()
        if isinstance(entry, Value):
            yield entry
        elif isinstance(entry, Expr):
            stack.extend(entry.args)
        elif isinstance(entry, (list, tuple)):
            stack.extend(entry)


def _name(mesh: Mesh, taken: dict[str, Mesh]) -> str:
    """`stage0` for the workers at position 0 along the root's dim stage; else `part`, with a number."""
    root = mesh._root
    found = ""
    points = [root.spec.point(rank) for rank in mesh.ranks]
    for dim, (name, size) in enumerate(root.spec.dims):
        places = {point[dim] for point in points}
        if size > 1 and len(places) == 1:
            found += f"_{name}{places.pop()}" if found else f"{name}{places.pop()}"
    if found and found not in taken:
        return found
    return f"part{len(taken)}"


def apart_error(first: Mesh, second: Mesh) -> ProgramError:
    """The error of one program on meshes that have no workers to share a step."""
    if first.is_closed or second.is_closed:
        return _closed_error(first, second)
    if first.spec == second.spec:
        return ProgramError(
            f"a program on two meshes that were made apart, and are alike: {first!r} twice",
            hint="where a cell or a function has run again: make the mesh once, and place the model once more.\n"
            "root = Mesh(stage=2, data=2)                       # right for two: parts of one mesh\n"
            "a, b = root.slice(stage=0), root.slice(stage=1)\n"
            "or, outside of programs, bring a tensor there through this process: monarch.distribute(x, mesh, layout).",
            source=user_source(),
        )
    return ProgramError(
        "a program on two meshes that were made apart",
        hint=f"one is {first!r}, the other {second!r}.\n"
        "a, b = Mesh(data=2), Mesh(data=2)                  # wrong: no step is of both\n"
        "root = Mesh(stage=2, data=2)                       # right: two parts of one mesh\n"
        "a, b = root.slice(stage=0), root.slice(stage=1)\n"
        "or, outside of programs, bring a tensor there through this process: monarch.distribute(x, mesh, layout).",
        source=user_source(),
    )


def mesh_error(first: Mesh, second: Mesh) -> ProgramError:
    """The error of an op with operands on two meshes."""
    if first._root is not second._root and (first.is_closed or second.is_closed):
        return _closed_error(first, second)
    same = " (another mesh of the same shape)" if first.spec == second.spec else ""
    move = "a + b.to(a.mesh)      # right: b moves to a's mesh, and its gradient back.\n"
    move += "For gradients of a pipeline's stages: pipe.clip_grad_norm_(max_norm)"
    if first._root is not second._root:
        move = "monarch.distribute(x.full_tensor(), mesh, layout)"
    return ProgramError(
        "tensors on different meshes in one op",
        hint=f"one is on {first!r}, the other on {second!r}{same}.\nMove one: {move}.",
        source=user_source(),
    )


def _closed_error(first: Mesh, second: Mesh) -> ProgramError:
    """The error of a program on two meshes one of which is closed."""
    closed, other = (first, second) if first.is_closed else (second, first)
    return ProgramError(
        f"the mesh is closed: {closed!r}",
        hint=f"its tensors have ended with its workers. The other one is on {other!r}: make both there,\n"
        "monarch.distribute(tensor, mesh, layout), or monarch.load(path, into=...).",
        source=user_source(),
    )
