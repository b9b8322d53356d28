"""The trainer's update of the toy step on one rank: its rows cover what divisions differ in, and faults are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.lab.losses.check_update import TOLERANCE
from lockstep.lab.losses.examined_loss import change
from lockstep.lab.losses.toy_update import (
    DIVISIONS,
    ONE_MICROBATCH,
    RankReport,
    divisions_of,
    report_of,
    tiny_model,
    token_budget,
    toy_step,
)
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.losses import POLICY_LOSSES
from tests.fixtures.distributed import FakeRank

pytestmark = pytest.mark.long

FAULTY = Path(__file__).parent / "faulty_losses.py"


def report(**algorithm: Any) -> RankReport:
    return report_of(algorithm, FakeRank(), lambda name: None, with_extremes=True)  # type: ignore[arg-type]


def changes(found: RankReport) -> dict[str, float]:
    """Return the largest relative change of the gradient of each division, over the normalizers."""
    whole = found.gradients.pop(ONE_MICROBATCH.name)
    return {name: max(change(of[key], whole[key]) for key in whole) for name, of in found.gradients.items()}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_built_in_loss_has_the_same_gradient_in_every_division(name: str) -> None:
    found = report(loss=name)
    assert found.extreme_norm is not None
    assert np.isfinite(found.extreme_norm)
    assert max(changes(found).values()) < TOLERANCE


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_built_in_advantage_can_be_updated_with(name: str) -> None:
    assert max(changes(report(advantage=name)).values()) < TOLERANCE


@pytest.mark.parametrize("function", ["divided_by_tokens", "centered_in_microbatch", "mean_of_rollout"])
def test_a_mean_over_the_microbatch_changes_the_gradient_of_more_than_one(function: str) -> None:
    found = changes(report(loss=f"{FAULTY}:{function}"))
    assert found.pop("shared prefixes") < TOLERANCE
    assert len(found) == 2
    assert min(found.values()) > 1e-3


def test_an_unbounded_ratio_is_seen_at_extreme_log_ratios() -> None:
    assert report(loss=f"{FAULTY}:surrogate").extreme_norm != np.inf
    assert report(loss=f"{FAULTY}:unbounded").extreme_norm == np.inf


def test_the_step_has_branches_rejected_tokens_and_weights() -> None:
    batch, usual, extreme = toy_step(Policy(tiny_model()), AlgorithmConfig(kl_coef=0.1))
    rollouts, counts = np.unique(batch.layout.rollout_index, return_counts=True)
    assert len(set(map(len, batch.rows))) > 4
    assert rollouts[counts > 1].tolist() == [1, 3]
    assert 0 < int(usual.keep_N.sum()) < batch.layout.num_tokens
    assert usual.correction.weights_N is not None
    assert len(usual.correction.weights_N.unique()) > 10
    assert torch.isfinite(extreme.advantages_N).all()


def test_budgets_make_the_microbatches_of_the_divisions_and_put_branches_on_different_ranks() -> None:
    policy = Policy(tiny_model())
    batch, *_ = toy_step(policy, AlgorithmConfig())
    lengths = [len(row) for row in batch.rows]
    for division in (one for one in DIVISIONS if not one.shares_prefixes):
        distributed = FakeRank(policy, world_size=division.ranks)
        made = plan(lengths, num_ranks=division.ranks, token_budget=token_budget(division, batch, policy, distributed))
        assert made.num_microbatches == division.microbatches or max(map(len, sum(made.microbatches, ()))) == 1
        if division.ranks == 2 and division.microbatches is None:
            ranks_of = [{int(batch.layout.rollout_index[row]) for pack in packs for row in pack} for packs in
                        made.microbatches]  # fmt: skip
            assert ranks_of[0] & ranks_of[1], "a rollout has rows on both ranks"
    assert sum(len(divisions_of(ranks)) for ranks in (1, 2)) == len(DIVISIONS)
