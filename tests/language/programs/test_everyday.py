"""Everyday training code, with changes between calls: a program gives what the same code gives without it."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from monarch.language import Mesh, distribute, module_to_mesh, program


class Mode(enum.Enum):
    A = 1
    B = 2


class Fl(enum.Flag):
    X = 1
    Y = 2


class Sq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return x * x * k

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g * ctx.k, None


class Half(nn.Module):
    def forward(self, w):
        return w * 0.5


def custom(w):
    st = {"k": 1.0}

    def step(x):
        y = Sq.apply(w["m"](x), st["k"]).sum()
        y.backward()
        w["o"].step()
        w["o"].zero_grad()
        return y

    return step, lambda i: st.update(k=1.0 + i)


def enum(w):
    st = {"mode": Mode.A, "fl": Fl.X}

    def step(x):
        return x * (2 if st["mode"] is Mode.A else 3) + (1 if Fl.Y in st["fl"] else 0)

    return step, lambda i: st.update(mode=Mode(1 + i % 2), fl=Fl(1 + i % 3))


def ema(w):
    ema = copy.deepcopy(w["m"])

    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        w["o"].step()
        w["o"].zero_grad()
        with torch.no_grad():
            for a, b in zip(ema.parameters(), w["m"].parameters(), strict=True):
                a.lerp_(b, 0.1)
        return loss, ema(x)

    return step, lambda i: None


def accum(w):
    st = {"n": 0}

    def step(x):
        loss = w["m"](x).square().mean() / 2
        loss.backward()
        st["n"] += 1
        if st["n"] % 2 == 0:
            w["o"].step()
            w["o"].zero_grad()
        return loss

    return step, lambda i: None


def hook(w):
    h = w["m"].register_forward_hook(lambda m, a, out: out * 2)

    def step(x):
        return w["m"](x)

    def ch(i):
        if i == 2:
            h.remove()
        if i == 3:
            w["m"].register_forward_pre_hook(lambda m, a: (a[0] + 1,))

    return step, ch


def ghook(w):
    w["m"].weight.register_hook(lambda g: g * 0.5)

    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        w["o"].step()
        w["o"].zero_grad()
        return loss

    return step, lambda i: None


def lru(w):
    st = {"b": 2.0}

    @functools.lru_cache(None)
    def scale(k):
        return k * st["b"]

    def step(x):
        return x * scale(3)

    def ch(i):
        st["b"] = 5.0
        if i == 2:
            scale.cache_clear()

    return step, ch


def prop(w):
    class C:
        k = 2

        @property
        def p(self):
            return self.k * C.k

        @classmethod
        def c(cls):
            return cls.k

        @staticmethod
        def s():
            return 4

    c = C()

    def step(x):
        return x * c.p + C.c() + c.s()

    def ch(i):
        if i == 1:
            C.k = 5
        if i == 2:
            c.k = 7
        if i == 3:
            C.s = staticmethod(lambda: 9)

    return step, ch


def ctx(w):
    st = {"on": True}

    @contextlib.contextmanager
    def swap():
        old = st.get("v", 0.0)
        st["v"] = old + 1.0
        try:
            yield st["v"]
        finally:
            st["v"] = old

    def step(x):
        with swap() as v:
            return x * v + (1 if st["on"] else 0)

    return step, lambda i: st.update(on=i % 2 == 0)


def gen(w):
    vals = [1.0, 2.0]

    def gen():
        yield from vals

    def step(x):
        return sum(x * v for v in gen())

    return step, lambda i: vals.append(float(i))


def partials(w):
    st = {"f": functools.partial(torch.mul, other=2.0)}

    def step(x):
        return st["f"](x)

    return step, lambda i: st.update(f=functools.partial(torch.mul, other=float(i)))


def functional(w):
    def step(x):
        p = dict(w["m"].named_parameters())

        def f(p, x):
            return torch.func.functional_call(w["m"], p, (x,)).square().sum()

        g, v = torch.func.grad_and_value(f)(p, x)
        return v, g["weight"], torch.vmap(lambda r: r * r.sum())(x)

    return step, lambda i: None


def parametrized(w):
    nn.utils.parametrize.register_parametrization(w["m"], "weight", Half())

    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        w["o"].step()
        w["o"].zero_grad()
        return loss

    return step, lambda i: None


def amp(w):
    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = w["m"](x)
        return y.float().sum(), y

    return step, lambda i: None


def sched(w):
    s = torch.optim.lr_scheduler.StepLR(w["o"], 2, 0.5)

    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        w["o"].step()
        w["o"].zero_grad()
        return loss

    return step, lambda i: s.step()


def freeze(w):
    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        w["o"].step()
        w["o"].zero_grad()
        return loss

    def ch(i):
        w["m"].weight.requires_grad_(i % 2 == 0)

    return step, ch


def counter(w):
    c = collections.Counter()

    def step(x):
        c["a"] += 1
        return x * c["a"]

    return step, lambda i: c.update(a=1)


def closure(w):
    k = 1.0

    def step(x):
        return x * k

    def ch(i):
        nonlocal k
        k = float(i)

    return step, ch


def defaults(w):
    def helper(x, k=2.0, *, j=1.0):
        return x * k + j

    def step(x):
        return helper(x)

    def ch(i):
        helper.__defaults__ = (float(i),)
        helper.__kwdefaults__ = {"j": i * 2.0}

    return step, ch


def multi(w):
    st = {"m": [w["m"]]}

    def step(x):
        return sum(m(x) for m in st["m"])

    return step, lambda i: st["m"].append(w["m"])


def namedtuple(w):
    P = collections.namedtuple("P", "a b")
    st = {"p": P(1.0, 2.0)}

    def step(x):
        return x * st["p"].a + st["p"].b

    return step, lambda i: st.update(p=st["p"]._replace(a=float(i)))


def clip(w):
    st = {"c": 1.0}

    def step(x):
        loss = w["m"](x).square().sum()
        loss.backward()
        n = nn.utils.clip_grad_norm_(w["m"].parameters(), st["c"])
        w["o"].step()
        w["o"].zero_grad()
        return loss, n

    return step, lambda i: st.update(c=0.1 * (i + 1))


def walrus(w):
    st = {}

    def step(x):
        if (v := st.get("v")) is None:
            st["v"] = v = x.detach() * 2
        return x + v

    return step, lambda i: st.clear() if i == 2 else None


def global_tensor(w):
    t = {"t": torch.ones(4)}

    def step(x):
        return x * t["t"]

    def ch(i):
        t["t"][0] = float(i)

    return step, ch


def slotsprop(w):
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.inner = w["m"]
            s.temp = 1.0

        def __getattr__(s, n):
            if n == "magic":
                return s.temp * 10
            return super().__getattr__(n)

        def forward(s, x):
            return s.inner(x) * s.magic

    m = M()

    def step(x):
        return m(x)

    def ch(i):
        m.temp = float(i)

    return step, ch


def dictview(w):
    d = {"a": 1.0, "b": 2.0}

    def step(x):
        y = x
        for k in sorted(d):
            y = y * d[k]
        return y

    return step, lambda i: d.update({f"k{i}": 0.5})


def matchcase(w):
    st = {"v": ("mul", 2.0)}

    def step(x):
        match st["v"]:
            case ("mul", k):
                return x * k
            case ("add", k):
                return x + k

    return step, lambda i: st.update(v=("add" if i % 2 else "mul", float(i)))


def exc(w):
    st = {}

    def step(x):
        try:
            return x * st["k"]
        except KeyError:
            return x * 10

    return step, lambda i: st.update(k=2.0) if i == 2 else None


def rebind_opt(w):
    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        w["o"].step()
        w["o"].zero_grad()
        return loss

    def ch(i):
        if i == 2:
            w["o"] = torch.optim.Adam(w["m"].parameters(), lr=0.1)

    return step, ch


def bn(w):
    bn = w["place"](nn.BatchNorm1d(4))

    def step(x):
        return bn(w["m"](x))

    return step, lambda i: bn.train(i % 2 == 0)


def shared_tuples(w):
    """One tuple at two places, of which one gets another: as an optimizer's betas, which its defaults have too."""
    pair = ((1.0,), (2.0, "a"))
    one, two = [pair], [pair[1], pair]

    def step(x):
        return x * one[0][1][0] + two[0][0] + two[1][0][0]

    def change(i):
        if i == 1:
            two[0] = (9.0, "a")
        if i == 2:
            two[1] = ((4.0,), pair[1])
        if i == 3:
            one[0] = (pair[0], (3.0, "a"))

    return step, change


def shared_functions(w):
    class Scale:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

        def method(self, x):
            return x + self.k

    first, second = Scale(2.0), Scale(3.0)
    part, method, names = functools.partial(first), first.method, frozenset("ab")
    one, two = [part, method, names], [part, method, names]

    def step(x):
        return one[0](x) + two[0](x) + one[1](x) + two[1](x) + len(one[2]) + 3 * len(two[2])

    def change(i):
        if i == 1:
            two[0] = functools.partial(second)
        if i == 2:
            two[1] = second.method
        if i == 3:
            two[2] = frozenset("a")

    return step, change


def betas(w):
    optimizer = torch.optim.Adam(w["m"].parameters(), lr=0.1)

    def step(x):
        loss = w["m"](x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, lambda i: optimizer.param_groups[0].update(betas=(0.5 + i / 10, 0.9)) if i > 1 else None


CASES: list[Callable[..., Any]] = [
    custom,
    enum,
    ema,
    accum,
    hook,
    ghook,
    lru,
    prop,
    ctx,
    gen,
    partials,
    functional,
    parametrized,
    shared_tuples,
    shared_functions,
    betas,
    amp,
    sched,
    freeze,
    counter,
    closure,
    defaults,
    multi,
    namedtuple,
    clip,
    walrus,
    global_tensor,
    slotsprop,
    dictview,
    matchcase,
    exc,
    rebind_opt,
    bn,
]
"""Each takes a world (a layer "m", its optimizer "o", and what places modules), and gives a step and what changes the
world behind call number i."""


def world(place: Callable[[Any], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = place(nn.Linear(4, 4))
    return {"m": layer, "o": torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), "place": place}


def plain(value: Any) -> Any:
    return value.full_tensor().detach() if hasattr(value, "full_tensor") else value


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_it_is_without_a_program(case: Callable[..., Any], mesh: Mesh) -> None:
    theirs, ours = world(lambda module: module), world(lambda module: module_to_mesh(module, mesh, {}))
    (step, change), (traced, change_ours) = case(theirs), case(ours)
    traced = program(traced, mesh=mesh)
    for call in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(call))
        expected = pytree.tree_leaves(step(x)), list(theirs["m"].parameters())
        found = pytree.tree_leaves(traced(distribute(x, mesh))), list(ours["m"].parameters())
        for one, other in zip(sum(map(list, found), []), sum(map(list, expected), []), strict=True):
            torch.testing.assert_close(plain(one), other.detach(), rtol=1e-4, atol=1e-5)
        change(call)
        change_ours(call)
