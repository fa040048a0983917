"""Programs of named sizes: one trace and one compile for all their values, the numbers of dense PyTorch, and conditions
that hold on both of their sides."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.errors import LayoutError, PerformanceWarning, ProgramError
from monarch.compiler.pipeline import compile_template
from monarch.compiler.plan import CompileOptions
from monarch.compiler.schedule.family import plan_at, with_sizes
from monarch.language import program
from tests.language import partitioned
from tests.language.models import (
    TinyGPT,
    assert_same_parameters,
    make_step,
    token_batch,
    token_loss,
    twins,
)
from tests.language.partitioned import partitioned_mesh

WIDTH = 8
WEIGHT = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
POSITIONS = torch.linspace(-2, 2, 16 * WIDTH).reshape(16, WIDTH)
TABLE = torch.linspace(-2, 2, 11 * WIDTH).reshape(11, WIDTH)


@pytest.fixture(autouse=True)
def nothing_specialises() -> Iterator[None]:
    """A program that is compiled for each value, where it should not be, fails its test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        partitioned.COMPILED.clear()
        yield


def views(x: "f32[b@data, t, 8]") -> Any:
    heads = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    return heads.reshape(x.shape[0] * 2, -1, 4), x.flatten(0, 1), x[:, -1], x[:, 1:], x.transpose(0, 1).contiguous()


def reductions(x: "f32[b@data, t, 8]") -> Any:
    return (
        x.sum(),
        x.mean(1),
        x.amax((0, 2)),
        x.std(1),
        x.softmax(1),
        x.cumsum(1),
        F.layer_norm(x, (8,)),
        x.logsumexp(0),
    )


def attention(x: "f32[b@data, t, 8]") -> Any:
    q = (x @ WEIGHT).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    fast = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (q @ q.transpose(-1, -2)).masked_fill(~mask, -torch.inf).softmax(-1)
    return fast, scores @ q


def joined(x: "f32[b@data, t, 8]") -> Any:
    first, second = x.split(4, dim=-1)
    return torch.cat([x, x * 2], 1), torch.cat([second, first], -1), torch.stack([x, -x]), F.pad(x, (0, 0, 1, 2))


def convolved(x: "f32[b@data, t, 8]") -> Any:
    kernel = WEIGHT[:6].reshape(2, 8, 3)
    return F.conv1d(x.transpose(1, 2), kernel, padding=1), F.conv1d(x.transpose(1, 2), kernel, padding=2, stride=2)


def made(x: "f32[b@data, t, 8]") -> Any:
    places = torch.arange(x.shape[1])
    return x + places[:, None], torch.zeros(x.shape[1], 3), x / x.shape[1], torch.full((x.shape[0],), 7), x.shape[1] - 1


def branches(x: "f32[b@data, t, 8]") -> Any:
    def twice(y: torch.Tensor) -> torch.Tensor:
        return monarch.cond(y.mean() > 0, lambda: y @ WEIGHT @ WEIGHT, lambda: y.cumsum(1) + x.mean(1, keepdim=True))

    count, y = monarch.while_loop(lambda i, y: (i < 3) & (y.abs().max() < 8), lambda i, y: (i + 1, y * 1.5), (0, x))
    return count, twice(y), twice(-y), twice(x[:, 1:].abs())


def loops(x: "f32[b@data, t, 8]") -> Any:
    weight = WEIGHT.clone().requires_grad_()

    def cell(h: torch.Tensor, row: torch.Tensor) -> Any:
        h = (h + monarch.cond(row.sum() > 0, lambda: row @ weight, lambda: row * weight[0])).tanh()
        return h, h.sum(-1)

    last, sums = monarch.scan(cell, torch.zeros(x.shape[0], 8), x, dim=1)
    (gradient,) = torch.autograd.grad(last.square().mean() + sums.mean(), weight)
    return last, sums, gradient


def composed(x: "f32[b@data, t, 8]") -> Any:
    rows = x[0].detach().requires_grad_()
    apart = torch.block_diag(rows, rows[0].double(), torch.ones(2, 3))
    (gradient,) = torch.autograd.grad(apart.sin().cumsum(1).sum(), rows)
    rows = rows.detach()
    return (
        apart.detach(),
        gradient,
        torch.linalg.multi_dot([rows.T, rows, x[0, 0]]),
        torch.linalg.slogdet(torch.eye(x.shape[1]) + rows @ rows.T)[1],
        torch.kron(rows, x[:, 0]),
        torch.cov(rows),
        torch.corrcoef(rows.T),
        torch.vander(rows[:, 0]),
        torch.linalg.vander(rows.T),
    )


def numbers(x: "f32[b@data, t, 8]") -> Any:
    length = x.shape[1]
    places = torch.linspace(0, 1, length)[:, None] + torch.arange(0.0, length)[:, None]
    hits = F.one_hot(x.argmax(1), length)
    return x * places * length**-0.5, torch.tensor([length, 2]), x / torch.tensor(length * 0.5).sqrt(), hits


def gradients(x: "f32[b@data, t, 8]") -> Any:
    x = x.detach().requires_grad_()
    normed = F.batch_norm(x.transpose(1, 2), torch.zeros(8), torch.ones(8), training=True)
    fixed = F.batch_norm(x.transpose(1, 2), torch.zeros(8), torch.ones(8))
    pooled = F.max_pool1d(x.transpose(1, 2), 2).sum() + F.interpolate(x.transpose(1, 2), scale_factor=2.0).pow(3).sum()
    loss = x.std(1).square().sum() + x.var((0, 1)).sum() + normed.pow(3).sum() + fixed.pow(2).mean() + pooled
    return torch.autograd.grad(loss, x)


def with_plain_tensors(x: "f32[b@data, t, 8]") -> Any:
    length = x.shape[1]
    bias = torch.full((8,), 0.5)
    ordered = x.take_along_dim(x.argsort(1), 1)
    return x + POSITIONS[:length], F.linear(x, WEIGHT, bias), WEIGHT[0].expand(length, 8) * x, ordered


PROGRAMS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(views, reductions, attention, joined, convolved, made, branches, loops),
        *(composed, numbers, gradients, with_plain_tensors),
    )
}


def assert_equal(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-5)
        else:
            assert ours == theirs and type(ours) is type(theirs)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kernels", [False, True])
def test_one_plan_gives_the_numbers_of_all_sizes(name: str, kernels: bool) -> None:
    function = PROGRAMS[name]
    draw = random.Random(f"{name}{kernels}")
    sizes = [(draw.choice([2, 6, 10, 13, 15]), draw.choice([3, 5, 7, 9, 11])) for _ in range(5)]
    with partitioned_mesh(data=2, kernels=kernels) as mesh:
        step = program(mesh=mesh)(function)
        partitioned.COMPILED.clear()
        for batch, length in sizes:
            x = torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(batch * length))
            assert_equal(step(x), function(x))
        # A pool of 3 leaves a dim of size 1.
        assert len(partitioned.COMPILED) <= len({(batch % 2, length == 3) for batch, length in sizes})


def test_random_numbers_are_those_of_a_program_without_names() -> None:
    def draws(x: torch.Tensor) -> Any:
        drawn = torch.rand(x.shape[0], x.shape[1]), torch.randperm(x.shape[1]), torch.randint(0, x.shape[1], (3,))
        kept = torch.bernoulli(x.sigmoid()), torch.empty_like(x).exponential_()
        return *drawn, *kept, torch.multinomial(x[:, 0].softmax(-1), 1)

    def named(x: "f32[b@data, t, 8]") -> Any:
        return draws(x)

    with partitioned_mesh(data=2) as mesh:
        step, other = program(mesh=mesh)(named), program(mesh=mesh)(draws)
        for batch, length in ((6, 5), (4, 7), (10, 4)):
            x = torch.randn(batch, length, WIDTH)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PerformanceWarning)  # the other is compiled for each
                monarch.manual_seed(batch)
                wanted = other(x)
            monarch.manual_seed(batch)
            for ours, theirs in zip(step(x), wanted, strict=True):
                assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        assert partitioned.COMPILED == ["named"]


def test_ops_that_run_whole_are_compiled_once() -> None:
    def whole(x: "f32[b@data, t, 8]") -> Any:
        return x.renorm(2, 0, 1.0)

    with partitioned_mesh(data=2) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # that it runs whole
        step = program(mesh=mesh)(whole)
        for batch, length in ((6, 5), (4, 7)):
            x = torch.randn(batch, length, WIDTH)
            torch.testing.assert_close(step(x).full_tensor(), whole(x))
        assert partitioned.COMPILED == ["whole"]


def test_a_plain_tensor_is_not_written_through_a_part_of_named_size() -> None:
    def writes(x: "f32[n]") -> Any:
        plain = POSITIONS.flatten()
        plain[: x.shape[0]].mul_(2)
        return x + 1

    with partitioned_mesh(data=2) as mesh:
        with pytest.raises(ProgramError, match="a plain tensor of shape .* is changed in place"):
            program(mesh=mesh)(writes)(torch.ones(4))


def test_what_takes_sizes_as_numbers_says_so() -> None:
    def pairs(x: "f32[n]") -> Any:
        return torch.combinations(x)

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(pairs)
        with pytest.warns(PerformanceWarning, match="computes this op with its operands' sizes as numbers"):
            step(torch.ones(3))
        for size in (3, 5):
            x = torch.arange(float(size))
            torch.testing.assert_close(step(x).full_tensor(), pairs(x))


def test_a_plan_file_lays_regions_out_as_a_process_does() -> None:
    with partitioned_mesh(data=2) as mesh:
        traced = program(mesh=mesh)(branches).trace_named(torch.zeros(32, 60, WIDTH))
    assert traced is not None
    template = compile_template(traced[0], CompileOptions(), traced[1])
    plan = with_sizes(template.at(template.scope.examples), template)
    arenas = []
    for values in ({"b": 48, "t": 20}, {"b": 10, "t": 240}, {"b": 2, "t": 3}):
        made = plan_at(plan, values)
        assert made.hash == template.at(values).hash
        arenas.append(max(function.arena for function in made.functions.values()))
    assert arenas[0] != arenas[1] and all(arenas[:2])


def test_lengths_that_grow_by_one_compile_once() -> None:
    def generate(tokens: "i64[1, t]") -> Any:
        hidden = F.embedding(tokens, TABLE) @ WEIGHT
        return (hidden[:, -1] @ TABLE.T).argmax(-1)

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(generate)
        tokens = torch.tensor([[3, 1]])
        for _ in range(6):
            following = step(tokens).full_tensor()
            assert torch.equal(following, generate(tokens))
            tokens = torch.cat([tokens, following[None]], 1)
        assert partitioned.COMPILED == ["generate"]


def test_training_with_a_new_length_each_step_compiles_once() -> None:
    def gpt() -> TinyGPT:
        return TinyGPT(vocabulary=16, width=8, heads=2, layers=1, length=20)

    with partitioned_mesh(data=2) as mesh:
        model, plain = twins(gpt, mesh)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, plain))
        run, reference = make_step(model, ours, token_loss), make_step(plain, theirs, token_loss)

        @program(mesh=mesh)
        def step(tokens: "i64[b@data, t]", targets: "i64[b@data, t]") -> torch.Tensor:
            return run(tokens, targets)

        for seed, (rows, length) in enumerate([(4, 5), (4, 7), (2, 3), (6, 8), (4, 6)]):
            batch = token_batch(seed, rows, length, 16)
            torch.testing.assert_close(step(*batch).full_tensor(), reference(*batch), rtol=1e-4, atol=1e-5)
        assert_same_parameters(model, plain)
        assert len(partitioned.COMPILED) <= 2  # the optimizer's state is made in the first step


def test_parts_of_a_batch_compile_once_and_transposed_arguments_are_of_their_own() -> None:
    def step(tokens: "f32[b@data, t]", targets: "f32[b@data, t]") -> Any:
        made = tokens.clone()
        made.reshape(-1).add_(1)  # which `made` shows where it is contiguous
        return made * targets

    with partitioned_mesh(data=2) as mesh:
        run = program(mesh=mesh)(step)
        for rows, length in ((4, 5), (2, 7), (6, 3)):
            batch = torch.arange(float(rows * length)).reshape(rows, length)
            assert torch.equal(run(batch[:, :-1], batch[:, 1:]).full_tensor(), step(batch[:, :-1], batch[:, 1:]))
        assert partitioned.COMPILED == ["step"]
        turned = batch.t().contiguous().t()
        assert torch.equal(run(turned, batch).full_tensor(), step(turned, batch))


def test_a_condition_is_noticed_on_both_sides() -> None:
    def branches(x: "f32[n]") -> Any:
        return (x * 2).sum() if x.shape[0] > 5 else (x * 3).sum()

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(branches)
        for size in (3, 5, 6, 9, 4, 2, 100):
            x = torch.arange(float(size))
            assert step(x).item() == branches(x).item()
        assert len(partitioned.COMPILED) == 2


def test_a_size_taken_as_a_number_is_compiled_for_each() -> None:
    def loops(x: "f32[n]") -> Any:
        total = x.sum()
        for at in range(x.shape[0]):
            total = total + at
        return total

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(loops)
        for size in (3, 4, 3, 4):
            x = torch.arange(float(size))
            assert step(x).item() == loops(x).item()
        assert len(partitioned.COMPILED) == 2


def test_sizes_0_and_1_are_programs_of_their_own() -> None:
    def twice(x: "f32[n, m]") -> Any:
        return x * 2, x.sum(0)

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(twice)
        for rows, columns in [(3, 4), (1, 4), (0, 4), (3, 1), (1, 1), (5, 6)]:
            x = torch.randn(rows, columns)
            assert_equal(step(x), twice(x))


def test_a_name_stands_for_one_number() -> None:
    def add(x: "f32[n]", y: "f32[n]") -> Any:
        return x + y

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(add)
        with pytest.raises(ProgramError, match="the size 'n' is 3 in dim 0 of 'x', and 4 in dim 0 of 'y'"):
            step(torch.ones(3), torch.ones(4))
        assert step(torch.ones(4), torch.ones(4)).full_tensor().tolist() == [2.0] * 4


def test_a_tensor_left_in_python_is_compiled_for_each_size_and_says_so() -> None:
    class Holder:
        kept: Any = None

    holder = Holder()

    def keeps(x: "f32[n]") -> Any:
        holder.kept = x * 2
        return x + 1

    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(keeps)
        with pytest.warns(PerformanceWarning, match="it leaves a tensor of a named size in Python"):
            step(torch.ones(3))
        for size in (3, 5):
            step(torch.ones(size))
            assert holder.kept.full_tensor().tolist() == [2.0] * size
        assert partitioned.COMPILED == []


def test_the_third_shape_says_how_to_spell_the_sizes() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, scale: float) -> Any:
        return (x * scale).sum(0) + y

    with partitioned_mesh(data=2) as mesh:
        compiled = program(mesh=mesh)(step)
        compiled(torch.ones(2, 4), torch.ones(4), 1.0)
        compiled(torch.ones(3, 6), torch.ones(6), 1.0)
        compiled(torch.ones(3, 6), torch.ones(6), 2.0)
        with pytest.warns(PerformanceWarning, match=r'x: "f32\[n, m\]", y: "f32\[m\]"'):
            compiled(torch.ones(5, 7), torch.ones(7), 1.0)
        compiled(torch.ones(6, 8), torch.ones(8), 1.0)


def test_a_size_is_not_named_as_a_mesh_dim() -> None:
    def step(x: "f32[4, data]") -> Any:
        return x * 2

    with partitioned_mesh(data=2) as mesh:
        with pytest.raises(LayoutError, match="a size of 'x' is named 'data', as a mesh dim is"):
            program(mesh=mesh)(step)(torch.ones(4, 4))


GATED = torch.nn.GRU(8, 8, batch_first=True)


def product_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(x.cumprod(1).sum(), x)[0]


def lower(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.tril_indices(x.shape[1], x.shape[1])
    return (x @ x.mT)[:, rows, columns]


def upper(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1], 1)
    return (x @ x.mT)[:, rows, columns]


AS_NUMBERS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "range": (lambda x: [x[:, at] * at for at in range(x.shape[1])][-1], r"which range\(x.shape\[1\]\) .*monarch.scan"),
    "unbind": (lambda x: x.unbind(1)[-1] * 2, r"which torch.Tensor.unbind .* monarch.scan"),
    "recurrent": (lambda x: GATED(x)[0].detach(), r"which torch.gru takes as a number. monarch.scan"),
    "float": (lambda x: x * float(x.shape[1]), r"which float\(x.shape\[1\]\) .* n \* 1.0"),
    "sqrt": (lambda x: x / math.sqrt(x.shape[1]), r"which math.sqrt\(x.shape\[1\]\) .* n \*\* 0.5"),
    "log": (lambda x: x / math.log(x.shape[1]), r"which math.log\(x.shape\[1\]\) .* torch.tensor\(n \* 1.0\).log"),
    "int": (lambda x: x * int(x.shape[1] * 0.5), r"'\(t//2\)' .* which int\(x.shape\[1\] \* 0.5\) .* n \* 3 // 10"),
    "round": (lambda x: x[:, : round(x.shape[1] * 0.5)], r"which round takes .* Whole numbers .* n \* 3 // 10"),
    "len": (lambda x: x * len(x), r"'b' .*which len\(x\) takes as a number. x.shape\[0\] stays a size"),
    "numel": (lambda x: x * x.shape.numel(), r"which x.shape.numel\(\) takes .* x.numel\(\) stays a size"),
    "tril": (lower, "which torch.tril_indices .* A mask is compiled once"),
    "triu": (upper, "which torch.triu_indices .* A mask is compiled once"),
    "cumprod": (product_gradient, "which the gradient of cumprod takes .*cumsum"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", AS_NUMBERS)
def test_the_third_size_taken_as_a_number_says_what_takes_it(name: str) -> None:
    function, said = AS_NUMBERS[name]

    def step(x: "f32[b@data, t, 8]") -> Any:
        return function(x)

    with partitioned_mesh(data=2) as mesh:
        compiled = program(mesh=mesh)(step)
        inputs = [torch.rand(rows, length, WIDTH) for rows, length in ((3, 4), (4, 6), (5, 8), (4, 10))]
        for at, x in enumerate(inputs):
            context = pytest.warns(PerformanceWarning, match=said) if at == 2 else contextlib.nullcontext()
            with context:
                torch.testing.assert_close(compiled(x).full_tensor(), function(x))


def spared(x: "f32[b@data, t, 8]") -> Any:
    """What the warnings say in place of what takes a size as a number."""
    n = x.shape[1]
    _, rows = monarch.scan(lambda h, row: (h + row, h * row), torch.zeros(x.shape[0], 8), x, dim=1)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    positive = x.square().add(1).requires_grad_()
    (gradient,) = torch.autograd.grad(positive.log().cumsum(1).exp().log().sum(), positive)
    scores = (x @ x.mT).masked_fill(~mask, 0.0)
    return rows, x * (n * 1.0) / n**0.5, x / torch.tensor(n * 1.0).log(), x * (n * 3 // 10), scores, gradient


def rounded(x: "f32[b@data, t, 8]") -> Any:
    n = x.shape[1]
    halves = x[:, : math.floor(n / 2)], x[:, -math.ceil(n / 2) :], x[:, : math.trunc(n * 0.75)]
    return *halves, F.interpolate(x[:, None], scale_factor=2.0, mode="bicubic")


def placed(x: "f32[b@data, t, 8]") -> Any:
    n = x.shape[1]
    y = x.clone()
    y[:, n // 2] = 1.0
    y[0, -(n // 2), :4] += x[x.shape[0] // 2, n - 3, 4:]
    blocks = F.pad(x, (0, 0, 1, -n % 4)).narrow(1, 1, n + -n % 4).unflatten(1, (-1, 4))
    return y, x[..., n // 2, :], x[torch.tensor([2, 0]), n // 2], POSITIONS[:, None].expand(16, 20, 8)[0, n], blocks


@pytest.mark.parametrize("function", [spared, rounded, placed])
def test_what_follows_from_a_size_is_compiled_once(function: Callable[..., Any]) -> None:
    with partitioned_mesh(data=2) as mesh:
        step = program(mesh=mesh)(function)
        for rows, length in ((4, 9), (6, 7), (8, 11), (4, 5)):
            x = torch.rand(rows, length, WIDTH)
            found = step(x)
            wanted = eager(function, x)
            assert_equal(found, wanted)
        assert partitioned.COMPILED == [function.__name__]


def eager(function: Callable[..., Any], x: torch.Tensor) -> Any:
    if function is not spared:
        return function(x)
    before = torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(1)[:, :-1]], 1)
    n = x.shape[1]
    gradient = torch.arange(n, 0, -1)[:, None] / x.square().add(1)
    scores = (x @ x.mT).tril()
    return before * x, x * n / n**0.5, x / math.log(n), x * (n * 3 // 10), scores, gradient


def test_sizes_that_a_program_compares_are_no_numbers_that_it_takes() -> None:
    def step(x: "f32[n]") -> Any:
        return x * 2 if x.shape[0] in (3, 5, 7, 9) else x * 3

    with partitioned_mesh(data=2) as mesh:
        compiled = program(mesh=mesh)(step)
        for size in (3, 5, 7, 9, 4):
            assert torch.equal(compiled(torch.ones(size)).full_tensor(), step(torch.ones(size)))
