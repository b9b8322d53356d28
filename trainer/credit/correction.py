"""Rollout correction of one step: the weight of each trained token, and the loss mask.

Dimensions: `_N` trained tokens of the step, `_T` trained tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.credit.old_policy import FromEngine, OldPolicy
from lockstep.trainer.objective.correction.weights import CorrectionResult, correction_weights, token_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCorrection:
    """Importance weights between engine and trainer."""

    settings: CorrectionConfig
    weights_N: Tensor | None
    """None with `FromUpdate`: each microbatch computes its own weights."""
    keep_N: Tensor
    """bool: False for tokens outside of the loss mask and its denominators (rejected, or of a masked rollout)."""
    result: CorrectionResult | None = None
    """Weights with the tensors for metrics; None if it is known only after the update."""

    @classmethod
    def of(cls, batch: StepBatch, old: OldPolicy, settings: CorrectionConfig) -> StepCorrection:
        """Return the correction, as far as π_old is known before the update."""
        keep_N = torch.from_numpy(batch.is_kept_S)[batch.rollout_N]
        if old.logp_N is None:
            return cls(settings=settings, weights_N=None, keep_N=keep_N)
        is_bypass = isinstance(old, FromEngine)
        result = _weights(batch, old.logp_N, settings, mode="off" if is_bypass else settings.mode)
        return cls(
            settings=settings,
            weights_N=result.weights_T,
            keep_N=result.keep_T & keep_N,
            result=None if is_bypass else result,
        )

    def weights_at(self, index_T: Tensor, old_T: Tensor, sampling_T: Tensor) -> Tensor:
        """Return (T,) weights of a microbatch. old_T, sampling_T: its logprobs under π_old and of the engine."""
        if self.weights_N is not None:
            return self.weights_N[index_T].to(old_T.device, old_T.dtype)
        bounds = (self.settings.low, self.settings.high)
        return token_weights(old_T, sampling_T, mode=self.settings.mode, bounds=bounds)

    def measured(self, batch: StepBatch, trained_N: Tensor) -> CorrectionResult:
        """Return the correction for the metrics, after the update. trained_N: `OldPolicy.by_trainer`."""
        if self.result is not None:
            return self.result
        if self.weights_N is None:
            return _weights(batch, trained_N, self.settings, mode=self.settings.mode)
        # Bypass: the ratio of the loss is the weight, known since the forward pass of the update.
        return _weights(batch, trained_N, self.settings, mode="off").uncontrolled()


def _weights(batch: StepBatch, logp_old_N: Tensor, settings: CorrectionConfig, *, mode: str) -> CorrectionResult:
    return correction_weights(
        logp_old_N,
        batch.sampling_logprobs_N,
        batch.rollout_N,
        batch.num_rollouts,
        mode=mode,
        bounds=(settings.low, settings.high),
        rejection=settings.rejection,
        batch_normalize=settings.batch_normalize,
    )
