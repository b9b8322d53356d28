"""Validation of token evidence: a call or row with inconsistent evidence cannot be created."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import (
    EngineCall,
    FinishReason,
    Rollout,
    RolloutStatus,
    SamplingSupport,
    TrainingRow,
    VersionSpan,
)

GOOD: dict[str, Any] = {
    "prompt_ids": (1, 2),
    "sampled_ids": (3, 4),
    "sampled_logprobs": (-0.5, 0.0),
    "finish_reason": FinishReason.STOP,
}


def spans(*bounds: tuple[int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=index, start=start, end=end) for index, (start, end) in enumerate(bounds))


def a_support(offsets: list[int], token_ids: list[int]) -> SamplingSupport:
    return SamplingSupport(offsets=np.array(offsets), token_ids=np.array(token_ids))


def test_complete_evidence_is_accepted() -> None:
    call = EngineCall(**GOOD, version_spans=spans((0, 1), (1, 2)), support=a_support([0, 1, 3], [3, 4, 5]))
    assert call.all_ids == (1, 2, 3, 4)
    assert call.oldest_version == 0
    assert EngineCall(**GOOD).oldest_version == -1


@pytest.mark.parametrize(("turns", "expected"), [(0, 2), (1, 4), (2, 2), (3, 2)])
def test_the_prompt_ends_before_the_first_sampled_message(turns: int, expected: int) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant")
    calls = (EngineCall(**GOOD),) * turns
    messages = tuple({"role": role, "content": ""} for role in roles)
    assert Rollout(rollout_id=0, group_id=0, calls=calls, messages=messages).num_prompt_messages == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"sampled_logprobs": (-0.5,)}, "2 sampled tokens but 1 logprobs"),
        ({"sampled_logprobs": (-0.5, math.nan)}, "token 1 .id 4. has logprob nan"),
        ({"sampled_logprobs": (-math.inf, -0.5)}, "token 0 .id 3. has logprob -inf"),
        ({"sampled_logprobs": (-9999.0, -0.5)}, "logprob -9999"),
        ({"sampled_logprobs": (0.1, -0.5)}, "logprob 0.1"),
        ({"sampled_logprobs": (None, -0.5)}, "token 0 .id 3. has logprob None"),
        ({"sampled_logprobs": ("-0.5", -0.5)}, "has logprob -0.5"),
        ({"sampled_logprobs": (False, -0.5)}, "token 0 .id 3. has logprob False"),
        ({"sampled_logprobs": (-0.5, np.False_)}, "token 1 .id 4. has logprob False"),
        ({"sampled_ids": (True, 4)}, "a sampled id is not a token id .True is a bool"),
        ({"prompt_ids": (7, False)}, "a prompt id is not a token id .False is a bool"),
        ({"sampled_ids": ("3", 4)}, "a sampled id is not a token id"),
        ({"version_spans": (VersionSpan(version=True, start=0, end=2),)}, "are not 32-bit integers"),  # type: ignore[arg-type]
        ({"version_spans": (VersionSpan(version="3", start=0, end=2),)}, "are not 32-bit integers"),  # type: ignore[arg-type]
        ({"version_spans": (VersionSpan(version=3, start=False, end=2),)}, "are not 32-bit integers"),
        ({"sampled_ids": (3, -1)}, "negative sampled id"),
        ({"sampled_ids": (3, 4.5)}, "a sampled id is not a token id"),
        ({"prompt_ids": (-1,)}, "negative prompt id"),
        ({"prompt_ids": (None,)}, "a prompt id is not a token id"),
        ({"support": a_support([0, 1, 3], [3, 5, 6])}, "token 1 .id 4. is not in its support"),
        ({"version_spans": spans((0, 1))}, "end at token 1, but 2 tokens"),
        ({"version_spans": spans((0, 1), (0, 2))}, "do not tile"),
        ({"version_spans": spans((1, 2))}, "do not tile"),
        ({"support": a_support([0, 1], [3])}, "support for 1 tokens, 2 were sampled"),
    ],
)
def test_inconsistent_evidence_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        EngineCall(**{**GOOD, **change})


def test_an_inconsistent_support_is_refused() -> None:
    with pytest.raises(EvidenceError, match="empty support"):
        a_support([0, 0, 1], [3])
    with pytest.raises(EvidenceError, match="must run from 0 to 2"):
        a_support([0, 1], [3, 4])
    with pytest.raises(EvidenceError, match="offsets of shape"):
        a_support([], [])


def test_a_row_needs_arrays_of_its_length_and_an_untrained_first_token() -> None:
    arrays: dict[str, Any] = {
        "ids": np.array([1, 2]),
        "loss_mask": np.array([False, True]),
        "sampling_logprobs": np.zeros(2, np.float32),
        "versions": np.zeros(2, np.int32),
        "turns": np.zeros(2, np.int32),
    }
    assert TrainingRow(**arrays).num_trained == 1
    with pytest.raises(EvidenceError, match="'versions': 3"):
        TrainingRow(**{**arrays, "versions": np.zeros(3, np.int32)})
    with pytest.raises(EvidenceError, match="no context to predict it"):
        TrainingRow(**{**arrays, "loss_mask": np.array([True, True])})


def test_a_rollout_is_cut_off_if_a_token_limit_ended_its_last_turn() -> None:
    """Also at the turn limit: the environment sees a truncated tool call as an error, not as the end."""
    whole, cut = (
        EngineCall(**{**GOOD, "finish_reason": reason}) for reason in (FinishReason.STOP, FinishReason.LENGTH)
    )
    for calls, is_cut_off in (((cut, cut), True), ((cut, whole), False), ((), False)):
        rollout = Rollout(rollout_id=0, group_id=0, calls=calls, messages=(), status=RolloutStatus.MAX_TURNS)
        assert rollout.is_cut_off is is_cut_off


def test_a_rollout_that_failed_or_sampled_nothing_is_not_trainable() -> None:
    call = EngineCall(**GOOD)
    assert Rollout(rollout_id=0, group_id=0, calls=(call,)).is_trainable
    assert Rollout(rollout_id=0, group_id=0, calls=(call,), status=RolloutStatus.CONTEXT_FULL).is_trainable
    assert not Rollout(rollout_id=0, group_id=0, calls=(call,), status=RolloutStatus.FAILED).is_trainable
    assert not Rollout(rollout_id=0, group_id=0, calls=()).is_trainable
