"""The divergence from a teacher in an update: its gradient over its own tokens, however the work is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.distillation.divergence import divergence
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, flat_gradient
from tests.fixtures.models import VOCAB_SIZE, tiny_qwen3
from tests.fixtures.teachers import made_up_scores
from tests.unit.trainer.update.test_updater import close, config, gradient, random_logp, rollouts, scored, targets_of

TOP_K = 6
COEF = 0.7


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(tiny_qwen3(tied=True))


@pytest.fixture
def batch() -> StepBatch:
    plain = StepBatch.of(rollouts(), mask_truncated=False)
    return replace(plain, teacher=made_up_scores(plain, top_k=TOP_K, vocab_size=VOCAB_SIZE))


def expected_divergence(policy: Policy, batch: StepBatch, kind: str) -> Tensor:
    """Return the (N,) divergence by full logits, row by row."""
    table = []
    for row in batch.rows:
        logp = policy.causal_lm(torch.from_numpy(row.ids)[None]).logits[0, :-1].log_softmax(-1)
        table.append(logp[torch.from_numpy(row.loss_mask[1:])])
    teacher, table_NV = batch.teacher, torch.cat(table)
    assert teacher is not None
    rest = table_NV.scatter(1, teacher.top_ids_NE, -torch.inf).logsumexp(1, keepdim=True)
    return divergence(kind, torch.cat([table_NV.gather(1, teacher.top_ids_NE), rest], 1), teacher.top_logp_NE)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("token_budget", [100_000, 24])
def test_the_gradient_is_that_of_the_mean_over_the_kept_tokens(
    kind: str, token_budget: int, policy: Policy, batch: StepBatch
) -> None:
    made = config(
        teacher_divergence=kind, teacher_divergence_coef=COEF, teacher_divergence_top_k=TOP_K, reward_coef=0.0
    )
    made.token_budget = token_budget
    logprobs = scored(random_logp(batch, 1))
    targets, result, advantages_N = targets_of(batch, made, logprobs, mode="off", rejection={"token_k2": 0.1})
    keep_N = result.keep_T
    assert 0 < int(keep_N.sum()) < len(keep_N)
    assert not advantages_N.any(), "with reward_coef=0 only the divergence trains"
    found, metrics = gradient(policy, batch, made, targets)
    mean = expected_divergence(policy, batch, kind)[keep_N].mean()
    (COEF * mean).backward()
    mean = mean.detach()
    expected = flat_gradient(policy)
    policy.zero_grad()
    assert close(found, expected)
    assert metrics["loss/teacher"] == pytest.approx(float(mean), rel=1e-5)
    assert (metrics["loss/teacher_weight"], metrics["loss/teacher_tokens"]) == (COEF, int(keep_N.sum()))
    assert 0 < metrics["loss/teacher_rest"] < 1
    assert (metrics["perf/microbatches"] > 2) == (token_budget == 24)


def test_minibatches_have_their_own_counts(policy: Policy, batch: StepBatch) -> None:
    made = config(teacher_divergence="reverse", teacher_divergence_top_k=TOP_K, reward_coef=0.0, minibatches=2)
    targets, *_ = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")
    metrics = Updater(policy, FakeRank(policy), made).update(batch, targets).metrics
    assert metrics["loss/teacher_tokens"] == batch.layout.num_tokens / 2


def test_the_advantage_from_a_teacher_is_its_logprob_less_the_students(batch: StepBatch) -> None:
    made = config(teacher_coef=0.5, reward_coef=2.0)
    old_N = random_logp(batch, 1)
    _, _, advantages_N = targets_of(batch, made, scored(old_N), mode="off")
    assert batch.teacher is not None
    of_rewards_N = torch.tensor([-1.0, 1.0, -0.5, 2.0])[batch.rollout_N]
    torch.testing.assert_close(advantages_N, 2 * of_rewards_N + 0.5 * (batch.teacher.logp_N - old_N))


def test_rows_without_scores_of_a_teacher_are_refused(policy: Policy, batch: StepBatch) -> None:
    made = config(teacher_divergence="reverse", teacher_divergence_top_k=TOP_K)
    without = replace(batch, teacher=None)
    targets, *_ = targets_of(without, made, scored(random_logp(batch, 1)), mode="off")
    with pytest.raises(TrainingError, match="no scores of a teacher"):
        gradient(policy, without, made, targets)
