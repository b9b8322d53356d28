"""`Trainer.step` over hand-made collaborators: order of stages, report, numbers, and errors of engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.rollout.errors import EngineError, SyncError, TrainingError
from lockstep.rollout.records import DataRow, EngineCall, FinishReason, Rollout, RolloutStatus, VersionSpan
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.targets import Targets, rollout_targets
from lockstep.trainer.objective.correction import mismatch
from lockstep.trainer.objective.correction.mismatch import QUANTIZATION_K3
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.step import MAX_EMPTY_STEPS, Trainer
from lockstep.trainer.stopwatch import Stopwatch
from lockstep.trainer.update.updater import Updated
from tests.fixtures.distributed import FakeRank
from tests.fixtures.teachers import made_up_scores

UPDATES = 2
"""Optimizer steps of one rollout batch."""


def rollout(rollout_id: int, length: int, reward: float, *, version: int | None = None) -> Rollout:
    call = EngineCall(
        prompt_ids=(1, 2),
        sampled_ids=(5,) * length,
        sampled_logprobs=(-1.0,) * length,
        finish_reason=FinishReason.STOP,
        version_spans=() if version is None else (VersionSpan(version=version, start=0, end=length),),
    )
    return Rollout(rollout_id=rollout_id, group_id=0, calls=(call,), reward=reward)


class World:
    """Updater, rollout source, weight sync and reference of a step. All note their calls in `calls`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: str | None = None
        """First word of the call that fails."""
        self.rollouts = (rollout(0, 2, 1.0), rollout(1, 3, 0.0))
        self.num_updates = 4
        self.weight = 0.5
        """The one weight of the policy: logprobs are 1 below it."""
        self.targets: Targets
        self.scorer = self
        self.trainer: Trainer

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call.split()[0] == self.failing:
            raise SyncError("the engine is dead") if self.failing == "push" else EngineError("the engine is dead")

    # Source

    def collect(self, step: int, version: int, watch: Stopwatch, on_rollout: Callable[[Rollout], None]) -> Collected:
        self.note(f"collect step {step} version {version}")
        for found in self.rollouts:
            on_rollout(found)
        return Collected(rollouts=self.rollouts, trained=self.rollouts, metrics={"data/epoch": 0.25})

    # Updater and its scorer

    def score_with(self, batch: StepBatch, *, values: bool, routes: bool) -> tuple[Tensor, None, StepBatch]:
        self.note("score")
        assert not values
        assert not routes
        return torch.full((batch.layout.num_tokens,), self.weight - 1), None, batch

    def score_repacked(self, batch: StepBatch) -> Tensor:
        self.note("score again")
        return torch.full((batch.layout.num_tokens,), self.weight - 1.25)

    def update(self, batch: StepBatch, targets: Targets, stage: object) -> Updated:
        self.note("update")
        self.targets = targets
        seen_N = torch.full((batch.layout.num_tokens,), self.weight - 1)
        self.num_updates += UPDATES
        self.weight += 1.0
        return Updated(metrics={"policy/loss": 0.125}, logp_N=seen_N)

    # Weight sync

    def sleep(self) -> None:
        self.note("sleep")

    def push(self, version: int) -> World:
        self.note(f"push version {version} after {self.trainer.num_steps} steps")
        return self

    def metrics(self) -> dict[str, float]:
        return {"sync/version": float(self.num_updates)}

    def take_changes(self) -> dict[str, float]:
        return {}


class Reference:
    def __init__(self, world: World) -> None:
        self._world = world

    def score(self, batch: StepBatch) -> Tensor:
        self._world.note("score reference")
        return torch.full((batch.layout.num_tokens,), -0.75)


class Rank(FakeRank):
    """The first of two ranks, which notes what it shares."""

    def __init__(self, world: World) -> None:
        super().__init__(world_size=2)
        self._world = world

    def broadcast_bytes(self, payload: bytes) -> bytes:
        self._world.note("share")
        return payload


class Retries:
    """Recovery that repeats work once."""

    num_restarts = 0

    def __init__(self, world: World) -> None:
        self._world = world

    def attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except (EngineError, SyncError):
            self.num_restarts += 1
            self._world.failing = None
            return act()


class Teacher:
    def __init__(self, world: World) -> None:
        self._world = world

    measured: Mapping[str, float] = {}

    def scored(self, batch: StepBatch, rollouts: Sequence[Rollout], *, measures_floor: bool = False) -> StepBatch:
        self._world.note("score by the teacher")
        return replace(batch, teacher=made_up_scores(batch, top_k=2, vocab_size=9))


def trainer(world: World, *, retries: bool = False, is_quantized: bool = False) -> Trainer:
    config = Config(algorithm=AlgorithmConfig(advantage="rloo", minibatches=UPDATES, kl_coef=0.1))
    config.correction.high = 1.5
    world.trainer = Trainer(
        config,
        distributed=Rank(world),
        updater=world,  # type: ignore[arg-type]
        rollouts=world,  # type: ignore[arg-type]
        reference=Reference(world),  # type: ignore[arg-type]
        sync=world,  # type: ignore[arg-type]
        recovery=Retries(world) if retries else None,  # type: ignore[arg-type]
        is_quantized=is_quantized,
    )
    return world.trainer


def noted(world: World, call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def with_note(*arguments: Any, **settings: Any) -> Any:
        world.note(call)
        return function(*arguments, **settings)

    return with_note


def test_the_stages_of_a_step_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(StepCorrection, "of", noted(world, "correct", StepCorrection.of))
    monkeypatch.setattr("lockstep.trainer.step.rollout_targets", noted(world, "assign credit", rollout_targets))
    trainer(world).step()
    assert world.calls == [
        "collect step 0 version 4",
        "share",
        "sleep",
        "score",
        "score again",
        "score reference",
        "correct",
        "assign credit",
        "update",
        "push version 6 after 1 steps",
    ]


def test_ranks_share_the_statistics_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def spread(rank: Rank, count: int, work: Callable[[int], Any]) -> list[Any]:
        counts.append(count)
        return list(map(work, range(count)))

    monkeypatch.setattr(mismatch, "PART_TOKENS", 1)
    monkeypatch.setattr(Rank, "spread", spread)
    trainer(world := World()).step()
    assert counts == [len(world.rollouts)] == [2]


def test_a_teacher_scores_the_rows_before_they_are_shared() -> None:
    world = World()
    made = trainer(world)
    made._teacher = Teacher(world)  # type: ignore[assignment]
    report = made.step()
    assert world.calls[1:4] == ["score by the teacher", "share", "sleep"], "the teacher may be in engines that sleep"
    assert report.batch.teacher is not None
    d_N = report.logp_train_N - report.batch.teacher.logp_N
    assert report.metrics["teacher/kl"] == pytest.approx(float(d_N.mean()))
    assert report.metrics["time/teacher"] >= 0


class Averaged:
    """The weights of a teacher that averages the policy's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.measured = {"teacher/canary_abs_diff": 0.125}

    def advance(self) -> None:
        self._world.note("average")

    def push(self, version: int) -> None:
        self._world.note(f"send the average {version}")


def test_an_average_advances_once_per_step_with_updates_and_is_sent_after_the_policy() -> None:
    world = World()
    made = trainer(world)
    made._averaged = Averaged(world)  # type: ignore[assignment]
    made.push_weights()
    report = made.step()
    assert [call for call in world.calls if "average" in call or "push" in call] == [
        "push version 4 after 0 steps",
        "send the average 4",
        "average",
        "push version 6 after 1 steps",
        "send the average 6",
    ]
    assert report.metrics["teacher/canary_abs_diff"] == 0.125


def test_a_step_whose_updates_are_all_skipped_leaves_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    made = trainer(world)
    made._averaged = Averaged(world)  # type: ignore[assignment]
    monkeypatch.setattr("tests.unit.trainer.test_step.UPDATES", 0)
    made.step()
    assert "average" not in world.calls
    assert "send the average 4" in world.calls


def test_the_update_gets_advantages_weights_and_logprobs_of_the_step() -> None:
    world = World()
    trainer(world).step()
    assert world.targets.advantages_N.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0]
    assert world.targets.old.logp_N is not None
    assert world.targets.old.logp_N.tolist() == [-0.5] * 5
    assert world.targets.correction.weights_N is not None
    assert world.targets.correction.weights_N.tolist() == [1.5] * 5, "exp(-0.5 + 1) is truncated"
    assert world.targets.ref_logp_N is not None
    assert world.targets.ref_logp_N.tolist() == [-0.75] * 5


def test_the_report_holds_the_step() -> None:
    world, arrived = World(), []
    report = trainer(world).step(arrived.append)
    assert isinstance(report, StepReport)
    assert report.update == 4 + UPDATES
    assert report.rollouts == world.rollouts == tuple(arrived)
    assert report.batch.rollout_ids.tolist() == [0, 1]
    assert report.logp_train_N.tolist() == [-0.5] * 5, "logprobs before the update"
    assert report.advantages_N.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0]
    assert report.weights_N.tolist() == [1.5] * 5
    expected = {
        "rollout/batch": 1.0,
        "rollout/engine_restarts": 0.0,
        "reward/mean": 0.5,
        "data/epoch": 0.25,
        "policy/loss": 0.125,
        "policy/ref_kl": 0.25,
        "sync/version": 6.0,
        "rollout_correction/kl": -0.5,
        "rollout_correction/noise_floor_kl": -0.25,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected)
    assert {"time/score", "time/update", "time/sync", "time/step"} <= report.metrics.keys()
    assert all(math.isfinite(value) for value in report.metrics.values())


def test_quantization_is_measured_once_and_with_tokens_of_the_trained_version_alone() -> None:
    world, found = World(), []
    made = trainer(world, is_quantized=True)
    for version in (3, made.version + UPDATES, made.version):  # stale, fresh, stale
        world.rollouts = (rollout(0, 2, 1.0, version=version), rollout(1, 3, 0.0, version=version))
        found.append(made.step().metrics)

    assert QUANTIZATION_K3 not in found[0], "its difference is staleness, too"
    log_ratio = 0.5 + 1.0  # the policy's 0.5 after one update, and the engine's -1
    assert found[1][QUANTIZATION_K3] == pytest.approx(math.exp(log_ratio) - 1 - log_ratio)
    assert found[2][QUANTIZATION_K3] == found[1][QUANTIZATION_K3]
    assert QUANTIZATION_K3 not in trainer(World()).step().metrics


def test_a_step_counts_when_its_batch_is_trained_and_the_sync_sends_the_new_version() -> None:
    world = World()
    made = trainer(world)
    made.step()
    assert (made.num_steps, made.version) == (1, 6)
    made.step()
    assert (made.num_steps, made.version) == (2, 8)
    with_numbers = [call for call in world.calls if "version" in call]
    assert with_numbers == [
        "collect step 0 version 4",
        "push version 6 after 1 steps",
        "collect step 1 version 6",
        "push version 8 after 2 steps",
    ]


def test_a_step_whose_sync_fails_counts_because_its_batch_is_trained() -> None:
    world = World()
    world.failing = "push"
    made = trainer(world)
    with pytest.raises(SyncError):
        made.step()
    assert (made.num_steps, made.version) == (1, 6)


@pytest.mark.parametrize("stage", ["collect", "sleep"])
def test_an_engine_error_before_the_update_leaves_weights_and_numbers_alone(stage: str) -> None:
    world = World()
    world.failing = stage
    made = trainer(world)
    with pytest.raises(EngineError, match="the engine is dead"):
        made.step()
    assert (world.weight, made.version, made.num_steps) == (0.5, 4, 0)
    assert made.noise_floor == {}
    world.failing = None
    made.step()
    assert "collect step 0 version 4" in world.calls[1:], "the same step is collected again"


@pytest.mark.parametrize("stage", ["collect", "sleep", "push"])
def test_a_recovered_engine_repeats_its_stage_but_not_the_update(stage: str) -> None:
    world = World()
    world.failing = stage
    report = trainer(world, retries=True).step()
    stages = [call.split()[0] for call in world.calls]
    assert stages.count(stage) == 2
    assert stages.count("update") == 1
    assert report.metrics["rollout/engine_restarts"] == 1


def test_a_first_step_whose_rollouts_all_fail_alike_ends_the_run() -> None:
    world = World()
    good = world.rollouts
    rows = [DataRow(), DataRow()]
    for number, row in enumerate(rows):
        row.place = f"row {number} of mine.jsonl"
    failed = [
        replace(found, status=RolloutStatus.FAILED, error="KeyError: 'a'", example=row)
        for found, row in zip(good, rows, strict=True)
    ]
    world.rollouts = (failed[0], replace(failed[1], error="KeyError: 'b'"))
    made = trainer(world)
    world.num_updates = 0
    made.step()
    world.rollouts, world.num_updates = tuple(failed), 1
    made.step()
    world.num_updates = 0
    with pytest.raises(
        TrainingError, match=r"all rollouts failed alike \(environment \d+\); the first failure: KeyError: 'a' \(row 0"
    ):
        made.step()


def test_repeated_steps_without_a_trainable_rollout_end_the_run() -> None:
    world = World()
    good = world.rollouts
    world.rollouts = tuple(replace(found, status=RolloutStatus.FAILED, error="KeyError") for found in good)
    made = trainer(world)
    for _ in range(2):
        for _ in range(MAX_EMPTY_STEPS - 1):
            made.step()
        failed, world.rollouts = world.rollouts, good
        made.step()
        world.rollouts = failed
    for _ in range(MAX_EMPTY_STEPS - 1):
        made.step()
    with pytest.raises(TrainingError, match=r"5 steps in a row .* \(environment \d+\); the first failure: KeyError"):
        made.step()
