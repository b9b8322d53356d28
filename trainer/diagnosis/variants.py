"""The pipeline, broken on purpose: what seed 000 found, and what else sets engine and trainer apart.

A variant damages what is really computed: the rows that are scored, or the policy that scores them. It does not touch
the record, the statistics or the report, which have to find it by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout
from transformers import PreTrainedTokenizerBase

from rollout.episode.rows import rows_from_calls
from rollout.records import EngineCall, Rollout, TrainingRow, VersionSpan

DROPOUT_P = 0.1
"""As GPT-2 has it."""
UPDATE_SCALE = 0.1
"""Size of the update that the engine missed, relative to the spread of each parameter."""


class Variant(StrEnum):
    RETOKENISE = "retokenise"
    """Every sampled turn is decoded, and the text encoded again (seed 000, issue 2)."""
    MISSING_FINAL = "missing_final"
    """The last turn's final tokens are lost when the episode ends (seed 000, issue 1)."""
    SHIFT = "shift"
    """Logprobs are placed one position late, as if targets were inputs (seed 000, issue 3)."""
    DROPOUT = "dropout"
    """The policy scores with dropout (seed 000, the second investigation)."""
    STALE_WEIGHTS = "stale_weights"
    """The trainer made an update that the engine was not given."""


Damage = Callable[[Rollout, Sequence[TrainingRow]], list[TrainingRow]]
"""Rows of one rollout → the rows that a broken pipeline would have made."""


@contextmanager
def broken(variant: Variant | None, *, tokenizer: PreTrainedTokenizerBase, policy: nn.Module) -> Iterator[Damage]:
    """The pipeline under a variant; None leaves it right. On leaving, the policy is as it was, to the bit."""
    match variant:
        case None:
            yield lambda rollout, rows: list(rows)
        case Variant.RETOKENISE:
            yield lambda rollout, rows: retokenised(rollout, tokenizer)
        case Variant.MISSING_FINAL:
            yield lambda rollout, rows: without_final_tokens(rows)
        case Variant.SHIFT:
            yield lambda rollout, rows: [shifted(row) for row in rows]
        case Variant.DROPOUT:
            with _dropout(policy):
                yield lambda rollout, rows: list(rows)
        case Variant.STALE_WEIGHTS:
            with _one_update_ahead(policy):
                yield lambda rollout, rows: list(rows)


def retokenise_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return list(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[arg-type]


def retokenised(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[TrainingRow]:
    """Rows from turns that went through text. Logprobs are cut or filled up to the new length, as they come."""
    calls: list[EngineCall] = []
    for call in rollout.calls:
        ids = retokenise_ids(call.sampled_ids, tokenizer)
        filled = (*call.sampled_logprobs, *[0.0] * len(ids))[: len(ids)]
        calls.append(
            EngineCall(
                prompt_ids=_with_earlier_turns(call, rollout.calls[: len(calls)], calls),
                sampled_ids=tuple(ids),
                sampled_logprobs=filled,
                finish_reason=call.finish_reason,
                version_spans=(VersionSpan(version=call.oldest_version, start=0, end=len(ids)),),
            )
        )
    return rows_from_calls(calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id)


def without_final_tokens(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The last half of the last turn is gone, at least one token."""
    last_turn = max((int(row.turns.max()) for row in rows), default=-1)
    damaged = []
    for row in rows:
        trained = np.flatnonzero(row.loss_mask & (row.turns == last_turn))
        end = len(row) if not len(trained) else int(trained[len(trained) // 2])
        damaged.append(_cut(row, end))
    return [row for row in damaged if row.num_trained]


def shifted(row: TrainingRow) -> TrainingRow:
    """Every logprob one position late. The first token of a turn gets none, the last one's is lost."""
    late = np.concatenate([row.sampling_logprobs[:1], row.sampling_logprobs[:-1]])
    return replace(row, sampling_logprobs=np.where(row.loss_mask, late, 0.0).astype(np.float32))


def _with_earlier_turns(
    call: EngineCall, originals: Sequence[EngineCall], damaged: Sequence[EngineCall]
) -> tuple[int, ...]:
    """The prompt of a call, with the latest turn that it extends replaced by what became of it."""
    for original, replacement in zip(reversed(originals), reversed(damaged), strict=True):
        if call.prompt_ids[: len(original.all_ids)] == original.all_ids:
            return replacement.all_ids + call.prompt_ids[len(original.all_ids) :]
    return call.prompt_ids


def _cut(row: TrainingRow, end: int) -> TrainingRow:
    return replace(
        row,
        ids=row.ids[:end],
        loss_mask=row.loss_mask[:end],
        sampling_logprobs=row.sampling_logprobs[:end],
        versions=row.versions[:end],
        turns=row.turns[:end],
        support=None,
    )


@contextmanager
def _dropout(policy: nn.Module) -> Iterator[None]:
    """Dropout on the embeddings. `Policy` switches off its model's own, in every mode, so it is put in from outside."""
    embeddings = _policy_embeddings(policy)

    def drop(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return dropout(output, DROPOUT_P)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        handle = embeddings.register_forward_hook(drop)
        try:
            yield
        finally:
            handle.remove()


def _policy_embeddings(policy: nn.Module) -> nn.Module:
    embeddings = [module for module in policy.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        raise ValueError("the policy has no embedding layer to put dropout on")
    return embeddings[0]


@contextmanager
def _one_update_ahead(policy: nn.Module) -> Iterator[None]:
    """Every parameter moved by seeded noise: the step that a trainer makes and an engine has not seen."""
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_(noise * spread * UPDATE_SCALE)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(before[name])
