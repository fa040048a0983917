"""Guards as one Python function: what `Guards.check` finds node by node, as straight code, for a check before each step
costs the controller's time."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

from monarch.language.programs.nodes import Node, Spot
from monarch.language.programs.snapshot import (
    MISSING,
    Attributes,
    Class,
    Function,
    Mapping,
    Members,
    Names,
    Parts,
    Sequence,
    Tensor,
)
from monarch.language.tensors.tensor import DistributedTensor

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LONGEST = 500
_MODULE = frozenset(
    "_backward_pre_hooks _backward_hooks _is_full_backward_hook _forward_hooks _forward_hooks_with_kwargs "
    "_forward_hooks_always_called _forward_pre_hooks _forward_pre_hooks_with_kwargs _state_dict_hooks "
    "_state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks _non_persistent_buffers_set "
    "_parameters _buffers _modules training".split()
)
"""The attributes of every `nn.Module`. Programs do not delete them; of hooks only their presence is checked."""


def compile_check(nodes: list[Node], used: set[Spot]) -> Callable[[list[Any]], dict[Spot, Any] | None]:
    """A function of the arguments' leaves that gives what is at the places `used` where all is as expected. It gives
    None too where values are equal and not the same objects: `Guards.check` knows then."""
    return _Writer(nodes, used).function()


class _Writer:
    def __init__(self, nodes: list[Node], used: set[Spot]) -> None:
        self.nodes = nodes
        self.used = used
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"DT": DistributedTensor, "MISSING": MISSING, "look": Node.read_now}
        self.names["mismatch"] = Node.mismatch
        self.names["REQUIRES"] = operator.attrgetter("requires_grad")
        self.required: dict[bool, list[str]] = {False: [], True: []}
        """Variables that hold tensors that require no gradient, and that require one: asked in one call for all."""
        self.same: list[tuple[str, int]] = []
        """Variables that hold the object with this id."""
        self.children = {node.parent: number for number, node in enumerate(nodes) if node.parent is not None}
        self.empty: set[int] = set()

    def constant(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name

    def function(self) -> Callable[[list[Any]], dict[Spot, Any] | None]:
        for number, node in enumerate(self.nodes):
            if number not in self.empty:
                self.node(number, node)
        for required, some in ((False, "any"), (True, "not all")):
            if self.required[required]:
                self.lines.append(f"if {some}(map(REQUIRES, ({', '.join(self.required[required])},))): return None")
        variables = ", ".join(name for name, _ in self.same)
        spots = sorted(self.used)
        values = ", ".join(f"v{node}_{position}" for node, position in spots)
        self.names["IDS"] = [ident for _, ident in self.same]
        self.names["SPOTS"] = spots
        source = ["def check(A):", "  try:", *(f"    {line}" for line in self.lines)]
        source += [f"    if [*map(id, ({variables},))] != IDS: return None" if variables else "    pass"]
        source += ["  except (AttributeError, KeyError, IndexError, TypeError, ValueError): return None"]
        source += [f"  return dict(zip(SPOTS, ({values},)))" if values else "  return {}"]
        exec(compile("\n".join(source), "<guards>", "exec"), self.names)
        return self.names["check"]

    # -- one node ------------------------------------------------------------------------------------------------

    def node(self, number: int, node: Node) -> None:
        if node.parent is not None:
            holder = "v{}_{}".format(*node.parent)
        elif isinstance(node.root, int):
            holder = f"A[{node.root}]"
        else:
            name = self.constant(f"r{number}", node.root)
            holder = f"{name}()" if node.is_weak else name
        h = f"h{number}"
        self.lines.append(f"{h} = {holder}")
        if node.kind not in (Tensor, Function, Names) or node.parent is None:  # those are known to be the same objects
            self.lines.append(f"if type({h}) is not {self.constant(f't{number}', node.type)}: return None")
        write = {
            Attributes: self.attributes,
            Names: self.by_name,
            Class: self.by_name,
            Function: self.of_function,
            Mapping: self.mapping,
            Sequence: self.sequence,
            Members: self.sequence,
            Parts: self.parts,
            Tensor: self.tensor,
        }.get(node.kind, self.otherwise)
        write(number, node, h)

    def expect(self, number: int, position: int, expression: str) -> None:
        """Check the value that an expression gives, and keep it where another node or the call needs it."""
        node = self.nodes[number]
        spot = number, position
        special = node.special.get(position)
        kept = spot in self.used or spot in self.children
        name = f"v{number}_{position}"
        if position in node.plain and special is None:
            if kept:
                self.lines.append(f"{name} = {expression}")
                expression = name
            plain = self.constant(f"p{number}_{position}", node.plain[position])
            self.lines.append(f"if {expression} is not {plain}: return None")
            return
        if special is not None and special.__name__ in ("_anything", "same_type") and not kept:
            return
        self.lines.append(f"{name} = {expression}")
        if special is None:
            self.same.append((name, node.ids[position]))
        elif special.__name__ not in ("_anything", "same_type"):  # a container's own node looks at its type
            self.lines.append(f"if not {self.constant(f's{number}_{position}', special)}({name}): return None")

    def attributes(self, number: int, node: Node, h: str) -> None:
        self.lines.append(f"d = {h}.__dict__")
        self.lines.append(f"if len(d) != {node.length}: return None")
        for key in node.others:
            if key not in _MODULE:
                self.lines.append(f"d[{key!r}]")
        empty: list[str] = []
        for position, key in enumerate(node.keys):
            child = self.children.get((number, position))
            if key in _MODULE and child is not None and (number, position) not in self.used:
                inner = self.nodes[child]
                if inner.kind in (Mapping, Members) and inner.length == 0:
                    self.empty.add(child)
                    empty.append(f"d[{key!r}]")
                    continue
            self.expect(number, position, f"d[{key!r}]")
        if empty:
            self.lines.append(f"if {' or '.join(empty)}: return None")

    def by_name(self, number: int, node: Node, h: str) -> None:
        entries = h if node.kind is Names and not issubclass(node.type, ModuleType) else f"{h}.__dict__"
        self.lines.append(f"d = {entries}")
        if node.kind is Class:
            self.lines.append(f"if not {self.constant(f'a{number}', node.absent)}.isdisjoint(d): return None")
            if node.length >= 0:
                self.lines.append(f"if len(d) != {node.length}: return None")
        for position, key in enumerate(node.keys):
            self.expect(number, position, f"d.get({key!r}, MISSING)")

    def of_function(self, number: int, node: Node, h: str) -> None:
        own = [key for key in node.keys if key.startswith(".")]
        self.lines.append(f"if len({h}.__dict__) != {len(own)}: return None")
        for position, key in enumerate(node.keys):
            expression = f"{h}.{key}" if position < 3 else f"{h}.__closure__[{position - 3}].cell_contents"
            self.expect(number, position, f"{h}.__dict__[{key[1:]!r}]" if key in own else expression)

    def mapping(self, number: int, node: Node, h: str) -> None:
        if node.type not in _DICTS or node.length > _LONGEST:
            self.otherwise(number, node, h)
            return
        self.lines.append(f"if len({h}) != {node.length}: return None")
        if node.length == 0:
            return
        if all(type(key) is str for key in node.keys):
            self.lines.append(f"if [*{h}] != {self.constant(f'k{number}', node.keys)}: return None")
        else:
            names = [f"k{number}_{position}" for position in range(node.length)]
            self.lines.append(f"{', '.join(names)}, = {h}")
            for name, key in zip(names, node.keys, strict=True):
                ident = getattr(key, "ident", None)
                if ident is None:
                    self.lines.append(f"if {name} is not {self.constant(f'c{name}', key)}: return None")
                else:
                    self.same.append((name, ident))
        self.unpack(number, node, f"{h}.values()")

    def sequence(self, number: int, node: Node, h: str) -> None:
        if node.length > _LONGEST or node.type not in (list, tuple, set, frozenset, collections.deque):
            self.otherwise(number, node, h)
            return
        self.lines.append(f"if len({h}) != {node.length}: return None")
        if node.length:
            self.unpack(number, node, h)

    def unpack(self, number: int, node: Node, expression: str) -> None:
        names = [f"e{number}_{position}" for position in range(len(node.keys))]
        self.lines.append(f"{', '.join(names)}, = {expression}")
        for position, name in enumerate(names):
            self.expect(number, position, name)

    def parts(self, number: int, node: Node, h: str) -> None:
        if issubclass(node.type, functools._lru_cache_wrapper):
            self.otherwise(number, node, h)
            return
        for position, key in enumerate(node.keys):
            self.expect(number, position, f"{h}()" if key == "()" else f"{h}.{key}")

    def tensor(self, number: int, node: Node, h: str) -> None:
        if node.type is not DistributedTensor:
            self.otherwise(number, node, h)
            return
        for position, key in enumerate(node.keys):
            if position == 0:
                if (number, 0) in self.used or 0 not in node.plain:
                    self.expect(number, position, f"{h}.requires_grad")
                else:
                    self.required[bool(node.plain[0])].append(h)
            elif len(node.keys) > 3 or node.plain.get(0) or position not in node.plain:
                # A tensor that needs no gradient, and that Python knows nothing else of, is asked for none.
                own = f"{h}.__dict__[{key!r}]" if position > 2 else f"{h}.{key}"
                self.expect(number, position, own)
        if len(node.keys) > 3 or node.plain.get(0):
            self.lines.append(f"if len({h}.__dict__) != {len(node.keys) - 2}: return None")

    def otherwise(self, number: int, node: Node, h: str) -> None:
        name = self.constant(f"n{number}", node)
        self.lines.append(f"d = look({name}, {h})")
        self.lines.append(f"if d is None or mismatch({name}, d) is not None: return None")
        for position in range(len(node.keys)):
            if (number, position) in self.used or (number, position) in self.children:
                self.lines.append(f"v{number}_{position} = d[{position}]")
