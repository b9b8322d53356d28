"""Gain and bias that give a reward model's rewards mean 0 and variance 1.

    reward = gain · score + bias,   gain = 1 / σ,   bias = −gain · μ

μ and σ² are mean and population variance of the *raw* scores (gain 1, bias 0: reset first) of responses sampled from
the frozen pretrained model. Done before training, so that the first loss sees rewards of order 1, and after it, so that
β means the same for every reward model.

Source: Ziegler et al. 2019, section 2.1; "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023),
"Reward model normalization before and after".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollout.errors import TrainingError
from trainer.objective.whitening import moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    gain: float = 1.0
    bias: float = 0.0

    def __call__(self, scores: Tensor) -> Tensor:
        return scores * self.gain + self.bias


def fit(scores_B: Tensor) -> Normalization:
    """Compute gain and bias from the raw scores of all samples.

    Raises:
        TrainingError: all scores are equal, or one is not finite.
    """
    mean, variance = moments(scores_B)
    if not (variance.isfinite() and variance > 0):
        raise TrainingError(
            f"reward normalization: scores of the samples have mean {float(mean):g} and variance {float(variance):g}; "
            "expected a finite variance above 0. Check the initialization of the head and the sampled responses"
        )
    gain = float(variance.rsqrt())
    return Normalization(gain=gain, bias=-gain * float(mean))
