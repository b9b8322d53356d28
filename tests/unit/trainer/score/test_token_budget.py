"""When memory runs out: the budget is halved and reported, and the gradient does not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lockstep.rollout.errors import TrainingError
from lockstep.rollout.system.device_memory import is_out_of_memory
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.score.token_budget import TokenBudget
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.unit.trainer.update.test_updater import (
    batch,
    config,
    gradient,
    policy,
    random_logp,
    scored,
    targets_of,
)

__all__ = ["batch", "policy"]  # fixtures

LONGEST_ROW = 24
UPDATES = {"grpo": {}, "gspo": {"loss": "gspo", "normalizer": "grpo"}}


@contextmanager
def room_for(policy: Policy, tokens: int, *, in_backward: bool) -> Iterator[list[int]]:
    """Raise out-of-memory errors for packs with more tokens; yield the sizes of all packs."""
    seen: list[int] = []

    def too_large(size: int) -> None:
        if size > tokens:
            raise torch.OutOfMemoryError(f"injected: no room for {size} tokens")

    def check_forward(module, arguments) -> None:
        seen.append(arguments[0].num_tokens)
        if not in_backward:
            too_large(seen[-1])

    def check_backward(module, gradients) -> None:
        if in_backward:
            too_large(seen[-1])

    hooks = [
        policy.register_forward_pre_hook(check_forward),
        policy.register_full_backward_pre_hook(check_backward),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def made_targets(batch: StepBatch, made) -> Targets:
    return targets_of(batch, made, scored(random_logp(batch, 1)), mode="token_truncate")[0]


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_repeated_step_gives_the_gradient_of_a_step_with_enough_memory(
    name: str, in_backward: bool, policy: Policy, batch: StepBatch
) -> None:
    made = config(**UPDATES[name])
    targets = made_targets(batch, made)
    expected, plain = gradient(policy, batch, made, targets)
    policy.train()
    with room_for(policy, 30, in_backward=in_backward) as packs:
        found, metrics = gradient(policy, batch, made, targets)
    assert max(packs) > 30, "memory never ran out, so nothing was tested"
    assert packs[-1] <= 30
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert metrics["policy/loss"] == pytest.approx(plain["policy/loss"], rel=1e-5)
    assert metrics["perf/token_budget"] <= 30
    assert metrics["perf/microbatches"] > plain["perf/microbatches"]


def test_gradients_of_a_failed_attempt_are_cleared(policy: Policy, batch: StepBatch) -> None:
    """The second pack fails in the first attempt: the gradient of the first one must not be counted twice."""
    made = config()
    made.token_budget = 40
    targets = made_targets(batch, made)
    expected, _ = gradient(policy, batch, made, targets)
    calls = 0

    def fail_once(module, arguments) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("injected")

    with policy.register_forward_pre_hook(fail_once):
        found, _ = gradient(policy, batch, made, targets)
    assert calls > 2
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_halved_budget_is_reported_with_its_override_and_stays(policy: Policy, batch: StepBatch) -> None:
    made = config()
    updater = Updater(policy, FakeRank(policy), made)
    said: list[str] = []
    updater.scorer.budget.warn = said.append
    with room_for(policy, 40, in_backward=False) as packs:
        updater.update(batch, made_targets(batch, made))
        first = list(packs)
        updater.update(batch, made_targets(batch, made))
    assert len(said) == 1
    assert f"set token_budget={updater.scorer.budget.tokens} " in said[0]
    assert max(packs[len(first) :]) <= 40


def test_scoring_halves_the_budget_too(policy: Policy, batch: StepBatch) -> None:
    scorer = Scorer(policy, FakeRank(policy), temperature=1.0, token_budget=4096)
    expected = scorer.score(batch)
    with room_for(policy, 30, in_backward=False):
        found = scorer.score(batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert LONGEST_ROW <= scorer.budget.tokens <= 30


def test_a_single_row_that_does_not_fit_ends_the_run_with_overrides(policy: Policy, batch: StepBatch) -> None:
    made = config()
    with (
        room_for(policy, 20, in_backward=False),
        pytest.raises(TrainingError, match=r"packs of one row each, of up to 24 tokens.*gradient_checkpointing=true"),
    ):
        gradient(policy, batch, made, made_targets(batch, made))


def test_all_ranks_repeat_the_step_if_one_runs_out_of_memory() -> None:
    def tried(rank: FakeRank) -> list[int]:
        budget = TokenBudget(100, rank)
        budget.warn = lambda sentence: None
        tokens_tried: list[int] = []

        def run() -> str:
            if rank.rank == 1 and len(tokens_tried) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return "done"

        def work(tokens: int) -> str:
            tokens_tried.append(tokens)
            return budget.agreed(run)

        assert budget.attempt(work, [10, 30, 60]) == "done"
        return tokens_tried

    assert on_ranks(2, tried) == [[100, 60], [100, 60]]


def test_under_deepspeed_the_run_ends_with_an_override(policy: Policy) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nlong story")

    budget = TokenBudget(100, FakeRank(policy, zero_stage=2))
    with pytest.raises(TrainingError, match=r"Tried to allocate 2 GiB\. .*set token_budget=50 and resume=auto"):
        budget.attempt(lambda tokens: budget.agreed(full), [10, 20])


def test_other_errors_are_raised_unchanged(policy: Policy) -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not fit")

    budget = TokenBudget(100, FakeRank(policy))
    with pytest.raises(RuntimeError, match="shapes"):
        budget.attempt(lambda tokens: budget.agreed(broken), [10])


def test_the_error_of_the_cpu_allocator_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
