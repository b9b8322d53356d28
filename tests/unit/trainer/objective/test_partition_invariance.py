"""The gradient of an optimizer step is the same for every partition of its tokens into ranks and microbatches.

A toy policy (softmax over a linear map of random features) with every declared loss and normalizer, against one
microbatch of all tokens. Gradients agree to 1e-10 in float64 and to 1e-6 of the largest one in float32.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.lab.losses.examined_loss import step_values
from lockstep.trainer.objective.loss_normalization import NORMALIZERS
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.inputs import StepInputs
from tests.fixtures.toy_step import NUM_ROLLOUTS, ToyStep, partition, partitions

# Wide bounds for GSPO: with the paper's 3e-4 every rollout of this toy would be clipped, and the gradient 0.
# Narrow ones where a mask over the step would otherwise leave all tokens of this toy, or all but one, as they are.
OPTIONS = {
    "gspo": {"clip_low": 0.3, "clip_high": 0.4},
    "dppo": {"divergence_bound": 0.02},
    "opsm": {"off_policy_kl": -0.05},
    "clip_cov": {"cov_fraction": 0.2, "cov_low": 0.1},
    "kl_cov": {"cov_fraction": 0.3},
}
LOSSES = [
    *((name, POLICY_LOSSES[name], OPTIONS.get(name, {})) for name in POLICY_LOSSES),
    ("dppo_kl", POLICY_LOSSES["dppo"], {"divergence": "kl", "divergence_bound": 0.01}),
    ("clipped_tis_sequence", POLICY_LOSSES["clipped_tis"], {"importance_sampling_level": "sequence"}),
    ("ppo_dual_clip", POLICY_LOSSES["ppo_clip"], {"dual_clip": 1.1}),
]


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize(("name", "loss", "options"), LOSSES, ids=[name for name, _, _ in LOSSES])
def test_gradient_does_not_depend_on_ranks_and_microbatches(name, loss, options, normalizer):
    step = ToyStep()
    assert len(step.kept) < len(step.rollout_T), "the toy must reject some tokens"
    assert (step.weights_T[step.kept] == 0).any(), "the toy must mask some weights"
    whole = step.gradient(loss, options, normalizer, [[step.kept]])
    assert whole.abs().max() > 1e-3, "a gradient of zero would be invariant for the wrong reason"
    for division, ranks in partitions(step).items():
        gradient = step.gradient(loss, options, normalizer, ranks)
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-10, msg=division)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize(("name", "loss", "options"), LOSSES, ids=[name for name, _, _ in LOSSES])
def test_float32_gradient_does_not_depend_on_ranks_and_microbatches(name, loss, options, normalizer):
    step = ToyStep(dtype=torch.float32)
    whole = step.gradient(loss, options, normalizer, [[step.kept]])
    parts = step.gradient(loss, options, normalizer, partition(step.kept, 3, 4, seed=5))
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6 * float(whole.abs().max()))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    loss=st.sampled_from(LOSSES),
    normalizer=st.sampled_from(sorted(NORMALIZERS)),
)
def test_gradient_does_not_depend_on_the_partition_for_any_data(seed, ranks, microbatches, loss, normalizer):
    step = ToyStep(seed)
    whole = step.gradient(*loss[1:], normalizer, [[step.kept]])
    parts = partition(step.kept, ranks, microbatches, seed)
    torch.testing.assert_close(step.gradient(*loss[1:], normalizer, parts), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_step_without_any_trained_token_has_gradient_zero_and_no_nan(normalizer):
    step = ToyStep()
    step.kept = torch.zeros(0, dtype=torch.long)
    gradient = step.gradient(POLICY_LOSSES["ppo_clip"], {}, normalizer, [[step.kept, step.kept], [step.kept]])
    assert torch.equal(gradient, torch.zeros_like(gradient))


def entropy_at(step: ToyStep, logp_T: Tensor) -> Tensor:
    """Return the entropies of the tokens with these logprobs under the initial weights, which are all different."""
    all_logp_T, entropy_T = step.logp_and_entropy(step.initial, torch.arange(len(step.targets_T)))
    return entropy_T[(all_logp_T - logp_T.detach()[:, None]).abs().argmin(dim=1)]


SEQUENCE_LOSSES = ["gspo", "gmpo", "clipped_tis_sequence"]
STEP_LOSSES = [name for name, loss, _ in LOSSES if loss.step_values is not None]


@pytest.mark.parametrize("name", [*STEP_LOSSES, *SEQUENCE_LOSSES])
def test_values_of_a_microbatch_alone_would_give_another_gradient(name):
    step = ToyStep()
    loss, options = next((loss, options) for n, loss, options in LOSSES if n == name)

    def alone(inputs, **options):
        entropy_T = entropy_at(step, inputs.logp_T)
        of_step = StepInputs(
            logp_N=inputs.logp_T.detach(),
            old_logp_N=inputs.old_logp_T,
            sampling_logp_N=inputs.sampling_logp_T,
            advantages_N=inputs.advantages_T,
            rollout_N=inputs.rollout_T,
            num_rollouts=NUM_ROLLOUTS,
            seed=0,
            entropy_N=entropy_T,
        )
        return loss(replace(inputs, step_values=step_values(loss, of_step, **options)), **options)

    guess = replace(loss, function=alone)
    whole = step.gradient(loss, options, "grpo", [[step.kept]])
    torch.testing.assert_close(step.gradient(guess, options, "grpo", [[step.kept]]), whole, rtol=0, atol=1e-10)
    parts = partition(step.kept, 2, 3, seed=1)
    assert (step.gradient(guess, options, "grpo", parts) - whole).abs().max() > 1e-6


@pytest.mark.parametrize("name", [name for name in STEP_LOSSES if name != "vespo"])
def test_the_toy_masks_some_tokens_and_keeps_others(name):
    step = ToyStep()
    loss, options = next((loss, options) for n, loss, options in LOSSES if n == name)
    (mask_T,) = step.step_values(loss, options).values()
    assert 0 < float(mask_T[step.kept].mean()) < 1
