"""The bench on which a pipeline is examined: rows from rollouts by the real training path, scored, compared, judged.

It is made once; `examine` can be called for any cases, with the pipeline as it is or broken on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from rollout.records import Message, Rollout, TrainingRow
from trainer.batch.step_batch import StepBatch, decode, encode
from trainer.diagnosis import statistics
from trainer.diagnosis.cases import Case
from trainer.diagnosis.causes import EngineCheck, Evidence, judge
from trainer.diagnosis.classes import TokenTexts
from trainer.diagnosis.match import match
from trainer.diagnosis.report import CaseReport, Diagnosis, conclude
from trainer.diagnosis.scored import CorrectionSettings, ScoredRow, Scorer, score_rows
from trainer.diagnosis.variants import Damage, Variant, broken, retokenise_ids

CHECKED_ROWS = 4
"""Rows per case that the engine is asked about again."""


class EngineScores(Protocol):
    """The engine's own scores, now: log π(ids[i] | ids[:i]) at temperature 1 for i ≥ 1, for each sequence."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence it can score."""
        ...

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    policy: nn.Module
    """What `scorer` scores with; variants break it and put it back."""
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    engine_scores: EngineScores | None
    """None where there is no engine to ask."""
    temperature: float
    correction: CorrectionSettings
    settings: Mapping[str, Any]
    parity: Callable[[Sequence[Message]], str] = lambda messages: ""
    """A sentence on the two renderers of a model that has two (`Chat.parity`)."""

    def examine(self, cases: Sequence[Case], variant: Variant | None = None) -> Diagnosis:
        """Diagnose the cases. The variant breaks the pipeline; what is reported as cause comes from the evidence."""
        texts = TokenTexts(self.tokenizer)
        with broken(variant, tokenizer=self.tokenizer, policy=self.policy) as damage:
            reports = [self._examine(case, damage, texts) for case in cases]
        scored = [row for report in reports for row in report.scored]
        return conclude(
            reports,
            statistics.noise_floor(scored),
            {**self.settings, "temperature": self.temperature, "broken": variant},
        )

    def _examine(self, case: Case, damage: Damage, texts: TokenTexts) -> CaseReport:
        rollouts = [rollout for rollout in case.rollouts if rollout.is_trainable]
        rows = training_rows(rollouts, damage)
        scored = score_rows(rows, self.scorer, texts, self.correction)
        evidence = Evidence(
            match=match(rollouts, rows),
            mismatch=statistics.mismatch(scored),
            noise=statistics.noise_floor(scored),
            abs_diff_by_offset=statistics.abs_diff_by_offset(scored),
            engine=self._ask_engine(scored),
        )
        return CaseReport(
            name=case.name,
            purpose=case.purpose,
            note=self._note(case, evidence, texts),
            finding=judge(evidence),
            num_rollouts=len(rollouts),
            num_failed=len(case.rollouts) - len(rollouts),
            match=evidence.match,
            mismatch=evidence.mismatch,
            noise=evidence.noise,
            by_class=statistics.by_class(scored),
            by_turn=statistics.by_turn(scored),
            abs_diff_by_offset=evidence.abs_diff_by_offset,
            engine=evidence.engine,
            worst=statistics.worst_positions(scored, texts),
            scored=scored,
        )

    def _ask_engine(self, scored: Sequence[ScoredRow]) -> EngineCheck | None:
        if self.engine_scores is None:
            return None
        fitting = [s for s in scored if len(s.row) <= self.engine_scores.max_tokens and len(s.position_T)]
        chosen = fitting[:CHECKED_ROWS]
        if not chosen:
            return EngineCheck(tokens=0, record_vs_trainer=0.0, engine_vs_trainer=0.0, engine_vs_record=None)
        answers = self.engine_scores([s.row.ids.tolist() for s in chosen])
        engine_T = np.concatenate(
            [np.asarray(answer)[s.position_T - 1] for s, answer in zip(chosen, answers, strict=True)]
        )
        trainer_T = np.concatenate(self.scorer([s.row for s in chosen], temperature=1.0)).astype(np.float64)
        record_T = np.concatenate([s.logp_samp_T for s in chosen])
        return EngineCheck(
            tokens=len(engine_T),
            record_vs_trainer=float(np.abs(np.concatenate([s.diff_T for s in chosen])).mean()),
            engine_vs_trainer=float(np.abs(engine_T - trainer_T).mean()),
            engine_vs_record=float(np.abs(engine_T - record_T).mean()) if self.temperature == 1.0 else None,
        )

    def _note(self, case: Case, evidence: Evidence, texts: TokenTexts) -> str:
        if case.name == "alignment":
            parts = [f"{offset:+d}: {value:.2g}" for offset, value in evidence.abs_diff_by_offset.items()]
            return f"mean |Δ log π| by offset  {'   '.join(parts)}"
        if case.name == "single_turn" and case.rollouts:
            said = case.rollouts[0].messages
            return self.parity([message for message in said if message["role"] != "assistant"])
        if case.name == "retokenisation":
            return retokenisation_note([r for r in case.rollouts if r.is_trainable], self.tokenizer, texts)
        return ""


def training_rows(rollouts: Sequence[Rollout], damage: Damage) -> list[TrainingRow]:
    """Rows by the path that training takes, bytes and all, then damaged."""
    batch = decode(encode(StepBatch.of(rollouts, mask_truncated=False)))
    rows: list[TrainingRow] = []
    for rollout in sorted(rollouts, key=lambda rollout: rollout.rollout_id):
        own = [row for row in batch.rows if row.rollout_id == rollout.rollout_id]
        rows += damage(rollout, own)
    return rows


def retokenisation_note(rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> str:
    """Share of sampled tokens that would keep id and place through decode and encode, and the first that would not."""
    kept = total = changed_turns = turns = 0
    example = ""
    for call in (call for rollout in rollouts for call in rollout.calls):
        again = retokenise_ids(call.sampled_ids, tokenizer)
        same = [a == b for a, b in zip(call.sampled_ids, again, strict=False)]
        kept, total, turns = kept + sum(same), total + len(call.sampled_ids), turns + 1
        if tuple(again) == call.sampled_ids:
            continue
        changed_turns += 1
        if not example:
            first = same.index(False) if False in same else len(same)
            was = " ".join(repr(texts[token]) for token in call.sampled_ids[first : first + 3])
            now = " ".join(repr(texts[token]) for token in again[first : first + 3])
            example = f"; for example {was} would become {now or 'nothing'}"
    if not total:
        return ""
    return (
        f"{kept / total:.1%} of sampled tokens would survive decode and encode "
        f"({changed_turns} of {turns} turns would change){example}"
    )
