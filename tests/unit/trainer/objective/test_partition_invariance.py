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

from tests.fixtures.losses import sequence_ratios, step_values
from trainer.objective.correction.weights import correction_weights
from trainer.objective.kl import kl_term
from trainer.objective.loss_normalization import NORMALIZERS, StepCounts, loss_coefficients, normalized_loss
from trainer.objective.losses import POLICY_LOSSES
from trainer.objective.losses.inputs import LossInputs, StepInputs
from trainer.objective.per_rollout import rollout_count

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
NUM_ROLLOUTS = 6  # the last two have no trained tokens
LENGTHS = (9, 1, 5, 3, 0, 0)
VOCABULARY, WIDTH = 7, 4


class ToyStep:
    """One optimizer step of a toy policy: its trained tokens with their records."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.rollout_T = torch.repeat_interleave(torch.arange(NUM_ROLLOUTS), torch.tensor(LENGTHS))
        num_tokens = len(self.rollout_T)
        self.features = normal(num_tokens, WIDTH)
        self.targets_T = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
        self.initial = normal(WIDTH, VOCABULARY)
        logp_T = self.logp_and_entropy(self.initial, torch.arange(num_tokens))[0]
        self.old_logp_T = logp_T + 0.3 * normal(num_tokens)
        self.ref_logp_T = logp_T + 0.3 * normal(num_tokens)
        self.samp_logp_T = self.old_logp_T + 0.2 * normal(num_tokens)
        self.advantages_T = normal(NUM_ROLLOUTS)[self.rollout_T]
        correction = correction_weights(
            self.old_logp_T,
            self.samp_logp_T,
            self.rollout_T,
            NUM_ROLLOUTS,
            mode="token_mask",
            bounds=(0.85, 1.15),
            rejection={"token_k3": 0.05},
        )
        self.weights_T = correction.weights_T
        self.kept = correction.keep_T.nonzero()[:, 0]

    def logp_and_entropy(self, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logp = (self.features[tokens] @ weight).log_softmax(dim=1)
        return logp.gather(1, self.targets_T[tokens, None])[:, 0], -(logp.exp() * logp).sum(dim=1)

    def entropy_at(self, logp_T: Tensor) -> Tensor:
        """Return the entropies of the tokens with these logprobs under the initial weights, which are all different."""
        all_logp_T, entropy_T = self.logp_and_entropy(self.initial, torch.arange(len(self.targets_T)))
        return entropy_T[(all_logp_T - logp_T.detach()[:, None]).abs().argmin(dim=1)]

    def of_step(self, loss_function, options: dict, logp_T: Tensor, entropy_T: Tensor) -> dict[str, Tensor]:
        """Return the loss's values of the whole step at all tokens; NaN at rejected ones, which no loss may read."""
        inputs = StepInputs(
            logp_N=logp_T,
            old_logp_N=self.old_logp_T[self.kept],
            sampling_logp_N=self.samp_logp_T[self.kept],
            advantages_N=self.advantages_T[self.kept],
            rollout_N=self.rollout_T[self.kept],
            num_rollouts=NUM_ROLLOUTS,
            seed=0,
            entropy_N=entropy_T,
        )
        nowhere = torch.full_like(self.old_logp_T, torch.nan)
        found = step_values(loss_function, inputs, **options)
        return {name: nowhere.index_copy(0, self.kept, x_N.to(nowhere.dtype)) for name, x_N in found.items()}

    def gradient(self, loss_function, options: dict, normalizer: str, ranks: list[list[Tensor]]) -> Tensor:
        """Return the gradient averaged over ranks, each of which accumulates its microbatches."""
        kept_rollout_T = self.rollout_T[self.kept]
        counts = StepCounts(num_rollouts=NUM_ROLLOUTS, num_tokens=len(self.kept), max_completion_length=16)
        tokens_per_rollout_S = rollout_count(kept_rollout_T, NUM_ROLLOUTS)
        with torch.no_grad():
            logp_T, entropy_T = self.logp_and_entropy(self.initial, self.kept)
            log_ratio_T = logp_T - self.old_logp_T[self.kept]
            seq_log_ratio_S = sequence_ratios(
                loss_function, log_ratio_T, self.advantages_T[self.kept], kept_rollout_T, NUM_ROLLOUTS, **options
            )
            of_step = self.of_step(loss_function, options, logp_T, entropy_T)
        gradients = []
        for microbatches in ranks:
            weight = self.initial.clone().requires_grad_()
            for tokens in microbatches:
                logp_T, entropy_T = self.logp_and_entropy(weight, tokens)
                inputs = LossInputs(
                    logp_T=logp_T,
                    old_logp_T=self.old_logp_T[tokens],
                    advantages_T=self.advantages_T[tokens],
                    rollout_T=self.rollout_T[tokens],
                    num_rollouts=NUM_ROLLOUTS,
                    weights_T=self.weights_T[tokens],
                    seq_log_ratio_S=seq_log_ratio_S,
                    sampling_logp_T=self.samp_logp_T[tokens],
                    step_values={name: values_T[tokens] for name, values_T in of_step.items()},
                )
                loss_T = loss_function(inputs, **options).loss_T
                loss_T = loss_T + 0.1 * kl_term("unbiased", logp_T, self.ref_logp_T[tokens], inputs.old_logp_T)
                loss_T = loss_T - 0.01 * entropy_T
                coefficient_T = loss_coefficients(
                    normalizer, inputs.rollout_T, tokens_per_rollout_S, counts, dtype=loss_T.dtype
                )
                (normalized_loss(loss_T, coefficient_T) * len(ranks)).backward()
            gradients.append(weight.grad if weight.grad is not None else torch.zeros_like(weight))
        return torch.stack(gradients).mean(dim=0)


def partition(tokens: Tensor, ranks: int, microbatches: int, seed: int) -> list[list[Tensor]]:
    """Assign tokens to random microbatches of random ranks, in random order; some stay empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tokens[torch.randperm(len(tokens), generator=generator)]
    places = torch.randint(ranks * microbatches, (len(tokens),), generator=generator)
    return [[tokens[places == rank * microbatches + m] for m in range(microbatches)] for rank in range(ranks)]


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize(("name", "loss", "options"), LOSSES, ids=[name for name, _, _ in LOSSES])
def test_gradient_does_not_depend_on_ranks_and_microbatches(name, loss, options, normalizer):
    step = ToyStep()
    assert len(step.kept) < len(step.rollout_T), "the toy must reject some tokens"
    assert (step.weights_T[step.kept] == 0).any(), "the toy must mask some weights"
    whole = step.gradient(loss, options, normalizer, [[step.kept]])
    assert whole.abs().max() > 1e-3, "a gradient of zero would be invariant for the wrong reason"
    for ranks, microbatches in ((1, 2), (1, 18), (2, 1), (2, 3), (3, 1), (3, 7)):
        parts = partition(step.kept, ranks, microbatches, seed=ranks * 31 + microbatches)
        torch.testing.assert_close(
            step.gradient(loss, options, normalizer, parts), whole, rtol=0, atol=1e-10, msg=f"{ranks} x {microbatches}"
        )


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


@pytest.mark.parametrize("name", ["gspo", "gmpo", "clipped_tis_sequence"])
def test_sequence_losses_need_the_ratio_of_the_whole_rollout(name):
    """With the ratio of its own tokens only, each microbatch would give another gradient."""
    step = ToyStep()
    loss, options = next((loss, options) for n, loss, options in LOSSES if n == name)

    def alone(inputs, **options):
        log_ratio_T = inputs.logp_T - inputs.old_logp_T
        own_S = sequence_ratios(
            loss, log_ratio_T, inputs.advantages_T, inputs.rollout_T, inputs.num_rollouts, **options
        )
        return loss(replace(inputs, seq_log_ratio_S=own_S), **options)

    guess = replace(loss, function=alone)
    whole = step.gradient(loss, options, "grpo", [[step.kept]])
    torch.testing.assert_close(step.gradient(guess, options, "grpo", [[step.kept]]), whole, rtol=0, atol=1e-10)
    parts = partition(step.kept, 2, 3, seed=1)
    assert (step.gradient(guess, options, "grpo", parts) - whole).abs().max() > 1e-6


STEP_LOSSES = [name for name, loss, _ in LOSSES if loss.step_values is not None]


@pytest.mark.parametrize("name", STEP_LOSSES)
def test_values_of_a_microbatch_alone_would_give_another_gradient(name):
    step = ToyStep()
    loss, options = next((loss, options) for n, loss, options in LOSSES if n == name)

    def alone(inputs, **options):
        entropy_T = step.entropy_at(inputs.logp_T)
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
    logp_T, entropy_T = step.logp_and_entropy(step.initial, step.kept)
    (mask_T,) = step.of_step(loss, options, logp_T, entropy_T).values()
    assert 0 < float(mask_T[step.kept].mean()) < 1
