"""`torch.distributions` and the samplers below it: densities against plain PyTorch, draws by their statistics, and
arguments that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F

import monarch
from monarch.language import Mesh
from monarch.language.errors import OperatorError
from tests.language.partitioned import partitioned_mesh


@pytest.fixture(autouse=True)
def validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo, once it has run in a process, leaves the arguments of distributions unchecked from then on."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


# Each takes two positive tensors [4, 3].
CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "normal": lambda a, b: D.Normal(a, b),
    "bernoulli": lambda a, b: D.Bernoulli(a / (a + b)),
    "bernoulli, logits": lambda a, b: D.Bernoulli(logits=a - b),
    "categorical": lambda a, b: D.Categorical(a),
    "categorical, logits": lambda a, b: D.Categorical(logits=a - b),
    "one-hot": lambda a, b: D.OneHotCategoricalStraightThrough(logits=a),
    "beta": lambda a, b: D.Beta(a, b),
    "gamma": lambda a, b: D.Gamma(a, b),
    "dirichlet": lambda a, b: D.Dirichlet(a),
    "poisson": lambda a, b: D.Poisson(a),
    "binomial": lambda a, b: D.Binomial(12, a / (a + b)),
    "negative binomial": lambda a, b: D.NegativeBinomial(b, a / (a + b)),
    "exponential": lambda a, b: D.Exponential(a),
    "laplace": lambda a, b: D.Laplace(a, b),
    "gumbel": lambda a, b: D.Gumbel(a, b),
    "log-normal": lambda a, b: D.LogNormal(a / 2, b / 4),
    "half-normal": lambda a, b: D.HalfNormal(a),
    "geometric": lambda a, b: D.Geometric(a / (a + b)),
    "student": lambda a, b: D.StudentT(a + 4, b),
    "uniform": lambda a, b: D.Uniform(-a, b),
    "weibull": lambda a, b: D.Weibull(a, b + 1),
    "kumaraswamy": lambda a, b: D.Kumaraswamy(a, b),
    "continuous bernoulli": lambda a, b: D.ContinuousBernoulli(a / (a + b)),
    "multivariate normal": lambda a, b: D.MultivariateNormal(a, torch.diag_embed(b)),
    "low rank": lambda a, b: D.LowRankMultivariateNormal(a, b.unsqueeze(-1), b),
    "mixture": lambda a, b: D.MixtureSameFamily(D.Categorical(a), D.Normal(a, b)),
    "independent": lambda a, b: D.Independent(D.Normal(a, b), 1),
    "relaxed": lambda a, b: D.RelaxedOneHotCategorical(torch.tensor(0.5), logits=a),
    "multinomial": lambda a, b: D.Multinomial(6, a),
    "transformed": lambda a, b: D.TransformedDistribution(D.Normal(a / 4, b / 4), [D.TanhTransform(cache_size=1)]),
    "inverse gamma": lambda a, b: D.InverseGamma(a + 3, b),
}


@pytest.fixture(scope="module")
def halves() -> Iterator[Mesh]:
    with partitioned_mesh(data=2) as mesh:
        yield mesh


def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.rand(4, 3, generator=generator) * 2 + 0.5 for _ in range(2))
    return a, b


DIVERGE = frozenset(
    "normal bernoulli categorical beta gamma dirichlet poisson exponential laplace one-hot log-normal".split()
)
"""Whose divergences are compared. PyTorch branches on the values of others', or has none."""


def summary(name: str, a: torch.Tensor, b: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
    """Everything of a distribution that is not drawn, with the gradients of the density."""
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    made = CASES[name](a, b)
    density = made.log_prob(at)
    grads = torch.autograd.grad(density.sum(), [a, b], allow_unused=True)
    found = [density, *(grad for grad in grads if grad is not None)]
    if name in DIVERGE:
        found.append(D.kl_divergence(made, CASES[name](b, a)))
    for known in (lambda: made.entropy(), lambda: made.mean):
        try:
            found.append(known())
        except NotImplementedError:
            pass
    return found


def full(value: torch.Tensor) -> torch.Tensor:
    """A value as a plain tensor: some are constants, which outside of programs are plain already."""
    return value.full_tensor() if isinstance(value, monarch.DistributedTensor) else value


@pytest.mark.sample(8)
@pytest.mark.parametrize("door", ["program", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_densities_are_pytorch_s_and_draws_are_of_the_distribution(name: str, door: str, halves: Mesh) -> None:
    make, (a, b) = CASES[name], parameters()
    torch.manual_seed(0)
    at = make(a, b).sample()
    placed = [monarch.distribute(x, halves, "[@data, -]") for x in (a, b)]

    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        made = make(a, b)
        return summary(name, a, b, at), made.sample((1500,))

    found, draws = (monarch.program(run) if door == "program" else run)(*placed)
    for ours, theirs in zip(found, summary(name, a, b, at), strict=True):
        torch.testing.assert_close(full(ours), theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    made, drawn = make(a, b), draws.full_tensor()
    assert drawn.shape == (1500, *at.shape) and made.support.check(drawn).all()
    theirs = make(a, b).sample((1500,))
    spread = (theirs.double().std(0) * (2 / 1500) ** 0.5).clamp(min=1e-3)
    assert ((drawn.double().mean(0) - theirs.double().mean(0)).abs() < 6 * spread).all()
    if drawn.ndim == 3 and not made.support.is_discrete:
        levels = torch.tensor([0.1, 0.5, 0.9])
        ours, theirs = (torch.quantile(x[:, 0, 0].float(), levels) for x in (drawn, theirs))
        assert ((ours - theirs).abs() <= 6 * spread.max() + 0.2 * theirs.abs() + 0.1).all()


@pytest.mark.parametrize("rate", [0.3, 4.0, 9.9, 10.1, 60.0, 5000.0])
@pytest.mark.parametrize("kind", ["gamma", "poisson", "binomial"])
def test_samplers_have_the_moments_of_their_distribution(kind: str, rate: float, mesh: Mesh) -> None:
    count = 40_000
    x = monarch.distribute(torch.full((count,), rate, dtype=torch.float64), mesh)
    made: Any = {
        "gamma": (lambda: torch._standard_gamma(x), D.Gamma(rate, 1.0)),
        "poisson": (lambda: torch.poisson(x), D.Poisson(rate)),
        "binomial": (
            lambda: torch.binomial(x.round() * 3, x * 0 + 0.7),
            D.Binomial(round(rate) * 3, torch.tensor(0.7)),
        ),
    }[kind]
    torch.manual_seed(3)
    drawn, expected = made[0]().full_tensor(), made[1]
    mean, variance = float(expected.mean), float(expected.variance)
    assert abs(drawn.mean() - mean) <= 5 * (variance / count) ** 0.5
    assert abs(drawn.var() - variance) <= 0.05 * variance
    if kind == "gamma":
        assert abs((drawn <= rate).double().mean() - torch.special.gammainc(*2 * (torch.tensor(rate),))) < 0.02
    else:
        assert drawn.eq(drawn.round()).all()
        probability = expected.log_prob(torch.tensor(mean).floor()).exp()
        assert abs((drawn == int(mean)).double().mean() - probability) < 0.02


def test_samples_of_rows_that_the_mesh_does_not_divide_are_those_of_any_mesh(mesh: Mesh) -> None:
    rates = torch.arange(1.0, 6).expand(3, 5)
    draw = lambda x: (torch.poisson(x), torch.binomial(x, x / 6), torch._standard_gamma(x))  # noqa: E731
    found = []
    for layout in ("[-, -]", "[@data, -]", "[-, @data]"):
        with partitioned_mesh(data=4) as parts:
            torch.manual_seed(2)
            found.append([x.full_tensor() for x in monarch.program(draw)(monarch.distribute(rates, parts, layout))])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial_draws_in_proportion_and_never_what_has_none(replacement: bool, mesh: Mesh) -> None:
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    x = monarch.distribute(weights.expand(4000, 6).contiguous(), mesh)
    drawn = monarch.program(lambda x: torch.multinomial(x, 3, replacement))(x).full_tensor()
    if replacement:
        assert ((drawn.flatten().bincount(minlength=6) / 12000 - weights / 8).abs() < 0.03).all()
    else:
        assert (drawn.sort(-1).values == torch.tensor([1, 2, 4])).all()
        assert ((drawn[:, 0].bincount(minlength=6) / 4000 - weights / 8).abs() < 0.03).all()


def test_a_reparametrized_draw_has_pytorch_s_gradient(halves: Mesh) -> None:
    a, b = parameters()

    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        gamma, dirichlet, normal = D.Gamma(a, b).rsample(), D.Dirichlet(a).rsample(), D.Normal(a, b).rsample()
        return (
            *(gamma, dirichlet, normal),
            *torch.autograd.grad(gamma.sum(), [a, b]),
            *torch.autograd.grad((dirichlet * dirichlet).sum(), [a]),
            *torch.autograd.grad(normal.sum(), [a, b]),
        )

    placed = [monarch.distribute(x, halves, "[@data, -]") for x in (a, b)]
    found = [x.full_tensor() for x in monarch.program(run)(*placed)]
    gamma, dirichlet, normal, by_shape, by_rate, by_concentration, by_mean, by_deviation = found
    torch.testing.assert_close(by_rate, -gamma / b)
    torch.testing.assert_close(by_shape, torch._standard_gamma_grad(a, gamma * b) / b, rtol=1e-3, atol=1e-4)
    total = a.sum(-1, True).expand_as(a)
    inner = 2 * dirichlet
    expected = torch._dirichlet_grad(dirichlet, a, total) * (inner - (dirichlet * inner).sum(-1, True))
    torch.testing.assert_close(by_concentration, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(by_mean, torch.ones_like(a))
    torch.testing.assert_close(by_deviation, (normal - a) / b, rtol=1e-3, atol=1e-4)


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "scale": (
        lambda x: D.Normal(x, x).sample(),
        r"parameter scale of Normal has to satisfy GreaterThan\(lower_bound=0",
    ),
    "probs": (lambda x: D.Bernoulli(x * 3).sample(), "parameter probs of Bernoulli has to satisfy"),
    "value": (lambda x: D.Exponential(x.abs()).log_prob(x), "in the support of Exponential"),
    "bounds": (lambda x: D.Uniform(x.abs(), x).sample(), "parameter|Uniform"),
    "covariance": (lambda x: D.MultivariateNormal(x[0], torch.diag_embed(x[1])).sample(), "covariance_matrix"),
    "multinomial": (lambda x: torch.multinomial(x, 1), "probability tensor contains"),
    "no weight": (lambda x: torch.multinomial(x * 0, 1), "sum of probabilities <= 0"),
    "poisson": (lambda x: torch.poisson(x), "invalid Poisson rate"),
    "bernoulli": (lambda x: torch.bernoulli(x), "bernoulli expects all elements of p"),
    "normal": (lambda x: torch.normal(x, x), "normal expects all elements of std"),
    "cholesky": (lambda x: torch.linalg.cholesky(torch.diag_embed(x[0])), "factorization cannot be completed"),
    "assert": (lambda x: _asserted(x), "values that do not pass"),
    "raise": (lambda x: _raises(x), "if .x < 0..any"),
}


SOURCE = """
def asserted(x):
    assert (x > 0).all(), f"not positive: {x}"
    return x * 2
"""
_made: dict[str, Any] = {"__name__": "asserted"}
exec(compile(SOURCE, "<asserted>", "exec"), _made)  # not as pytest writes assertions
_asserted: Callable[[torch.Tensor], torch.Tensor] = _made["asserted"]


def _raises(x: torch.Tensor) -> torch.Tensor:
    if (x < 0).any() or x.isnan().any():
        wrong = x[x < 0]
        raise ValueError(f"negative: {wrong}")
    return x * 2


@pytest.mark.parametrize("door", ["program", "eager"])
@pytest.mark.parametrize("name", BAD)
def test_wrong_values_are_refused_as_pytorch_refuses_them(name: str, door: str, halves: Mesh) -> None:
    function, words = BAD[name]
    run = monarch.program(function) if door == "program" else function
    good, bad = (monarch.distribute(x, halves, "[@data, -]") for x in (torch.rand(4, 3) / 2 + 0.1, -torch.rand(4, 3)))
    if name not in ("bounds", "no weight", "probs", "covariance", "value"):
        run(good).full_tensor()  # type: ignore[no-untyped-call]
    with pytest.raises((ValueError, RuntimeError, AssertionError), match=words if door == "program" else None):
        run(bad).full_tensor()  # type: ignore[no-untyped-call]


def test_a_check_whose_error_the_program_catches_is_a_branch(mesh: Mesh) -> None:
    def caught(x: torch.Tensor) -> torch.Tensor:
        try:
            return _raises(x)
        except ValueError:
            return x

    def within(x: torch.Tensor) -> torch.Tensor:
        try:
            with torch.no_grad():
                return _asserted(x)
        finally:
            x = x + 1

    with pytest.raises(monarch.ProgramError, match="cannot branch"):
        monarch.program(caught)(monarch.distribute(torch.ones(2), mesh))
    assert monarch.program(within)(monarch.distribute(torch.ones(2), mesh)).tolist() == [2, 2]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.exponential_(-1.0),
        lambda x: x.geometric_(2.0),
        lambda x: torch.randint_like(x, 3, 2),
        lambda x: torch.normal(x, -1.0),
        lambda x: torch.bernoulli(x, 1.5),
        lambda x: torch.multinomial(x, 9),
    ],
)
def test_wrong_numbers_are_refused_at_once(draw: Callable[[torch.Tensor], Any], mesh: Mesh) -> None:
    with pytest.raises(RuntimeError):
        draw(torch.ones(4))
    with pytest.raises(OperatorError):
        draw(monarch.distribute(torch.ones(4), mesh))


# -- other functions that draw -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_are_drawn_below_one_and_never_lose_a_sure_thing(dtype: torch.dtype, mesh: Mesh) -> None:
    def run(x: torch.Tensor) -> Any:
        return (
            torch.rand_like(x),
            torch.bernoulli(x),
            x.clone().exponential_(),
            F.gumbel_softmax(x, hard=True),
            x.clone().uniform_(),
        )

    x = monarch.distribute(torch.ones(200, 100, dtype=dtype), mesh)
    uniform, sure, exponential, hot, filled = (made.full_tensor() for made in monarch.program(run)(x))
    assert (uniform < 1).all() and (filled < 1).all() and sure.eq(1).all()
    assert exponential.isfinite().all() and exponential.gt(0).all()
    assert hot.sum(-1).eq(1).all() and uniform.float().mean().sub(0.5).abs() < 0.02


def test_complex_numbers_are_drawn_in_both_parts(mesh: Mesh) -> None:
    normal, uniform = monarch.program(
        lambda: (torch.randn(5000, dtype=torch.complex64), torch.rand(5000, dtype=torch.complex64)), mesh=mesh
    )()
    normal, uniform = normal.full_tensor(), uniform.full_tensor()
    assert abs(normal.real.var() - 0.5) < 0.05 and abs(normal.imag.var() - 0.5) < 0.05
    assert uniform.imag.mean().sub(0.5).abs() < 0.02 and not torch.equal(uniform.real, uniform.imag)


@pytest.mark.parametrize("dropout", [F.dropout1d, F.dropout2d, F.feature_alpha_dropout, F.alpha_dropout, F.dropout])
def test_dropouts_drop_what_pytorch_s_drop(dropout: Callable[..., torch.Tensor], mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(40, 50, 8), mesh)
    torch.manual_seed(1)
    ours = monarch.program(lambda x: dropout(x, 0.4, training=True))(x).full_tensor()
    theirs = dropout(torch.ones(40, 50, 8), 0.4, training=True)
    torch.testing.assert_close(ours.unique(), theirs.unique())
    assert (ours.flatten(1).mean() - theirs.mean()).abs() < 0.1
    assert (ours.var(-1).eq(0).float().mean() > 0.9) == (theirs.var(-1).eq(0).float().mean() > 0.9)
