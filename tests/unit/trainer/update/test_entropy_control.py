"""The adaptive entropy bonus: its rule, and its weight in the gradient of an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.entropy_control import EntropyControl
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.unit.trainer.update.test_updater import batch, close, config, policy, random_logp, scored, targets_of

__all__ = ["batch", "policy"]  # fixtures

ADAPTIVE = AlgorithmConfig(entropy_target=0.2, entropy_coef_step=0.005, entropy_coef_max=0.012)


def test_the_coefficient_grows_below_the_target_and_falls_above_it() -> None:
    control, coefs, weights = EntropyControl(coef=0.0), [], []
    for entropy in (0.3, 0.2, 0.1, 0.1, 0.21, 0.4, 0.4, 0.4):
        weights.append(control.weight(ADAPTIVE))
        control = control.after(entropy, ADAPTIVE)
        coefs.append(control.coef)
    assert coefs == pytest.approx([0, 0.005, 0.01, 0.012, 0.007, 0.002, 0, 0])
    # The weight of an update is c before it, where the entropy of the update before was at or below the target.
    assert weights == pytest.approx([0, 0, 0.005, 0.01, 0.012, 0, 0, 0])


def test_before_the_first_update_nothing_is_measured_and_the_bonus_is_off() -> None:
    assert EntropyControl(coef=0.1).weight(ADAPTIVE) == 0


def test_without_a_target_the_weight_is_fixed() -> None:
    fixed = AlgorithmConfig(entropy_coef=0.1)
    control = EntropyControl(coef=0.1).after(0.0, fixed).after(9.0, fixed)
    assert control.weight(fixed) == 0.1


def updated(policy: Policy, batch: StepBatch, control: EntropyControl | None, **algorithm: Any) -> tuple[Updater, Any]:
    made = config(**algorithm)
    distributed = FakeRank(policy)
    updater = Updater(policy, distributed, made)
    updater.entropy = control or updater.entropy
    targets, _, _ = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")
    report = updater.update(batch, targets)
    return updater, (distributed.gradient, report.metrics)


def test_the_controller_weighs_the_bonus_and_measures_the_mean_over_the_step(policy: Policy, batch: StepBatch) -> None:
    target = {"entropy_target": 100.0, "entropy_coef_step": 0.5}
    updater, (found, metrics) = updated(policy, batch, EntropyControl(coef=0.5, entropy=1.0), **target)
    _, (expected, fixed) = updated(policy, batch, None, entropy_coef=0.5)
    _, (plain, _) = updated(policy, batch, None)
    assert close(found, expected)
    assert not close(found, plain)
    assert metrics["policy/entropy_coef"] == 0.5
    assert "policy/entropy_coef" not in fixed
    assert updater.entropy == EntropyControl(coef=1.0, entropy=metrics["policy/entropy"])


def test_above_the_target_the_gradient_has_no_bonus(policy: Policy, batch: StepBatch) -> None:
    updater, (found, _) = updated(policy, batch, EntropyControl(coef=0.5, entropy=1.0), entropy_target=0.9)
    _, (plain, _) = updated(policy, batch, None)
    assert close(found, plain)
    assert updater.entropy.coef == pytest.approx(0.495)


def test_a_skipped_update_leaves_the_controller_as_it_was(policy: Policy, batch: StepBatch) -> None:
    made = config(entropy_target=1.0)
    updater = Updater(policy, FakeRank(policy), made)
    targets, _, advantages_N = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")
    updater.update(batch, replace(targets, advantages_N=torch.full_like(advantages_N, torch.nan)))
    assert updater.guard.skipped == 1
    assert updater.entropy == EntropyControl(coef=0.0)
