"""Distributed tensors: torch tensors of the global shape whose data is on a mesh's workers."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.blocks import own_part, reading
from monarch.compiler.errors import ArgumentWritten, LayoutError, MonarchError, ProgramError
from monarch.compiler.execution.executor import Executor, Handle, outgoing
from monarch.compiler.loading import load
from monarch.compiler.tape import Value, View
from monarch.compiler.types import Layout, TensorType
from monarch.language.errors import branch_error, numpy_error
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.source import belongs_to_user, shorten, user_source
from monarch.language.tensors.cell import Cell, Recorded
from monarch.language.tensors.history import end_of, ended
from monarch.language.tensors.instead import STAGER, instead
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.operations import operations

if TYPE_CHECKING:
    from monarch.language.tensors.typed import TypedTensor as _Base
else:
    _Base = torch.Tensor


class Ref:
    """One way of looking at a cell: all of it (`parent` is None), or a view of another Ref. Caches its value on the
    tape where it was last used. A view at a `place` that only the workers know keeps the tensor that says it."""

    __slots__ = ("cell", "fake", "parent", "place", "recording", "value", "view")

    def __init__(
        self,
        cell: Cell,
        fake: torch.Tensor,
        parent: Ref | None = None,
        view: View | None = None,
        recording: Recorded | None = None,
        value: Value | None = None,
        place: DistributedTensor | None = None,
    ) -> None:
        self.cell = cell
        self.fake = fake
        self.parent = parent
        self.view = view
        self.recording = recording
        self.value = value
        self.place = place

    @property
    def type(self) -> TensorType:
        """The tensor's type; a view's layout is the partitioner's to choose, and is shown as replicated."""
        if self.parent is None:
            return self.cell.type
        type_ = TensorType(self.fake.dtype, tuple(self.fake.shape))
        return type_.varying_along(self.cell.type.layout.varying)


_CPU = torch.device("cpu")


def _is_row_major(fake: torch.Tensor) -> bool:
    """Whether a tensor has PyTorch's default strides: to leave them out is quicker."""
    expected = 1
    for size, stride in zip(reversed(fake.shape), reversed(fake.stride()), strict=True):
        if type(size) is not int or stride != expected:
            return False
        expected *= max(size, 1)
    return fake.storage_offset() == 0


def _has_mask(index: Any) -> bool:
    entries = index if type(index) is tuple else (index,)
    return any(isinstance(entry, DistributedTensor) and entry.dtype is torch.bool for entry in entries)


def _has_place(index: Any) -> bool:
    """Whether among the entries of an index there is a tensor without dims, which PyTorch takes for a number."""
    entries = index if type(index) is tuple else (index,)
    return any(isinstance(entry, DistributedTensor) and not entry.ndim for entry in entries)


class DistributedTensor(_Base):
    """A tensor whose blocks the workers of a mesh hold. Its shape and dtype are those of the whole tensor.

    Ops on it are recorded and run on the workers: at once as part of a `@monarch.program`, or, outside one, when a
    value is needed (`full_tensor()`, `item()`, `print`).
    """

    _ref: Ref
    _source: Cell | None = None
    """Of a copy that stands for a view among a program's arguments, the storage of that."""
    _history: Any = None
    """Of such a copy, the view's history that autograd has."""
    _stands_in: bool = False
    """Whether it stands for another tensor while a branch or a loop is recorded."""
    _own: tuple[int, frozenset[str]] = (0, frozenset())
    """For an argument's stand-in in a trace, the argument's number, and the attributes that its user has given it."""

    @staticmethod
    def __new__(cls, fake: torch.Tensor, ref: Ref, requires_grad: bool = False) -> DistributedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            fake.shape,
            strides=fake.stride(),
            storage_offset=fake.storage_offset(),
            dtype=fake.dtype,
            device=_CPU,
            requires_grad=requires_grad,
        )
        made._ref = ref
        return made

    def __init__(self, *given: Any, **_: Any) -> None:
        """`torch.Tensor([1.0, 2.0])` in a program makes one of these, and Python calls this with the list."""

    @classmethod
    def looking(cls, fake: torch.Tensor, requires_grad: bool = False) -> Callable[[Ref], DistributedTensor]:
        """Makes tensors that look like `fake`, of a Ref each: quicker than one after the other."""
        plain = _is_row_major(fake)
        wrapper = partial(
            torch.Tensor._make_wrapper_subclass,
            cls,
            fake.shape,
            strides=None if plain else fake.stride(),
            storage_offset=None if plain else fake.storage_offset(),
            dtype=fake.dtype,
            device=_CPU,
            requires_grad=requires_grad,
        )

        def make(ref: Ref) -> DistributedTensor:
            made: DistributedTensor = wrapper()
            made._ref = ref
            return made

        return make

    def __getattr__(self, name: str) -> Any:
        number, own = self._own
        if name in own:
            raise ArgumentWritten(
                f"the program reads an attribute '{name}' of argument {number}, which is a plain tensor",
                hint=f"pass it as an argument of its own: step(x, x.{name}).",
                source=user_source(),
            )
        return super().__getattribute__(name)  # which raises its former error

    def __delattr__(self, name: str) -> None:
        number, own = self._own
        if name in own and name not in self.__dict__:
            raise ArgumentWritten(
                f"the program deletes an attribute '{name}' of argument {number}, which is a plain tensor",
                hint="its caller would not see it: pass monarch.distribute(x, mesh).",
                source=user_source(),
            )
        super().__delattr__(name)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            return operations.dispatch(func, args, kwargs or {})
        except Exception as error:
            shorten(error)
            raise

    # -- properties ----------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The mesh whose workers hold it."""
        return self._ref.cell.mesh

    @property
    def tensor_type(self) -> TensorType:
        """Dtype, global shape and layout. A tensor that was recorded and not run yet is run, for its layout. Raises
        ProgramError in a program, where the partitioner is still to choose the layout."""
        cell = self._ref.cell
        if self._ref.parent is None and cell.placed:
            return cell.type
        if operations.is_tracing():
            raise ProgramError(
                "this tensor has no layout yet: the partitioner chooses it when the program is compiled",
                hint="choose it: x = monarch.layout(x, '[@data, -]').",
                source=user_source(),
            )
        return self._materialized().type

    @property
    def sharding(self) -> Layout:
        """The tensor's layout on the mesh. (`layout` is torch's: strided.)"""
        return self.tensor_type.layout

    if not TYPE_CHECKING:  # DTensor's, whose error names the replacement; hasattr() is False for them

        @property
        def placements(self) -> Any:
            """None: raises AttributeError, which names `sharding` and `to_dtensor`."""
            raise AttributeError(
                "a tensor of a mesh has no 'placements': x.sharding is its layout, and x.to_dtensor() a DTensor"
            )

        @property
        def device_mesh(self) -> Any:
            """None: raises AttributeError, which names `mesh` and `to_dtensor`."""
            raise AttributeError(
                "a tensor of a mesh has no 'device_mesh': x.mesh is its mesh, and x.to_dtensor() a DTensor"
            )

    def _materialized(self) -> Ref:
        """A Ref of a whole cell that holds this tensor's value on the workers."""
        cell = self._ref.cell
        if cell.recording is not None and cell.recording is not cell.mesh.pending and cell.handle is None:
            raise branch_error(user_source()) if cell.recording.program else MonarchError("this tensor has no value")
        if self._ref.parent is None:
            if cell.recording is not None or cell.mesh.pending is not None:
                cell.mesh.flush()
            cell.raise_failure()
            return self._ref
        with torch.no_grad():
            whole: DistributedTensor = operations.clone(self.detach())
        return whole._materialized()

    # -- fetching ------------------------------------------------------------------------------------------------

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor as a plain one, of the global shape: waits for its value and fetches it from the workers. In
        a program only of a tensor that depends on no argument, no state and no random number. Raises LayoutError where
        the workers hold different values."""
        if operations.is_tracing():
            known = operations.read_known(self)
            if known is None:
                raise branch_error(user_source())
            return known
        handle, mesh = self._value()
        known = reading(handle.type, mesh.spec)
        if known.refusal:
            raise LayoutError(known.refusal, hint=known.hint, source=user_source())

        def ask(executor: Executor) -> torch.Tensor:
            shards = executor.shards(handle, known.ranks)
            return shards[0] if len(shards) == 1 else known.whole(shards)

        return mesh.fetch(handle, ask)

    def to_local(self, **coordinates: int) -> torch.Tensor:
        """The block of one worker, by its coordinates: `x.to_local(data=0, model=1)`. Dims that are left out are 0.

        At the end of a dim that the mesh does not divide it is smaller than on the workers before, or empty. A pending
        sum is added up first.
        """
        handle, mesh = self._blocks()
        worker = mesh.extent.point(dict.fromkeys(mesh.mesh_dim_names, 0) | coordinates).rank
        block = mesh.fetch(handle, lambda executor: executor.shards(handle, [worker]))[0]
        return own_part(block, handle.type, mesh.spec, worker)

    def _value(self) -> tuple[Handle, Mesh]:
        if operations.is_tracing():
            raise branch_error(user_source())
        cell = self._materialized().cell
        cell.mesh.settle()
        if cell.handle is None:
            cell.mesh.executor  # noqa: B018  (an abstract mesh says so)
            raise MonarchError("this tensor has no value")
        return cell.handle, cell.mesh

    def _blocks(self) -> tuple[Handle, Mesh]:
        """As `_value`, with pending sums added up: then a worker has a block of the value, and no summand."""
        handle, mesh = self._value()
        layout = handle.type.layout
        if not layout.partial:
            return handle, mesh
        with torch.no_grad():
            return self.redistribute(replace(layout, partial=(), varying=()))._value()

    def redistribute(self, layout: LayoutLike) -> DistributedTensor:
        """The same tensor in another layout, which its gradient gets too."""
        type_ = TensorType(self.dtype, tuple(self.shape))
        return operations.constrain(self, as_layout(layout, type_, self.mesh.spec, "the tensor", user_source()))

    def reduce(
        self, dims: str | Sequence[str] = (), reduction: str = "sum", scatter: bool = False, mesh: Any = None
    ) -> DistributedTensor:
        """The workers' values along mesh dims of a tensor that varies along them, reduced: see `monarch.reduce`."""
        return operations.reduce(self, dims, reduction, scatter, mesh)

    def slice_mesh(self, **positions: int) -> Any:
        """The tensor as the workers at a position along mesh dims have it: `x.slice_mesh(data=0).to_mesh(x.mesh)` is
        worker 0's on all workers. Raises MeshDimError for an unknown mesh dim, LayoutError for a position outside."""
        return operations.slice_mesh(self, positions)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As of any tensor, `x.to(torch.bfloat16)`; and, for a part of the mesh that was made with it,

            y = x.to(other)                   # the same value on the workers of `other`
            y = x.to(other, "[@data, -]")     # in this layout

        straight from worker to worker, in programs and outside. Without a layout it is the one in which the tensor is,
        as far as both meshes have dims of the same names and sizes, else replicated. The gradient comes back, in the
        tensor's own layout. Raises ProgramError where the meshes were made apart or share workers, and LayoutError
        where the layout does not fit."""
        mesh = args[0] if args else kwargs.get("mesh")
        if isinstance(mesh, Mesh):
            return operations.transfer(self, mesh, *args[1:], **{k: v for k, v in kwargs.items() if k != "mesh"})
        return super().to(*args, **kwargs)

    def to_mesh(self, mesh: Mesh) -> DistributedTensor:
        """The tensor on another mesh: the same value, or, of one that varies, each worker's own on the worker at its
        place. Along dims that only the other mesh has all workers get the same. In the layout in which it is, as far as
        the dims fit.

        Between parts of one mesh that share no workers it goes from worker to worker, in programs and outside, as by
        `to`, and has a gradient. To other meshes it goes outside of programs alone, through this process, which waits
        for it. Raises LayoutError where a mesh dim along which it varies is missing there, or of another size, and
        ProgramError in a program on meshes that cannot be one program's, and for a gradient that cannot come back."""
        return operations.to_mesh(self, mesh)

    def wait(self) -> DistributedTensor:
        """Wait until the workers have computed it, and raise what went wrong there."""
        handle, mesh = self._value()
        mesh.fetch(handle, lambda executor: executor.wait(handle))
        return self

    def __getitem__(self, index: Any) -> Any:
        return operations.selected(self, index) if _has_place(index) else super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if _has_place(index) or _has_mask(index):
            operations.put(self, index, value)
        else:
            super().__setitem__(index, value)

    def select(self, dim: int, index: Any) -> Any:
        """The part at one place along a dim, a view; `index` may be a tensor without dims."""
        if _has_place(index):
            return operations.selected(self, (*(slice(None),) * (dim % max(1, self.ndim)), index))
        return super().select(dim, index)

    def item(self) -> Any:
        """The value of a tensor with one element, as a Python number: waits for it."""
        return operations.read_item(self)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if operations.is_tracing() and operations.read_known(self) is None:
            raise numpy_error(user_source())
        return self.full_tensor().__array__(dtype)

    def __bool__(self) -> bool:
        return operations.read_truth(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        value = self.item()
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return value

    def __complex__(self) -> complex:
        return complex(self.item())

    # -- printing ------------------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        cell = self._ref.cell
        grad = ", requires_grad=True" if self.requires_grad else ""
        note = ", not computed yet" if cell.handle is None and not cell.mesh.is_abstract else ""
        return f"DistributedTensor({self._ref.type} on {cell.mesh.spec}{note}{grad})"

    def _repr_html_(self) -> str:
        """The tensor's type, and the workers of each block, for a notebook: from this process's knowledge. No worker is
        started for it, and nothing is run or fetched."""
        cell = self._ref.cell
        mesh, view = cell.mesh, self._ref.parent is not None
        error, notes = "", ["requires grad"] if self.requires_grad else []
        if cell.failure is not None and (cell.handle is None or not cell.failure.raised):
            found = cell.failure.error
            error = getattr(found, "message", "") or str(found) or type(found).__name__
        elif cell.handle is None and not mesh.is_abstract:
            notes.append("not computed yet")
        placed = cell.placed and not view and self._ref.type.layout.ndim == self.ndim
        if view:
            notes.append("a view of another tensor: its layout is chosen when it is used")
        elif not placed:
            notes.append("its layout is not chosen yet")
        draw = load("monarch.compiler.inspect.html:tensor_html")
        return draw(self._ref.type, mesh.spec, mesh.ranks, notes, error, placed)

    def __str__(self) -> str:
        if operations.is_tracing():
            return repr(self.full_tensor())
        if self._ref.cell.mesh.is_abstract:
            return repr(self)
        if own := self._materialized().type.layout.varying:
            sizes = self.mesh.spec.sizes
            points = (dict(zip(own, at, strict=True)) for at in itertools.product(*(range(sizes[dim]) for dim in own)))
            each = (f"{at}: {self.to_local(**at)!r}" for at in points)
            return "\n".join([*each, f"{self.tensor_type} on {self.mesh.spec}"])
        return f"{self.full_tensor()!r} : {self.tensor_type} on {self.mesh.spec}"

    def __format__(self, spec: str) -> str:
        if not spec and (self.ndim or self._ref.cell.mesh.is_abstract):
            return str(self)
        return format(self.item(), spec)

    # -- what torch does with tensors ----------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The same value without its history of gradients.

        It can be set to a distributed tensor of the same shape and dtype; MonarchError otherwise.
        """
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, DistributedTensor) or new.shape != self.shape:
            raise MonarchError(
                f"cannot set the data of {self._ref.type} to {type(new).__name__} {list(new.shape)}",
                hint=instead("assign a distributed tensor of the same shape, or copy: p.copy_(x) in torch.no_grad()."),
                source=user_source(),
            )
        if new.dtype != self.dtype or new.stride() != self.stride():
            torch._C.TensorBase.data.__set__(self, new)  # type: ignore[attr-defined]
        self._ref = new._ref

    def new(self, *sizes: Any) -> Any:  # type: ignore[override]
        """An uninitialised tensor of these sizes, of the same dtype and on the same mesh; PyTorch's of old."""
        if sizes and all(isinstance(size, (int, torch.Size)) for size in sizes):
            return self.new_empty(sizes[0] if isinstance(sizes[0], torch.Size) else sizes)
        return super().new(*sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedTensor:
        with torch.no_grad():
            made: Any = self.detach().clone()
        made = self._requiring(made)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __copy__(self) -> DistributedTensor:
        made = self._requiring(self.detach())
        if getattr(self, "_is_param", False):
            made._is_param = True
        return made

    def _requiring(self, made: Any) -> Any:
        """A copy, which requires a gradient where this one does. That of a program's result is as little a leaf."""
        end = end_of(self)
        return made.requires_grad_(self.requires_grad) if end is None else ended((end, ()), lambda: made)

    def data_ptr(self) -> int:
        """A number that tells memory from memory, as in PyTorch: equal where two tensors begin at the same place."""
        return (id(self._ref.cell) << 48) + int(self._ref.fake.storage_offset()) * self.itemsize if self.numel() else 0

    def storage(self) -> Any:
        """Raises MonarchError: the workers write files of a tensor's memory (safetensors)."""
        raise self._without_memory()

    def untyped_storage(self) -> Any:
        """PyTorch's storage object, which has no memory. Raises MonarchError where a program asks for it."""
        caller = sys._getframe(1)
        if operations.is_tracing() and belongs_to_user(caller.f_code) or caller.f_globals["__name__"] == STAGER:
            raise self._without_memory()
        return super().untyped_storage()

    def share_memory_(self) -> Any:
        """Raises MonarchError: there is no memory here to share."""
        raise self._without_memory()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises MonarchError: no other library can read a worker's memory."""
        raise self._without_memory()

    def _without_memory(self) -> MonarchError:
        return MonarchError(
            f"{self!r} has no storage here: its data is on the workers",
            hint=instead(
                'write safetensors with monarch.save(model, "model.safetensors"); '
                "elsewhere pass x.full_tensor(), which is plain."
            ),
            source=user_source(),
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, and so in `torch.save`, it is the plain tensor: its data is fetched. In a message to actors it stays
        where it is."""
        message = outgoing.get()
        requires_grad = self.requires_grad and self.is_leaf  # a tensor with a history leaves it behind
        if message is not None:
            handle, mesh = self._blocks()
            return message.refer(mesh.executor, handle, bool(getattr(self, "_is_param", False)), requires_grad)
        if operations.is_tracing():
            raise ProgramError(
                "a program cannot save a tensor, or pickle it: it has no value while the program is traced",
                hint="save it between calls: monarch.save(model, path).",
                source=user_source(),
            )
        whole = self.full_tensor()
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (whole, requires_grad, OrderedDict())
        return whole.requires_grad_(requires_grad).__reduce_ex__(protocol)

    def to_dtensor(self, device_mesh: Any = None) -> Any:
        """The tensor as a DTensor of PyTorch's, laid out alike: this process gets the part that is its own on
        `device_mesh`, which has the same dim names, and fetches no more than that. Without one, it is a mesh of this
        process alone. Pending sums are added up. Raises LayoutError for other names, and for a varying value."""
        return operations.to_dtensor(self, device_mesh)
