"""Examination of cases: training rows from rollouts, scored by the trainer, compared with the record, and judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.lab.diagnosis import evidence
from lockstep.lab.diagnosis.case_distributions import CaseDistributions
from lockstep.lab.diagnosis.cases import Case
from lockstep.lab.diagnosis.causes import Cause, judge
from lockstep.lab.diagnosis.diagnosis import REEXAMINED, CaseReport, Diagnosis, conclude
from lockstep.lab.diagnosis.evidence import EngineCheck, Evidence, ScoredTokens
from lockstep.lab.diagnosis.variants import damaged_policy, damaged_rows, retokenize
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.records import Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.observe.token_texts import TokenTexts

CHECKED_ROWS = 4
"""Rows per case that the engine scores again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examiner:
    """The pipeline of a run, ready to be examined."""

    model: ModelConfig
    correction: CorrectionConfig
    temperature: float
    """Temperature of sampling."""
    with_routes: bool
    """True if the trainer computes with the experts that the engine chose."""
    chat: Chat
    policy: nn.Module
    """The module that `score` uses; variants break and restore it."""
    score: Callable[..., Tensor]
    """`score(batch, temperature=..., alone=False)` returns (N,) logprobs of the trained tokens of a `StepBatch`, packed
    as in training or with each row alone."""
    engine: EnginePool | None
    """None for saved rollouts."""
    whole: Callable[[ScoredTokens], CaseDistributions | None] | None = None
    """Comparison of the distributions over the vocabulary; None: they are not compared."""

    def examine(self, cases: Sequence[Case], variant: Cause | None = None) -> Diagnosis:
        """Diagnose the cases, with a deliberate fault if `variant` names one, which the evidence alone must reveal.

        The rollouts of the last case are shown again under both names of `REEXAMINED`.
        """
        texts = TokenTexts(self.chat.tokenizer)
        with damaged_policy(variant, self.policy):
            reports = [self._examine(case, variant, texts) for case in cases]
        last, by_offset = reports[-1], reports[-1].evidence.abs_diff_by_offset
        offsets = "   ".join(f"{offset:+d}: {diff:.2g}" for offset, diff in by_offset.items())
        views = (
            ("logprobs against neighboring positions", f"mean |Δ log π| by offset  {offsets}"),
            ("tokens that survive decode and encode", retokenization_note(cases[-1].trainable, texts)),
        )
        for name, (purpose, note) in zip(REEXAMINED, views, strict=True):
            reports.append(replace(last, name=name, purpose=purpose, note=note))
        return conclude(reports, self.model, self.correction, temperature=self.temperature, variant=variant)

    def _examine(self, case: Case, variant: Cause | None, texts: TokenTexts) -> CaseReport:
        batch = StepBatch.of(case.trainable, mask_truncated=False, with_routes=self.with_routes)
        batch = replace(batch, rows=tuple(damaged_rows(variant, batch.rows, texts.tokenizer)))
        scored_tokens = ScoredTokens(
            batch=batch,
            train_N=self.score(batch, temperature=self.temperature),
            again_N=self.score(batch, temperature=self.temperature, alone=True),
            texts=texts,
            correction=self.correction,
        )
        note = ""
        if case.name == "single_turn" and case.rollouts:
            note = self.chat.parity(case.rollouts[0].prompt)
        engine = self._ask_engine(scored_tokens)
        whole = None
        if self.whole is not None and engine is not None:
            try:
                whole = self.whole(scored_tokens)
            except (ConfigError, EngineError) as error:
                note = f"{note}{'; ' if note else ''}distributions were not compared: {error}"
        return report_case(case, scored_tokens, engine=engine, whole=whole, note=note)

    def _ask_engine(self, scored: ScoredTokens) -> EngineCheck | None:
        """Let the engine score the first rows that leave one token of its context free."""
        engine, rows = self.engine, scored.batch.rows
        if engine is None:
            return None
        fitting = [index for index, row in enumerate(rows) if len(row) < engine.max_model_len]
        checked_rows = [rows[index] for index in fitting[:CHECKED_ROWS]]
        if not checked_rows:
            return None

        async def ask() -> list[list[float]]:
            return await asyncio.gather(*(engine.score(row.ids.tolist(), row.images) for row in checked_rows))

        answers = engine.loop.run(ask())  # answer i − 1 is the logprob of token i
        parts = [np.array(answer)[row.loss_mask[1:]] for answer, row in zip(answers, checked_rows, strict=True)]
        engine_N = torch.from_numpy(np.concatenate(parts))
        batch = replace(scored.batch, rows=tuple(checked_rows))
        trainer_N = self.score(batch, temperature=1.0)
        is_chosen_N = torch.isin(scored.row_N, torch.tensor(fitting[:CHECKED_ROWS]))
        was_at_1 = self.temperature == 1.0
        return EngineCheck(
            tokens=len(engine_N),
            record_vs_trainer=float(scored.diff_N[is_chosen_N].abs().mean()),
            engine_vs_trainer=float((engine_N - trainer_N).abs().mean()),
            engine_vs_record=float((engine_N - batch.sampling_logprobs_N).abs().mean()) if was_at_1 else None,
        )


def report_step(
    rollouts: Sequence[Rollout], batch: StepBatch, logp_train_N: Tensor, texts: TokenTexts, correction: CorrectionConfig
) -> CaseReport:
    """Judge trainable rollouts of a training step by the step's own logprobs, without a noise floor."""
    rollout_ids = {rollout.rollout_id for rollout in rollouts}
    is_chosen = np.array([row.rollout_id in rollout_ids for row in batch.rows], dtype=bool)
    is_chosen_N = torch.from_numpy(np.repeat(is_chosen, np.diff(batch.layout.token_start)))
    part = replace(batch, rows=tuple(row for row in batch.rows if row.rollout_id in rollout_ids))
    scored_tokens = ScoredTokens(batch=part, train_N=logp_train_N[is_chosen_N], texts=texts, correction=correction)
    purpose = "rollouts of a training step, with the logprobs that it was trained with"
    return report_case(Case(name="step", purpose=purpose, rollouts=tuple(rollouts)), scored_tokens)


def report_case(
    case: Case,
    scored: ScoredTokens,
    *,
    engine: EngineCheck | None = None,
    whole: CaseDistributions | None = None,
    note: str = "",
) -> CaseReport:
    """Summarize and judge the scored rows of a case."""
    rollouts = case.trainable
    case_evidence = Evidence(
        match=evidence.match_rows(rollouts, scored.batch.rows),
        mismatch=evidence.mismatch(scored.train_N, scored.samp_N),
        noise=evidence.noise_floor([scored]),
        abs_diff_by_offset=evidence.abs_diff_by_offset(scored),
        engine=engine,
        whole=whole,
    )
    return CaseReport(
        name=case.name,
        purpose=case.purpose,
        note=note,
        finding=judge(case_evidence),
        num_rollouts=len(rollouts),
        num_failed=len(case.rollouts) - len(rollouts),
        evidence=case_evidence,
        scored=scored,
    )


def retokenization_note(rollouts: Sequence[Rollout], texts: TokenTexts) -> str:
    """Report the share of sampled tokens that would survive decode and encode, and the first that would not."""
    num_kept = total = changed_turns = 0
    example = ""
    calls = [call for rollout in rollouts for call in rollout.calls]
    for call in calls:
        ids, again = call.sampled_ids, retokenize(call.sampled_ids, texts.tokenizer)
        same = [a == b for a, b in zip(ids, again, strict=False)]
        num_kept, total = num_kept + sum(same), total + len(ids)
        changed_turns += again != ids
        if again != ids and not example:
            first = [*same, False].index(False)
            was, now = (" ".join(repr(texts[token]) for token in part[first : first + 3]) for part in (ids, again))
            example = f"; for example {was} would become {now or 'nothing'}"
    if not total:
        return ""
    return (
        f"{num_kept / total:.1%} of sampled tokens would survive decode and encode "
        f"({changed_turns} of {len(calls)} turns would change){example}"
    )
