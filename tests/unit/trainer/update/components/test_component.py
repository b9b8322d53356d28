"""Components of the loss: their gradients add up, each over its own tokens, however the work is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs
from lockstep.trainer.update.batch_dumps import read_given, write_dump
from lockstep.trainer.update.components.component import Share, Term, TokenSet, mean_over
from lockstep.trainer.update.components.demonstrations_component import demonstrations_component
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.fixtures.loss_steps import loss_batch, outputs_of
from tests.fixtures.models import tiny_qwen3
from tests.unit.trainer.update.test_updater import (
    close,
    expected_gradient,
    random_logp,
    rollouts,
    scored,
    targets_of,
)

WEIGHT = 0.3


@dataclass
class Given:
    """Rows that are the same in every step."""

    batch: StepBatch
    name: str = "given"
    cursor: int = 0
    temperature: float = 1.0

    def metrics(self) -> dict[str, float]:
        return {"data/given": float(self.cursor)}

    def draw(self, stage: object = None) -> StepBatch:
        self.cursor += len(self.batch.rows)
        return self.batch

    def token_set(self, batch: StepBatch, *, update: int, routers: Any) -> TokenSet:
        term = demonstrations_component(self.name, weight=WEIGHT, num_tokens=batch.layout.num_tokens)
        return TokenSet(batch=batch, rows=range(len(batch.rows)), terms=[term], temperature=self.temperature)


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(tiny_qwen3(tied=True))


@pytest.fixture
def batch() -> StepBatch:
    return StepBatch.of(rollouts(), mask_truncated=False)


@pytest.fixture
def given() -> Given:
    """Rows of other lengths than those of the rollouts."""
    others = StepBatch.of(rollouts()[1:3], mask_truncated=False)
    rows = tuple(replace(row, ids=(row.ids * 7 + 3) % 200) for row in others.rows)
    return Given(replace(others, rows=rows))


def config(token_budget: int = 100_000, **algorithm: Any) -> Config:
    made = Config(algorithm=AlgorithmConfig(**{"loss": "reinforce", "normalizer": "token"} | algorithm))
    made.token_budget = token_budget
    return made


def updated(
    policy: Policy, batch: StepBatch, made: Config, targets: Targets, given: list[Given]
) -> tuple[Tensor, dict[str, float]]:
    rank = FakeRank(policy)
    metrics = Updater(policy, rank, made, given=given).update(batch, targets).metrics
    return rank.gradient, dict(metrics)


def good(batch: StepBatch, made: Config) -> Targets:
    return targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")[0]


@pytest.mark.parametrize("token_budget", [100_000, 17])
def test_the_gradient_is_the_sum_of_components_over_their_own_counts(
    token_budget: int, policy: Policy, batch: StepBatch, given: Given
) -> None:
    made = config(token_budget)
    targets = good(batch, made)
    found, metrics = updated(policy, batch, made, targets, [given])
    of_policy = expected_gradient(policy, batch, lambda logp: -(targets.advantages_N * logp).mean())
    of_given = expected_gradient(policy, given.batch, lambda logp: -logp.mean())
    assert close(found, of_policy + WEIGHT * of_given)
    assert metrics["loss/given_tokens"] == given.batch.layout.num_tokens != metrics["loss/policy_tokens"]
    assert metrics["loss/given_weight"] == WEIGHT
    assert (metrics["perf/microbatches"] > 2) == (token_budget == 17)


def test_a_component_with_rows_of_its_own_leaves_the_metrics_of_the_policy_as_they_are(
    policy: Policy, batch: StepBatch, given: Given
) -> None:
    made = config()
    targets = good(batch, made)
    _, alone = updated(policy, batch, made, targets, [])
    _, both = updated(policy, batch, made, targets, [given])
    own = [name for name in alone if name.startswith(("policy/", "loss/"))]
    assert {name: both[name] for name in own} == {name: alone[name] for name in own}
    assert alone["loss/policy"] == alone["policy/loss"]


def test_the_temperature_of_the_rollouts_does_not_reach_given_rows(
    policy: Policy, batch: StepBatch, given: Given
) -> None:
    made = config()
    made.rollout.temperature = 0.5
    targets = replace(good(batch, made), advantages_N=torch.zeros(batch.layout.num_tokens))
    found, _ = updated(policy, batch, made, targets, [given])
    assert close(found, WEIGHT * expected_gradient(policy, given.batch, lambda logp: -logp.mean()))


def test_each_optimizer_step_draws_rows_and_a_dump_holds_them(
    policy: Policy, batch: StepBatch, given: Given, tmp_path: Any
) -> None:
    made = config(minibatches=2)
    targets = good(batch, made)
    updater = Updater(policy, FakeRank(policy), made, given=[given])
    paths = []
    updater.dump = lambda *rows: paths.append(write_dump(tmp_path, *rows))
    updater.update(batch, replace(targets, advantages_N=torch.full_like(targets.advantages_N, torch.nan)))
    assert given.cursor == 2 * len(given.batch.rows)
    assert len(paths) == 2
    (read,) = read_given(paths[0]).items()
    assert read[0] == "given"
    for row, expected in zip(read[1].rows, given.batch.rows, strict=True):
        np.testing.assert_array_equal(row.ids, expected.ids)
        np.testing.assert_array_equal(row.loss_mask, expected.loss_mask)


def test_a_token_set_weights_and_divides_each_term_and_adds_those_of_the_policy_loss() -> None:
    """The third is on its own, and the last one is measured, although it is not finite."""
    outputs, by_rollout = outputs_of(loss_batch()), lambda loss_T, rollout_T: (loss_T * (1 + rollout_T)).sum()

    def share(_: object, factor: float = 1.0) -> Share:
        return Share(loss_T=factor * outputs.logp_T, sums={"one": torch.ones(())})

    terms = [
        Term(name="a", weight=2.0, num_tokens=6, normalized=by_rollout, share=share, in_policy_loss=True),
        Term(name="b", weight=-0.5, num_tokens=6, normalized=by_rollout, share=share, in_policy_loss=True),
        Term(name="c", weight=3.0, num_tokens=6, normalized=mean_over(4), share=share),
        Term(name="d", weight=0.0, num_tokens=6, normalized=mean_over(4), share=partial(share, factor=torch.nan)),
    ]
    tokens = TokenSet(batch=loss_batch(), rows=range(3), terms=terms)
    loss, sums = tokens.share(outputs)
    of_policy = 1.5 * (outputs.logp_T * (1 + outputs.rollout_T)).sum()
    torch.testing.assert_close(loss, of_policy + 3.0 * outputs.logp_T.sum() / 4)
    torch.testing.assert_close(sums[tokens]["policy/loss"], of_policy.detach())
    assert all(sums[term]["one"] == 1 for term in terms)
    value = float(of_policy.detach())
    expected = {"policy/loss": value, "loss/policy": value, "loss/policy_weight": 1.0, "loss/policy_tokens": 6.0}
    assert tokens.metrics(sums[tokens]) == pytest.approx(expected)


def test_a_loss_that_reports_names_of_the_trainer_does_not_replace_them(policy: Policy, batch: StepBatch) -> None:
    made = config()
    targets, names = good(batch, made), ("policy/loss", "loss/policy", "policy/entropy")
    _, expected = updated(policy, batch, made, targets, [])
    updater = Updater(policy, FakeRank(policy), made)
    plain = updater.loss.function

    def loss(inputs: LossInputs) -> LossOutputs:
        found = plain(inputs)
        return replace(found, metrics={**found.metrics, **dict.fromkeys(names, torch.full((), 9.0))})

    updater.loss.function = loss
    metrics = updater.update(batch, targets).metrics
    assert {name: metrics[name] for name in names} == {name: expected[name] for name in names}


def test_rows_of_others_make_a_step_of_their_own_only_in_a_run_without_rollouts(policy: Policy, given: Given) -> None:
    """A rollout batch without a trainable rollout trains nothing; `algorithm=sft` has none and trains each time."""
    empty = StepBatch.of([], mask_truncated=False)
    for trains_on, num_updates in (("rollouts", 0), ("demonstrations", 1)):
        made = config(trains_on=trains_on)
        updater = Updater(policy, FakeRank(policy), made, given=[given])
        report = updater.update(empty, good(empty, made))
        assert updater.num_updates == num_updates
        assert set(report.given) == ({given.name} if num_updates else set())
        assert ("loss/policy" in report.metrics) is False
