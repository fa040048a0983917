"""What the linter finds and what it passes: which values it takes for tensors, and how far it follows a program."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from monarch.compiler.errors import MonarchError, ProgramError
from monarch.language.check import Finding, check_file, check_source

ROOT = Path(__file__).parents[3]
SHARED = """\
import functools, itertools, math, os, random, time
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, no_grad as quiet
from torch.utils.checkpoint import checkpoint
import monarch
import monarch as m
from monarch import program, distribute
from monarch import program as traced
from monarch.distributed import Mesh

mesh = Mesh(data=4, model=2)
model = monarch.module_to_mesh(nn.Linear(4, 4), mesh)
plain = torch.ones(4)
weight = distribute(torch.ones(4, 4), mesh, "[@data, -]")
steps = 3
"""


def findings(code: str) -> list[Finding]:
    return check_source(SHARED + textwrap.dedent(code), "train.py")


def found(code: str) -> list[tuple[str, str]]:
    """Rule, and the text of the place, of each finding."""
    lines = (SHARED + textwrap.dedent(code)).splitlines()
    return [(f.code, lines[f.line - 1][f.column - 1 : f.end - 1 if f.end else None]) for f in findings(code)]


def in_program(*body: str) -> str:
    return "@monarch.program\ndef step(x: torch.Tensor, n: int, flag=True):\n" + "".join(
        f"    {line}\n" for line in body
    )


# -- how programs are spelled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "@monarch.program\ndef f(x: torch.Tensor):\n    return x.item()",
        "@m.program()\ndef f(x: torch.Tensor):\n    return x.item()",
        "@program(mesh=mesh)\ndef f(x: torch.Tensor):\n    return x.item()",
        "@traced\ndef f(x: torch.Tensor):\n    return x.item()",
        "@functools.partial(program, mesh=mesh)\ndef f(x: torch.Tensor):\n    return x.item()",
        "@torch.no_grad()\n@program\ndef f(x: torch.Tensor):\n    return x.item()",
        "def f(x: torch.Tensor):\n    return x.item()\nstep = program(f)",
        "def f(x: torch.Tensor):\n    return x.item()\nstep = program(f, mesh=mesh)",
        "def f(x: torch.Tensor):\n    return x.item()\nstep = program(mesh=mesh)(f)",
        "def f(w, x: torch.Tensor):\n    return x.item()\nstep = program(functools.partial(f, weight))",
        "step = program(lambda x: x.sum().item())",
        "class A:\n    @program\n    def f(self, x: torch.Tensor):\n        return x.item()",
        "def make():\n    @program\n    def f(x: torch.Tensor):\n        return x.item()\n    return f",
        "def make():\n    def f(x: torch.Tensor):\n        return x.item()\n    return f\nstep = program(make())",
        "class A:\n    def f(self, x: torch.Tensor):\n        return x.item()\na = A()\nstep = program(a.f)",
        "if steps:\n    @program\n    def f(x: torch.Tensor):\n        return x.item()",
    ],
)
def test_a_program_is_found_however_it_is_spelled(code: str) -> None:
    assert [f.code for f in findings(code)] == ["M102"]


@pytest.mark.parametrize(
    "code",
    [
        "def f(x: torch.Tensor):\n    return x.item()",
        "import other\n@other.program\ndef f(x: torch.Tensor):\n    return x.item()",
        "def program(f):\n    return f\n@program\ndef f(x: torch.Tensor):\n    return x.item()",
        "print(weight.sum().item(), time.time())\nif weight.sum() > 3:\n    pass",
    ],
)
def test_what_is_no_program_is_left_alone(code: str) -> None:
    assert findings(code) == []


@pytest.mark.parametrize(
    "lines",
    [
        "assert x.min() >= 0, f'not positive: {x}'",
        "if x.isnan().any() or not (x > 0).all():\n        wrong = x[x < 0]\n        raise ValueError(f'{wrong}')",
        "if (x > 0).all():\n        x = x * 2\n    else:\n        raise ValueError('negative')",
    ],
)
def test_a_test_that_only_raises_is_no_branch(lines: str) -> None:
    """The workers make it. Where the function may catch the error, it is one."""
    assert found(f"@program\ndef f(x):\n    {lines}\n    return x\nf(weight)") == []
    indented = lines.replace("\n", "\n    ")
    raised = "AssertionError" if lines.startswith("assert") else "ValueError"
    for caught, codes in (("(KeyError, TypeError)", set()), (f"(KeyError, {raised})", {"M101"}), ("mine", {"M101"})):
        code = f"    try:\n        {indented}\n    except {caught}:\n        pass\n    return x"
        assert {code for code, _ in found(f"@program\ndef f(x):\n{code}\nf(weight)")} & {"M101"} == codes


# -- what is a tensor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "place"),
    [
        ("if x.sum() > 3: pass", "M101", "x.sum() > 3"),
        ("while (x > 0).all(): pass", "M101", "(x > 0).all()"),
        ("y = 1 if x.any() else 2", "M101", "x.any()"),
        ("y = x.any() or n", "M101", "x.any()"),
        ("y = not x.any()", "M101", "x.any()"),
        ("if x is None or x.sum() > 0: pass", "M101", "x.sum() > 0"),
        ("if isinstance(x, torch.Tensor) and x.any(): pass", "M101", "x.any()"),
        ("for a, b in itertools.product([x.sum()], [n]):\n        if a > b: pass", "M101", "a > b"),
        ("for a in itertools.chain([x.sum()], [x.mean()]):\n        if a > 0: pass", "M101", "a > 0"),
        ("for a, b in itertools.pairwise([x.sum(), x.mean()]):\n        if a > b: pass", "M101", "a > b"),
        ("y = functools.reduce(lambda a, b: a if a > b else b, [x.sum(), x.mean()], x.max())", "M101", None),
        ("y = (x.sum(), 1) < (3, 2)", "M102", "(x.sum(), 1) < (3, 2)"),
        ("y = [x.sum()] == [x.mean()]", "M102", "[x.sum()] == [x.mean()]"),
        ("y = 0 < x.sum() < 3", "M101", "0 < x.sum() < 3"),
        ("y = [r for r in x if r[0] > 0]", "M101", "r[0] > 0"),
        ("if n > 3 and x.any(): pass", "M101", "x.any()"),
        ("if torch.isnan(model(x)).any(): pass", "M101", "torch.isnan(model(x)).any()"),
        ("if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 9: pass", "M101", None),
        ("if weight.sum() > 0: pass", "M101", "weight.sum() > 0"),
        ("if torch.rand(3).sum() > 0: pass", "M101", "torch.rand(3).sum() > 0"),
        ("if (plain + x).sum() > 0: pass", "M101", "(plain + x).sum() > 0"),
        ("if (y := x.sum()) > 0: pass", "M101", "(y := x.sum()) > 0"),
        ("y = float(x.sum())", "M102", "float(x.sum())"),
        ("for i in range(x.sum()): pass", "M102", "range(x.sum())"),
        ("y = math.sqrt(x.sum())", "M102", "math.sqrt(x.sum())"),
        ("y = max(x.sum(), x.mean())", "M102", "max(x.sum(), x.mean())"),
        ("y = sorted([x.sum(), x.mean()])", "M102", "sorted([x.sum(), x.mean()])"),
        ("y = np.asarray(x)", "M102", "np.asarray(x)"),
        ("y = max([x, x], key=lambda t: t.sum())", "M102", None),
        ("y = sorted([x, x * 2], key=lambda t: t.sum(), reverse=True)", "M102", None),
        ("y = sorted(range(4), key=lambda i: x[i].sum())", "M102", None),
        ("y = sorted([x, x], key=torch.Tensor.item)", "M102", None),
        ("y = sorted({'a': x}.items(), key=lambda p: p[1].sum())", "M102", None),
        ("y = sorted([x.sum(), x.mean()], key=None)", "M102", None),
        ("apply = lambda read: read()\n    y = apply(x.sum().item)", "M102", "read()"),
        ("a = [x.sum(), 1]\n    b = [x.mean(), 1]\n    y = a == b", "M102", "a == b"),
        ("on = True\n    on = n > 2\n    if on: y = x.item()", "M102", "x.item()"),
        ("y = [x.sum(), x.mean()].index(3)", "M102", None),
        ("y = 3 in [x.sum(), 2]", "M102", None),
        ("y = x.sum() in (1, 2)", "M102", None),
        ("y = list(map(float, x[0]))", "M102", None),
        ("y = list(filter(lambda t: t.sum() > 0, [x, x]))", "M102", None),
        ("y = bytes(x.argmax())", "M102", None),
        ("y = math.fsum([x.sum(), x.mean()])", "M102", None),
        ("y = x.topk(x.argmax())", "M102", None),
        ("y = x.add(x, alpha=x.sum())", "M102", None),
        ("y = torch.tensor([x.sum(), x.mean()])", "M102", None),
        ("y = F.pad(x, (x.argmax(), 0))", "M102", None),
        ("l = [1, 2, 3]; l[x.argmax()] = 1", "M102", "x.argmax()"),
        ("l = [1, 2, 3]; del l[x.argmax()]", "M102", "x.argmax()"),
        ("l = [x, x * 2]; l.sort(key=lambda t: t.sum())", "M102", None),
        ("match x.sum():\n        case 1 | 2: pass", "M101", "x.sum()"),
        ("match (x.sum(), n):\n        case (3, _): pass", "M101", None),
        ("y = x[: x.argmax()]", "M102", "x.argmax()"),
        ("y = [1, 2][x.argmax()]", "M102", "x.argmax()"),
        ("y = x.view(x.argmax(), 4)", "M102", "x.view(x.argmax(), 4)"),
        ("y = torch.zeros(x.argmax())", "M102", "torch.zeros(x.argmax())"),
        ("y = 3 in x", "M102", "3 in x"),
        ("y = torch.equal(x, x)", "M102", "torch.equal(x, x)"),
        ("y = x.full_tensor()", "M102", "x.full_tensor()"),
        ("y = '%.3f' % x.sum()", "M103", "'%.3f' % x.sum()"),
        ("y = '{}'.format(x)", "M103", "'{}'.format(x)"),
        ("y = str(x)", "M103", "str(x)"),
        ("y = F.one_hot(x)", "M104", "F.one_hot(x)"),
        ("y = torch.where(x > 0)", "M104", "torch.where(x > 0)"),
        ("y = plain.masked_select(x > 0)", "M104", "plain.masked_select(x > 0)"),
        ("y = torch.masked_select(plain, mask=x > 0)", "M104", "torch.masked_select(plain, mask=x > 0)"),
        ("mask = x > 0; y = x[mask & (x < 1)]", "M104", "x[mask & (x < 1)]"),
        ("x.t_()", "M105", "x.t_()"),
        ("x.unsqueeze_(0)", "M105", "x.unsqueeze_(0)"),
        ("plain[0] = 1", "M106", "plain[0]"),
        ("nn.init.zeros_(plain)", "M106", "nn.init.zeros_(plain)"),
        ("plain.view(2, 2)[0].add_(1)", "M106", "plain.view(2, 2)[0].add_(1)"),
        ("y = monarch.layout(plain, '[-]')", "M107", None),
        ("y = x.sum().tensor_type", "M108", "x.sum().tensor_type"),
        ("y = x.bernoulli(generator=torch.Generator().manual_seed(0))", "M109", None),
    ],
)
def test_a_value_that_is_needed_is_found_at_its_place(line: str, code: str, place: str | None) -> None:
    ((rule, text),) = found(in_program(line))
    assert rule == code
    assert place is None or text == place


@pytest.mark.parametrize(
    "line",
    [
        "if x.shape[0] > 3 and x.ndim == 2 and len(x) > 1 and x.size(0) and x.numel(): pass",
        "if x is None or x is not n: pass",
        "if isinstance(x, torch.Tensor) or x > 0: pass",
        "off = False\n    if off and x.sum() > 0: pass",
        "off = False\n    if off: print(x.sum().item())",
        "on = True\n    if not on: print(x)\n    return x if on else x.item()",
        "read = x.sum().item\n    return x",
        "a, b = [x.sum(), 1], [x.mean(), 2]\n    a.clear()\n    return a == b",
        "a = [x.sum()]\n    b = a\n    return a == b",
        "y = x is not None or x.any()",
        "y = x.masked_select(plain > 0), torch.masked_select(x, torch.ones(3) > 0)",
        "if not torch.is_tensor(x) and x > 0: pass",
        "y = [x.sum(), 1] == [x.sum(), 1], [x] == [x, x], [x] == [None], (x, 1) == ('a', 1)",
        "for a, b in itertools.product([x], [n]): y = a + b",
        "y = functools.reduce(lambda a, b: a + b, [x, x * 2])",
        "if isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.requires_grad: pass",
        "if n > 3 and flag: pass",
        "for i in range(n): x = x + i",
        "for row in x: row.sum()",
        "y = [a + b for a, b in zip(x, x)]",
        "y = sum(r.sum() for r in x)",
        "y = x[0] + x[:, n] + x[..., None] + x[x.argmax(0)]",
        "y = x.chunk(2)\n    if len(y) > 1: pass",
        "y = torch.where(x > 0, x, 0.0)",
        "y = F.one_hot(x, 4)",
        "y = f'{x!r} {x.shape} {n}'",
        "y = repr(x)",
        "x = x * 2\n    x += 1\n    x.mul_(2)\n    x[0] = 1",
        "weight.add_(1)",
        "y = weight.sharding, x.sharding",
        "if plain.sum() > 3: pass",
        "y = plain.sum().item()",
        "y = int(x.shape[0]) + int(n) + float(plain[0])",
        "y = monarch.layout(torch.ones(4, 4), '[@data, -]')",
        "y = max(x.shape) + min(n, 3)",
        "y = np.prod(x.shape)",
        "y = math.sqrt(x.shape[-1])",
        "y = unknown(x)\n    if y: pass",
        "y = unknown(x)\n    size = y.shape[0]\n    if size > 2: torch.ones(size, size)",
        "y = None\n    if y is None: y = x",
        "cache = []\n    cache.append(x)\n    cache[0] = n",
        "y = {'a': x}\n    if 'a' in y: pass\n    if y: pass",
        "if not isinstance(x, (int, float)):\n        return x\n    if x > 3: pass",
        "y = x.max(1).values + x.max(1)[0]\n    a, b = x.max(1)",
        "with torch.no_grad():\n        y = model(x)\n    model(x).sum().backward()",
        "torch.set_grad_enabled(True)",
        "torch._assert_async(x.any())",
        "if torch.triu(torch.ones(4, 4), 1)[0, 0] > 0: pass",
        "if not (plain > 0).any() or torch.equal(plain, plain): pass",
        "y = torch.where(torch.ones(3) > 0), torch.arange(3).nonzero(), plain[plain > 0]",
        "y = torch.tensor([1.0]).item() + torch.arange(3).sum().item() + x.new_tensor([1.0]).item()",
        "for i in range(torch.arange(3)[2]): pass",
        "y = torch.zeros(4)\n    y += 1\n    y[0] = 2\n    y.view(2, 2)[1].mul_(4)",
        "(plain * 2).add_(1)\n    (-plain).add_(1)\n    plain.float().add_(1)\n    plain[[0, 1]].add_(1)",
        "y = x * 2\n    y.unsqueeze_(0)\n    y.t_()\n    y.resize_(2, 8)",
        "x.t().contiguous().add_(1)\n    x.t().reshape(16).add_(1)\n    x[[0, 1]].add_(1)\n    x.requires_grad_()",
        "y = functools.partial(torch.randn, generator=None)(4) + torch.randn(4, generator=None)",
        "y = max([x, x], key=len) + np.ndim(x)",
        "y = torch.normal(x, 1.0)",
        "y = max([x.sum()]), max((1, x.sum()), (2, x.mean()))",
        "d = {'a': x}\n    y = [k for k in d if k == 'a'], sorted(d)",
        "y = sorted([x, x], key=lambda t: t.shape[0])",
        "y = x in [x], x in {x}, None in [x, x]",
        "y = x.narrow(0, x.argmax(), 1)",
        "def f(**named):\n        return [k for k in named if k == 'a']\n    f(a=x)",
        "y = list(filter(lambda t: t.ndim > 0, [x, x]))",
        "y = [x, x]\n    y.sort(key=lambda t: t.ndim)",
        "import copy\n    copy.deepcopy(x).add_(1)",
        "y = '%r' % x, '{!r}'.format(x), ascii(x), f'{x!a}'",
        "y = model(x).sum()\n    with torch.no_grad():\n        y.backward()",
        "model(x.detach()).sum().backward()",
        "y = x.detach()\n    y.requires_grad_()\n    y.sum().backward()",
        "y = os.environ['HOME'], os.getenv('HOME')",
        "y = x + torch.from_numpy(np.ones((4, 4)))",
        "o = torch.optim.AdamW(model.parameters(), fused=True)\n    o.step()",
    ],
)
def test_what_the_tracer_takes_is_passed(line: str) -> None:
    assert found(in_program(line)) == []


def test_a_parameter_without_annotation_is_a_tensor_where_it_is_used_as_one() -> None:
    assert found("@program\ndef f(x, n):\n    h = x @ weight\n    if n > 3: pass\n    if x > 3: pass") == [
        ("M101", "x > 3")
    ]
    assert found("@program\ndef f(x, n):\n    if n > 3: pass\n    if x > 3: pass\nf(weight, 3)") == [("M101", "x > 3")]
    assert found("@program\ndef f(x, n):\n    if n > 3: pass\n    if x > 3: pass\nf(n=weight, x=3)") == [
        ("M101", "n > 3")
    ]
    assert found("@program\ndef f(x, n=3):\n    if n > 3: pass\n    if x: pass") == []


def test_annotations_of_containers_say_what_is_in_them() -> None:
    code = (
        "@program\ndef f(batch: dict[str, torch.Tensor], pair: tuple[torch.Tensor, int], y: 'torch.Tensor | None'):\n"
    )
    assert found(code + "    if pair[1] > 3 or y is None or 'a' in batch: pass") == []
    assert found(code + "    if pair[0] > 3: pass") == [("M101", "pair[0] > 3")]
    assert found(code + "    for key, value in batch.items():\n        if key and value > 3: pass") == [
        ("M101", "value > 3")
    ]


# -- how far a program is followed -----------------------------------------------------------------------------------


def test_functions_methods_and_modules_of_the_file_are_followed() -> None:
    code = """
    def positive(t):
        return t.sum() > 0

    def helper(t, scale=1):
        if scale > 1: return t
        return helper(t, scale + 1) if positive(t) else t

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.count = 0
        def forward(self, x):
            self.count += 1
            return self.gate(self.inner(x))
        def gate(self, h):
            if h.min() > 0: return h
            return -h

    net = monarch.module_to_mesh(Net(), mesh)

    @program
    def step(x: torch.Tensor):
        def inner(y):
            return y.item()
        inner(x)
        return helper(net(x)) + checkpoint(lambda t: t * t.tolist(), x)
    """
    assert found(code) == [
        ("M101", "positive(t)"),
        ("M101", "h.min() > 0"),
        ("M102", "y.item()"),
        ("M102", "t.tolist()"),
    ]
    assert "'step' cannot branch on a tensor's value" in findings(code)[0].message


def test_a_loop_carries_what_its_first_round_made() -> None:
    assert found(in_program("y = 0", "for i in range(n):", "    if y > 3: pass", "    y = y + x.sum()")) == [
        ("M101", "y > 3")
    ]


def test_recursion_and_a_function_for_everything_end() -> None:
    lines = [f"def f{i}(t):\n    return f{(i * 7 + 1) % 60}(t) + f{(i * 5 + 3) % 60}(t)\n" for i in range(60)]
    assert findings("".join(lines) + in_program("return f0(x)")) == []


# -- what is slow, or done once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "rules"),
    [
        (in_program("y = time.time() + random.random() + np.random.rand()"), ["M301"] * 3),
        (in_program("print(n)"), ["M305"]),
        ("import logging\nlog = logging.getLogger(__name__)\n" + in_program("logging.info('a')"), ["M305"]),
        (in_program("quiet()"), ["M307"]),
    ],
)
def test_what_only_python_does(code: str, rules: list[str]) -> None:
    assert [f.code for f in findings(code)] == rules


def test_the_state_of_a_program_is_exact() -> None:
    code = """
    calls, losses, log = 0, [], {}

    class Trainer:
        def __init__(self):
            self.total = distribute(torch.zeros(4), mesh)
            self.steps = 0
        @program
        def add(self, x: torch.Tensor):
            self.total += x
            self.steps += 1
            return self.total * 2

    @program
    def step(x: torch.Tensor):
        global calls
        calls += 1
        losses.append(x.mean())
        log["calls"] = calls
        return x * rate

    for rate in (0.1, 0.2):
        step(weight)
    """
    assert found(code) == []


def test_a_name_that_may_be_a_plain_tensor_or_another_is_none() -> None:
    code = "table = torch.ones(4)\ntable = prepare(table)\n" + in_program("table.add_(1)", "if table.sum() > 0: pass")
    assert found(code) == []


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "rule", "place"),
    [
        ('@program\ndef f(x: "f32[4@data,, 4]"): pass', "M201", ","),
        ("@program\ndef f(x: 'f32[4 4]'): pass", "M201", "4"),
        ('@program\ndef f(x: Annotated[torch.Tensor, "f32[4@data,, 4]"]): pass', "M201", ","),
        ('X = Annotated[torch.Tensor, "f32[4@dat]"]\n@program\ndef f(x: X): pass', "M203", '"f32[4@dat]"'),
        ('@program\ndef f(x: "f32[4@data"): pass', "M201", '"'),
        ('@program\ndef f(ä: int, x: "f32[4@@]"): pass', "M201", "@"),
        ("@program\ndef f(x: f32[4 @ dat, 4]): pass", "M203", "f32[4 @ dat, 4]"),
        ('@program\ndef f(x: "f23[6@data]"): pass', "M201", '"f23[6@data]"'),
        ('distribute(plain, mesh, "[-, model]")', "M202", "m"),
        ('distribute(plain, mesh, sharding_spec=["dta"])', "M203", '["dta"]'),
        ('distribute(torch.ones(4, 4), mesh, "[@data]")', "M204", '"[@data]"'),
        ('layouts = {"a": "[@tp]"}\nmonarch.module_to_mesh(model, mesh, layouts=layouts)', "M203", '"[@tp]"'),
        ('monarch.module_to_mesh(model, mesh, layouts={"a": {1: "[@data", 2: None}})', "M202", '"'),
        ('@program\ndef f(x: torch.Tensor):\n    return monarch.layout(x, "[@tp, -]")', "M203", '"[@tp, -]"'),
        ('weight.redistribute("[@tp, -]")', "M203", '"[@tp, -]"'),
    ],
)
def test_a_layout_is_wrong_at_the_very_character(code: str, rule: str, place: str) -> None:
    ((code_, text),) = found(code)
    assert code_ == rule
    assert text == place


@pytest.mark.parametrize(
    "code",
    [
        '@program\ndef f(x: "f32[8@data, 4] partial<sum: model>", y: "i64[8@(data,model)]"): pass',
        'other = Mesh(rows=2)\n@program\ndef f(x: "f32[8@rows]"): pass',
        'other = Mesh(**{"rows": 2})\n@program\ndef f(x: "f32[8@rows]"): pass',
        'other = mesh.rename(data="rows")\n@program\ndef f(x: "f32[8@rows]"): pass',
        'def g(mesh):\n    @program\n    def f(x: "f32[8@rows]"): pass',
        '@program\ndef f(x: "list[int]", y: "dict[str, int]", z: list[int], u: "np.ndarray[3]"): pass',
        'distribute(plain, mesh, ["data", None])\ndistribute(plain, mesh, placements=[m.Shard(0)])',
        'distribute(plain, unknown, "[@rows]")',
    ],
)
def test_a_layout_that_may_be_right_is_passed(code: str) -> None:
    assert found(code) == []


@pytest.mark.parametrize(
    "decorator", ['torch.library.custom_op("l::g", mutates_args=())', 'monarch.remote(propagate="mocked")']
)
def test_the_body_of_an_op_is_no_part_of_the_program(decorator: str) -> None:
    code = f"@{decorator}\ndef g(x): return torch.from_numpy(x.numpy() * 2)\n@program\ndef f(x: 'f32[4]'): return g(x)"
    assert found(code) == []


def test_meshes_are_read_in_all_their_forms() -> None:
    for made in (
        'Mesh(shape=(2, 2), mesh_dim_names=("a", "b"))',
        "Mesh((2, 2), ['a', 'b'])",
        "Mesh.abstract(a=2, b=2)",
    ):
        assert found(f'other = {made}\n@program(mesh=other)\ndef f(x: "f32[4@a, 4@b]"): pass') == []
        assert [rule for rule, _ in found(f'other = {made}\n@program(mesh=other)\ndef f(x: "f32[4@data]"): pass')] == [
            "M203"
        ]


# -- comments, places, files -----------------------------------------------------------------------------------------


def test_a_comment_ignores_a_rule_in_its_line() -> None:
    line = "if x.sum() > x.max(): print(n)"
    assert [rule for rule, _ in found(in_program(line))] == ["M101", "M305"]
    assert found(in_program(line + "  # monarch: ignore")) == []
    assert [rule for rule, _ in found(in_program("print(x.item())  # monarch: ignore[M102]"))] == ["M305"]
    assert found(in_program("print(x.item())  # monarch: ignore[M102, M305]")) == []
    assert [rule for rule, _ in found(in_program("x.item()  # monarch: ignore[M101]"))] == ["M102"]
    assert [rule for rule, _ in found(in_program("x.item(); y = '# monarch: ignore'"))] == ["M102"]


def test_a_findings_text(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from monarch import program\n\n@program\ndef step(x):\n    é = x.mean(); y = x.item()\n")
    (finding,) = check_file(path)
    assert (finding.level, finding.line, finding.column, finding.end) == ("error", 5, 23, 31)
    assert str(finding).splitlines() == [
        f"{path}:5:23: error[M102]: 'step' cannot read a tensor's value into Python",
        "      é = x.mean(); y = x.item()",
        "                        ^^^^^^^^",
        "  é = x.mean(); y = x.item()  # wrong: the value is unknown when the program is traced",
        "  return loss                 # right: give the tensor back",
        "  step(x).item()              # right: outside the program: waits for the value",
    ]


def test_a_file_that_is_no_python_says_where(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\nif x:\n  y = (\n")
    with pytest.raises(ProgramError, match=r"train\.py:3:7: error: no Python: '\(' was never closed"):
        check_file(path)
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(ProgramError, match="no text that Python reads"):
        check_file(path)
    path.write_bytes(b"x = 1\0\n")
    with pytest.raises(ProgramError, match="no Python"):
        check_file(path)
    path.write_text("x = " + "(" * 150 + ")" * 150)
    assert check_file(path) == []
    path.write_text("# coding: latin-1\nx = 1\n", encoding="latin-1")
    assert check_file(path) == []
    path.write_bytes(b"\xef\xbb\xbfx = 1\r\n\x0cy = 2\r")
    assert check_file(path) == []
    with pytest.raises(MonarchError, match="cannot read .*: No such file"):
        check_file(tmp_path / "none.py")
    with pytest.raises(MonarchError, match="cannot read .*: Is a directory"):
        check_file(tmp_path)


@pytest.mark.parametrize("folder", ["examples", "stdlib", "benchmarks"])
def test_our_own_programs_are_clean(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [str(finding) for path in paths for finding in check_file(path)] == []


@pytest.mark.full
def test_the_tests_good_programs_are_clean() -> None:
    refused = {ROOT / "tests/language" / name for name in ("test_errors.py", "programs/test_refused.py")}
    wrong = {*refused, *(ROOT / "tests/language/check").glob("*.py")}
    paths = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path not in wrong]
    assert len(paths) > 30
    assert [str(finding) for path in paths for finding in check_file(path)] == []


def test_the_tests_wrong_programs_are_found() -> None:
    rules = {finding.code for finding in check_file(ROOT / "tests/language/test_errors.py")}
    assert {"M101", "M105", "M106"} <= rules
