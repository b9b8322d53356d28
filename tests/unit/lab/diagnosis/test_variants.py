"""Deliberate faults: each damages its own part of the pipeline, and policies are restored."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.lab.diagnosis.causes import Cause
from lockstep.lab.diagnosis.evidence import match_rows
from lockstep.lab.diagnosis.variants import damaged_policy, damaged_rows, retokenize
from lockstep.rollout.episode.rows import rows_from_calls
from tests.fixtures.made_up_model import TOKENIZER, ids_of, two_turns

POLICY_VARIANTS = (Cause.STALE_WEIGHTS, Cause.DROPOUT)


def test_retokenizing_encodes_every_turn_again_and_keeps_the_context():
    rollout = two_turns()
    (row,) = rows_from_calls(rollout.calls)
    (damaged,) = damaged_rows(Cause.RETOKENIZE, [row], TOKENIZER)
    for turn, call in enumerate(rollout.calls):
        assert tuple(damaged.ids[damaged.turns == turn]) == retokenize(call.sampled_ids, TOKENIZER) != call.sampled_ids
        logprobs = damaged.sampling_logprobs[damaged.turns == turn]
        assert logprobs.tolist() == pytest.approx(call.sampled_logprobs[: len(logprobs)])
    assert (damaged.ids[~damaged.loss_mask] == row.ids[~row.loss_mask]).all()
    assert (damaged.loss_mask == (damaged.turns >= 0)).all()
    assert set(damaged.versions[damaged.loss_mask]) == {0}


def test_a_turn_that_grows_by_retokenizing_is_filled_up_with_zeros():
    class Speller:
        def decode(self, ids, **_):
            return "x" * len(ids)

        def encode(self, text, **_):
            return [5] * (len(text) + 2)

    rollout = two_turns()
    (damaged,) = damaged_rows(Cause.RETOKENIZE, rows_from_calls(rollout.calls), Speller())  # type: ignore[arg-type]
    last = damaged.sampling_logprobs[damaged.turns == 1]
    assert last[:-2].tolist() == pytest.approx(rollout.calls[1].sampled_logprobs)
    assert last[-2:].tolist() == [0.0, 0.0]


def test_missing_final_loses_the_end_of_the_last_turn_of_each_rollout():
    rollouts = [two_turns(0), two_turns(1)]
    rows = [row for r in rollouts for row in rows_from_calls(r.calls, rollout_id=r.rollout_id)]
    for rollout in rollouts:
        found = match_rows([rollout], damaged_rows(Cause.MISSING_FINAL, rows, TOKENIZER))
        assert found.same == found.trained < found.sampled
        assert found.lost_ends == found.sampled - found.trained <= len(rollout.calls[-1].sampled_ids)


def test_shift_moves_logprobs_and_nothing_else():
    (row,) = rows_from_calls(two_turns().calls)
    (late,) = damaged_rows(Cause.SHIFT, [row], TOKENIZER)
    assert (late.ids == row.ids).all()
    assert (late.loss_mask == row.loss_mask).all()
    inside = row.loss_mask[1:] & row.loss_mask[:-1]
    assert (late.sampling_logprobs[1:][inside] == row.sampling_logprobs[:-1][inside]).all()
    assert not late.sampling_logprobs[~row.loss_mask].any()


@pytest.mark.parametrize("variant", [None, *POLICY_VARIANTS])
def test_other_variants_leave_rows_alone(variant):
    rows = rows_from_calls(two_turns().calls)
    assert damaged_rows(variant, rows, TOKENIZER) is rows


def test_variants_of_rows_do_not_modify_them():
    (row,) = rows_from_calls(two_turns().calls)
    before = {name: getattr(row, name).copy() for name in ("ids", "loss_mask", "sampling_logprobs", "turns")}
    for variant in (Cause.RETOKENIZE, Cause.MISSING_FINAL, Cause.SHIFT):
        damaged_rows(variant, [row], TOKENIZER)
    assert all(np.array_equal(getattr(row, name), value) for name, value in before.items())


def test_the_tokenizer_survives_its_own_encoding():
    assert retokenize(ids_of("the answer is 42"), TOKENIZER) == ids_of("the answer is 42")


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_the_policy_is_broken_inside_and_restored_to_the_bit(variant):
    policy = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    expected = policy(torch.arange(8))
    with damaged_policy(variant, policy):
        assert not torch.equal(policy(torch.arange(8)), expected)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert torch.equal(policy(torch.arange(8)), expected)


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_the_policy_is_restored_when_scoring_fails(variant):
    policy = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    expected = policy(torch.arange(8))
    with contextlib.suppress(ZeroDivisionError), damaged_policy(variant, policy):
        raise ZeroDivisionError
    assert torch.equal(policy(torch.arange(8)), expected)
    assert torch.is_grad_enabled()


def test_gradients_stay_enabled_inside_of_the_block():
    with damaged_policy(Cause.STALE_WEIGHTS, nn.Linear(2, 2)):
        assert torch.is_grad_enabled()
