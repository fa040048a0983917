"""Training in which random faults come ends with the bits of training in peace (`make chaos` has hundreds of them)."""

from __future__ import annotations

import pytest

from tests.chaos.faults import KINDS
from tests.chaos.run import choose, train
from tests.sample import is_full


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8 if is_full() else 1))
def test_training_with_faults_of_every_kind(seed: int) -> None:
    kinds = choose(seed, sum(not kind.across for kind in KINDS), across=False)
    outcomes = train(seed, kinds, small=True)
    assert [outcome.kind for outcome in outcomes] == [kind.name for kind in kinds]
    assert all((outcome.healed is not None) for outcome, kind in zip(outcomes, kinds, strict=True) if kind.ends)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4 if is_full() else 1))
def test_training_of_which_other_workers_keep_copies(seed: int) -> None:
    """No mesh dim replicates the weights: what a death takes comes from the copies of `redundancy=1`."""
    one = [kind for kind in KINDS if kind.ends and not kind.across and not kind.two]
    outcomes = train(seed, one if is_full() else one[:2], small=True, redundant=True)
    assert all(outcome.healed is not None for outcome in outcomes)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4 if is_full() else 1))
def test_training_goes_on_with_fewer_workers(seed: int) -> None:
    ending = [kind for kind in KINDS if kind.ends and not kind.across]
    outcomes = train(seed, ending if is_full() else ending[:1], small=True, policy="shrink")
    assert all(outcome.healed is not None for outcome in outcomes)
