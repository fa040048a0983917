"""Texts of small programs that read and write Python in every way, and of changes from outside; the worlds that they
make with plain tensors and with distributed ones."""

from __future__ import annotations

import array
import enum
import functools
import itertools
import linecache
import os
import re
import types
from collections import ChainMap, deque
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from monarch.language import DistributedTensor, Mesh, distribute, module_to_mesh, program

KINDS = """
import array, collections, contextvars, copy, dataclasses, enum, functools, itertools, os, types, weakref

class Mode(enum.Enum):
    A = 1
    B = 2

@dataclasses.dataclass
class Plain:
    count: int = 0
    rate: float = 1.0
    kept: list = dataclasses.field(default_factory=list)

class Flags(enum.Flag):
    A = 1
    B = 2

Point = collections.namedtuple("Point", "v n")
"""
"""What programs do not change."""

PRELUDE = """
class Base:
    base_only = 1.0
    @program
    def member(self, y):
        self.f = self.f * 0.5
        return y * self.k + self.f

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

x0 = make(0.25)
s = S()
s.a, s.b, s.c, s.k, s.f, s.flag, s.t, s.d, s.o = make(1.0), make(2.0), None, 1, 0.5, True, [], {}, Other(0.5)
s.fail, s.n = False, None
G = 1
GT = make(0.0)
"""

PIECES = {
    "lotted": """
class Slotted:
    __slots__ = ("value", "__weakref__")

s.slotted = Slotted()
""",
    "egistry": """
class Registry(dict):
    def get(self, key):
        return super().get(key) * self.scale

registry = Registry(a=2.0)
registry.scale = 1.0
""",
    "ecord": """
class Record:
    __slots__ = ("value", "parts")
    def __init__(self, value):
        self.value, self.parts = value, []

record = Record(1.0)
""",
    "azy": """
class Lazy:
    shared = []
    @functools.cached_property
    def made(self):
        return self.size * 2
    def __getattr__(self, name):
        if name.startswith("auto_"):
            return self.size * len(name)
        raise AttributeError(name)
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value + 1 if name == "size" else value)
    def __len__(self):
        return int(self.size)
    def __call__(self, y):
        return y * self.size
    @classmethod
    def add(cls, value):
        cls.shared = [*cls.shared[-1:], value]

s.lazy = Lazy()
s.lazy.size = 1
""",
    "caught": """
def caught(y):
    try:
        s.k += 1
        y = y * s.k
        s.ct["caught"] += 1
        s.d["missing"] if s.flag else s.t[len(s.t)]
    except KeyError:
        return y + s.ct["caught"]
    except IndexError as error:
        s.last = type(error).__name__
        return y * 0.5
    finally:
        s.f = s.f * 0.5

s.ct, s.last = collections.Counter("a"), None
""",
    "by_default": """
def by_default(y, kept=[]):
    kept.append(len(kept))
    return y + sum(kept[-3:])
""",
    "s.gen": """
def counting(start):
    while True:
        start += 1
        yield start

s.gen = counting(0)
""",
    "s.q": "s.q = collections.deque([make(0.5)], 2)",
    "s.e": "s.e = {1}",
    "s.p": "s.p = Plain()",
    "s.on": "s.on = Mode.A",
    "s.g": "s.g = {}",
    "s.cached": "s.cached = functools.cache(lambda by: by * s.f)",
    "s.dd": "s.dd = collections.defaultdict(list)",
    "s.ct": 's.ct = collections.Counter("a")',
    "s.od": "s.od = collections.OrderedDict(a=make(0.5), b=x0)",
    "s.pt": "s.pt = Point(make(0.5), 1)",
    "s.fl": "s.fl = Flags.A",
    "s.w": "s.w = weakref.ref(s.o)",
    "s.ns": "s.ns = types.SimpleNamespace(v=1.0)",
    "s.fs": "s.fs = []",
    "s.i": "s.i = make(2.0).long()",
    "s.it": "s.it = itertools.cycle([1.0, 2.0, 0.5])",
    "s.ch": 's.ch = collections.ChainMap({}, {"a": 2})',
    "s.ar": 's.ar = array.array("d", [0.5])',
    "s.by": 's.by = bytearray(b"ab")',
    "CV": 'CV = contextvars.ContextVar("CV", default=1)',
    "half": "half = functools.partial(lambda y, by: y * by, by=0.5)",
}
"""What a world has only where its text has this in it: a trace looks at all that there is."""

NET = """
def build():
    net = place(torch.nn.Linear(3, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)

net, opt = build()
net2, opt2 = build()
sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
"""

DEEP = """
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(3, 3)
        self.two = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
        self.norm = torch.nn.BatchNorm1d(3)
        self.scale = 1.0
        self.register_buffer("seen", torch.zeros(3))
    def forward(self, y):
        self.seen = self.seen * 0.5 + y.detach()
        return self.norm(torch.stack([self.one(y), self.two(y), y * self.scale])).sum(0)

deep = place(Deep())
dopt = torch.optim.Adam([{"params": deep.one.parameters()}, {"params": deep.two.parameters(), "lr": 0.01}], lr=0.02)
hook = deep.two.register_forward_hook(lambda module, args, out: out * 0.5)
"""

MODULES = {"net": (NET, "net", "opt", "sched"), "deep": (DEEP, "deep", "dopt", "hook")}
"""Likewise, where it has one of the words: modules take long to make."""

PROGRAM = """
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
s.w = weakref.ref(s.o); y = y * s.w().scale
y = y + 1 if s.w() is s.o else y
s.dd['u'].append(y.detach()); y = y + s.dd['u'][-1]
s.dd[s.k % 2] += [x]; y = y * len(s.dd)
s.ct['a'] += 1; y = y * s.ct['a']
s.ct.update('ab'); y = y + s.ct.most_common(1)[0][1]
s.od['b'] = x; s.od.move_to_end('a'); y = y + next(iter(s.od.values()))
s.od.popitem(last=False); s.od[str(s.k)] = y.detach(); y = y * len(list(s.od))
s.pt = s.pt._replace(v=s.pt.v * 0.5 + x); y = y + s.pt.v * s.pt.n
s.pt = Point(s.pt.v, s.pt.n + 1)
y = y + next(s.gen)
y = y * next(s.it)
y = y + CV.get()
CV.set(CV.get() + 1)
s.fl = s.fl | Flags.B; y = y * s.fl.value
y = y + 1 if Flags.A in s.fl else y
s.fl ^= Flags.A
for function in s.fs[-2:]: y = function(y)
s.fs = [(lambda y, i=i: y + i * s.f) for i in range(2)]
s.fs.append((lambda z: lambda y: y + z)(y.detach()))
y = caught(y)
y = by_default(y)
y = y + s.lazy.made + s.lazy.auto_scale
s.lazy.size = s.lazy.size * 0.5
s.lazy.__dict__.pop('made', None)
y = s.lazy(y) + len(s.lazy)
Lazy.add(y.detach()); y = y + Lazy.shared[-1]
s.ns.v *= 0.5; y = y * s.ns.v
s.ns = types.SimpleNamespace(v=y.detach().sum())
s.ch['a'] = s.ch['a'] + 1; y = y + s.ch['a']
s.ar.append(s.f); y = y + s.ar[-1] + len(s.ar)
s.by[0] += 1; y = y + s.by[0] * 0.01
del s.d; s.d = {'v': x}
y = y + deep(x).detach()
dopt.zero_grad(); deep(x).square().sum().backward(); dopt.step()
deep.two[0], deep.one = deep.one, deep.two[0]
deep.norm.eval()
deep.train(not deep.training)
deep.norm.momentum = s.f * 0.5
deep.norm.reset_running_stats()
y = y + deep.norm.running_mean + deep.norm.num_batches_tracked
deep.seen.add_(y.detach()); y = y + deep.seen
deep.scale = deep.scale * 0.5
dopt.param_groups[1]['weight_decay'] = s.f
dopt.param_groups.reverse()
handle = net.register_forward_hook(lambda module, args, out: out * s.f); y = y + net(x).detach(); handle.remove()
hook.remove()
z = net(x); z.register_hook(lambda grad: grad * 0.5); z.sum().backward()
s.a[:2].mul_(0.5)
s.a[0] = s.f
view = s.a.view(3, 1); view.add_(1.0); y = y + view[:, 0]
s.a.unsqueeze(0).expand(2, 3)[0].add_(1.0) if False else None; y = y + s.a.unsqueeze(0).expand(2, 3).sum(0)
torch.nn.init.constant_(net.bias, s.f)
net.bias.requires_grad_(not net.bias.requires_grad)
z = s.a.detach().clone().requires_grad_(); (z * z).sum().backward(); y = y + z.grad
s.g2 = torch.autograd.grad(net(x).sum(), net.weight)[0]; y = y + s.g2.sum(0)
y = y.double().float()
s.a = s.a.double()
y = y + s.a.to(y.dtype)
s.i = s.i + 1; y = y * s.i
s.i.add_(s.k)
y = y + (torch.rand_like(y) < 2.0).to(y.dtype)
y = torch.nn.functional.dropout(y, 0.0) + 0 * torch.randn(3)
y = y + (net.weight.grad is None) + len(opt.state)
opt.zero_grad(set_to_none=False)
opt.state.clear()
for name, parameter in net.named_parameters(): y = y + parameter.detach().sum() * len(name)
y = y + sum(getattr(s, each).sum() for each in ('a', 'b'))
y = y + functools.reduce(lambda a, b: a + b, [s.a, x], s.f)
y, *rest = (y, *s.t[:1]); y = y + len(rest)
s.t, s.d = [*s.t, s.t][:1], {**s.d}
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
s.w = weakref.ref(s)
s.w = weakref.ref(s.o)
s.dd = collections.defaultdict(list)
s.dd.default_factory = lambda: [make(1.0)]
s.dd['u'] = []
s.ct.clear()
s.ct['b'] = 5
s.od.move_to_end(next(iter(s.od)))
s.od = collections.OrderedDict(reversed(list(s.od.items())))
s.pt = Point(make(1.0), 2)
s.it = itertools.cycle([3.0])
s.gen = counting(5)
CV.set(7)
s.fl = Flags.A | Flags.B
s.fs = [lambda y: y * 2]
s.fs.reverse()
s.lazy = Lazy(); s.lazy.size = 2
s.lazy.made = 5
Lazy.__getattr__ = lambda self, name: 3
Lazy.shared = [make(0.5)]
s.ns.v = 2.0
s.ch.maps[1]['a'] = 7
s.ch = s.ch.new_child({'a': 1})
s.ar[0] = 2.0
s.by[0] = 7
by_default.__defaults__[0].clear()
caught = lambda y: y
deep.norm.eval()
deep.train()
deep.one = place(torch.nn.Linear(3, 3))
deep.two = torch.nn.Sequential(deep.two[0])
deep.two.append(torch.nn.ReLU())
deep.seen = make(1.0)
deep.scale = 2
hook = deep.one.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
hook.remove()
dopt.param_groups[0]['lr'] = 0.1
dopt.param_groups[0]['weight_decay'] = 0.1
dopt.param_groups[1]['betas'] = (0.5, 0.9)
len(dopt.param_groups) < 3 and dopt.add_param_group({'params': deep.norm.parameters(), 'lr': 0.5})
dopt = torch.optim.SGD(deep.parameters(), lr=0.1)
deep.one.requires_grad_(False)
deep.one.weight.requires_grad_(not deep.one.weight.requires_grad)
s.i = make(1.0).long()
s.a = make(1.0).double()
s.a[1] = 0.5
s.b = s.a[:2]
torch.nn.init.constant_(net.weight, 0.5)
opt.state.clear()
s.od.pop('b', None)
half = lambda y: y
half.by = 3
""".strip().splitlines()


@functools.cache
def code_of(source: str, name: str) -> types.CodeType:
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    return compile(source, name, "exec", dont_inherit=True)


@functools.cache
def kinds() -> dict[str, Any]:
    """The classes that all worlds share."""
    names: dict[str, Any] = {"__name__": "stateful", "torch": torch}
    exec(code_of(KINDS, "<kinds>"), names)
    return names


class Text:
    """What a world is made of, and which attributes of `s` are named in it."""

    def __init__(self, body: list[str], changes: list[list[str]]) -> None:
        text = " ".join(itertools.chain(body, *changes))
        self.named = {"k", "x", "y", *re.findall(r"\bs\.(\w+)", text)} | set("ab" if "'ab'" in text else "")
        sources = {"<s>": PRELUDE}
        for word, source in PIECES.items():
            if word in text:
                sources[f"<{word}>"] = source
        for name, (source, *words) in MODULES.items():
            if any(word in text for word in words):
                sources[f"<{name}>"] = source
        self.codes = [code_of(source, name) for name, source in sources.items()]
        lines = [
            f"        {line}\n        if s.fail is {number}: raise KeyError" for number, line in enumerate(body, 1)
        ]
        self.codes.append(code_of.__wrapped__(PROGRAM % "\n".join(lines), "<program>"))


class World:
    """The module that the source makes, with plain tensors or distributed ones, and its program."""

    def __init__(self, text: Text, make: Callable[..., Any], place: Callable[..., Any], wrap: Any) -> None:
        self.names = {**kinds(), "make": make, "place": place, "program": wrap}
        torch.default_generator.manual_seed(0)
        for code in text.codes:
            exec(code, self.names)

    def step(self, x: torch.Tensor) -> Any:
        return self.names["step"](x)

    def change(self, line: str, seed: int) -> str | None:
        """Run a line from outside. Says how it fails."""
        torch.default_generator.manual_seed(seed)
        try:
            exec(line, self.names)
        except Exception as error:
            return type(error).__name__
        return None

    def state(self, attributes: Collection[str]) -> Any:
        """All that its program may have changed; of `s` these attributes."""
        names = self.names
        found = [seen(names[key]) for key in STATE if key in names]
        own = {key: value for key, value in vars(names["s"]).items() if key in attributes}
        left = [own, names["S"].count, names["look"]()]
        if registry := names.get("registry"):
            left += [dict(registry), vars(registry)]
        if lazy := names.get("Lazy"):
            left.append(lazy.shared)
        return [found, seen(left)]

    def close(self) -> None:
        """Take it apart: the garbage collector has nothing to find."""
        self.names.clear()


STATE = "G GT net opt net2 opt2 keep record deep dopt CV by_default".split()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


def seen(value: Any) -> Any:
    """All that can be reached from a value, as plain data."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, DistributedTensor) and value._ref.parent is None and not value._ref.cell.mesh.pending:
            cell = value._ref.cell  # what `tolist` gives, without taking it apart into shards
            value = getattr(cell.handle, "tensor", value)
        return [str(value.dtype), *(float(f"{float(entry):.3g}") for entry in value.detach().flatten().tolist())]
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        tensors += [(f"{name}.grad", parameter.grad) for name, parameter in value.named_parameters()]
        flags = [(module.training, *(len(vars(module)[kind]) for kind in _HOOKS)) for module in value.modules()]
        return [flags, *((name, tensor is not None and tensor.requires_grad, seen(tensor)) for name, tensor in tensors)]
    if isinstance(value, torch.optim.Optimizer):
        states = [sorted((k, seen(v)) for k, v in entry.items()) for entry in value.state.values()]
        return [states, [{k: seen(v) for k, v in group.items() if k != "params"} for group in value.param_groups]]
    if isinstance(value, dict):
        return type(value).__name__, [(key, seen(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple, set, deque, array.array)):
        return [type(value).__name__, [seen(entry) for entry in value]]
    if isinstance(value, types.FunctionType):
        cells = [seen(cell.cell_contents) for cell in value.__closure__ or ()]
        return [value.__name__, cells, seen(value.__defaults__ or ())]
    if isinstance(value, (ChainMap, ContextVar)):
        return seen(value.maps if isinstance(value, ChainMap) else value.get())
    if isinstance(value, float):
        return ("float", float(f"{value:.4g}"), str(value)[0] == "-")
    if isinstance(value, (int, str, bytes, bytearray, type(None), enum.Enum)):
        return (type(value).__name__, str(value))
    if type(value).__name__ in ("Record", "Slotted"):
        return [seen(getattr(value, name, None)) for name in type(value).__slots__ if name != "__weakref__"]
    if type(value).__name__ in ("S", "Other", "Plain", "Lazy", "SimpleNamespace"):
        kept = {key: entry for key, entry in vars(value).items() if key not in ("apply", "member", "cached")}
        return type(value).__name__, seen(kept)
    return type(value).__name__


def compare(body: list[str], changes: list[list[str]], mesh: Mesh) -> None:
    def plain(value: float) -> torch.Tensor:
        return torch.full((3,), value)

    os.environ.pop("MONARCH_STATEFUL", None)
    if any("next(s." in line for line in body):  # an iterator cannot be taken back
        changes = [[line for line in lines if "s.fail" not in line] for lines in changes]
    text = Text(body, changes)
    theirs = World(text, plain, lambda module: module, lambda function: function)
    ours = World(
        text,
        lambda value: distribute(plain(value), mesh),
        lambda module: module_to_mesh(module, mesh),
        lambda function: program(function, mesh=mesh),
    )
    try:
        _compare(body, changes, text.named, theirs, ours)
    finally:
        theirs.close()
        ours.close()


def _compare(body: list[str], changes: list[list[str]], named: set[str], theirs: World, ours: World) -> None:
    def plain(value: float) -> torch.Tensor:
        return torch.full((3,), value)

    for number, lines in enumerate(changes):
        for line in lines:
            assert theirs.change(line, number) == ours.change(line, number), line
        where = f"call {number} of {body} with {changes}"
        if theirs.names["s"].fail:
            with pytest.raises(KeyError):  # the state is that before the call
                ours.step(plain(float(number)))
            theirs.names["s"].fail = ours.names["s"].fail = False
        else:
            try:
                expected = theirs.step(plain(0.25 * number))
            except Exception as error:  # the code's own: there is no state to compare with
                with pytest.raises(type(error)):
                    ours.step(plain(0.25 * number))
                return
            assert seen(ours.step(plain(0.25 * number))) == seen(expected), where
        kept = named if number < len(changes) - 1 else vars(ours.names["s"])
        assert ours.state(kept) == theirs.state(kept), where


BODIES = st.lists(st.sampled_from(INSIDE), min_size=1, max_size=4)
CHANGES = st.lists(st.lists(st.sampled_from(OUTSIDE), max_size=2), min_size=2, max_size=4)
