"""Pipelines against the same model without: partitioned, and run by the reference executor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import LayoutError, ProgramError
from monarch.language import Mesh
from monarch.stdlib.pipeline import Pipeline, pipeline
from tests.language.partitioned import partitioned_mesh

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)]
Loss = Callable[..., torch.Tensor]


def mlp(depth: int = 4, width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])


def trained(
    pipe: Pipeline, dense: nn.Module, batches: list[tuple[Any, Any]], loss_fn: Loss, layout: str = "[-]", **options: Any
) -> list[torch.Tensor]:
    """Train a pipeline and the model without one on the same batches, compare, and give losses and parameters."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=loss_fn, **options)
        optimizer.step()
        return loss

    found = []
    for x, y in batches:
        theirs.zero_grad()
        wanted = loss_fn(dense(x), y)
        wanted.backward()
        theirs.step()
        loss = step(x, y)
        assert loss.mesh is pipe.meshes[-1] or len(pipe.meshes) == 1
        found.append(loss.full_tensor())
        torch.testing.assert_close(found[-1], wanted.detach())
    for (name, ours), wanted in zip(pipe.model.named_parameters(), dense.parameters(), strict=True):
        found.append(ours.detach().full_tensor())  # type: ignore[attr-defined]
        torch.testing.assert_close(found[-1], wanted.detach(), msg=lambda text, name=name: f"{name}: {text}")
    return found


def batches(rows: int, width: int = 6, count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, width), torch.randn(rows, width)) for _ in range(count)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_all_schedules_give_the_bits_of_one_another_and_the_numbers_of_the_whole(stages: int) -> None:
    found = []
    with partitioned_mesh(pipe=stages) as mesh:
        for schedule, virtual in SCHEDULES:
            model = mlp(stages * 2)
            dense = copy.deepcopy(model)
            pipe = pipeline(model, mesh, microbatches=4, schedule=schedule, virtual=virtual, layouts={})
            found.append(trained(pipe, dense, batches(8), F.mse_loss))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("rows", "microbatches"), [(7, 3), (5, 4), (3, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_microbatches_of_different_sizes_count_by_their_rows(rows: int, microbatches: int, reduction: str) -> None:
    with partitioned_mesh(pipe=2, data=2) as mesh:
        model = mlp(2)
        dense = copy.deepcopy(model)
        unseen = rows == microbatches  # whether the model mixes rows
        pipe = pipeline(model, mesh, microbatches=microbatches, layouts={}, mixes_rows=unseen)

        def loss_fn(output: Any, target: Any) -> Any:
            return F.mse_loss(output, target, reduction=reduction) / (1 if reduction == "mean" else 6)

        trained(pipe, dense, batches(rows), loss_fn, reduction=reduction)


@pytest.mark.parametrize("preset", [None, {}, {"*.weight": "[@data, -]"}])
def test_stages_are_sharded_along_the_other_dims(preset: Any) -> None:
    with partitioned_mesh(pipe=2, data=2) as mesh:
        model = mlp(2)
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=2, schedule="zero-bubble", layouts=preset)
        placed = [
            (monarch.distribute(x, pipe.meshes[0], "[@data, -]"), monarch.distribute(y, pipe.meshes[1], "[@data, -]"))
            for x, y in batches(8)
        ]
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

        @monarch.program
        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
            optimizer.step()
            return loss

        theirs = torch.optim.SGD(dense.parameters(), lr=0.1)
        for (x, y), (dense_x, dense_y) in zip(placed, batches(8), strict=True):
            theirs.zero_grad()
            wanted = F.mse_loss(dense(dense_x), dense_y)
            wanted.backward()
            theirs.step()
            torch.testing.assert_close(step(x, y).full_tensor(), wanted.detach())


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_divides_by_the_targets_that_count_in_the_batch(schedule: str, weighted: bool) -> None:
    weight = torch.rand(6) + 0.5 if weighted else None

    def loss_fn(output: Any, target: Any) -> Any:
        return F.cross_entropy(output, target, weight=weight, label_smoothing=0.1) + 0.1 * output.square().mean()

    with partitioned_mesh(pipe=2) as mesh:
        model = mlp(2)
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=3, schedule=schedule, layouts={})
        x = torch.randn(7, 6)
        y = torch.tensor([0, -100, -100, 5, 2, -100, 1])
        trained(pipe, dense, [(x, y)], loss_fn)
        if not weighted:
            with_sum = lambda output, target: F.cross_entropy(output, target) + output.sum()  # noqa: E731
            pipe = pipeline(copy.deepcopy(dense), mesh, microbatches=3, schedule=schedule, layouts={})
            trained(pipe, dense, [(x, y)], with_sum, reduction="sum")


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        skip = torch.relu(self.down1(x))
        h = torch.relu(self.down2(skip))
        h = torch.relu(self.middle(h))
        return self.out(torch.cat([self.up(h), skip], 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_skip_connection_passes_over_a_stage(schedule: str) -> None:
    torch.manual_seed(0)
    with partitioned_mesh(pipe=3) as mesh:
        model = UNet()
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=2, schedule=schedule, split_at=["middle", "up"], layouts={})
        assert [pipe.stages.of[f"{name}.weight"] for name in ("down1", "down2", "middle", "up", "out")] == [
            0,
            0,
            1,
            2,
            2,
        ]
        x = torch.randn(4, 3, 4, 4)
        trained(pipe, dense, [(x, x)], F.mse_loss)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = mlp(2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.body(self.embedding(tokens)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_weight_that_two_stages_read_is_on_one_and_has_the_gradients_of_both(schedule: str) -> None:
    torch.manual_seed(0)
    with partitioned_mesh(pipe=2, data=2) as mesh:
        model = Tied()
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=4, schedule=schedule, split_at=["body.1"], layouts={})
        assert model.head.weight is model.embedding.weight
        assert model.embedding.weight.mesh is pipe.meshes[0]  # type: ignore[attr-defined]
        x = torch.randint(0, 11, (8,))
        trained(pipe, dense, [(x, x.flip(0)), (x.flip(0), x)], F.cross_entropy)


def test_stages_as_a_list_pass_on_what_they_like() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return {"h": self.layer(x), "x": x}

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, given: Any) -> Any:
            return self.layer(given["h"].relu()) + given["x"]

    torch.manual_seed(0)
    stages = [First(), Second()]
    dense = copy.deepcopy(nn.Sequential(*stages))
    with partitioned_mesh(pipe=2) as mesh:
        trained(pipeline(stages, mesh, microbatches=2), dense, batches(4), F.mse_loss)


def test_random_numbers_are_the_same_with_every_schedule_and_number_of_stages() -> None:
    """A microbatch draws its numbers behind those of the microbatches before it, as one program without stages."""
    found = []
    for stages, schedule in ((1, "gpipe"), (2, "1f1b"), (2, "zero-bubble"), (4, "gpipe")):
        with partitioned_mesh(pipe=stages) as mesh:
            model = nn.Sequential(*[nn.Sequential(layer, nn.Dropout(0.5)) for layer in mlp(4)])
            pipe = pipeline(model, mesh, microbatches=2, schedule=schedule, layouts={})

            @monarch.program
            def step(x: Any, y: Any, pipe: Any = pipe) -> Any:
                return pipe.step(x, target=y, loss_fn=F.mse_loss)

            monarch.manual_seed(3)
            loss = step(*batches(4)[0]).full_tensor()
            found.append([loss, *(each.grad.full_tensor() for each in model.parameters())])  # type: ignore[union-attr]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_the_whole_batch_goes_through_the_stages_for_evaluation() -> None:
    with partitioned_mesh(pipe=2, data=2) as mesh:
        model = mlp(4)
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=2)

        @monarch.program
        def evaluate(x: "f32[6@data, 6]") -> Any:
            with torch.no_grad():
                return pipe(x)

        x = torch.randn(6, 6)
        torch.testing.assert_close(evaluate(x).full_tensor(), dense(x).detach())


# -- what needs all microbatches ---------------------------------------------------------------------------------------


def exact(pipe: Pipeline, dense: nn.Module, batches: list[tuple[Any, Any]], loss_fn: Loss = F.mse_loss) -> None:
    """Training gives the numbers of the whole batch, of buffers too."""
    trained(pipe, dense, batches, loss_fn)
    for name, buffer in dense.named_buffers():
        found: Any = pipe.model.get_buffer(name)
        torch.testing.assert_close(found.full_tensor(), buffer, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sample()
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(("rows", "microbatches"), [(8, 4), (7, 3)])
def test_batch_norm_takes_the_statistics_of_the_whole_batch(schedule: str, rows: int, microbatches: int) -> None:
    with partitioned_mesh(pipe=2, data=2) as mesh:
        layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)]
        model = nn.Sequential(*layers, nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 6), nn.BatchNorm1d(6))
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=microbatches, schedule=schedule, split_at=["3"], layouts={})
        exact(pipe, dense, batches(rows))


def test_batch_norm_over_images_and_a_skip_connection() -> None:
    class Normed(UNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Any) -> Any:
            skip = torch.relu(self.down1(x))
            h = torch.relu(self.middle(self.norm(self.down2(skip))))
            return self.out(torch.cat([self.up(h), skip], 1))

    torch.manual_seed(0)
    with partitioned_mesh(pipe=3) as mesh:
        model = Normed()
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=2, split_at=["middle", "up"], layouts={})
        x = torch.randn(4, 3, 4, 4)
        exact(pipe, dense, [(x, x)])


class Averaging(nn.Module):
    """Keeps a mean of what it sees, and how often it has seen something."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)  # type: ignore[operator]
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)  # type: ignore[operator]
        return x - self.mean * self.seen


@pytest.mark.sample()
@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3),
        lambda x: x * (x @ x.t()).softmax(1).square().sum(1, keepdim=True),
        lambda x: x.relu() + x.cumsum(0).mul_(0.5),
        lambda x: x.flip(0),
        lambda x: x.t().softmax(1).t(),
        lambda x: x.sort(0).values,
        lambda x: x + x[:1],
        lambda x: torch.cat([x, x])[::2] * x,
        lambda x: x * x.square().mean(),
        lambda x: F.batch_norm(x, None, None, training=True),
        Averaging(),
    ],
)
def test_ops_that_mix_rows_see_the_whole_batch(mix: Callable[[Any], Any], rows: int) -> None:
    with partitioned_mesh(pipe=2) as mesh:
        torch.manual_seed(0)
        last = mix if isinstance(mix, nn.Module) else Mixing(mix)
        model = nn.Sequential(nn.Linear(6, 6), Mixing(lambda x: x.mul_(2)), nn.Linear(6, 6), copy.deepcopy(last))
        dense = copy.deepcopy(model)
        exact(pipeline(model, mesh, microbatches=2, split_at=["2"], layouts={}), dense, batches(rows))


@pytest.mark.sample()
@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, t: (o @ o.T).mean(),
        lambda o, t: F.cross_entropy(o @ t.T, torch.arange(o.shape[0])),
    ],
)
def test_a_loss_that_mixes_rows_is_that_of_the_whole_batch(loss_fn: Loss, rows: int) -> None:
    with partitioned_mesh(pipe=2) as mesh:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        for each in (mlp(2), model):
            dense = copy.deepcopy(each)
            exact(pipeline(each, mesh, microbatches=2, layouts={}), dense, batches(rows), loss_fn)


# -- what is refused ---------------------------------------------------------------------------------------------------


def stepped(mesh: Mesh, model: nn.Module, loss_fn: Loss, rows: int = 4, **options: Any) -> Any:
    pipe = pipeline(model, mesh, microbatches=2, split_at=["1"], layouts={})

    @monarch.program
    def step(x: Any, y: Any) -> Any:
        return pipe.step(x, target=y, loss_fn=loss_fn, **options)

    return step(*batches(rows)[0])


def test_one_microbatch_is_exact_whatever_the_model_mixes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), Mixing(lambda x: x - x.mean(0)))
    dense = copy.deepcopy(model)
    with partitioned_mesh(pipe=2) as mesh:
        trained(pipeline(model, mesh, microbatches=1, split_at=["2"]), dense, batches(4), F.mse_loss)
        for name, buffer in dense.named_buffers():
            torch.testing.assert_close(model.get_buffer(name).full_tensor(), buffer)  # type: ignore[operator]


def test_microbatches_of_one_row_hide_whether_rows_are_mixed() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Mixing(lambda x: x - x.mean(0)))
    with partitioned_mesh(pipe=2) as mesh:
        with pytest.raises(ProgramError, match="2 microbatches of one row") as raised:
            stepped(mesh, model, F.mse_loss, rows=2)
        assert "take at most 1 microbatches" in str(raised.value)


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Any], Any]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Any) -> Any:
        return self.mix(x)


def test_an_op_that_mixes_rows_in_place_is_refused_with_its_line() -> None:
    with partitioned_mesh(pipe=2) as mesh:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Mixing(lambda x: x.cumsum_(0)))
        with pytest.raises(ProgramError, match="mixes the rows of a batch") as raised:
            stepped(mesh, model, F.mse_loss)
        assert "lambda x" in str(raised.value)


def test_rows_apart_through_views_and_attention_are_not_refused() -> None:
    def mix(x: Any) -> Any:
        heads = x.unflatten(1, (1, 2, 3)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(1)
        return F.layer_norm(found, (6,)) + x.flatten().view(-1, 3).softmax(-1).view(-1, 6).amax(1, keepdim=True)

    with partitioned_mesh(pipe=2) as mesh:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Mixing(mix))
        dense = copy.deepcopy(model)
        trained(pipeline(model, mesh, microbatches=2, layouts={}), dense, batches(4), F.mse_loss)


def test_what_is_written_in_another_dtype_than_it_is_computed_in(recwarn: pytest.WarningsRecorder) -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros_like(x).masked_fill_(x > 0, 2.0)

    def loss_fn(output: Any, target: Any) -> Any:
        return (output * torch.ones_like(target).masked_fill_(target > 0, 3.0)).square().mean()

    with partitioned_mesh(pipe=2) as mesh:
        model = nn.Sequential(*mlp(1), Masked(), nn.Linear(6, 6))
        dense = copy.deepcopy(model)
        trained(pipeline(model, mesh, microbatches=2, layouts={}), dense, batches(4), loss_fn)
    assert not recwarn


def test_rows_of_a_microbatch_are_mixed_where_the_user_says_so() -> None:
    with partitioned_mesh(pipe=2) as mesh:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Mixing(lambda x: x - x.mean(0)))
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=2, layouts={}, mixes_rows=True)

        @monarch.program
        def step(x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=F.mse_loss)

        (x, y), *_ = batches(4)
        wanted = sum(F.mse_loss(dense(x[k::2]), y[k::2]) for k in range(2)) / 2
        torch.testing.assert_close(step(x, y).full_tensor(), wanted.detach())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("loss_fn", "options", "match"),
    [
        (lambda o, t: (o - t).square().sum(), {}, "say so, pipe.step"),
        (lambda o, t: (o - t).square().sum() / 4, {}, "say so, pipe.step"),
        (F.mse_loss, {"reduction": "sum"}, "leave out reduction='sum'"),
        (lambda o, t: (o - t).square(), {}, r"a tensor of shape \(2, 6\)"),
        (lambda o, t: None, {}, "loss_fn gives NoneType, and no tensor"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(loss_fn: Loss, options: Any, match: str) -> None:
    with partitioned_mesh(pipe=2) as mesh, pytest.raises(ProgramError, match=match):
        stepped(mesh, mlp(2), loss_fn, **options)


def test_one_microbatch_takes_any_loss() -> None:
    with partitioned_mesh(pipe=2) as mesh:
        model = mlp(2)
        dense = copy.deepcopy(model)
        pipe = pipeline(model, mesh, microbatches=1, layouts={})
        trained(pipe, dense, batches(3), lambda o, t: (o - t).square().sum() / 4)


def test_a_step_is_one_of_a_program_and_of_enough_rows() -> None:
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(mlp(2), mesh, microbatches=2)
        x, y = batches(4)[0]
        with pytest.raises(ProgramError, match="a pipeline's step outside of a program"):
            pipe.step(x, target=y, loss_fn=F.mse_loss)

        @monarch.program
        def twice(x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=F.mse_loss) + pipe.step(x, target=y, loss_fn=F.mse_loss)

        @monarch.program
        def once(x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=F.mse_loss)

        with pytest.raises(ProgramError, match="a program with two steps of pipelines"):
            twice(x, y)
        with pytest.raises(ProgramError, match="a batch of 1 rows in 2 microbatches"):
            once(x[:1], y[:1])
        with pytest.raises(ProgramError, match="the tensors of a step have 3, 4 rows"):
            once(x, y[:3])
        with torch.no_grad(), pytest.raises(ProgramError, match="where no gradients are computed"):
            once(x, y)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mesh_dim": "stage"}, LayoutError, "unknown mesh dim 'stage'"),
        ({"split_at": ["4"]}, ProgramError, "no module of Sequential is called '4'"),
        ({"split_at": "2"}, ProgramError, "split_at='2'"),
        ({"split_at": ["2", "1"]}, ProgramError, "in another order"),
        ({"split_at": ["1", "2"]}, ProgramError, "3 stages for 2 places: pipe=2, 1 stages for each"),
        ({"schedule": "interleaved", "virtual": 8}, ProgramError, "16 stages need more"),
        ({"schedule": "f1"}, ValueError, "unknown schedule 'f1'"),
    ],
)
def test_models_that_cannot_be_cut_so(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with partitioned_mesh(pipe=2) as mesh, pytest.raises(error, match=match):
        pipeline(mlp(4), mesh, microbatches=2, **options)


def test_stages_are_balanced_by_their_parameters() -> None:
    widths = [4, 4, 4, 16, 16]
    model = nn.Sequential(nn.Embedding(1000, 4), *[nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)])
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(model, mesh, microbatches=2)
        assert [pipe.stages.of[f"{at}.weight"] for at in range(5)] == [0, 0, 0, 0, 1]
