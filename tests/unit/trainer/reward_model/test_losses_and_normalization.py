"""Padding, truncation and rejection of sequences for a reward model."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rewards.model.padding import fixed_length, pad, position_ids
from rewards.model.truncation import StopRule, replace_rejected

# Padding


def test_positions_skip_padding_as_in_the_seed():
    """query = [23073, pad, pad], response = [11, 339, 561] → 0 1 1 1 2 3."""
    mask = torch.tensor([[True, False, False, True, True, True]])
    assert position_ids(mask).tolist() == [[0, 1, 1, 1, 2, 3]]
    assert position_ids(torch.tensor([[False, False, True, True, True, True]])).tolist() == [[0, 0, 0, 1, 2, 3]]


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=600, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval().double()


@torch.no_grad()
def logits_of_first(model, batch):
    output = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT.long(), position_ids=batch.position_ids_BT)
    return output.logits[0][batch.mask_BT[0]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("others", [[], [[5] * 9], [[7, 8], [0] * 20]], ids=["alone", "longer mate", "two mates"])
@pytest.mark.parametrize("length", [None, 31])
def test_logits_do_not_depend_on_padding_its_side_or_batch_mates(gpt2, side, others, length):
    row = [230, 11, 339, 561, 0]
    expected = logits_of_first(gpt2, pad([row]))
    found = logits_of_first(gpt2, pad([row, *others], side=side, length=length))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_padding_between_query_and_response_changes_nothing_as_in_the_seed(gpt2):
    mask = torch.tensor([[True, False, False, True, True, True]])
    ids = torch.tensor([[230, 0, 0, 11, 339, 561]])
    found = gpt2(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask)).logits[mask]
    torch.testing.assert_close(found, logits_of_first(gpt2, pad([[230, 11, 339, 561]])), rtol=0, atol=1e-10)


def test_padding_is_never_embedded_and_the_last_token_is_a_real_one():
    batch = pad([[9, 9], [9, 9, 9, 0]], side="right")
    assert batch.ids_BT.tolist() == [[9, 9, 0, 0], [9, 9, 9, 0]]
    assert batch.last_B.tolist() == [1, 3]  # a sampled 0 is a token, whatever padding looks like
    assert pad([[9, 9], [9]], side="left").last_B.tolist() == [1, 1]


def test_what_cannot_be_padded_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        pad([[1], []])
    with pytest.raises(ValueError, match="expected at most 2"):
        pad([[1, 2, 3]], length=2)
    with pytest.raises(ValueError, match="left or right"):
        pad([[1]], side="top")
    assert fixed_length([1, 2, 3], 2) == [1, 2]


# Truncation and rejection

STOP = StopRule(token_ids=frozenset({13}), after=16)


def test_the_first_stop_token_at_or_after_the_minimum_ends_the_response():
    response = [13] * 3 + [1] * 13 + [13, 2, 13, 2, 2, 2, 2, 2]
    assert STOP.end(response) == 17
    assert STOP.truncate(response) == response[:17]
    assert STOP.accepts(response)


def test_stop_tokens_before_the_minimum_do_not_count():
    response = [1] * 15 + [13] + [1] * 8
    assert not STOP.accepts(response)
    assert STOP.truncate(response) == response
    assert STOP.accepts([1] * 23 + [13])


def test_rejection_replaces_the_score_and_does_not_add_to_it():
    assert replace_rejected([5.0, -3.0, 0.2], [False, False, True], rejected=-1.0) == [-1.0, -1.0, 0.2]


def test_a_stop_rule_without_stop_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one stop token"):
        StopRule(token_ids=frozenset())
