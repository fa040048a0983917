"""Programs of several meshes against dense PyTorch: partitioned, and run by the reference executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import LayoutError, ProgramError
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh


@pytest.fixture
def root() -> Iterator[Mesh]:
    with partitioned_mesh(stage=2, data=2) as mesh:
        yield mesh


@pytest.fixture
def parts(root: Mesh) -> tuple[Mesh, Mesh]:
    return root.slice(stage=0), root.slice(stage=1)


def copies(*modules: nn.Module) -> list[Any]:
    """The same modules without a mesh."""
    found = []
    for module in modules:
        dense = type(module)(*([] if not isinstance(module, nn.Linear) else [module.in_features, module.out_features]))
        dense.load_state_dict({name: value.full_tensor() for name, value in module.state_dict().items()})  # type: ignore[attr-defined]
        found.append(dense)
    return found


def placed(module: nn.Module, mesh: Mesh) -> Any:
    return monarch.module_to_mesh(module, mesh)


def same(module: nn.Module, dense: nn.Module) -> None:
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), dense.state_dict()[name])


def linears(*where: tuple[int, int, Mesh]) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    made = [placed(nn.Linear(takes, gives), mesh) for takes, gives, mesh in where]
    return made, copies(*made)


def test_a_model_whose_halves_are_on_two_meshes_trains_with_one_optimizer(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    (first, second), dense = linears((8, 16, a), (16, 4, b))
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1)
    theirs = torch.optim.AdamW([p for module in dense for p in module.parameters()], lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, theirs)]

    @monarch.program
    def step(x: "f32[8@data, 8]", y: "f32[8@data, 4]") -> Any:
        optimizer.zero_grad()
        h = torch.relu(first(x))
        loss = F.mse_loss(second(h.to(b)), y)
        loss.backward()
        optimizer.step()
        return loss, h

    for _ in range(4):
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        loss, h = step(x, y)
        theirs.zero_grad()
        wanted = F.mse_loss(dense[1](torch.relu(dense[0](x))), y)
        wanted.backward()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
        assert loss.mesh is b and h.mesh is a
    same(first, dense[0])
    same(second, dense[1])
    assert {value.mesh for value in optimizer.state[first.weight].values()} == {a}
    assert {value.mesh for value in optimizer.state[second.weight].values()} == {b}
    assert second.weight.grad.mesh is b
    assert len(step.remembered) == 1 and step.remembered[0].plans == 2


def test_state_that_two_meshes_train_is_state_of_each_alone(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    (first, second), dense = linears((8, 8, a), (8, 8, b))

    @monarch.program
    def both(x: "f32[8@data, 8]") -> Any:
        with torch.no_grad():
            second.weight.add_(first.weight.to(b))
        return second(first(x).to(b))

    @monarch.program
    def alone(x: "f32[8@data, 8]") -> Any:
        return second(x)

    x = torch.randn(8, 8)
    both(x)
    torch.testing.assert_close(
        alone(x).full_tensor(), F.linear(x, dense[1].weight + dense[0].weight, dense[1].bias).detach()
    )
    assert alone(x).mesh is b


def test_what_was_written_outside_of_programs_on_any_of_the_meshes_is_read(parts: tuple[Mesh, Mesh]) -> None:
    first, second = (monarch.distribute(torch.ones(4), part) for part in parts)

    @monarch.program
    def step(x: Any) -> Any:
        return (x * first).to(second.mesh) * second

    x = torch.arange(4.0)
    for value in (2.0, 3.0, 4.0):
        second.fill_(value)  # not run yet where the program is called: traced, traced again, and remembered
        assert step(x).full_tensor().tolist() == (x * value).tolist()


def test_skips_between_three_meshes() -> None:
    with partitioned_mesh(stage=3, data=2) as root:
        a, b, c = (root.slice(stage=at) for at in range(3))
        modules, dense = linears((8, 8, a), (8, 8, b), (8, 8, c), (8, 8, b), (8, 8, a))
        x = torch.randn(6, 8)

        def net(x: Any, modules: list[Any], to: Callable[[Any, Mesh], Any]) -> Any:
            down = torch.tanh(modules[0](x))
            middle = torch.tanh(modules[1](to(down, b)))
            deep = torch.tanh(modules[2](to(middle, c)))
            up = torch.tanh(modules[3](to(deep, b) + middle))
            return modules[4](to(up, a) + down).square().mean()

        @monarch.program
        def step(x: "f32[6@data, 8]") -> Any:
            loss = net(x, modules, lambda value, mesh: value.to(mesh))
            loss.backward()
            return loss

        loss = step(x)
        wanted = net(x, dense, lambda value, mesh: value)
        wanted.backward()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
        for module, other in zip(modules, dense, strict=True):
            torch.testing.assert_close(module.weight.grad.full_tensor(), other.weight.grad)
            assert module.weight.grad.mesh is module.weight.mesh


def test_a_weight_that_two_meshes_read(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    torch.manual_seed(0)
    table = nn.Embedding(10, 8)
    ours = placed(nn.Embedding(10, 8), a)
    with torch.no_grad():
        ours.weight.copy_(monarch.distribute(table.weight.detach(), a))
    tokens = torch.randint(0, 10, (4, 6))

    @monarch.program
    def step(tokens: "i64[4@data, 6]") -> Any:
        h = ours(tokens).to(b)
        logits = F.linear(h, ours.weight.to(b))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss

    loss = step(tokens)
    wanted = F.cross_entropy(F.linear(table(tokens), table.weight).flatten(0, 1), tokens.flatten())
    wanted.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted.detach())
    torch.testing.assert_close(ours.weight.grad.full_tensor(), table.weight.grad)


@pytest.mark.parametrize("layout", [None, "[-, @model]", "[@model, -]"])
def test_meshes_with_other_dims(root: Mesh, layout: str | None) -> None:
    a, b = root.slice(stage=0), root.slice(stage=1).rename(data="model")
    (first, second), dense = linears((8, 16, a), (16, 4, b))

    @monarch.program
    def step(x: "f32[7@data, 8]") -> Any:
        h = first(x)
        y = second(h.to(b) if layout is None else h.to(b, layout)).sum()
        y.backward()
        return y

    x = torch.randn(7, 8)
    y = step(x)
    wanted = dense[1](dense[0](x)).sum()
    wanted.backward()
    torch.testing.assert_close(y.full_tensor(), wanted.detach())
    for module, other in zip((first, second), dense, strict=True):
        torch.testing.assert_close(module.weight.grad.full_tensor(), other.weight.grad)


def test_the_default_layout_is_the_sources_as_far_as_the_dims_fit(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts

    @monarch.program
    def move(x: Any) -> Any:
        return x.to(b) * 1.0

    x = monarch.distribute(torch.randn(8, 4), a, "[@data, -]")
    assert str(move(x).sharding) == "[@data, -]"
    other = b.rename(data="model")

    @monarch.program
    def elsewhere(x: Any) -> Any:
        return x.to(other) * 1.0

    assert str(elsewhere(x).sharding) == "[-, -]"


def test_random_numbers_are_those_of_one_mesh(root: Mesh, parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x = torch.ones(8, 4)

    @monarch.program(mesh=a)
    def one(x: "f32[8@data, 4]") -> Any:
        h = F.dropout(x, 0.5) + torch.rand(8, 4)
        return F.dropout(h, 0.5) + torch.randn(4)

    @monarch.program
    def two(x: Any) -> Any:
        h = F.dropout(x, 0.5) + torch.rand(8, 4)
        return F.dropout(h.to(b), 0.5) + torch.randn(4)

    torch.manual_seed(3)
    wanted = one(x).full_tensor()
    torch.manual_seed(3)
    found = two(monarch.distribute(x, a, "[@data, -]"))
    assert found.mesh is b
    torch.testing.assert_close(found.full_tensor(), wanted)


def test_what_is_on_no_mesh_is_where_it_is_read(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x, y = monarch.distribute(torch.ones(4), a), monarch.distribute(torch.full((4,), 2.0), b)
    constant = torch.arange(4.0)

    @monarch.program
    def step(x: Any, y: Any, plain: Any, factor: float) -> Any:
        ramp = torch.arange(4.0) * factor
        buffer = torch.zeros(4)
        buffer.copy_(y)
        return x + ramp + constant + plain, y * ramp + constant + plain, buffer, torch.ones(2), plain.to(b)

    results = step(x, y, torch.full((4,), 10.0), 3.0)
    ramp = torch.arange(4.0) * 3
    wanted = [1 + ramp + constant + 10, 2 * ramp + constant + 10, torch.full((4,), 2.0), torch.ones(2)]
    for found, value in zip(results, [*wanted, torch.full((4,), 10.0)], strict=True):
        torch.testing.assert_close(found.full_tensor(), value)
    assert [found.mesh for found in results] == [a, b, b, a, b]


def test_an_annotation_names_the_mesh_of_an_argument(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    c = b.rename(data="model")
    w = monarch.distribute(torch.ones(4, 4), a)

    def step(x, y):  # type: ignore[no-untyped-def]
        return x @ w, y * 2

    step.__annotations__ = {
        "x": "f32[8@data, 4]",
        "y": Annotated[torch.Tensor, "f32[8@model, 4]", c],
    }
    program = monarch.program(step)
    first, second = program(torch.ones(8, 4), torch.ones(8, 4))
    assert first.mesh is a and second.mesh is c
    assert str(second.sharding) == "[@model, -]"
    with pytest.raises(ProgramError, match="argument 'y' of step is on .*, and its annotation says"):
        program(torch.ones(8, 4), monarch.distribute(torch.ones(8, 4), a))


def test_what_a_program_leaves_in_python_is_on_its_mesh(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x = monarch.distribute(torch.ones(4), a)
    kept: dict[str, Any] = {}

    @monarch.program
    def step(x: Any) -> None:
        kept["here"], kept["there"] = x * 2, x.to(b) * 3

    for _ in range(3):
        step(x)
        assert kept["here"].mesh is a and kept["there"].mesh is b
        torch.testing.assert_close(kept["there"].full_tensor(), torch.full((4,), 3.0))
    assert (kept["there"] + 1).mesh is b


def test_branches_and_loops_on_one_of_the_meshes(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x = monarch.distribute(torch.arange(4.0), a)
    w = monarch.distribute(torch.full((4,), 2.0), b)

    @monarch.program
    def step(x: Any) -> Any:
        y = x.to(b)
        chosen = monarch.cond(y.sum() > 3, lambda v: v * w, lambda v: v - w, (y,))
        return monarch.while_loop(lambda v: v.sum() < 100, lambda v: v + torch.ones(4), (chosen,)), x * 2

    (found,), other = step(x)
    value = torch.arange(4.0) * 2
    while value.sum() < 100:
        value = value + 1
    torch.testing.assert_close(found.full_tensor(), value)
    assert found.mesh is b and other.mesh is a

    @monarch.program
    def inside(x: Any) -> Any:
        return monarch.cond(x.sum() > 3, lambda v: v.to(b), lambda v: v.to(b), (x,))

    with pytest.raises(ProgramError, match="whichever way the workers go, the others would wait"):
        inside(x)


def test_outside_of_programs(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x = monarch.distribute(torch.arange(8.0).reshape(4, 2), a, "[@data, -]").requires_grad_()
    y = x.to(b, "[-, @data]")
    assert y.mesh is b and str(y.sharding) == "[-, @data]"
    (y * y).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * torch.arange(8.0).reshape(4, 2))
    assert x.grad.mesh is a
    assert x.to(a) is x
    assert x.to(torch.float64).dtype == torch.float64


@pytest.mark.parametrize("inside", [False, True])
def test_a_gradient_of_a_gradient_goes_to_another_mesh_and_back(parts: tuple[Mesh, Mesh], inside: bool) -> None:
    a, b = parts
    values, weight = torch.randn(4, 3), torch.randn(3, 3)

    def penalty(x: Any, w: Any, there: Callable[[Any], Any], back: Callable[[Any], Any]) -> Any:
        y = torch.tanh(there(x) @ w).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        loss = gradient.square().sum() + back(y)
        loss.backward()
        return loss, x.grad, w.grad

    def found(x: Any, w: Any) -> Any:
        return penalty(x, w, lambda value: value.to(b), lambda value: value.to(a))

    x = monarch.distribute(values, a, "[@data, -]").requires_grad_()
    w = monarch.distribute(weight, b, "[-, @data]").requires_grad_()
    ours = monarch.program(found)(x, w) if inside else found(x, w)
    wanted = penalty(values.requires_grad_(), weight.requires_grad_(), lambda value: value, lambda value: value)
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach())


def test_inference_mode_brings_a_tensor_to_another_mesh(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x = monarch.distribute(torch.arange(4.0), a, "[@data]")
    with torch.inference_mode():
        assert x.to(b).full_tensor().tolist() == [0, 1, 2, 3]


def test_an_op_on_two_meshes_says_how_to_move_one(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x, y = monarch.distribute(torch.ones(4), a), monarch.distribute(torch.ones(4), b)
    step = monarch.program(lambda x, y: x + y)
    with pytest.raises(ProgramError, match="tensors on different meshes in one op") as error:
        step(x, y)
    assert "a + b.to(a.mesh)" in error.value.hint
    late = monarch.program(lambda x, y: (x * 2).to(b) + x)
    with pytest.raises(ProgramError, match="tensors on different meshes in one op"):
        late(x, y)
    with pytest.raises(ProgramError, match="tensors on different meshes in one op"):
        x + y


def test_meshes_that_cannot_be_one_programs_say_so(root: Mesh, parts: tuple[Mesh, Mesh]) -> None:
    a, _ = parts
    x = monarch.distribute(torch.ones(4), a)
    with Mesh(data=2) as apart:
        with pytest.raises(ProgramError, match="two meshes that were made apart") as error:
            monarch.program(lambda x: x.to(apart))(x)
        assert "root.slice(stage=0)" in error.value.hint
        y = monarch.distribute(torch.ones(4), apart)
        with pytest.raises(ProgramError, match="two meshes that were made apart"):
            monarch.program(lambda x, y: (x * 2, y * 2))(x, y)
    for program in (lambda x, y: (x * 2, y * 2), lambda x, y: x + y):
        with pytest.raises(ProgramError, match=r"the mesh is closed: Mesh\(data=2\)") as error:
            monarch.program(program)(x, y)
        assert f"on {a!r}" in error.value.hint
    with pytest.raises(ProgramError, match="two meshes that share workers"):
        monarch.program(lambda x: x.to(root.slice(data=0)) * 2)(x)
    assert monarch.distribute(x, root.slice(data=0)).full_tensor().tolist() == [1, 1, 1, 1]  # as its hint says


def test_what_cannot_be_sent_says_so(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    x = monarch.distribute(torch.ones(4), a)
    with pytest.raises(LayoutError, match="unknown mesh dim 'model'"):
        monarch.program(lambda x: x.to(b, "[@model]"))(x)
    with pytest.raises(ProgramError, match=r"to\(\) in the layout \[-\] partial<sum: data>"):
        monarch.program(lambda x: x.to(b, "[-] partial<sum: data>"))(x)

    @monarch.program
    def own(x: Any) -> Any:
        with a.activate():
            return monarch.reduce((x + a.rank("data")).to(b), "data")

    with pytest.raises(ProgramError, match=r"to\(\) of a tensor that varies along 'data'"):
        own(x)


def test_what_changes_between_calls_is_traced_again(parts: tuple[Mesh, Mesh]) -> None:
    a, b = parts
    settings = {"factor": 2.0}
    (first,), _ = linears((4, 4, a))
    x = monarch.distribute(torch.ones(2, 4), a)

    @monarch.program
    def step(x: Any) -> Any:
        return first(x).to(b) * settings["factor"]

    before = step(x).full_tensor()
    settings["factor"] = 4.0
    torch.testing.assert_close(step(x).full_tensor(), 2 * before)
    with torch.no_grad():
        first.weight.mul_(0.0)
        first.bias.fill_(1.0)
    torch.testing.assert_close(step(x).full_tensor(), torch.full((2, 4), 4.0))
