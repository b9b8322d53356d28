"""Padding of token rows: it changes no result and is never mistaken for a token."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.rewards.model.padding import PaddedBatch, pad, position_ids


def padded_left(rows: list[list[int]], width: int = 31) -> PaddedBatch:
    mask_BT = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    ids_BT = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return PaddedBatch(ids_BT, mask_BT, position_ids(mask_BT))


def test_position_ids_skip_padding():
    """query = [23073, pad, pad], response = [11, 339, 561] → 0 1 1 1 2 3 ("The N Implementation Details of RLHF with
    PPO", "Adjust position indices")."""
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


OTHERS = {"alone": [], "longer row": [[5] * 9], "two rows": [[7, 8], [0] * 20], "long row": [[1] * 31]}


@pytest.mark.parametrize("make_batch", [pad, padded_left])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_logits_do_not_depend_on_padding_its_side_or_other_rows(gpt2, others, make_batch):
    row = [230, 11, 339, 561, 0]
    expected = logits_of_first(gpt2, pad([row]))
    torch.testing.assert_close(logits_of_first(gpt2, make_batch([row, *others])), expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_padding_between_query_and_response_changes_nothing(gpt2):
    mask = torch.tensor([[True, False, False, True, True, True]])
    ids = torch.tensor([[230, 0, 0, 11, 339, 561]])
    found = gpt2(input_ids=ids, attention_mask=mask.long(), position_ids=position_ids(mask)).logits[mask]
    torch.testing.assert_close(found, logits_of_first(gpt2, pad([[230, 11, 339, 561]])), rtol=0, atol=1e-10)


def test_padding_is_never_embedded_and_the_last_token_is_a_real_one():
    batch = pad([[9, 9], [9, 9, 9, 0]])
    assert batch.ids_BT.tolist() == [[9, 9, 0, 0], [9, 9, 9, 0]]
    assert batch.last_B.tolist() == [1, 3]  # a sampled 0 is a token, although padding has that id
    assert padded_left([[9, 9], [9]], 2).last_B.tolist() == [1, 1]


def test_an_empty_row_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        pad([[1], []])
