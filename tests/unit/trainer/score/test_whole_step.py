"""Values of the whole step: which logprobs they come from, over which tokens, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.credit.old_policy import FromEngine, FromUpdate, OldPolicy, Recomputed
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.declare import PolicyLoss
from lockstep.trainer.objective.losses.inputs import StepInputs
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.score.whole_step import ConfiguredLoss
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.unit.trainer.update.test_updater import (
    batch,
    close,
    config,
    expected_gradient,
    gradient,
    policy,
    random_logp,
    scored,
    targets_of,
)

__all__ = ["batch", "policy"]  # fixtures


def seen(
    policy: Policy, batch: StepBatch, old: OldPolicy, *, rows: list[int], needs_entropy: bool = False, **call: Any
) -> tuple[StepInputs, dict[str, Tensor], int]:
    """Return the inputs of the function, the values, and the number of forward passes of `policy`."""
    found: list[StepInputs] = []

    def function(inputs: StepInputs) -> dict[str, Tensor]:
        found.append(inputs)
        return {"one": torch.ones_like(inputs.logp_N)}

    loss = PolicyLoss(function=lambda inputs: None, arguments={}, step_values=function, needs_entropy=needs_entropy)
    made = config()
    targets, _, _ = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off", rejection={"token_k2": 0.1})
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    handle = policy.register_forward_hook(count)
    scorer = Updater(policy, FakeRank(policy), made).scorer
    values = ConfiguredLoss(loss, made.algorithm, seed=made.seed).step_values(
        scorer, batch, replace(targets, old=old), rows, **{"is_first": True, "update": 5} | call
    )
    handle.remove()
    return found[0], dict(values), passes


def kept(batch: StepBatch, rows: list[int]) -> Tensor:
    targets, weights, _ = targets_of(
        batch, config(), scored(random_logp(batch, 1)), mode="off", rejection={"token_k2": 0.1}
    )
    assert 0 < int(weights.keep_T.sum()) < len(weights.keep_T)
    return targets.keep_N & torch.isin(batch.rollout_N, torch.tensor(rows))


def test_only_tokens_of_the_loss_mask_and_of_the_step_are_compared(policy: Policy, batch: StepBatch) -> None:
    rows = [1, 3]  # one row per rollout
    old_N = random_logp(batch, 2)
    inputs, values, _ = seen(policy, batch, Recomputed(old_N), rows=rows)
    keep_N = kept(batch, rows)
    assert torch.equal(values["one"], keep_N.float())
    assert torch.equal(inputs.rollout_N, batch.rollout_N[keep_N])
    assert torch.equal(inputs.old_logp_N, old_N[keep_N])
    assert torch.equal(inputs.sampling_logp_N, batch.sampling_logprobs_N.float()[keep_N])


def test_the_first_update_takes_the_recomputed_logprobs_and_later_ones_score(policy: Policy, batch: StepBatch) -> None:
    rows, old_N = [0, 1, 2, 3], random_logp(batch, 2)
    scored_N = Updater(policy, FakeRank(policy), config()).scorer.score(batch)
    keep_N = kept(batch, rows)
    first, _, passes = seen(policy, batch, Recomputed(old_N), rows=rows)
    assert (passes, torch.equal(first.logp_N, old_N[keep_N])) == (0, True)
    for old, call in ((Recomputed(old_N), {"is_first": False}), (FromEngine(old_N), {})):
        later, _, passes = seen(policy, batch, old, rows=rows, **call)
        assert passes == 1
        torch.testing.assert_close(later.logp_N, scored_N[keep_N])
        assert torch.equal(later.old_logp_N, old_N[keep_N])
    own, _, passes = seen(policy, batch, FromUpdate(), rows=rows)
    assert passes == 1
    assert torch.equal(own.logp_N, own.old_logp_N)


def test_entropies_are_those_of_the_plain_logits(policy: Policy, batch: StepBatch) -> None:
    rows = [0, 1, 2, 3]
    inputs, _, passes = seen(policy, batch, Recomputed(random_logp(batch, 2)), rows=rows, needs_entropy=True)
    assert passes == 1
    expected = []
    for row in batch.rows:
        with torch.no_grad():
            logp = policy.causal_lm(torch.from_numpy(row.ids)[None]).logits[0, :-1].log_softmax(-1)
        expected.append(-(logp.exp() * logp).sum(-1)[torch.from_numpy(row.loss_mask[1:])])
    assert inputs.entropy_N is not None
    torch.testing.assert_close(inputs.entropy_N, torch.cat(expected)[kept(batch, rows)], rtol=0, atol=1e-5)


def test_the_seed_changes_with_the_update_and_not_with_the_rank(policy: Policy, batch: StepBatch) -> None:
    old = Recomputed(random_logp(batch, 2))
    seeds = [seen(policy, batch, old, rows=[0, 1], update=update)[0].seed for update in (5, 5, 6)]
    assert seeds[0] == seeds[1] != seeds[2]


def test_two_ranks_see_the_same_inputs_as_one(policy: Policy, batch: StepBatch) -> None:
    rows = [0, 1, 2, 3]
    found: dict[int, StepInputs] = {}
    targets, _, _ = targets_of(batch, config(), scored(random_logp(batch, 1)), mode="off")

    def work(rank: FakeRank) -> StepInputs:
        def function(inputs: StepInputs) -> dict[str, Tensor]:
            found[rank.rank] = inputs
            return {}

        loss = PolicyLoss(function=lambda inputs: None, arguments={}, step_values=function, needs_entropy=True)
        scorer = Scorer(policy, rank, temperature=1.0, token_budget=20)
        ConfiguredLoss(loss, config().algorithm, seed=0).step_values(
            scorer, batch, targets, rows, is_first=True, update=0
        )
        return found[rank.rank]

    first, second = on_ranks(2, work)
    (alone,) = on_ranks(1, work)
    for name in ("logp_N", "entropy_N", "advantages_N", "sampling_logp_N"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
        torch.testing.assert_close(getattr(first, name), getattr(alone, name), rtol=0, atol=1e-5)
    assert first.seed == second.seed == alone.seed


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (lambda inputs: inputs.logp_N[1:], r"m has shape \(\d+,\), expected \(\d+,\), one entry per trained token"),
        (lambda inputs: inputs.logp_N.log(), "m is not finite for .* although their logprobs are finite"),
    ],
)
def test_values_of_another_length_or_not_finite_are_refused(
    values: Any, problem: str, policy: Policy, batch: StepBatch
) -> None:
    loss = PolicyLoss(function=lambda inputs: None, arguments={}, step_values=lambda inputs: {"m": values(inputs)})
    targets, _, _ = targets_of(batch, config(), scored(random_logp(batch, 1)), mode="off")
    scorer = Updater(policy, FakeRank(policy), config()).scorer
    with pytest.raises(TrainingError, match=f"algorithm.loss=reinforce: {problem}"):
        ConfiguredLoss(loss, config().algorithm, seed=0).step_values(
            scorer, batch, targets, [0], is_first=True, update=0
        )


def test_logprobs_that_are_not_finite_reach_the_guard_and_not_an_error(policy: Policy, batch: StepBatch) -> None:
    made = config(loss="vespo")
    targets, _, _ = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")
    updater = Updater(policy, FakeRank(policy), made)
    updater.update(batch, replace(targets, old=Recomputed(torch.full((42,), torch.nan))))
    assert updater.guard.skipped == 1


def m2po_loss(batch: StepBatch, targets: Targets, chosen: Tensor, budget: float) -> Any:
    """Return M2PO's loss of (N,) logprobs on the chosen tokens, by sorting in a loop."""

    def loss(logp_N: Tensor) -> Tensor:
        log_ratio_N = (logp_N - batch.sampling_logprobs_N).double()
        values, advantages = log_ratio_N.tolist(), targets.advantages_N.tolist()
        moved = [i for i in chosen.tolist() if values[i] * advantages[i] > 0]
        moved.sort(key=lambda i: -(values[i] ** 2))
        masked = []
        while moved and np.mean([values[i] ** 2 for i in moved]) > budget:
            masked.append(moved.pop(0))
        assert masked
        trained = [i for i in chosen.tolist() if i not in masked]
        return -(log_ratio_N.exp() * targets.advantages_N)[trained].sum() / len(chosen)

    return loss


@pytest.mark.parametrize("token_budget", [20, 4096])
def test_the_update_masks_over_all_of_its_microbatches(token_budget: int, policy: Policy, batch: StepBatch) -> None:
    made = replace(config(loss="m2po", m2_budget=0.1), token_budget=token_budget)
    targets, _, _ = targets_of(batch, made, scored(random_logp(batch, 1)), mode="token_truncate")
    found, metrics = gradient(policy, batch, made, replace(targets, old=FromEngine(batch.sampling_logprobs_N)))
    everything = torch.arange(batch.layout.num_tokens)
    assert close(found, expected_gradient(policy, batch, m2po_loss(batch, targets, everything, 0.1)))
    assert 0 < metrics["policy/step_mask_frac"] < 1


def test_an_unused_mechanism_costs_no_pass(policy: Policy, batch: StepBatch) -> None:
    loss = PolicyLoss(function=lambda inputs: None, arguments={})
    refuses = SimpleNamespace()  # any call would fail
    assert (
        ConfiguredLoss(loss, config().algorithm, seed=0).step_values(
            refuses, batch, refuses, [0], is_first=False, update=0
        )
        == {}
    )  # type: ignore[arg-type]
