"""Policy losses by hand, and their gradients against autograd through the papers' objectives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.lab.losses.examined_loss import step_values
from lockstep.trainer.objective.declare import SEQUENCE
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.inputs import LossInputs, StepInputs
from lockstep.trainer.objective.per_rollout import rollout_mean

cispo, clipped_tis, gmpo, gspo, ppo_clip, reinforce, sapo = (
    POLICY_LOSSES[name] for name in ("cispo", "clipped_tis", "gmpo", "gspo", "ppo_clip", "reinforce", "sapo")
)


def inputs_for(ratios, advantages, *, rollouts=None, weights=None, old=-1.0) -> LossInputs:
    """Return tokens with the given ratios to the old policy."""
    rollouts = list(range(len(ratios))) if rollouts is None else rollouts
    logp_T = torch.tensor([old + math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    old_T = torch.full((len(ratios),), old, dtype=torch.float64)
    return whole_step(
        logp_T,
        old_T,
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(rollouts),
        max(rollouts) + 1,
        weights_T=None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )


def whole_step(logp_T, old_T, advantages_T, rollout_T, num_rollouts, *, weights_T=None) -> LossInputs:
    """Return one microbatch with all tokens of its rollouts."""
    return LossInputs(
        logp_T=logp_T,
        old_logp_T=old_T,
        advantages_T=advantages_T,
        rollout_T=rollout_T,
        num_rollouts=num_rollouts,
        weights_T=weights_T,
        step_values={SEQUENCE: rollout_mean((logp_T - old_T).detach(), rollout_T, num_rollouts)[rollout_T]},
    )


def with_step(name: str, inputs: LossInputs, **settings) -> LossInputs:
    """Return inputs of a whole step with the values that the loss takes from it; the engine sampled by π_old."""
    of_step = StepInputs(
        logp_N=inputs.logp_T.detach(),
        old_logp_N=inputs.old_logp_T,
        sampling_logp_N=inputs.old_logp_T,
        advantages_N=inputs.advantages_T,
        rollout_N=inputs.rollout_T,
        num_rollouts=inputs.num_rollouts,
        seed=0,
        entropy_N=torch.arange(len(inputs.logp_T)).to(inputs.logp_T.dtype),
    )
    values = step_values(POLICY_LOSSES[name], of_step, **settings)
    return replace(inputs, sampling_logp_T=inputs.old_logp_T, step_values=values)


def gradient(inputs: LossInputs, loss_T: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss_T.sum(), inputs.logp_T)[0].tolist()


def test_ppo_clip_follows_the_table_of_ratio_and_sign():
    # r:      inside  above   above   below   below
    # A:        +       +       −       +       −
    inputs = inputs_for([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    outputs = ppo_clip(inputs, clip_low=0.2, clip_high=0.3)
    # −min(rA, clip(r)A): −2.2; −min(3, 2.6); −min(−3, −2.6); −min(1, 1.6); −min(−1, −1.6)
    assert outputs.loss_T.tolist() == pytest.approx([-2.2, -2.6, 3.0, -1.0, 1.6])
    # d/dlogp = −r A where r decides, 0 where the bound does
    assert gradient(inputs, outputs.loss_T) == pytest.approx([-2.2, 0.0, 3.0, -1.0, 0.0])
    assert outputs.metrics["policy/clip_high_frac"] == 1
    assert outputs.metrics["policy/clip_low_frac"] == 1
    assert outputs.metrics["policy/clip_frac"] == 2


def test_dual_clip_caps_only_negative_advantages_and_stops_their_gradient():
    inputs = inputs_for([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0])
    outputs = ppo_clip(inputs, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert outputs.loss_T.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert gradient(inputs, outputs.loss_T) == pytest.approx([0.0, 0.0, 2.0])
    assert outputs.metrics["policy/dual_clip_frac"] == 1


def test_gspo_clips_whole_rollouts_by_their_geometric_mean_ratio():
    # rollout 0: sqrt(1.2 · 1.2) = 1.2 inside; 1: sqrt(4 · 1) = 2, clipped at 1.4; 2: sqrt(0.25) = 0.5, clipped at 0.6
    inputs = inputs_for([1.2, 4.0, 0.25, 1.2, 1.0, 1.0], [1.0, 1.0, -1.0, 1.0, 1.0, -1.0], rollouts=[0, 1, 2, 0, 1, 2])
    outputs = gspo(inputs, clip_low=0.4, clip_high=0.4)
    assert outputs.loss_T.tolist() == pytest.approx([-1.2, -1.4, 0.6, -1.2, -1.4, 0.6])
    assert gradient(inputs, outputs.loss_T) == pytest.approx([-1.2, 0.0, 0.0, -1.2, 0.0, 0.0])


def test_gspo_gradient_is_that_of_the_papers_objective():
    """Autograd through s itself, without the stop-gradient trick: J = mean_i min(s_i A_i, clip(s_i) A_i)."""
    generator = torch.Generator().manual_seed(0)
    rollout_T = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    noise_T = 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)
    advantages_S = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    logp_T = (-1 + noise_T).requires_grad_()
    old_T = torch.full((9,), -1.0, dtype=torch.float64)
    inputs = whole_step(logp_T, old_T, advantages_S[rollout_T], rollout_T, 3)
    length_S = torch.tensor([3.0, 2.0, 4.0], dtype=torch.float64)
    ours = torch.autograd.grad((gspo(inputs, clip_low=0.2, clip_high=0.2).loss_T / length_S[rollout_T]).sum(), logp_T)
    sums_S = torch.stack([(logp_T + 1)[rollout_T == s].sum() for s in range(3)])
    ratio_S = (sums_S / length_S).exp()
    paper = -torch.minimum(ratio_S * advantages_S, ratio_S.clamp(0.8, 1.2) * advantages_S).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(paper, logp_T), rtol=0, atol=1e-12)
    assert ours[0].abs().max() > 0.1


def test_gspo_keeps_advantages_per_token():
    inputs = inputs_for([1.0, 1.0], [1.0, 3.0], rollouts=[0, 0])
    assert gradient(inputs, gspo(inputs).loss_T) == pytest.approx([-1.0, -3.0])


def test_cispo_clips_the_coefficient_and_keeps_the_gradient():
    inputs = inputs_for([8.0, 0.1, 1.0], [1.0, -1.0, 2.0], old=-3.0)
    outputs = cispo(inputs, clip_low=None, clip_high=4.0)
    assert outputs.loss_T.tolist() == pytest.approx([-5 * (math.log(8) - 3), 0.1 * (math.log(0.1) - 3), 6.0])
    assert gradient(inputs, outputs.loss_T) == pytest.approx([-5.0, 0.1, -2.0])
    assert outputs.metrics["policy/clip_frac"] == 1
    assert gradient(inputs, cispo(inputs, clip_low=0.5, clip_high=4.0).loss_T) == pytest.approx([-5.0, 0.5, -2.0])


def test_sapo_equals_the_gate_and_has_slope_one_on_policy():
    inputs = inputs_for([1.0, 1.0, 2.0], [1.0, -1.0, 1.0])
    outputs = sapo(inputs, tau_positive=1.0, tau_negative=1.05)
    sigmoid_1 = 1 / (1 + math.exp(-1))
    assert outputs.loss_T.tolist() == pytest.approx([-2.0, 2 / 1.05, -4 * sigmoid_1], rel=1e-12)
    # d gate / d logp = 4 σ(1−σ) r: 1 on policy; at r = 2: 8 σ(1)(1 − σ(1))
    assert gradient(inputs, outputs.loss_T) == pytest.approx([-1.0, 1.0, -8 * sigmoid_1 * (1 - sigmoid_1)])


def test_reinforce_ignores_the_old_policy():
    inputs = inputs_for([3.0, 0.5], [2.0, -1.0])
    assert gradient(inputs, reinforce(inputs).loss_T) == pytest.approx([-2.0, 1.0])


def test_clipped_tis_gradient_is_minus_tau_rho_advantage():
    inputs = inputs_for([0.5, 1.1, 3.0], [1.0, -2.0, 1.0], weights=[2.0, 0.5, 0.25])
    # min(r, 1.2) ρ A
    assert gradient(inputs, clipped_tis(inputs, clip_high=0.2).loss_T) == pytest.approx([-1.0, 1.1, -0.3])


def test_clipped_tis_sequence_level_uses_the_geometric_mean_of_the_rollout():
    inputs = inputs_for([4.0, 0.25, 2.0, 8.0], [1.0, 1.0, 1.0, 1.0], rollouts=[0, 0, 1, 1])
    # rollout 0: sqrt(4 · 0.25) = 1; rollout 1: sqrt(16) = 4, truncated at 1.5
    assert gradient(
        inputs, clipped_tis(inputs, clip_high=0.5, importance_sampling_level="sequence").loss_T
    ) == pytest.approx([-1.0, -1.0, -1.5, -1.5])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_policy_gradient_on_policy(name):
    """At π_θ = π_old the gradient of every loss is −w A ∇logp; w = 1 for a ratio to the sampling policy."""
    settings = {"entropy_fraction": 1.0} if name == "top_entropy" else {}
    weights = [1.0, 2.0, 0.0, 1.0]
    inputs = inputs_for([1.0] * 4, [1.0, -2.0, 0.5, 0.0], rollouts=[0, 0, 1, 2], weights=weights)
    inputs = with_step(name, inputs, **settings)
    applied = [1.0] * 4 if POLICY_LOSSES[name].weighs_by_sampling else weights
    expected = [-weight * advantage for weight, advantage in zip(applied, [1.0, -2.0, 0.5, 0.0], strict=True)]
    assert gradient(inputs, POLICY_LOSSES[name](inputs, **settings).loss_T) == pytest.approx(expected)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_keeps_the_dtype_and_accepts_an_empty_microbatch(name):
    for dtype in (torch.float32, torch.float64):
        empty = torch.zeros(0, dtype=dtype)
        inputs = with_step(name, whole_step(empty.clone().requires_grad_(), empty, empty, empty.long(), 3))
        outputs = POLICY_LOSSES[name](inputs)
        assert outputs.loss_T.dtype == dtype
        outputs.loss_T.sum().backward()
        assert inputs.logp_T.grad is not None
        assert all(float(value) == 0 for value in outputs.metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_finite_for_logprobs_300_nats_apart(name):
    inputs = whole_step(
        torch.tensor([-0.1, -300.0], requires_grad=True),
        torch.tensor([-300.0, -0.1]),
        torch.tensor([-1.0, 1.0]),
        torch.tensor([0, 1]),
        2,
    )
    inputs = with_step(name, inputs)
    loss_T = POLICY_LOSSES[name](inputs).loss_T
    assert torch.isfinite(loss_T).all()
    assert torch.isfinite(torch.autograd.grad(loss_T.sum(), inputs.logp_T)[0]).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_metrics_are_sums_that_add_up_over_microbatches(name):
    whole = with_step(name, inputs_for([1.5, 0.5, 1.0, 2.0], [1.0, -1.0, 1.0, -1.0]))

    def part(tokens: slice, ratios: list[float], advantages: list[float]) -> LossInputs:
        values = {key: value[tokens] for key, value in whole.step_values.items()}
        inputs = inputs_for(ratios, advantages)
        return replace(inputs, sampling_logp_T=inputs.old_logp_T, step_values=values)

    parts = [part(slice(1), [1.5], [1.0]), part(slice(1, 4), [0.5, 1.0, 2.0], [-1.0, 1.0, -1.0])]
    loss = POLICY_LOSSES[name]
    for key, value in loss(whole).metrics.items():
        assert float(sum(loss(part).metrics[key] for part in parts)) == pytest.approx(float(value)), key
        assert not value.requires_grad


def test_correction_weights_multiply_the_loss_and_carry_no_gradient():
    weights_T = torch.tensor([2.0, 0.0], dtype=torch.float64, requires_grad=True)
    plain = inputs_for([1.1, 0.9], [1.0, 1.0])
    weighted = LossInputs(
        logp_T=plain.logp_T,
        old_logp_T=plain.old_logp_T,
        advantages_T=plain.advantages_T,
        rollout_T=plain.rollout_T,
        num_rollouts=2,
        weights_T=weights_T,
    )
    assert ppo_clip(weighted).loss_T.tolist() == pytest.approx([-2.2, 0.0])
    ppo_clip(weighted).loss_T.sum().backward()
    assert weights_T.grad is None


def gmpo_inputs(ratios, advantages, rollouts, **settings) -> LossInputs:
    return with_step("gmpo", inputs_for(ratios, advantages, rollouts=rollouts), **settings)


def test_gmpo_takes_the_geometric_mean_of_clipped_ratios():
    # rollout 0, A > 0: 4 is capped at 2, sqrt(2 · 0.5) = 1; rollout 1, A < 0: 0.1 is raised to 0.5, sqrt(8 · 0.5) = 2
    settings = {"clip_low": 0.5, "clip_high": 1.0}
    inputs = gmpo_inputs([4.0, 8.0, 0.5, 0.1], [1.0, -1.0, 1.0, -1.0], [0, 1, 0, 1], **settings)
    outputs = gmpo(inputs, **settings)
    assert outputs.loss_T.tolist() == pytest.approx([-1.0, 2.0, -1.0, 2.0])
    assert gradient(inputs, outputs.loss_T) == pytest.approx([0.0, 2.0, -1.0, 0.0])
    assert outputs.metrics["policy/clip_frac"] == 2


def test_gmpo_gradient_is_that_of_the_papers_objective():
    """Autograd through the geometric mean itself: J = mean_i A_i (Π_t min(r^sgn A, clip(r^sgn A)))^(sgn A / |y|)."""
    generator = torch.Generator().manual_seed(0)
    rollout_T = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    logp_T = (-1 + 0.5 * torch.randn(9, generator=generator, dtype=torch.float64)).requires_grad_()
    old_T = torch.full((9,), -1.0, dtype=torch.float64)
    advantages_S = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    settings = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    advantages_T = advantages_S[rollout_T]
    inputs = LossInputs(
        logp_T=logp_T, old_logp_T=old_T, advantages_T=advantages_T, rollout_T=rollout_T, num_rollouts=3
    )  # fmt: skip
    inputs = with_step("gmpo", inputs, **settings)
    length_S = torch.tensor([3.0, 2.0, 4.0], dtype=torch.float64)
    ours = torch.autograd.grad((gmpo(inputs, **settings).loss_T / length_S[rollout_T]).sum(), logp_T)
    sign_T = advantages_T.sign()
    power_T = sign_T * (logp_T - old_T)
    bounded_T = sign_T * torch.minimum(power_T, power_T.clamp(-0.4, 0.4))
    assert (bounded_T != logp_T - old_T).any()
    mean_S = torch.stack([bounded_T[rollout_T == s].mean() for s in range(3)])
    paper = -(mean_S.exp() * advantages_S).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(paper, logp_T), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"), [("gspo", {}), ("gmpo", {}), ("clipped_tis", {"importance_sampling_level": "sequence"})]
)
def test_a_loss_with_one_ratio_per_rollout_requires_it_from_the_whole_step(name, settings):
    inputs = inputs_for([1.1, 0.9], [1.0, -1.0])
    alone = replace(inputs, step_values={})
    POLICY_LOSSES[name](inputs, **settings)
    with pytest.raises(AssertionError, match="needs seq_log_ratio_S"):
        POLICY_LOSSES[name](alone, **settings)


def test_inputs_of_different_length_are_refused_with_their_shapes():
    with pytest.raises(ValueError, match=r"one length.*'old_logp_T': \(2,\)"):
        LossInputs(
            logp_T=torch.zeros(3),
            old_logp_T=torch.zeros(2),
            advantages_T=torch.zeros(3),
            rollout_T=torch.zeros(3, dtype=torch.long),
            num_rollouts=1,
        )
