"""Skipped optimizer steps, spikes of the gradient norm, and dumps of batches."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from lockstep.rollout.errors import DataError, TrainingError
from lockstep.trainer.batch.batch_bytes import decode, encode
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.advantages.critic import Credit
from lockstep.trainer.update.batch_dumps import read_dump, write_dump
from lockstep.trainer.update.update_guard import MIN_NORMS, Attempt, UpdateGuard
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.unit.trainer.update.test_updater import batch, config, policy, random_logp, scored, targets_of  # noqa: F401


def guard(**settings: object) -> UpdateGuard:
    return UpdateGuard(OptimizerConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_sums_and_norms_are_skipped_and_named(value: float) -> None:
    judge = guard()
    found = judge.judge({"policy/loss": 1.0, "policy/entropy": value}, 1.0)
    assert found.is_skipped
    assert "policy/entropy" in str(found.reason)
    assert "policy/loss" not in str(found.reason)
    assert judge.judge({"policy/loss": 1.0}, value).reason == "the gradient norm is not finite"
    assert (judge.skipped, judge.in_a_row, list(judge.norms)) == (2, 2, [])
    assert not judge.judge({"policy/loss": 1.0}, 1.0).is_skipped
    assert (judge.skipped, judge.in_a_row, list(judge.norms)) == (2, 0, [1.0])


def test_repeated_skips_end_the_run() -> None:
    judge = guard(max_skipped_updates=2)
    for _ in range(3):
        bad = judge.judge({}, math.nan)
        judge.raise_after_repeated_skips(7, bad)
        judge.judge({}, 1.0)
    bad = judge.judge({}, math.nan)
    judge.raise_after_repeated_skips(7, bad)
    bad = judge.judge({}, math.nan)
    with pytest.raises(TrainingError, match=r"update 7 was skipped 2 times in a row.*optimizer\.lr"):
        judge.raise_after_repeated_skips(7, bad)


def test_a_spike_is_judged_against_the_median_of_updates_that_were_made() -> None:
    usual = [1.0, 1.2, 0.8, 1.1, 0.9, 1.0, 5.0, 1.0]
    for policy_name, skipped in (("off", False), ("skip", True), ("dump", False)):
        judge = guard(spike=policy_name, spike_factor=4.0)
        assert not any(judge.judge({}, norm).reason for norm in usual[: MIN_NORMS - 1])
        assert judge.judge({}, 100.0).reason is None, "too few norms for a median"
        judge.norms.clear()
        judge.norms.extend(usual)
        assert judge.judge({}, 3.9).reason is None
        found = judge.judge({}, 4.1)
        assert (found.reason is not None) == (policy_name != "off")
        assert found.is_skipped == skipped
        assert (4.1 in judge.norms) != skipped, "norms of skipped updates are not in the median"


def test_the_median_is_taken_over_a_window() -> None:
    judge = guard(spike="skip", spike_window=MIN_NORMS)
    judge.norms.extend([1.0] * MIN_NORMS + [100.0] * MIN_NORMS)
    assert not judge.judge({}, 900.0).is_skipped


def targets(batch: StepBatch) -> Targets:  # noqa: F811
    return targets_of(batch, Config(), scored(random_logp(batch, 1), random_logp(batch, 2)), mode="off")[0]


def test_a_non_finite_update_is_counted_and_dumped_but_not_made(batch: StepBatch, policy: Policy) -> None:  # noqa: F811
    distributed = FakeRank(policy)
    updater = Updater(policy, distributed, config())
    dumped: list[Attempt] = []
    updater.dump = lambda attempt, *rows: dumped.append(attempt)
    good = targets(batch)
    broken = replace(good, advantages_N=torch.full_like(good.advantages_N, math.nan))
    metrics = updater.update(batch, broken).metrics
    assert (updater.num_updates, len(distributed.gradient)) == (0, 0)
    assert metrics["health/skipped_updates"] == 1
    assert math.isnan(metrics["policy/loss"])
    assert [attempt.name for attempt in dumped] == ["update-000001-try-1"]
    metrics = updater.update(batch, good).metrics
    assert updater.num_updates == 1
    assert len(distributed.gradient) > 0
    assert math.isfinite(metrics["policy/loss"])
    assert metrics["health/skipped_updates"] == 1


def test_a_batch_survives_serialization(batch: StepBatch) -> None:  # noqa: F811
    again = decode(encode(batch))
    assert encode(again) == encode(batch)
    assert torch.equal(again.sampling_logprobs_N, batch.sampling_logprobs_N)


ATTEMPT = Attempt(
    update=3, number=1, rollouts=(0, 2), lr=1e-3, is_first=True, reason="x", sums={"policy/loss": math.nan, "b": 1.5},
    grad_norm=math.inf,
)  # fmt: skip


def test_a_dump_is_read_back_unchanged(batch: StepBatch, tmp_path) -> None:  # noqa: F811
    given = targets(batch)
    some = torch.zeros(batch.layout.num_tokens)
    credit = Credit(
        rewards_N=some, values_N=some, rollout_N=batch.rollout_N, turns_N=batch.turns_N, keep_N=given.keep_N
    )
    for of in (given, replace(given, ref_logp_N=None, credit=credit, returns_N=some)):
        path = write_dump(tmp_path, ATTEMPT, batch, of)
        attempt, found, found_targets = read_dump(path, CorrectionConfig())
        assert path.name == "update-000003-try-1"
        assert encode(found) == encode(batch)
        assert (attempt.rollouts, attempt.lr, attempt.grad_norm) == ((0, 2), 1e-3, math.inf)
        assert math.isnan(attempt.sums["policy/loss"])
        assert torch.equal(found_targets.advantages_N, of.advantages_N)
        assert (found_targets.ref_logp_N is None) == (of.ref_logp_N is None)
        assert (found_targets.credit is None) == (of.credit is None)
    assert not any(file.suffix in (".pt", ".pkl", ".bin") for file in tmp_path.rglob("*"))


@pytest.mark.parametrize("file", ["attempt.json", "batch.safetensors", "targets.safetensors"])
def test_a_damaged_dump_is_refused(batch: StepBatch, tmp_path, file: str) -> None:  # noqa: F811
    path = write_dump(tmp_path, ATTEMPT, batch, targets(batch))
    for content in (b"", b"{}", b"[]", json.dumps({"sums": 3}).encode(), b"\x80\x04cos\nsystem\n."):
        (path / file).write_bytes(content)
        with pytest.raises(DataError, match="not a dumped batch"):
            read_dump(path, CorrectionConfig())
