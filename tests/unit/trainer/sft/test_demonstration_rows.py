"""Demonstrations as components: their order, weights and rows on every rank, and the divergence from a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.distillation.divergence import divergence
from lockstep.trainer.sft.demonstration_rows import Demonstrations, refuse_long
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, flat_gradient, on_ranks
from tests.fixtures.models import VOCAB_SIZE, tiny_qwen3
from tests.fixtures.teachers import made_up_scores
from tests.integration.workers.component_gradients import fixed_demonstrations

TOP_K = 6


def config(rows_per_update: int = 2, trains_on: str = "rollouts") -> Config:
    made = Config(algorithm=AlgorithmConfig(trains_on=trains_on), updates=10)
    made.demonstrations.path, made.demonstrations.rows_per_update = "given", rows_per_update
    return made


def ids(batch: StepBatch) -> list[list[int]]:
    return [row.ids.tolist() for row in batch.rows]


def test_each_epoch_takes_every_conversation_once_and_a_resumed_run_goes_on_with_the_next() -> None:
    data = fixed_demonstrations()
    whole = Demonstrations(config(), FakeRank(), [data])
    drawn = [ids(whole.draw()) for _ in range(5)]
    epochs = [one for step in drawn for one in step]
    every = sorted(one.ids.tolist() for (one,) in data)
    assert sorted(epochs[:5]) == sorted(epochs[5:]) == every
    assert epochs[:5] != epochs[5:], "each epoch has an order of its own"
    assert whole.metrics() == {"data/demonstrations_epoch": 2.0}
    resumed = Demonstrations(config(), FakeRank(), [data])
    resumed.cursor = 2 * 2
    assert [ids(resumed.draw()) for _ in range(3)] == drawn[2:]


def test_every_rank_gets_the_rows_of_rank_0() -> None:
    def draw(rank: FakeRank) -> tuple[dict[int, list[int]], int]:
        data = [fixed_demonstrations()] if rank.is_main else None
        demonstrations = Demonstrations(config(), rank, data)
        demonstrations.draw()
        batch = demonstrations.draw()
        share = batch.share(lambda: plan(batch.row_lengths.tolist(), num_ranks=2, token_budget=1000), rank)
        rows = range(len(batch.rows)) if rank.is_main else [row for pack in share.packs for row in pack]
        return {row: batch.rows[row].ids.tolist() for row in rows}, demonstrations.cursor

    (all_rows, cursor), (own_rows, other_cursor) = on_ranks(2, draw)
    assert cursor == other_cursor == 4
    assert 0 < len(own_rows) < len(all_rows)
    assert own_rows == {row: all_rows[row] for row in own_rows}


@pytest.mark.parametrize(
    ("trains_on", "schedule", "weights"),
    [
        ("rollouts", "constant", [0.4, 0.4, 0.4]),
        ("rollouts", "linear", [0.4, 0.25, 0.13]),
        ("rollouts", "cosine", [0.4, 0.25, 0.1 + 0.3 * (1 + np.cos(0.9 * np.pi)) / 2]),
        ("demonstrations", "constant", [1.0, 1.0, 1.0]),
    ],
)
def test_the_weight_follows_its_schedule_over_the_updates(trains_on: str, schedule: str, weights: list[float]) -> None:
    made = config(trains_on=trains_on)
    settings = made.demonstrations
    settings.weight, settings.final_weight, settings.weight_schedule = 0.4, 0.1, schedule
    demonstrations = Demonstrations(made, FakeRank(), [fixed_demonstrations()])
    batch = demonstrations.draw()
    found = [demonstrations.token_set(batch, update=update, routers=None).terms[0].weight for update in (0, 5, 9)]
    assert found == pytest.approx(weights)


class MadeUpTeacher:
    """A teacher whose scores differ in every step."""

    def __init__(self, distributed: FakeRank) -> None:
        self._distributed = distributed
        self.measured = {"teacher/noise_floor_kl": 0.0}
        self.num_scored = 0

    def scored(self, batch: StepBatch, rollouts: Sequence[Rollout]) -> StepBatch:
        self.num_scored += 1
        if not self._distributed.is_main:
            return batch
        scores = made_up_scores(batch, top_k=TOP_K, vocab_size=VOCAB_SIZE, seed=self.num_scored)
        return replace(batch, teacher=scores)


def taught(rank: FakeRank, **settings: Any) -> Demonstrations:
    made = config(rows_per_update=4, trains_on=settings.pop("trains_on", "demonstrations"))
    made.demonstrations = replace(made.demonstrations, teacher_divergence="forward", **settings)
    data = [fixed_demonstrations()] if rank.is_main else None
    return Demonstrations(made, rank, data, teacher=MadeUpTeacher(rank))  # type: ignore[arg-type]


def test_every_rank_gets_the_scores_of_the_teacher_with_the_rows() -> None:
    def draw(rank: FakeRank) -> dict[int, list[Any]]:
        demonstrations = taught(rank)
        demonstrations.draw()
        batch = demonstrations.draw()
        share = batch.share(lambda: plan(batch.row_lengths.tolist(), num_ranks=2, token_budget=1000), rank)
        assert batch.teacher is not None
        scores, start = batch.teacher, batch.layout.token_start
        return {
            row: [one[start[row] : start[row + 1]].tolist() for one in (scores.logp, scores.top_ids, scores.top_logp)]
            for row in (range(len(batch.rows)) if rank.is_main else [row for pack in share.packs for row in pack])
        }

    of_all_rows, of_own_rows = on_ranks(2, draw)
    assert 0 < len(of_own_rows) < len(of_all_rows)
    assert of_own_rows == {row: of_all_rows[row] for row in of_own_rows}
    assert all(len(logp) == len(top_ids) > 0 for logp, top_ids, _ in of_all_rows.values())


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_the_gradient_is_that_of_both_means_over_the_tokens_of_the_demonstrations(kind: str) -> None:
    """Computed from full logits, row by row."""
    torch.manual_seed(0)
    policy, share = Policy(tiny_qwen3(tied=True)), 0.7
    rank = FakeRank(policy)
    demonstrations = taught(rank, teacher_share=share)
    settings = demonstrations._config
    settings.demonstrations.teacher_divergence, settings.token_budget = kind, 64
    batch = demonstrations.draw()
    assert batch.teacher is not None
    updater = Updater(policy, rank, settings, given=[demonstrations])
    metrics = updater.optimizer_step(None, {"demonstrations": batch}, lr=0.0)
    found = rank.gradient.clone()
    policy.zero_grad()
    logp_NV = torch.cat(
        [
            policy.causal_lm(torch.from_numpy(row.ids)[None]).logits[0, :-1].log_softmax(-1)[row.loss_mask[1:]]
            for row in batch.rows
        ]
    )
    sampled_N = torch.cat([torch.from_numpy(row.ids[row.loss_mask]) for row in batch.rows])
    cross_entropy = -logp_NV.gather(1, sampled_N[:, None]).mean()
    top_ids_NE = batch.teacher.top_ids_NE
    rest_N = logp_NV.scatter(1, top_ids_NE, -torch.inf).logsumexp(1, keepdim=True)
    mean = divergence(kind, torch.cat([logp_NV.gather(1, top_ids_NE), rest_N], 1), batch.teacher.top_logp_NE).mean()
    ((1 - share) * cross_entropy + share * mean).backward()
    torch.testing.assert_close(found, flat_gradient(policy), atol=2e-6, rtol=1e-4)
    assert metrics["loss/demonstrations"] == pytest.approx(float(cross_entropy), rel=1e-5)
    assert metrics["loss/demonstrations_teacher"] == pytest.approx(float(mean), rel=1e-5)
    assert metrics["loss/demonstrations_weight"] == pytest.approx(1 - share)
    assert metrics["loss/demonstrations_teacher_weight"] == share
    assert metrics["loss/demonstrations_teacher_tokens"] == metrics["loss/demonstrations_tokens"] == len(sampled_N)
    assert metrics["perf/microbatches"] > 1


def test_the_time_of_the_scores_is_that_of_the_teacher() -> None:
    named: list[str] = []

    def stage(name: str) -> AbstractContextManager[None]:
        named.append(name)
        return nullcontext()

    taught(FakeRank()).draw(stage)
    assert named == ["data", "teacher", "data"]


def test_beside_rollouts_both_losses_follow_the_schedule() -> None:
    demonstrations = taught(FakeRank(), trains_on="rollouts", weight=0.4, weight_schedule="linear", teacher_share=0.75)
    batch = demonstrations.draw()
    terms = [demonstrations.token_set(batch, update=update, routers=None).terms for update in (0, 5)]
    weights = [[term.weight for term in both] for both in terms]
    assert weights == [pytest.approx([0.1, 0.3]), pytest.approx([0.05, 0.15])]


def test_a_row_that_the_teacher_has_no_context_for_is_refused() -> None:
    made = config()
    data = [fixed_demonstrations()]
    longest = max(len(row) for (row,) in data[0])

    def refuse() -> None:
        refuse_long(data, made.demonstrations, made.rollout.max_model_len if made.has_teacher else None)

    made.rollout.max_model_len = longest - 1
    refuse()  # without a teacher, nothing limits it
    made.demonstrations.teacher_divergence, made.teacher.source = "jsd", "saved"
    refuse()  # nor by scores that were saved
    made.teacher = TeacherConfig(path="t")
    with pytest.raises(
        DataError, match=f"has {longest} tokens, the teacher scores {longest - 1}; set rollout.max_model"
    ):
        refuse()
    made.rollout.max_model_len = longest
    refuse()
