"""Guards as one Python function: what `Guards.check` finds node by node, as straight code, for a check before each step
costs the controller's time. Objects that are alike, such as a model's modules of one class, are checked by one loop."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable
from itertools import chain
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from monarch.language.programs import native
from monarch.language.programs.containers import Defaulting, Mapping, Members, Sequence
from monarch.language.programs.held import MISSING, Attributes, same_plain
from monarch.language.programs.identity import addresses, addresses_of
from monarch.language.programs.kinds import ASKED, TOLD, Class, Function, Names, Parts, Tensor
from monarch.language.programs.nodes import MODULE, Aliases, Live, Node, Spot
from monarch.language.tensors.tensor import DistributedTensor

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_LONGEST = 500
_MANY = 4
"""So many nodes that are alike are checked by a loop."""
_TYPES_ONLY = ("same_type",)
"""Specials that need no check: a container's own node looks at its type."""


Found = tuple[Live, list[Any]]
"""What is at the places in use, and the states."""


def compile_check(
    nodes: list[Node], used: set[Spot], states: list[Spot], aliases: Aliases, is_native: bool = False
) -> Callable[[list[Any]], Found | None]:
    """A function of the arguments' leaves that gives what is at the places `used`, and at those of `states`, where all
    is as expected. It gives None too where the keys of a dict are equal and not the same objects: `Guards.check` knows.
    `is_native` says to have native code, which is built, look at most of it."""
    return _Writer(nodes, used, states, aliases, is_native).function()


_SKIP, _EMPTY, _PLAIN, _KEEP = "skip", "empty", "plain", "keep"
"""What is done with a value: nothing, to ask whether it has entries, to compare it with a plain value, or to keep it
in a variable, where another node or the call needs it, or it is compared with others in one go."""


class _Writer:
    def __init__(
        self, nodes: list[Node], used: set[Spot], states: list[Spot], aliases: Aliases, is_native: bool
    ) -> None:
        self.nodes = nodes
        self.aliases = aliases
        self.states = states
        self.live = sorted(used)
        self.cells = [pair for pair in aliases.cells if not self.is_one_object(*pair)]
        self.used = used.union(states, aliases.apart, *aliases.same, *self.cells)
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"DT": DistributedTensor, "MISSING": MISSING, "look": Node.read_now}
        self.names |= {"addresses": addresses, "chained": chain.from_iterable}
        self.names |= {"mismatch": Node.mismatch, "EQUAL": same_plain}
        self.names["PLAINLY"] = torch._C.DisableTorchFunctionSubclass
        self.names["REQUIRES"] = operator.attrgetter("requires_grad")
        self.required: dict[bool, list[str]] = {False: [], True: []}
        """Variables that hold tensors that require no gradient, and that require one: asked in one call for all."""
        self.same: list[tuple[str, int]] = []
        """Variables that hold the object with this id."""
        self.distributed: list[str] = []
        """Variables that hold any distributed tensor."""
        self.children = {node.parent: number for number, node in enumerate(nodes) if node.parent is not None}
        self.empty: set[int] = set()
        self.roles = [
            [self.role(number, position) for position in range(len(node.keys))] for number, node in enumerate(nodes)
        ]
        self.native, self.behind = self.divided() if is_native else ([], set())
        """The nodes that native code looks into, and those that Python looks into when it has."""
        self.kept: dict[Spot, int] = {}
        """Places whose values native code keeps, and at which number."""
        self.alike: list[int] = []
        """The nodes that the loop that is being written is about; none where straight code is."""
        self.columns: list[int] = []
        """The positions whose values it keeps."""

    def is_one_object(self, first: Spot, second: Spot) -> bool:
        """Whether both places must have the same object as before, which is one."""
        (one, at), (other, there) = (self.nodes[first[0]], first[1]), (self.nodes[second[0]], second[1])
        return one.ids[at] == other.ids[there] and at not in one.special and there not in other.special

    def constant(self, name: str, value: Any) -> str:
        """A name for a value: in capitals, for no variable is, so that the code never assigns to it."""
        name = name.upper()
        self.names[name] = value
        return name

    def role(self, number: int, position: int) -> str:
        node, spot = self.nodes[number], (number, position)
        special, kept = node.special.get(position), spot in self.used or spot in self.children
        if node.kind is Attributes and node.keys[position] in MODULE and spot not in self.used:
            child = self.children.get(spot)
            if child is not None and self.nodes[child].kind in (Mapping, Members) and self.nodes[child].length == 0:
                self.empty.add(child)
                return _EMPTY
        if kept:
            return _KEEP
        if special is None:
            return _PLAIN if position in node.plain else _KEEP
        return _SKIP if special.__name__ in _TYPES_ONLY else _KEEP

    def divided(self) -> tuple[list[int], set[int]]:
        """The nodes whose objects native code can look into, with all between them and what Python hands it; and the
        nodes behind these."""
        inside: dict[int, None] = {}
        behind: set[int] = set()
        for number, node in enumerate(self.nodes):
            if node.parent is None or number in self.empty:
                continue
            if node.parent[0] not in behind and native.can_look(node):
                inside[number] = None
            elif node.parent[0] in behind or node.parent[0] in inside:
                behind.add(number)
        return [*inside], behind

    def function(self) -> Callable[[list[Any]], Found | None]:
        depths: list[int] = []
        levels: dict[tuple[bool, int], dict[Any, list[int]]] = {}
        done = self.empty.union(self.native)
        for number, node in enumerate(self.nodes):
            depths.append(0 if node.parent is None else 1 + depths[node.parent[0]])
            if number not in done:
                alike = levels.setdefault((number in self.behind, depths[-1]), {})
                alike.setdefault(self.likeness(number, node), []).append(number)
        looks = True, -1  # where native code looks: behind all that it starts from, before the rest
        if self.native:
            levels[looks] = {}
        for level in sorted(levels):
            if level == looks:
                self.look_natively()
            for numbers in levels[level].values():
                if len(numbers) < _MANY:
                    for number in numbers:
                        self.node(number)
                else:
                    self.loop(numbers)
        for required, some in ((False, "any"), (True, "not all")):
            if self.required[required]:
                self.lines.append(f"with PLAINLY(): wrong = {some}(map(REQUIRES, {_listed(self.required[required])}))")
                self.lines.append("if wrong: return None")
        if self.distributed:
            count = len(self.distributed)
            self.lines.append(f"if [*map(type, {_listed(self.distributed)})].count(DT) != {count}: return None")
        for first, second in self.aliases.same:
            self.lines.append(f"if {_variable(*first)} is not {_variable(*second)}: return None")
        for first, second in self.cells:
            self.lines.append(f"if {_variable(*first)}._ref.cell is not {_variable(*second)}._ref.cell: return None")
        if self.aliases.apart:
            self.names["TENSORS"] = self.aliases.tensors
            apart, _ = self.together("APART", self.aliases.apart)
            self.names["SEEN"] = [b""]  # these have been found to be apart
            self.lines += [
                f"a = {apart}",
                "d = addresses(a)",
                "if d != SEEN[0]:",
                "  e = {*map(id, a)}",
                f"  if len(e) != {len(self.aliases.apart)} or not TENSORS.isdisjoint(e): return None",
                "  SEEN[0] = d",
            ]
        self.names["SAME"] = addresses_of(ident for _, ident in self.same)
        live, self.names["SPOTS"] = self.together("LIVE", self.live)
        states, in_order = self.together("STATES", self.states)
        if in_order != self.states:
            states = _listed([_variable(*spot) for spot in self.states])
        source = ["def check(A):", "  try:", *(f"    {line}" for line in self.lines)]
        if self.same:
            source += [f"    if addresses({_listed([name for name, _ in self.same])}) != SAME: return None"]
        source += ["  except (AttributeError, KeyError, IndexError, TypeError, ValueError): return None"]
        source += [f"  return dict(zip(SPOTS, {live})), {states}"]
        exec(compile("\n".join(source), "<guards>", "exec"), self.names)
        check: Callable[[list[Any]], Found | None] = self.names["check"]
        assert self.names.keys().isdisjoint(check.__code__.co_varnames), "a constant is assigned to"
        return check

    # -- nodes ---------------------------------------------------------------------------------------------------

    def likeness(self, number: int, node: Node) -> Any:
        """Equal for nodes that one loop can check; unlike all others where none can."""
        plain = [id(node.plain[at]) for at, role in enumerate(self.roles[number]) if role == _PLAIN]
        like = node.kind, node.type, node.length, (*self.roles[number], *plain)
        if node.parent is not None and node.kind is Attributes:
            return *like, tuple(node.keys), tuple(node.others), node.is_ordered
        if node.parent is not None and node.kind is Tensor and node.type is DistributedTensor:
            return *like, tuple(node.keys), node.plain.get(0), tuple(sorted(node.plain))
        if node.parent is not None and self.unpacks(node) and node.kind is Mapping and _are_names(node.keys):
            return *like, tuple(node.keys)
        return number

    def holder(self, number: int) -> str:
        """An expression for the object that a node looks into."""
        node = self.nodes[number]
        if node.parent is not None:
            return _variable(*node.parent)
        if isinstance(node.root, int):
            return f"A[{node.root}]"
        name = self.constant(f"r{number}", node.root)
        return f"{name}()" if node.is_weak else name

    def look_natively(self) -> None:
        """Have native code look into its nodes, and take from what it keeps what Python looks at one by one."""
        table, start = native.Table(), dict[str, int]()
        inside = set(self.native)
        alone = {self.nodes[number].parent for number in self.behind}.union(*self.aliases.same, *self.cells)
        if not inside.issuperset(number for number, _ in self.states):
            alone.update(self.states)
        judged: list[Spot] = []
        for number in self.native:
            node = self.nodes[number]
            assert node.parent is not None
            if node.parent[0] in inside:
                where = self.kept[node.parent]
            else:
                where = ~start.setdefault(self.holder(number), len(start))
            expected = {}
            for position, role in enumerate(self.roles[number]):
                spot, (how, ident) = (number, position), native.how(node, position)
                if role == _EMPTY:
                    how = native.EMPTY
                elif role == _KEEP and not how and node.special[position].__name__ not in _TYPES_ONLY:
                    judged.append(spot)
                    alone.add(spot)
                keeps = spot in self.used or spot in self.children or spot in alone
                expected[position] = (how | native.KEPT if keeps else how), ident
            first = table.keeps
            self.kept.update(((number, at), place) for place, at in enumerate(table.add(node, where, expected), first))
        self.names["NATIVE"] = table.look()
        self.lines.append(f"with PLAINLY(): found = NATIVE({_listed([*start])})")
        self.lines.append("if found is None: return None")
        taken = [spot for spot in self.kept if spot in alone]
        if taken:
            self.lines.append(f"{', '.join(_variable(*spot) for spot in taken)}, = {self.together('TAKEN', taken)[0]}")
        for spot in judged:
            self.judge(*spot)

    def together(self, name: str, spots: list[Spot]) -> tuple[str, list[Spot]]:
        """An expression for the values at places, in one tuple, and the places in its order: first those that native
        code has kept."""
        kept = [spot for spot in spots if spot in self.kept]
        others = [spot for spot in spots if spot not in self.kept]
        if len(kept) < 2:  # of one place a getter gives no tuple
            return _listed([f"found[{self.kept[spot]}]" for spot in kept] + [_variable(*spot) for spot in others]), [
                *kept,
                *others,
            ]
        self.names[name] = operator.itemgetter(*(self.kept[spot] for spot in kept))
        expression = f"{name}(found)"
        return (f"(*{expression}, {', '.join(_variable(*spot) for spot in others)})" if others else expression), [
            *kept,
            *others,
        ]

    def node(self, number: int) -> None:
        node, h = self.nodes[number], self.holder(number)
        if node.parent is None:
            self.lines.append(f"h{number} = {h}")
            h = f"h{number}"
        self.look_into(number, h)

    def loop(self, numbers: list[int]) -> None:
        """Check nodes that are alike, in the words of the first of them."""
        if self.nodes[numbers[0]].kind is Mapping:
            self.dicts(numbers)
            return
        before, self.lines, self.alike, self.columns = self.lines, [], numbers, []
        self.look_into(numbers[0], "h")
        body, self.lines, self.alike = self.lines, before, []
        if not body:
            return
        self.lines += [f"c{at} = []; a{at} = c{at}.append" for at in self.columns]
        loop = [f"for h in {_listed([self.holder(number) for number in numbers])}:", *("  " + line for line in body)]
        if self.nodes[numbers[0]].kind is Tensor:
            loop = ["with PLAINLY():", *("  " + line for line in loop)]
        self.lines += loop
        for at in self.columns:
            self.lines.append(f"{', '.join(_variable(number, at) for number in numbers)}, = c{at}")
            for number in numbers:
                self.judge(number, at)

    def dicts(self, numbers: list[int]) -> None:
        """Check dicts with the same names, all of them in each call."""
        node, number, count = self.nodes[numbers[0]], numbers[0], len(numbers)
        types = self.constant(f"t{number}", addresses_of([id(node.type)] * count))
        keys = self.constant(f"k{number}", node.keys * count)
        values = self.constant(f"e{number}", node.type.values)  # type: ignore[attr-defined]
        self.lines += [
            f"d = {_listed([self.holder(each) for each in numbers])}",
            # None has more names than there are, so that all have each of them once.
            f"if addresses((*map(type, d),)) != {types} or [*chained(d)] != {keys}: return None",
            f"d = [*chained(map({values}, d))]",
        ]
        for at, role in enumerate(self.roles[number]):
            column = f"d[{at}::{len(node.keys)}]"
            if role == _KEEP:
                self.lines.append(f"{', '.join(_variable(each, at) for each in numbers)}, = {column}")
                for each in numbers:
                    self.judge(each, at)
            elif role == _PLAIN:
                plain = self.constant(f"p{number}_{at}", [node.plain[at]] * count)
                places = self.constant(f"a{number}_{at}", addresses_of([id(node.plain[at])] * count))
                self.lines.append(f"e = (*{column},)")
                self.lines.append(f"if addresses(e) != {places} and not all(map(EQUAL, {plain}, e)): return None")

    def look_into(self, number: int, h: str) -> None:
        node = self.nodes[number]
        if node.kind not in (Tensor, Function, Names) or node.parent is None:  # those are known to be the same objects
            self.lines.append(f"if type({h}) is not {self.constant(f't{number}', node.type)}: return None")
        write = {
            Attributes: self.attributes,
            Names: self.by_name,
            Class: self.by_name,
            Function: self.of_function,
            Mapping: self.mapping,
            Defaulting: self.defaulting,
            Sequence: self.sequence,
            Members: self.sequence,
            Parts: self.parts,
            Tensor: self.tensor,
        }.get(node.kind, self.otherwise)
        write(number, node, h)

    def expect(self, number: int, position: int, expression: str) -> None:
        """Check the value that an expression gives, and keep it where another node or the call needs it."""
        role = self.roles[number][position]
        if role == _PLAIN:
            plain = self.constant(f"p{number}_{position}", self.nodes[number].plain[position])
            self.lines.append(f"if (e := {expression}) is not {plain} and not EQUAL({plain}, e): return None")
        elif role == _KEEP and self.alike:
            self.columns.append(position)
            self.lines.append(f"a{position}({expression})")
        elif role == _KEEP:
            self.lines.append(f"{_variable(number, position)} = {expression}")
            self.judge(number, position)

    def judge(self, number: int, position: int) -> None:
        """Check a value that is kept in its variable."""
        node, name = self.nodes[number], _variable(number, position)
        special = node.special.get(position)
        if special is None and position in node.plain:
            plain = self.constant(f"p{number}_{position}", node.plain[position])
            self.lines.append(f"if {name} is not {plain} and not EQUAL({plain}, {name}): return None")
        elif special is None:
            self.same.append((name, node.ids[position]))
        elif special.__name__ == "_is_distributed":
            self.distributed.append(name)
        elif special.__name__ not in _TYPES_ONLY:
            self.lines.append(f"if not {self.constant(f's{number}_{position}', special)}({name}): return None")

    def attributes(self, number: int, node: Node, h: str) -> None:
        self.lines.append(f"d = {h}.__dict__")
        self.lines.append(f"if len(d) != {node.length}: return None")
        if node.is_ordered:
            self.lines.append(f"if [*d] != {self.constant(f'k{number}', node.keys)}: return None")
        for key in node.others:
            if key not in MODULE:
                self.lines.append(f"d[{key!r}]")
        for position, key in enumerate(node.keys):
            self.expect(number, position, f"d[{key!r}]")
        empty = [node.keys[at] for at, role in enumerate(self.roles[number]) if role == _EMPTY]
        if len(empty) > 1:
            self.lines.append(f"if any({self.constant(f'g{number}', operator.itemgetter(*empty))}(d)): return None")
        elif empty:
            self.lines.append(f"if d[{empty[0]!r}]: return None")

    def by_name(self, number: int, node: Node, h: str) -> None:
        entries = h if node.kind is Names and not issubclass(node.type, ModuleType) else f"{h}.__dict__"
        self.lines.append(f"d = {entries}")
        missing = [at for at, role in enumerate(self.roles[number]) if role == _PLAIN and node.plain[at] is MISSING]
        if node.kind is Names and len(missing) > _MANY:
            absent = self.constant(f"m{number}", frozenset(node.keys[at] for at in missing))
            self.lines.append(f"if not d.keys().isdisjoint({absent}): return None")
        else:
            missing = []
        if node.kind is Names and node.length:
            self.lines.append(f"if len(d) != {node.length}: return None")
        if node.kind is Class:
            self.lines.append(f"if not {self.constant(f'm{number}', node.absent)}.isdisjoint(d): return None")
            self.lines.append(f"if len(d) != {node.length}: return None")
            self.lines += [f"d[{key!r}]" for key in node.others]
        for position, key in enumerate(node.keys):
            if position in missing:
                continue
            self.expect(number, position, f"{h}.{key[1:]}" if key in TOLD else f"d.get({key!r}, MISSING)")

    def of_function(self, number: int, node: Node, h: str) -> None:
        own = [key for key in node.keys if key.startswith(".")]
        self.lines.append(f"if len({h}.__dict__) != {len(own)}: return None")
        for position, key in enumerate(node.keys):
            if key in own:
                expression = f"{h}.__dict__[{key[1:]!r}]"
            elif position < 3 or key in TOLD:
                expression = f"{h}.{key.lstrip('@')}"
            else:
                expression = f"{h}.__closure__[{position - 3}].cell_contents"
            self.expect(number, position, expression)

    @staticmethod
    def unpacks(node: Node) -> bool:
        """Whether the entries of a container are taken out as Python takes them, and are not too many."""
        kinds = _DICTS if node.kind in (Mapping, Defaulting) else (list, tuple, set, frozenset, collections.deque)
        return node.type in kinds and node.length <= _LONGEST

    def defaulting(self, number: int, node: Node, h: str) -> None:
        """A defaultdict's first place is what makes its entries."""
        if not self.unpacks(node):
            self.otherwise(number, node, h)
            return
        self.expect(number, 0, f"{h}.default_factory")
        self.mapping(number, node, h, 1)

    def mapping(self, number: int, node: Node, h: str, first: int = 0) -> None:
        """A dict's entries, at the places from `first` on."""
        if not self.unpacks(node):
            self.otherwise(number, node, h)
            return
        keys = node.keys[first:]
        if not keys:
            self.lines.append(f"if {h}: return None")
            return
        if _are_names(keys):
            self.lines.append(f"if [*{h}] != {self.constant(f'k{number}', keys)}: return None")
        else:
            self.lines.append(f"if len({h}) != {len(keys)}: return None")
            names = [f"k{number}_{position}" for position in range(len(keys))]
            self.lines.append(f"{', '.join(names)}, = {h}")
            for name, key in zip(names, keys, strict=True):
                ident = getattr(key, "ident", None)
                if ident is None:
                    self.lines.append(f"if {name} is not {self.constant(f'c{name}', key)}: return None")
                else:
                    self.same.append((name, ident))
        self.unpack(number, f"{h}.values()", first)

    def sequence(self, number: int, node: Node, h: str) -> None:
        if not self.unpacks(node):
            self.otherwise(number, node, h)
            return
        self.lines.append(f"if len({h}) != {node.length}: return None")
        if node.length:
            self.unpack(number, h)

    def unpack(self, number: int, expression: str, first: int = 0) -> None:
        """Take a container's entries out, which stand at the places from `first` on."""
        roles = list(enumerate(self.roles[number]))[first:]
        kept = {at for at, role in roles if role == _KEEP and not self.alike}
        names = {at: _variable(number, at) if at in kept else f"e{at}" for at, _ in roles}
        self.lines.append(f"{', '.join(names.values())}, = {expression}")
        for position, name in names.items():
            if position in kept:
                self.judge(number, position)
            else:
                self.expect(number, position, name)

    def parts(self, number: int, node: Node, h: str) -> None:
        if issubclass(node.type, (functools._lru_cache_wrapper, MappingProxyType)):
            self.otherwise(number, node, h)
            return
        for position, key in enumerate(node.keys):
            self.expect(number, position, f"{h}()" if key == "()" else f"{h}.{key}")

    def tensor(self, number: int, node: Node, h: str) -> None:
        if node.type is not DistributedTensor:
            self.otherwise(number, node, h)
            return
        self.lines.append(f"d = {h}.__dict__")
        for position in native.asked_of(node):
            if position == 0 and self.roles[number][0] == _PLAIN:
                self.required[bool(node.plain[0])] += [self.holder(at) for at in self.alike] or [h]
            else:
                self.expect(number, position, f"{h}.{ASKED[position]}")
        for position in range(len(ASKED), len(node.keys)):
            self.expect(number, position, f"d[{node.keys[position]!r}]")
        self.lines.append(f"if len(d) != {len(node.keys) - len(ASKED) + 1}: return None")  # and `_ref`

    def otherwise(self, number: int, node: Node, h: str) -> None:
        name = self.constant(f"n{number}", node)
        self.lines.append(f"d = look({name}, {h})")
        self.lines.append(f"if d is None or mismatch({name}, d) is not None: return None")
        for position in range(len(node.keys)):
            if (number, position) in self.used or (number, position) in self.children:
                self.lines.append(f"v{number}_{position} = d[{position}]")


def _variable(number: int, position: int) -> str:
    return f"v{number}_{position}"


def _listed(expressions: list[str]) -> str:
    return f"({''.join(f'{each}, ' for each in expressions)})"


def _are_names(keys: list[Any]) -> bool:
    return all(type(key) is str for key in keys)
