"""The linter's knowledge of a value without running anything: above all whether it is a tensor on the mesh."""

from __future__ import annotations

import bisect
import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch

from monarch.language.check.scopes import Class, Function


class Kind(enum.IntEnum):
    """Where two paths meet, the greater kind is kept: a value that may be a tensor is treated as one."""

    UNKNOWN = 0
    PYTHON = 1  # no tensor: a number, a string, a shape, None
    METHOD = 2  # of a tensor, and reads its value into Python: `dotted` is its name
    IMPORTED = 3  # what an import names: `dotted`
    FUNCTION = 4
    PROGRAM = 5
    CLASS = 6
    INSTANCE = 7  # of a class of the file
    MODULE = 8  # a torch.nn.Module
    GENERATOR = 9  # a torch.Generator
    MESH = 10
    CONTAINER = 11  # a list, tuple, dict or set, or an iterator: `each`, `items`
    DERIVED = 12  # what an unknown function made of a tensor
    HOST = 13  # a plain tensor in the controller's process
    SOME = 14  # a tensor, on the mesh or not, or one whose value is known while the program is traced
    TENSOR = 15  # a tensor on the mesh


@dataclass(frozen=True)
class AbstractValue:
    """`origin` of a tensor: "argument" (or a view of one), "state" (from outside the program) or "made" in it.

    `boolean`  a tensor of bools
    `each`     what a container's entries are; `items` the entries of a tuple or list, where they are known
    `mapping`  the container is a dict: `each` are its values, and iterating gives its keys
    `placed`   of a module: it lies on a mesh
    `detached` a tensor made where no gradients are recorded
    """

    kind: Kind = Kind.UNKNOWN
    origin: str = ""
    boolean: bool = False
    each: AbstractValue | None = None
    items: tuple[AbstractValue, ...] | None = None
    mapping: bool = False
    placed: bool = False
    detached: bool = False
    dotted: str = ""
    function: Function | None = None
    cls: Class | None = None
    bound: AbstractValue | None = None

    @property
    def is_tensor(self) -> bool:
        return self.kind in (Kind.HOST, Kind.SOME, Kind.TENSOR)

    @property
    def key(self) -> tuple[object, ...]:
        """The key of a function's analysis."""
        items = tuple(item.kind for item in self.items) if self.items is not None else None
        made_of = (self.each.kind if self.each else None, items, self.mapping, id(self.function), id(self.cls))
        return (int(self.kind), self.origin, self.boolean, self.placed, self.detached, made_of)


UNKNOWN = AbstractValue()
PYTHON = AbstractValue(Kind.PYTHON)
DERIVED = AbstractValue(Kind.DERIVED)
HOST = AbstractValue(Kind.HOST)
SOME = AbstractValue(Kind.SOME)
ARGUMENT = AbstractValue(Kind.TENSOR, "argument")
MADE = AbstractValue(Kind.TENSOR, "made")


def join(first: AbstractValue, second: AbstractValue, depth: int = 3) -> AbstractValue:
    """The value of a name where two paths meet."""
    if first == second:
        return first
    greater, other = (first, second) if first.kind >= second.kind else (second, first)
    if greater.kind is Kind.CONTAINER and other.kind is Kind.CONTAINER:
        if depth == 0:
            return replace(greater, each=None, items=None)
        if greater.items is not None and other.items is not None and len(greater.items) == len(other.items):
            items = tuple(join(a, b, depth - 1) for a, b in zip(greater.items, other.items, strict=True))
            return replace(greater, items=items)
        mapping = greater.mapping or other.mapping
        each = join(entry_of(greater), entry_of(other), depth - 1)
        return replace(greater, items=None, each=each, mapping=mapping)
    if greater.is_tensor and other.is_tensor:
        return replace(greater, boolean=first.boolean and second.boolean, detached=first.detached and second.detached)
    return greater


def join_all(values: Iterable[AbstractValue]) -> AbstractValue:
    return reduce(join, values, UNKNOWN)


def container(entries: Iterable[AbstractValue], known: bool = True) -> AbstractValue:
    items = tuple(entries)
    if known and len(items) <= 16:
        return AbstractValue(Kind.CONTAINER, items=items)
    return AbstractValue(Kind.CONTAINER, each=join_all(items))


def iterated(value: AbstractValue) -> AbstractValue:
    """The values of iterating over a value: of a dict its keys."""
    return UNKNOWN if value.mapping else entry_of(value)


def entry_of(value: AbstractValue) -> AbstractValue:
    """The entries of a value: of a dict its values."""
    if value.kind is Kind.CONTAINER:
        return join_all(value.items) if value.items is not None else value.each or UNKNOWN
    if value.is_tensor or value.kind is Kind.PYTHON:
        return value
    return UNKNOWN


# -- what torch's names give -----------------------------------------------------------------------------------------

_PYTHONS_OWN = {name for kind in (str, bytes, list, dict, set, tuple, int, float, complex) for name in dir(kind)}
_MODULES = {name for name in dir(torch.nn.Module) if not name.startswith("_")}
_COMMON = set("name names data device dtype layout mode grad values indices state size".split())
TENSOR_METHODS = {n for n in dir(torch.Tensor) if not n.startswith("_")} - _PYTHONS_OWN - _MODULES - _COMMON
"""Methods and attributes that only tensors have (and arrays, which do not stand in programs)."""

# Attributes of a tensor that are known without its values.
PYTHON_ATTRIBUTES = set(
    "shape ndim dtype device requires_grad is_leaf names mesh itemsize nbytes is_cuda is_cpu is_meta is_sparse "
    "is_quantized grad_fn output_nr name retains_grad is_nested layout sharding tensor_type".split()
)
PYTHON_METHODS = set(
    "size dim numel nelement ndimension stride storage_offset element_size is_contiguous is_floating_point is_complex "
    "type get_device data_ptr has_names is_shared is_pinned register_hook register_post_accumulate_grad_hook backward "
    "retain_grad is_same_size is_signed is_inference is_conj is_neg is_distributed is_set_to storage untyped_storage "
    "__len__ __repr__ __hash__".split()
)
READS = set(
    "item tolist numpy full_tensor to_local wait is_nonzero equal allclose __bool__ __float__ __int__ __index__ "
    "__contains__".split()
)
"""Methods that need a tensor's value in Python."""

VALUE_SHAPES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
"""Ops that give a tensor whose shape depends on values."""

VIEWS = set(
    "view view_as expand expand_as permute transpose t squeeze unsqueeze unflatten narrow select diagonal movedim "
    "moveaxis swapaxes swapdims detach unfold T mT H mH data real imag".split()
)
"""Methods of a tensor that always give a view of it. `reshape`, `flatten` and `contiguous` may copy."""
LISTS = set("chunk split unbind tensor_split hsplit vsplit dsplit split_with_sizes unsafe_chunk unsafe_split".split())
SHAPE_TAKERS = set(
    "view reshape expand repeat unflatten permute tile select roll new_zeros new_ones new_full topk kthvalue unfold "
    "split chunk".split()
)
"""Methods whose arguments are sizes, dims and counts: Python numbers."""
NUMBERED = (SHAPE_TAKERS - {"view", "repeat"}) | {"pad", "dropout", "leaky_relu"}
"""Functions of torch of which all but the first argument are Python numbers."""

RANDOM = set("rand randn randint randperm normal".split())
"""Ops that give a tensor whose value no trace knows, though it depends on no input."""
FACTORIES = set("zeros ones empty arange eye rand randn randint randperm full tril_indices triu_indices".split())
TORCH_PYTHON = set(
    "is_tensor is_grad_enabled numel is_floating_point is_complex get_default_dtype set_default_dtype manual_seed seed "
    "initial_seed get_rng_state set_rng_state finfo iinfo device dtype broadcast_shapes result_type promote_types "
    "can_cast no_grad enable_grad set_grad_enabled inference_mode autocast is_autocast_enabled compile "
    "is_inference_mode_enabled set_num_threads get_num_threads typename is_storage is_conj "
    "are_deterministic_algorithms_enabled use_deterministic_algorithms set_printoptions save "
    "set_float32_matmul_precision".split()
)
TORCH_READS = {"torch.equal", "torch.allclose", "torch.is_nonzero"}

READING_CALLS = {
    *(
        f"builtins.{name}"
        for name in ("float", "int", "bool", "complex", "range", "max", "min", "sorted", "any", "all")
    ),
    *(f"builtins.{name}" for name in ("round", "chr", "hex", "bin", "oct", "divmod", "bytes", "bytearray")),
    *(f"math.{name}" for name in dir(math) if callable(getattr(math, name))),
    "operator.index",
    "operator.truth",
    "operator.not_",
    *(f"heapq.{name}" for name in ("nlargest", "nsmallest", "heapify")),
    *(f"bisect.{name}" for name in dir(bisect) if callable(getattr(bisect, name))),
    "numpy.array",
    "numpy.asarray",
    *(f"statistics.{name}" for name in ("mean", "fmean", "median", "stdev")),
}
"""Calls that need the value of a tensor among their arguments."""

PRINTING_CALLS = {"builtins.print", "builtins.str", "builtins.format"}

FILES = ("torch.save", "torch.load", "monarch.save", "monarch.load")
"""Functions that save tensors to files, and load them."""

CHANGING = (
    "builtins.open",
    "time.time",
    "time.time_ns",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.monotonic",
    "time.monotonic_ns",
    "time.process_time",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "datetime.date.today",
    "os.urandom",
    "uuid.uuid1",
    "uuid.uuid4",
    "random.",
    "secrets.",
    "numpy.random.",
    "builtins.input",
)
"""Names, or their beginnings, of functions that give another Python value at every call."""

OUTPUTS = {"pprint.pprint", *(f"logging.{n}" for n in "debug info warning error critical exception log".split())}
"""Functions that write while the program is traced, and not when it runs."""


def named(dotted: str, names: Iterable[str]) -> bool:
    """Whether a name is one of `names`, below one, or begins with one that ends in a dot."""
    return any(dotted == name or dotted.startswith(name if name.endswith(".") else f"{name}.") for name in names)
