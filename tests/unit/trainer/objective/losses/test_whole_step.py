"""Losses that compare tokens over the whole step, and DPPO, against the formulas of their papers in plain loops.

Comparisons with TRL: tests/unit/trainer/objective/test_against_trl.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.lab.losses.examined_loss import step_values
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.dppo import binary_divergence
from lockstep.trainer.objective.losses.inputs import LossInputs, StepInputs
from lockstep.trainer.objective.losses.whole_step.selection import covariances, largest
from lockstep.trainer.objective.per_rollout import rollout_mean

NUM_ROLLOUTS, LENGTH = 6, 20


def random_step(seed: int = 0) -> StepInputs:
    """Return six rollouts of 20 tokens with logprobs between -4 and 0, off policy by about 0.3 nats."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rollout_N = torch.arange(NUM_ROLLOUTS).repeat_interleave(LENGTH)
    logp_N = -normal(len(rollout_N)).abs() - 0.01
    old_N = (logp_N + 0.3 * normal(len(rollout_N))).clamp(max=-1e-3)
    return StepInputs(
        logp_N=logp_N,
        old_logp_N=old_N,
        sampling_logp_N=(old_N + 0.1 * normal(len(rollout_N))).clamp(max=-1e-3),
        advantages_N=normal(NUM_ROLLOUTS)[rollout_N],
        rollout_N=rollout_N,
        num_rollouts=NUM_ROLLOUTS,
        seed=3,
        entropy_N=normal(len(rollout_N)).abs(),
    )


def loss_and_gradient(name: str, step: StepInputs, **settings) -> tuple[list[float], list[float]]:
    """Return losses and their gradients, with all tokens of the step in one microbatch."""
    logp_T = step.logp_N.clone().requires_grad_()
    inputs = LossInputs(
        logp_T=logp_T,
        old_logp_T=step.old_logp_N,
        advantages_T=step.advantages_N,
        rollout_T=step.rollout_N,
        num_rollouts=step.num_rollouts,
        sampling_logp_T=step.sampling_logp_N,
        step_values=step_values(POLICY_LOSSES[name], step, **settings),
    )
    loss_T = POLICY_LOSSES[name](inputs, **settings).loss_T
    return loss_T.tolist(), torch.autograd.grad(loss_T.sum(), logp_T)[0].tolist()


def tokens(step: StepInputs) -> list[tuple[float, float, float, float]]:
    """Return (logp, old, sampling, advantage) of each token."""
    columns = (step.logp_N, step.old_logp_N, step.sampling_logp_N, step.advantages_N)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def clipped(logp: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Return PPO's loss and its gradient with respect to logp."""
    ratio = math.exp(logp - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, bounded * advantage)
    return loss, -ratio * advantage if loss == -ratio * advantage else 0.0


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.03), ("tv", 0.2), ("kl", 0.01), ("kl", 0.05)])
def test_dppo_follows_the_binary_masks_of_the_paper(divergence, bound):
    step = random_step()
    losses, gradients, num_masked = [], [], 0
    for logp, _, sampling, advantage in tokens(step):
        p, q = math.exp(logp), math.exp(sampling)
        if divergence == "tv":
            is_kept = p - q <= bound if advantage > 0 else p - q >= -bound
        else:
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            is_kept = (kl <= bound) or (p <= q if advantage > 0 else p >= q)
        num_masked += not is_kept
        weight = -advantage * min(p / q, 1.2) * is_kept
        losses.append(weight * logp)
        gradients.append(weight)
    found = loss_and_gradient("dppo", step, divergence=divergence, divergence_bound=bound, ratio_cap=1.2)
    assert 0 < num_masked < len(losses) // 2
    assert found[0] == pytest.approx(losses, rel=1e-9)
    assert found[1] == pytest.approx(gradients, rel=1e-9)


def test_dppo_lets_a_rare_token_grow_and_holds_a_frequent_one():
    """From 1e-4 to 1e-2 the ratio is 100, the moved probability 0.01; from 0.6 to 0.9 the ratio is 1.5."""
    logp_T = torch.tensor([0.01, 0.9], dtype=torch.float64).log().requires_grad_()
    sampling_T = torch.tensor([1e-4, 0.6], dtype=torch.float64).log()
    inputs = LossInputs(
        logp_T=logp_T, old_logp_T=sampling_T, sampling_logp_T=sampling_T, advantages_T=torch.ones(2).double(),
        rollout_T=torch.arange(2), num_rollouts=2,
    )  # fmt: skip
    loss_T = POLICY_LOSSES["dppo"](inputs, divergence="tv", divergence_bound=0.2, ratio_cap=20.0).loss_T
    assert torch.autograd.grad(loss_T.sum(), logp_T)[0].tolist() == pytest.approx([-20.0, 0.0])


def test_the_binary_kl_is_finite_for_certain_tokens():
    logp_T = torch.tensor([0.0, 0.0, -40.0, -300.0])
    sampling_T = torch.tensor([0.0, -1.0, 0.0, -0.1])
    found = binary_divergence("kl", logp_T, sampling_T)
    assert found.isfinite().all()
    assert found[0] == 0
    assert (found[1:] > 1).all()


def test_opsm_masks_drifted_rollouts_of_negative_advantage():
    step, bound = random_step(), 0.02
    masked = set()
    for rollout in range(NUM_ROLLOUTS):
        own = [token for token, index in zip(tokens(step), step.rollout_N.tolist(), strict=True) if index == rollout]
        drift = sum(sampling - logp for logp, _, sampling, _ in own) / len(own)
        if drift > bound and own[0][3] < 0:
            masked.add(rollout)
    assert 0 < len(masked) < int((step.advantages_N < 0).sum()) // LENGTH
    expected = [
        (0.0, 0.0) if rollout in masked else clipped(logp, old, advantage, 0.2, 0.28)
        for (logp, old, _, advantage), rollout in zip(tokens(step), step.rollout_N.tolist(), strict=True)
    ]
    losses, gradients = loss_and_gradient("opsm", step, clip_low=0.2, clip_high=0.28, off_policy_kl=bound)
    assert losses == pytest.approx([loss for loss, _ in expected])
    assert gradients == pytest.approx([gradient for _, gradient in expected])


def test_vespo_weighs_rollouts_by_the_gamma_kernel_of_their_ratio():
    step = random_step()
    settings = {"k_positive": 2.0, "k_negative": 3.0, "decay_positive": 3.0, "decay_negative": 2.0}
    expected = []
    for (_, _, _, advantage), rollout in zip(tokens(step), step.rollout_N.tolist(), strict=True):
        own = step.rollout_N == rollout
        w = math.exp(float((step.logp_N - step.sampling_logp_N)[own].sum()))
        k, decay = (3.0, 2.0) if advantage < 0 else (2.0, 3.0)
        expected.append(-(w**k) * math.exp(decay * (1 - w)) * advantage)
    losses, gradients = loss_and_gradient("vespo", step, **settings)
    assert gradients == pytest.approx(expected, rel=1e-9)
    assert losses == pytest.approx([g * logp for g, logp in zip(expected, step.logp_N.tolist(), strict=True)])
    assert len({round(abs(g / a), 9) for g, a in zip(gradients, step.advantages_N.tolist(), strict=True)}) > 3


def test_m2po_masks_the_outliers_that_break_the_budget():
    step, budget = random_step(), 0.04
    moved = [(a * (logp - mu) > 0, (logp - mu) ** 2) for logp, _, mu, a in tokens(step)]
    masked: set[int] = set()
    order = sorted((i for i, (leaves, _) in enumerate(moved) if leaves), key=lambda i: -moved[i][1])
    while order and sum(moved[i][1] for i in order) / len(order) > budget:
        masked.add(order.pop(0))
    assert 3 < len(masked) < sum(leaves for leaves, _ in moved) - 3
    expected = [0.0 if i in masked else -math.exp(logp - mu) * a for i, (logp, _, mu, a) in enumerate(tokens(step))]
    losses, gradients = loss_and_gradient("m2po", step, m2_budget=budget)
    assert losses == pytest.approx(expected)
    assert gradients == pytest.approx(expected)


def test_m2po_leaves_a_step_within_the_budget_as_it_is():
    step = random_step()
    step = replace(step, sampling_logp_N=step.logp_N - 0.19 * step.advantages_N.sign())  # 0.19² < 0.04
    assert step_values(POLICY_LOSSES["m2po"], step)["mask"].all()
    on_policy = replace(step, sampling_logp_N=step.logp_N)
    assert step_values(POLICY_LOSSES["m2po"], on_policy)["mask"].all()


def test_m2po_masks_every_moved_token_if_the_smallest_breaks_the_budget():
    step = random_step()
    step = replace(step, sampling_logp_N=step.logp_N - 0.5 * step.advantages_N.sign())
    assert not step_values(POLICY_LOSSES["m2po"], step)["mask"].any()


def covariance_terms(step: StepInputs) -> list[float]:
    logps, advantages = step.logp_N.tolist(), step.advantages_N.tolist()
    logp_mean, advantage_mean = sum(logps) / len(logps), sum(advantages) / len(advantages)
    return [(x - logp_mean) * (a - advantage_mean) for x, a in zip(logps, advantages, strict=True)]


def test_clip_cov_masks_its_share_of_unclipped_tokens_within_the_bounds():
    step = random_step()
    settings = {"clip_low": 0.2, "clip_high": 0.28, "cov_fraction": 0.05, "cov_low": 0.1, "cov_high": 1.0}
    losses, gradients = loss_and_gradient("clip_cov", step, **settings)
    plain = [clipped(logp, old, a, 0.2, 0.28) for logp, old, _, a in tokens(step)]
    candidates = {i for i, cov in enumerate(covariance_terms(step)) if 0.1 < cov < 1.0 and plain[i][1] != 0}
    chosen = {i for i, (loss, _) in enumerate(plain) if losses[i] == 0 != loss}
    assert len(chosen) == int(0.05 * NUM_ROLLOUTS * LENGTH) < len(candidates)
    assert chosen <= candidates
    assert gradients == pytest.approx([0.0 if i in chosen else gradient for i, (_, gradient) in enumerate(plain)])


def test_clip_cov_draws_by_the_seed_alone():
    step = random_step()
    settings = {"cov_fraction": 0.05, "cov_low": 0.1, "cov_high": 1.0}
    masks = [step_values(POLICY_LOSSES["clip_cov"], replace(step, seed=seed), **settings)["mask"] for seed in (3, 3, 4)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_clip_cov_keeps_its_choice_if_rounding_moves_another_token_over_a_bound():
    step = random_step()
    cov = covariances(step.logp_N, step.advantages_N)
    settings = {"cov_fraction": 0.05, "cov_low": 0.1}
    inside, outside = (
        step_values(POLICY_LOSSES["clip_cov"], step, cov_high=float(cov[cov < 1].max()) + shift, **settings)["mask"]
        for shift in (1e-6, -1e-6)
    )
    assert int((inside != outside).sum()) <= 2, "the token at the bound, and the one that takes its place"


def test_kl_cov_penalizes_the_tokens_of_largest_covariance():
    step = random_step()
    settings = {"cov_fraction": 0.1, "cov_kl_coef": 2.0}
    count = int(0.1 * NUM_ROLLOUTS * LENGTH)
    cov = covariance_terms(step)
    picked = set(sorted(range(len(cov)), key=lambda i: -cov[i])[:count])
    expected = []
    for i, (logp, old, _, advantage) in enumerate(tokens(step)):
        loss, gradient = -math.exp(logp - old) * advantage, -math.exp(logp - old) * advantage
        if i in picked:
            loss, gradient = loss + 2 * abs(logp - old), gradient + 2 * math.copysign(1, logp - old)
        expected.append((loss, gradient))
    losses, gradients = loss_and_gradient("kl_cov", step, **settings)
    assert losses == pytest.approx([loss for loss, _ in expected])
    assert gradients == pytest.approx([gradient for _, gradient in expected])


@pytest.mark.parametrize("fraction", [0.2, 0.5, 1.0, 0.001])
def test_top_entropy_trains_the_tokens_at_or_above_the_quantile(fraction):
    step = random_step()
    assert step.entropy_N is not None
    bound = torch.quantile(step.entropy_N, 1 - fraction)
    expected = [
        clipped(logp, old, a, 0.2, 0.28) if entropy >= bound else (0.0, 0.0)
        for (logp, old, _, a), entropy in zip(tokens(step), step.entropy_N.tolist(), strict=True)
    ]
    losses, gradients = loss_and_gradient("top_entropy", step, clip_low=0.2, clip_high=0.28, entropy_fraction=fraction)
    assert losses == pytest.approx([loss for loss, _ in expected])
    assert gradients == pytest.approx([gradient for _, gradient in expected])


@pytest.mark.parametrize("seed", range(5))
def test_tokens_that_tie_at_the_threshold_share_its_fate_whatever_their_rounding(seed):
    exact_N = torch.tensor([0.1, 2.0, 1.0, 1.0, 1.0, 0.5])
    rounded_N = exact_N + 1e-6 * torch.randn(6, generator=torch.Generator().manual_seed(seed))
    assert largest(rounded_N, 2).tolist() == [False, True, True, True, True, False]
    squares = step_values(POLICY_LOSSES["m2po"], tied_step(1e-7, seed), m2_budget=0.5)["mask"]
    assert squares.tolist() == [1, 0, 0, 0, 0, 1]


def tied_step(noise: float, seed: int) -> StepInputs:
    """Return six tokens whose (log r)² are 0.1, 4, 1, 1, 1 and 0.25."""
    log_ratio_N = torch.tensor([0.1, 4.0, 1.0, 1.0, 1.0, 0.25]).sqrt()
    log_ratio_N = log_ratio_N + noise * torch.randn(6, generator=torch.Generator().manual_seed(seed))
    return StepInputs(
        logp_N=log_ratio_N - 3, old_logp_N=torch.full((6,), -3.0), sampling_logp_N=torch.full((6,), -3.0),
        advantages_N=torch.ones(6), rollout_N=torch.arange(6), num_rollouts=6, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, loss in POLICY_LOSSES.items() if loss.weighs_by_sampling])
def test_a_ratio_to_the_sampling_policy_takes_no_correction_weights(name):
    step = random_step()
    inputs = LossInputs(
        logp_T=step.logp_N,
        old_logp_T=step.old_logp_N,
        advantages_T=step.advantages_N,
        rollout_T=step.rollout_N,
        num_rollouts=step.num_rollouts,
        sampling_logp_T=step.sampling_logp_N,
        step_values=step_values(POLICY_LOSSES[name], step),
    )
    weighted = replace(inputs, weights_T=torch.full_like(step.logp_N, 3.0))
    assert torch.equal(POLICY_LOSSES[name](weighted).loss_T, POLICY_LOSSES[name](inputs).loss_T)
    with pytest.raises(AssertionError, match="needs its logprobs"):
        POLICY_LOSSES[name](replace(inputs, sampling_logp_T=None))


def test_step_values_of_another_length_are_refused_with_their_name():
    step = random_step()
    with pytest.raises(ValueError, match=r"'mask': \(3,\)"):
        LossInputs(
            logp_T=step.logp_N,
            old_logp_T=step.old_logp_N,
            advantages_T=step.advantages_N,
            rollout_T=step.rollout_N,
            num_rollouts=step.num_rollouts,
            step_values={"mask": torch.ones(3)},
        )


def test_the_drift_of_opsm_is_a_mean_over_the_rollout():
    step = random_step()
    drift_S = rollout_mean(step.sampling_logp_N - step.logp_N, step.rollout_N, NUM_ROLLOUTS)
    negative_S = torch.stack([step.advantages_N[step.rollout_N == s][0] < 0 for s in range(NUM_ROLLOUTS)])
    worst = float(drift_S[negative_S].max())
    masks = [step_values(POLICY_LOSSES["opsm"], step, off_policy_kl=worst + shift)["mask"] for shift in (1e-9, -1e-9)]
    assert masks[0].all()
    assert int((masks[1] == 0).sum()) == LENGTH
