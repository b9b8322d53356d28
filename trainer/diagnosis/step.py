"""A diagnosis of a training step from the numbers that the step has anyway: nothing is scored again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.records import Rollout, TrainingRow
from trainer.batch.step_batch import StepBatch
from trainer.config.schema import Config
from trainer.diagnosis import statistics
from trainer.diagnosis.causes import Evidence, judge
from trainer.diagnosis.classes import TokenTexts
from trainer.diagnosis.match import match
from trainer.diagnosis.report import CaseReport, Diagnosis, conclude
from trainer.diagnosis.scored import CorrectionSettings, score_rows


def diagnose_step(
    rollouts: Sequence[Rollout], batch: StepBatch, logp_train_N: torch.Tensor, texts: TokenTexts, config: Config
) -> Diagnosis:
    """Of some rollouts of a step, in one case. The noise floor is unknown here and stands as a dash.

    Args:
        rollouts: trainable ones of the step; others of the batch are left out.
        batch: of the step.
        logp_train_N: (N,) the trainer's logprobs of all trained tokens of the batch.
    """
    chosen = {rollout.rollout_id for rollout in rollouts}
    starts = batch.layout.token_start
    known = [
        (row, logp_train_N[starts[index] : starts[index + 1]].numpy())
        for index, row in enumerate(batch.rows)
        if row.rollout_id in chosen
    ]
    rows = [row for row, _ in known]

    def as_known(
        rows: Sequence[TrainingRow], *, temperature: float | None = None, alone: bool = False
    ) -> list[np.ndarray]:
        return [logprobs for _, logprobs in known]

    settings = config.correction
    scored = score_rows(
        rows, as_known, texts, CorrectionSettings(mode=settings.mode, low=settings.low, high=settings.high)
    )
    evidence = Evidence(
        match=match(rollouts, rows),
        mismatch=statistics.mismatch(scored),
        abs_diff_by_offset=statistics.abs_diff_by_offset(scored),
    )
    case = CaseReport(
        name="step",
        purpose="rollouts of a training step, with the logprobs that it was trained with",
        note="",
        finding=judge(evidence),
        num_rollouts=len(rollouts),
        num_failed=0,
        match=evidence.match,
        mismatch=evidence.mismatch,
        noise={},
        by_class=statistics.by_class(scored),
        by_turn=statistics.by_turn(scored),
        abs_diff_by_offset=evidence.abs_diff_by_offset,
        engine=None,
        worst=statistics.worst_positions(scored, texts),
        scored=scored,
    )
    shown = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "correction": settings.mode,
        "temperature": config.rollout.temperature,
        "broken": None,
    }
    return conclude([case], {}, shown)
