"""Summary of a run's first step: shapes, loss mask, and the first trained tokens of a row with both logprobs.

Such a print exposed the bugs in "KL Divergence Analysis" (jphme, gist, 2026). The forced tokens that its two-stage mask
would remove are counted as a diagnostic.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lockstep.rollout.records import TrainingRow
from lockstep.rollout.safe_text import terminal_safe
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.objective.correction.mismatch import FORCED_LOGPROB, PREFIX, mismatch_metrics
from lockstep.trainer.observe.token_texts import TokenTexts

SHOWN_TOKENS = 12


def first_step_summary(batch: StepBatch, logp_train_N: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return lines for the console: plain text, with model text escaped. logp_train_N: the trainer's logprobs."""
    num_tokens, num_trained = sum(map(len, batch.rows)), batch.layout.num_tokens
    if not num_trained:
        return [f"first step: {batch.num_rollouts} rollouts, no trained tokens"]
    samp_N = batch.sampling_logprobs_N
    num_forced = int((samp_N >= FORCED_LOGPROB).sum())
    lengths = [len(row) for row in batch.rows]
    metrics = mismatch_metrics(logp_train_N, samp_N, batch.rollout_N, batch.num_rollouts)
    lines = [
        f"first step: {batch.num_rollouts} rollouts, {len(batch.rows)} rows of {min(lengths)} to {max(lengths)} "
        f"tokens, {num_tokens} in all",
        f"  loss mask   {num_trained} sampled tokens are trained ({num_trained / num_tokens:.1%}), "
        f"{num_tokens - num_trained} are context",
        f"  forced      {num_forced} of them have a sampling logprob of at least {FORCED_LOGPROB} "
        f"({num_forced / num_trained:.1%}); they were almost certain, and are trained like the others",
        f"  logp_samp   {_spread(samp_N)}",
        f"  logp_train  {_spread(logp_train_N)}",
        f"  kl_v1       {metrics[PREFIX + 'kl_v1']:+.2e}, without forced tokens {_unforced(metrics, 'kl_v1')}",
        f"  kl_v2       {metrics[PREFIX + 'kl_v2']:+.2e}, without forced tokens {_unforced(metrics, 'kl_v2')}",
    ]
    index = next(i for i, row in enumerate(batch.rows) if row.num_trained)
    start = int(batch.layout.token_start[index])
    return lines + _row_lines(batch.rows[index], logp_train_N[start:], TokenTexts(tokenizer))


def first_demonstrations(batch: StepBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return lines for the console about the first demonstrations: counts, and a row with its trained tokens."""
    num_tokens, num_trained = sum(map(len, batch.rows)), batch.layout.num_tokens
    row = batch.rows[0]
    texts = TokenTexts(tokenizer)
    trained_text = "".join(texts[token] for token in row.ids[row.loss_mask].tolist())
    return [
        f"first step: {batch.num_rollouts} demonstrations, {len(batch.rows)} rows, {num_tokens} tokens in all",
        f"  loss mask   {num_trained} tokens of assistant turns are trained ({num_trained / max(num_tokens, 1):.1%})",
        f"  row 0       {len(row)} tokens, of which are trained: {terminal_safe(trained_text):.400}",
    ]


def _row_lines(row: TrainingRow, logp_train_T: torch.Tensor, texts: TokenTexts) -> list[str]:
    """Return a table of the first trained tokens of a row; `logp_train_T` starts at the row."""
    positions = np.flatnonzero(row.loss_mask)
    lines = [f"  row of rollout {row.rollout_id}: {len(row)} tokens, {len(positions)} trained; the first of them:"]
    lines += [f"    {'position':>8} {'turn':>4} {'id':>7} {'logp_samp':>10} {'logp_train':>10} {'diff':>9}  token"]
    for position, train in zip(positions[:SHOWN_TOKENS].tolist(), logp_train_T.tolist(), strict=False):
        token, samp = int(row.ids[position]), float(row.sampling_logprobs[position])
        lines.append(
            f"    {position:>8} {row.turns[position]:>4} {token:>7} {samp:>10.5f} {train:>10.5f} {samp - train:>+9.1e}"
            f"  {terminal_safe(texts[token])}"
        )
    return lines


def _spread(logp: torch.Tensor) -> str:
    return f"mean {float(logp.mean()):.4f}, min {float(logp.min()):.4f}, max {float(logp.max()):.2e}"


def _unforced(metrics: dict[str, float], name: str) -> str:
    value = metrics.get(f"{PREFIX}{name}_unforced")
    return "no tokens left" if value is None else f"{value:+.2e}"
