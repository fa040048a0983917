"""Small programs that read and write Python in every way, with changes from outside between their calls: results and
all that can be reached are those of the same code without `@program`."""

from __future__ import annotations

import enum
import gc
import linecache
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from monarch.compiler.execution.factories import executors_by
from monarch.language import DistributedTensor, Mesh, distribute, module_to_mesh, program
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, plan_of
from tests.sample import examples

PRELUDE = """
import collections, copy, dataclasses, enum, functools, os, types

class Mode(enum.Enum):
    A = 1
    B = 2

@dataclasses.dataclass
class Plain:
    count: int = 0
    rate: float = 1.0
    kept: list = dataclasses.field(default_factory=list)

class Slotted:
    __slots__ = ("value", "__weakref__")

class Base:
    base_only = 1.0
    @program
    def member(self, y):
        self.f = self.f * 0.5
        return y * self.k + self.f

class Registry(dict):
    def get(self, key):
        return super().get(key) * self.scale

class Record:
    __slots__ = ("value", "parts")
    def __init__(self, value):
        self.value, self.parts = value, []

class Other:
    def __init__(self, scale):
        self.scale = scale
        self.z = make(0.5)

class S(Base):
    count = 1
    def apply(self, y):
        return y * self.o.scale + self.a
    @property
    def twice(self):
        return self.k * 2
    def outer_member(self, y):
        inner = self.member(y)
        return inner * 2, inner.detach()

def helper(y):
    return y + G

def build():
    net = place(torch.nn.Linear(3, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)

s = S()
s.a, s.b, s.c, s.k, s.f, s.flag, s.t, s.d, s.o = make(1.0), make(2.0), None, 1, 0.5, True, [], {}, Other(0.5)
s.fail, s.q, s.e, s.n = False, collections.deque([make(0.5)], 2), {1}, None
s.p, s.slotted, s.on, s.g = Plain(), Slotted(), Mode.A, {}
s.cached = functools.cache(lambda by: by * s.f)
registry, record = Registry(a=2.0), Record(1.0)
registry.scale = 1.0
half = functools.partial(lambda y, by: y * by, by=0.5)
G = 1
GT = make(0.0)
net, opt = build()
net2, opt2 = build()
sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)

def outer():
    n = make(0.0)
    @program
    def inner(y):
        return y * 0.5 + s.f
    def step(x):
        global G, GT, registry, half
        nonlocal n
        y = x * 1.0
%s
        if s.fail:
            raise KeyError("the user's own")
        return y
    def look():
        return n
    return program(step), look

step, look = outer()
"""

INSIDE = """
s.p.count += 1; y = y + s.p.count
s.p = dataclasses.replace(s.p, rate=s.p.rate * 0.5)
y = y * s.p.rate
s.p.kept.append(y.detach())
y = y + s.slotted.value if hasattr(s.slotted, 'value') else y
s.slotted.value = x * 0.5
y = s.member(y)
y = y + s.base_only
for group in opt.param_groups: group['lr'] = max(group['lr'] * 0.5, 0.01)
y = y + round(opt2.param_groups[0]['lr'], 3)
sched.step()
y = y + len(os.getenv('MONARCH_STATEFUL', ''))
s.g = {**s.g, s.k: y.detach()} if len(s.g) < 3 else {}
y = y + s.on.value
s.on = Mode.B if s.on is Mode.A else Mode.A
s.a, alias = s.a.clone(), s.a; alias.add_(1)
s.b = s.a[:2].sum() + s.b
y, s.c = s.outer_member(y)
s.cached.cache_clear() if s.flag else None; y = y * s.cached(2)
s.a = s.a * 0.5 + x
s.b = s.a + 1
s.a, s.b = s.b, s.a
s.k += 1
y = y * s.k
y = y + s.twice
y = y + 1 if s.flag else y
s.flag = not s.flag
s.f = s.f * 0.5
s.t.append(y.detach())
y = y + s.t[-1] if s.t else y
s.t = s.t[-2:]
y = y + len(s.t)
s.d['u'] = y * 0.5
y = y + s.d.get('u', 0.0)
s.d.pop('u', None)
s.d = {**s.d, str(s.k % 2): x}
y = y + sum(s.d.values())
G += 1
y = helper(y)
GT = GT * 0.5 + y.detach()
y = y + GT
n = n * 0.5 + y.detach()
y = y + n
s.a.add_(x)
s.b.mul_(0.5)
s.a.data = s.a.data * 0.5
y = s.apply(y)
y = inner(y)
y = y + s.o.z * s.o.scale
s.o = Other(0.25)
s.o.scale = s.k * 0.5
s.c = x
s.c = y
y = y + s.c if s.c is not None else y
S.count += 1
y = y * S.count
y = y + 1 if s.a is s.b else y
y = y + getattr(s, 'ab'[int(s.k) % 2])
setattr(s, 'xy'[int(s.k) % 2], s.k)
y = y + 1 if hasattr(s, 'x') else y
opt.zero_grad(); net(y.detach()).square().mean().backward(); opt.step()
y = y + net(x).detach()
y = y + 0.1 * net.weight.grad.sum() if net.weight.grad is not None else y
net.train(not net.training)
y = y * 2 if net.training else y
s.t.insert(0, s.b)
s.t.clear()
s.q.append(x)
y = y + sum(s.q)
s.e = s.e | {s.k % 3}
y = y * len(s.e)
s.n = None if s.n is not None else x * 2
y = y + (s.n if s.n is not None else 1)
y = y * registry.get('a')
registry.scale = registry.scale * 0.5
registry['b'] = y.detach()
registry = type(registry)(registry, a=3.0); registry.scale = 2.0
record.value = record.value * 0.5
y = y * record.value
record.parts.append(x)
y = y + sum(record.parts[-2:])
y = half(y)
half = functools.partial(getattr(half, 'func', half), by=s.f)
for each in (net, net2): y = y + each(x).detach()
opt2.zero_grad(); (net(x) * net2(x)).sum().backward(); opt2.step()
torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
opt.param_groups[0]['lr'] *= 0.5
y = y + opt.param_groups[0]['lr']
for value in list(s.d.values()): y = y + value
s.t += [x, y.detach()]
s.t[:] = s.t[:1]
y = y + getattr(s, 'missing', 1)
s.a, s.t = (s.t[0] if s.t else s.a), [s.a]
y = y + (lambda: s.f)()
with torch.no_grad(): net2.weight.mul_(0.5)
net2.weight.grad = None
S.late = s.f
y = y + getattr(S, 'late', 0.0)
y = y + x.requires_grad
""".strip().splitlines()

OUTSIDE = """
s.p.rate = 2.0
s.p = Plain(3)
s.slotted = Slotted()
s.slotted.value = make(0.5)
type(s).base_only = 2.0
Base.base_only = 5.0
os.environ['MONARCH_STATEFUL'] = os.environ.get('MONARCH_STATEFUL', '')[:3] + 'a'
s.on = Mode.B
sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
opt.param_groups[0]['lr'] = 1
half = functools.partial(half, by=2.0) if isinstance(half, functools.partial) else half
net.register_forward_hook(lambda module, args, out: out + 1)
s = copy.copy(s)
s.member = types.MethodType(lambda self, y: y * self.k, s)
pass
s.k = 5
s.k = 1.0
s.k = True
s.flag = not s.flag
s.a = make(3.0)
s.t = []
s.t.append(make(0.5))
s.t = list(s.t)
s.d = dict(s.d)
s.d['u'] = make(0.25)
s.b = s.a
s.t = [s.a, s.b]
G = 7
G = 1.0
GT = make(1.5)
s.o.scale = 0.75
s.o = Other(1)
s.c = None
S.count = 2
S.apply = lambda self, y: y - self.a
s.apply = lambda y: y + 2
helper = lambda y: y * 2
s.a.add_(1)
s.f = -0.0
net, opt = build()
net.eval()
net.weight = torch.nn.Parameter(place(torch.nn.Linear(3, 3)).weight.detach() * 0.5)
net.zero_grad()
opt.param_groups[0]['lr'] = 0.01
opt.param_groups[0]['momentum'] = 0.25
net.bias.requires_grad_(False)
keep = s.a
s.fail = True
s.fail = 1
s.fail = 2
s.fail = 3
s.x = 1
s.__dict__.pop('x', None)
s.missing = 3
registry.scale = 4.0
registry['a'] = 0.5
record = Record(2.0)
record.parts = [make(1.0)]
net, net2 = net2, net
net2, opt2 = build()
net2 = net
net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
s.q.clear()
s.q = type(s.q)(s.q, 3)
s.e.add(7)
s.d.clear()
S.twice = property(lambda self: 7)
half = lambda y: y
half.by = 3
""".strip().splitlines()


def world(source: str, name: str, make: Callable[..., Any], place: Callable[..., Any], wrap: Any) -> dict[str, Any]:
    """The module that the source makes, with plain tensors or distributed ones."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names = {"__name__": "stateful", "torch": torch, "make": make, "place": place, "program": wrap}
    exec(compile(source, name, "exec", dont_inherit=True), names)
    return names


def seen(value: Any, depth: int = 0) -> Any:
    """All that can be reached from a value, as plain data."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, DistributedTensor) and value._ref.parent is None and not value._ref.cell.mesh.pending:
            cell = value._ref.cell  # what `tolist` gives, without taking it apart into shards
            value = getattr(cell.handle, "tensor", value)
        return [round(float(entry), 3) for entry in value.detach().flatten().tolist()]
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *((f"{n}.grad", p.grad) for n, p in value.named_parameters())]
        return [value.training, *((name, seen(tensor)) for name, tensor in tensors)]
    if isinstance(value, torch.optim.Optimizer):
        states = [sorted((k, seen(v)) for k, v in entry.items()) for entry in value.state.values()]
        return [states, [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]]
    if isinstance(value, dict):
        return {key: seen(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [seen(entry, depth + 1) for entry in value]
    if isinstance(value, (set, deque)):
        return [type(value).__name__, [seen(entry, depth + 1) for entry in value]]
    if type(value).__name__ == "Record":
        return seen([value.value, value.parts], depth + 1)
    if type(value).__name__ == "Slotted":
        return seen(getattr(value, "value", None), depth + 1)
    if type(value).__name__ in ("S", "Other", "Plain"):
        code = ("apply", "member", "cached")
        return seen({key: entry for key, entry in vars(value).items() if key not in code}, depth + 1)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return ("float", round(value, 4), str(value)[0] == "-")
    return (type(value).__name__, value)


def state(names: dict[str, Any]) -> Any:
    keys = ("s", "G", "GT", "net", "opt", "net2", "opt2", "keep", "record")
    registry = names["registry"]
    found = [seen(names[key]) for key in keys if key in names]
    return [found, seen([names["S"].count, names["look"](), dict(registry), vars(registry)])]


def compare(inside: list[str], outside: list[list[str]], mesh: Mesh) -> None:
    lines = [f"        {line}\n        if s.fail is {number}: raise KeyError" for number, line in enumerate(inside, 1)]
    source = PRELUDE % "\n".join(lines)

    def plain(value: float) -> torch.Tensor:
        return torch.full((3,), value)

    os.environ.pop("MONARCH_STATEFUL", None)
    torch.manual_seed(0)
    theirs = world(source, "<theirs>", plain, lambda module: module, lambda function: function)
    torch.manual_seed(0)
    ours = world(
        source,
        "<ours>",
        lambda value: distribute(plain(value), mesh),
        lambda module: module_to_mesh(module, mesh),
        lambda function: program(function, mesh=mesh),
    )
    for number, lines in enumerate(outside):
        for line in lines:
            for names in (theirs, ours):
                torch.default_generator.manual_seed(number)
                exec(line, names)
        where = f"call {number} of\n" + "\n".join(inside) + f"\nwith {outside}"
        if theirs["s"].fail:
            with pytest.raises(KeyError):  # the state is that before the call
                ours["step"](plain(float(number)))
            theirs["s"].fail = ours["s"].fail = False
        else:
            expected = theirs["step"](plain(0.25 * number))
            assert seen(ours["step"](plain(0.25 * number))) == seen(expected), where
        assert state(ours) == state(theirs), where


BODIES = st.lists(st.sampled_from(INSIDE), min_size=1, max_size=6)
CHANGES = st.lists(st.lists(st.sampled_from(OUTSIDE), max_size=2), min_size=3, max_size=7)


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """The garbage collector leaves alone what was there before: a trace may ask it to look at all."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    os.environ.pop("MONARCH_STATEFUL", None)


@pytest.mark.usefixtures("frozen")
@examples(250, 4_000)
@given(BODIES, CHANGES)
@example(["s.a = s.a * 0.5 + x", "s.b.mul_(0.5)"], [[], [], ["s.b = s.a"], [], []])
@example(["y = y + getattr(S, 'late', 0.0)", "S.late = s.f"], [[], [], []])
@example(["s.t.append(y.detach())", "y = y + s.t[-1] if s.t else y"], [[], [], ["s.t = []"], [], ["s.fail = True"], []])
def test_a_program_is_the_same_code_without_it(inside: list[str], outside: list[list[str]]) -> None:
    with (
        warnings.catch_warnings(),
        executors_by(DenseExecutor),
        compiling_with(plan_of),
        Mesh(data=2, model=2) as mesh,
    ):
        warnings.simplefilter("ignore")
        compare(inside, outside, mesh)
