"""Deliberate faults of the training pipeline, one for each cause in `VARIANTS`.

A fault damages rows before they are scored, or the policy that scores them. It leaves the engine's record and the
statistics alone: they have to detect it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout
from transformers import PreTrainedTokenizerBase

from lockstep.lab.diagnosis.causes import Cause
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.batch_bytes import ROW_ARRAYS

DROPOUT_P = 0.1
"""GPT-2's rate."""
UPDATE_SCALE = 0.1
"""Size of the update that the engine missed, relative to the standard deviation of each parameter."""


def damaged_rows(
    variant: Cause | None, rows: Sequence[TrainingRow], tokenizer: PreTrainedTokenizerBase
) -> Sequence[TrainingRow]:
    """Return the rows as the broken pipeline would have made them; variants of the policy leave them alone."""
    match variant:
        case Cause.RETOKENIZE:
            return [_retokenized(row, tokenizer) for row in rows]
        case Cause.MISSING_FINAL:
            return _without_final_tokens(rows)
        case Cause.SHIFT:
            return [_shifted(row) for row in rows]
    return rows


@contextmanager
def damaged_policy(variant: Cause | None, policy: nn.Module) -> Iterator[None]:
    """Break the policy for the duration of the block, and restore it bit by bit; variants of rows leave it alone."""
    match variant:
        case Cause.DROPOUT:
            with _dropout(policy):
                yield
        case Cause.STALE_WEIGHTS:
            with _one_update_ahead(policy):
                yield
        case _:
            yield


def retokenize(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Decode ids and encode the text again."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return tuple(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[arg-type]


def _retokenized(row: TrainingRow, tokenizer: PreTrainedTokenizerBase) -> TrainingRow:
    """Retokenize every turn that the row trains. Logprobs are cut, or filled up with 0, to the new length."""
    borders = np.flatnonzero(np.diff(row.turns)) + 1
    parts = {name: np.split(getattr(row, name), borders) for name in ROW_ARRAYS}
    for index, turns in enumerate(parts["turns"]):
        if turns[0] == -1:
            continue  # context
        ids = retokenize(parts["ids"][index].tolist(), tokenizer)
        for name in ("loss_mask", "versions", "turns"):
            parts[name][index] = np.resize(parts[name][index], len(ids))
        logprobs = parts["sampling_logprobs"][index]
        parts["sampling_logprobs"][index] = np.resize(np.append(logprobs, np.zeros(len(ids))), len(ids))
        parts["ids"][index] = np.array(ids, dtype=np.int64)
    return replace(row, support=None, routes=None, **{name: np.concatenate(arrays) for name, arrays in parts.items()})


def _without_final_tokens(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Cut the second half of each rollout's last turn, at least one token."""
    last_turn: dict[int, int] = {}
    for row in rows:
        last_turn[row.rollout_id] = max(last_turn.get(row.rollout_id, -1), row.turns.max())
    cut_rows = []
    for row in rows:
        final = np.flatnonzero(row.loss_mask & (row.turns == last_turn[row.rollout_id]))
        end = final[len(final) // 2] if len(final) else len(row)
        routes = None if row.routes is None else row.routes[:end]
        arrays = {name: getattr(row, name)[:end] for name in ROW_ARRAYS}
        cut_rows.append(replace(row, support=None, routes=routes, **arrays))
    return [row for row in cut_rows if row.num_trained]


def _shifted(row: TrainingRow) -> TrainingRow:
    """Store every logprob one position late: the first token of a turn gets 0, the logprob of the last one is lost."""
    return replace(row, sampling_logprobs=np.where(row.loss_mask, np.roll(row.sampling_logprobs, 1), np.float32(0)))


@contextmanager
def _dropout(policy: nn.Module) -> Iterator[None]:
    """Drop out embeddings through a hook, because `Policy` turns off its model's own dropout in every mode."""
    embedding = next(module for module in policy.modules() if isinstance(module, nn.Embedding))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        handle = embedding.register_forward_hook(lambda *call: dropout(call[-1], DROPOUT_P))  # module, inputs, output
        try:
            yield
        finally:
            handle.remove()


@contextmanager
@torch.no_grad()
def _one_update_ahead(policy: nn.Module) -> Iterator[None]:
    """Add seeded noise to every parameter, like an optimizer step that was not sent to the engine."""
    before = [parameter.clone() for parameter in policy.parameters()]
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
        parameter.add_(noise * spread * UPDATE_SCALE)
    try:
        yield
    finally:
        for parameter, value in zip(policy.parameters(), before, strict=True):
            parameter.copy_(value)
