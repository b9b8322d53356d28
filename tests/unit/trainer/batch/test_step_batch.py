"""Rollouts become one batch of rows, the same on every rank."""

from dataclasses import replace

import numpy as np
import pytest

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import (
    EngineCall,
    FinishReason,
    ImageSpan,
    Rollout,
    RolloutStatus,
    SamplingSupport,
    VersionSpan,
)
from lockstep.trainer.batch.batch_bytes import decode, encode
from lockstep.trainer.batch.step_batch import StepBatch


def rollout(
    rollout_id: int, *, sampled: int = 3, status: RolloutStatus = RolloutStatus.COMPLETED, support=None
) -> Rollout:
    call = EngineCall(
        prompt_ids=(1, 2, 3),
        sampled_ids=tuple(range(10, 10 + sampled)),
        sampled_logprobs=tuple(-0.1 * (i + 1) - rollout_id for i in range(sampled)),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=7, start=0, end=sampled),),
        support=support,
    )
    return Rollout(
        rollout_id=rollout_id, group_id=rollout_id // 2, calls=(call,), status=status, reward=float(rollout_id)
    )


def over_ranks(batch: StepBatch) -> StepBatch:
    """Return the batch as another rank receives it."""
    return decode(encode(batch))


def test_rollouts_are_in_the_order_of_their_ids() -> None:
    rollouts = [rollout(i, sampled=2 + i) for i in (3, 0, 4, 1, 2)]
    batch = StepBatch.of(rollouts, mask_truncated=False)
    assert batch.rollout_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.rewards_S.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert batch.rollout_N.tolist() == [0] * 2 + [1] * 3 + [2] * 4 + [3] * 5 + [4] * 6


def test_every_rank_gets_the_same_batch() -> None:
    batch = StepBatch.of([rollout(i, sampled=2 + i) for i in range(5)], mask_truncated=False, greedy_rewards={0: 0.5})
    received = over_ranks(batch)
    for name in (
        "rollout_ids",
        "group_S",
        "rewards_S",
        "is_kept_S",
        "greedy_rewards_S",
        "num_turns_S",
        "turn_rewards_K",
    ):
        np.testing.assert_array_equal(getattr(received, name), getattr(batch, name))
    for name in ("sampling_logprobs_N", "rollout_N", "versions_N", "turns_N"):
        assert getattr(received, name).tolist() == getattr(batch, name).tolist()
    for row, own in zip(received.rows, batch.rows, strict=True):
        assert (row.rollout_id, row.group_id) == (own.rollout_id, own.group_id)


def test_every_rank_gets_the_images_of_the_rows() -> None:
    batch = StepBatch.of([rollout(i) for i in range(3)], mask_truncated=False)
    spans = tuple(ImageSpan(start=2 * i, end=2 * i + 1, digest=f"{i:064x}") for i in range(2))
    of_rows = (spans, (), spans[1:])
    rows = tuple(replace(row, images=images) for row, images in zip(batch.rows, of_rows, strict=True))
    assert tuple(row.images for row in over_ranks(replace(batch, rows=rows)).rows) == of_rows
    assert all(row.images == () for row in over_ranks(batch).rows)


def test_rows_survive_serialization() -> None:
    batch = over_ranks(StepBatch.of([rollout(0)], mask_truncated=False))
    (row,) = batch.rows
    assert row.ids.tolist() == [1, 2, 3, 10, 11, 12]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 3
    np.testing.assert_allclose(row.sampling_logprobs, [0, 0, 0, -0.1, -0.2, -0.3], rtol=1e-6)
    assert row.versions.tolist() == [-1, -1, -1, 7, 7, 7]


def test_failed_rollouts_are_not_in_the_batch() -> None:
    batch = StepBatch.of([rollout(0, status=RolloutStatus.FAILED), rollout(1)], mask_truncated=False)
    assert batch.rollout_ids.tolist() == [1]
    assert len(batch.rows) == 1


def test_truncated_rollouts_are_masked_only_if_configured() -> None:
    rollouts = [rollout(0, status=RolloutStatus.TRUNCATED), rollout(1)]
    assert StepBatch.of(rollouts, mask_truncated=False).is_kept_S.tolist() == [True, True]
    assert StepBatch.of(rollouts, mask_truncated=True).is_kept_S.tolist() == [False, True]


def test_sampling_support_survives_serialization() -> None:
    support = SamplingSupport(offsets=np.array([0, 2, 3, 6]), token_ids=np.array([10, 4, 11, 12, 5, 6], dtype=np.int32))
    batch = over_ranks(StepBatch.of([rollout(0, support=support), rollout(1, support=support)], mask_truncated=False))
    for row in batch.rows:
        assert row.support is not None
        assert row.support.offsets.tolist() == [0, 2, 3, 6]
        assert row.support.token_ids.tolist() == [10, 4, 11, 12, 5, 6]


def test_a_step_in_which_only_some_rows_have_a_support_is_refused() -> None:
    """Without the error those rows would silently be trained over the whole vocabulary."""
    support = SamplingSupport(offsets=np.array([0, 2, 3, 6]), token_ids=np.array([10, 4, 11, 12, 5, 6], dtype=np.int32))
    with pytest.raises(EvidenceError, match="1 of 2 rows carry the sampling support"):
        StepBatch.of([rollout(0, support=support), rollout(1)], mask_truncated=False)


def test_an_empty_step_is_an_empty_batch() -> None:
    batch = over_ranks(StepBatch.of([], mask_truncated=False))
    assert batch.num_rollouts == 0
    assert len(batch.sampling_logprobs_N) == 0
    assert len(batch.rollout_N) == 0


@pytest.mark.parametrize("bad", [b"", b"\x00" * 20])
def test_bytes_of_something_else_are_refused(bad: bytes) -> None:
    with pytest.raises(Exception, match=r"(?i)header|buffer|deserializ"):
        decode(bad)
