"""What the worlds of small stateful programs are made of: classes, objects and functions, as texts."""

from __future__ import annotations

KINDS = """
import array, bisect, collections, contextlib, contextvars, copy, dataclasses, enum, functools, heapq, itertools, math
import operator, os, types, weakref

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
last = given = x0
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
    "nested": """
@program
def nested(y):
    global G
    s.left = y * s.f
    G = G + 1
    return within_nested(y) + G

@program
def within_nested(y):
    s.box["a"].append(y.detach()) if "a" in s.box and len(s.box["a"]) < 3 else s.box.clear()
    if s.fail == "nested":
        raise KeyError
    return y * s.k

@program
def nested_raises(y):
    s.k = s.k + 1
    s.left = y
    raise KeyError

s.left, s.box = None, {"a": []}
""",
    "trainer": """
class Trainer:
    def __init__(self):
        self.model = place(torch.nn.Linear(3, 3))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.steps, self.history, self.best = 0, [], {}
    @program
    def fit(self, y):
        def closure():
            self.opt.zero_grad()
            loss = self.model(y).square().mean()
            loss.backward()
            if s.fail == "closure":
                raise KeyError
            return loss
        loss = self.opt.step(closure).detach()
        self.steps += 1
        self.history = [*self.history[-1:], loss]
        self.best[self.steps % 2] = loss * 0.5
        return loss
    def predict(self, y):
        return self.model(y).detach() * self.steps

trainer, trainer2 = Trainer(), Trainer()
""",
    "loops": """
def loopers():
    made, total = [], 0
    for i in range(2):
        def each(y, by=i):
            nonlocal total
            total += i
            return y * (by + 1) + total
        made.append(each)
    return made

s.loops = loopers()
""",
    "watched": """
class Watched:
    def __init__(self, value):
        object.__setattr__(self, "log", [])
        self.value = value
    def __setattr__(self, name, value):
        self.log.append(name)
        object.__setattr__(self, name, value)
    def __enter__(self):
        self.inside = True
        return self
    def __exit__(self, *error):
        self.inside = False
        return error[0] is ValueError
    def __iter__(self):
        yield self.value
        self.value = self.value + 1
        yield self.value
    def __eq__(self, other):
        return self.value == other
    __hash__ = None

watched = Watched(1)
""",
    "dies": """
class Dies:
    count = 0
    def __del__(self):
        type(self).count += 1

s.dies = Dies()
""",
    "tapped": """
def tapped(grad):
    s.taps.append(grad.sum())
    del s.taps[:-2]
    if s.fail == "hook":
        raise KeyError
    return grad * s.f

def before_step(optimizer, args, kwargs):
    s.k += 1
    if s.fail == "step":
        raise KeyError

s.taps = []
""",
    "raising": """
def raising(grad):
    s.k += 1
    raise KeyError
""",
    "Doubled": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, by):
        s.calls = getattr(s, "calls", 0) + 1
        ctx.by = by
        return y * by
    @staticmethod
    def backward(ctx, grad):
        s.calls += 2
        return grad * ctx.by, None
""",
    "s.loc": "s.loc = contextlib.ExitStack()",
    "s.m2": "s.m2 = make(1.0).repeat(2, 1)",
    "s.vi": "s.vi = s.a[:2]",
    "s.pl": "s.pl = torch.ones(3)",
    "s.nest": 's.nest = {"a": [make(0.5), {"b": (make(1.0), [1])}]}',
    "s.hp": "s.hp = [3, 1, 2]",
    "s.tup": 's.tup = ([make(0.5)], {"n": 1}, (s.k, make(2.0)))',
    "s.gr": "s.gr = None",
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

def closure():
    opt.zero_grad()
    loss = net(x0).square().mean()
    loss.backward()
    return loss
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
groups = [{"params": deep.one.parameters()}, {"params": deep.two.parameters(), "lr": 0.01}]
dopt = torch.optim.Adam(groups, lr=0.02, eps=0.01)
hook = deep.two.register_forward_hook(lambda module, args, out: out * 0.5)
"""

MODULES = {"net": (NET, "net", "opt", "sched", "closure"), "deep": (DEEP, "deep", "dopt", "hook")}
"""Likewise, where it has one of the words: modules take long to make."""

PROGRAM = """
def outer():
    n = make(0.0)
    @program
    def inner(y):
        return y * 0.5 + s.f
    def step(x):
        global G, GT, registry, half, trainer, trainer2, net, net2, last, given
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
