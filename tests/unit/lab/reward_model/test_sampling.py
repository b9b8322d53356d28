"""Queries and samples of the pretrained model."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lockstep.demo.preferences.queries import select_query
from lockstep.lab.reward_model.sampling import sample_responses


def test_a_query_begins_after_the_first_start_and_ends_with_the_last_end_in_the_window():
    text = ["a", "b", ".", "c", "d", ".", "e", "f", ".", "g"]
    assert select_query(text, start=".", end=".", length=5) == ["c", "d", "."]
    assert select_query(text, start=".", end=".", length=6) == ["c", "d", ".", "e", "f", "."]
    assert select_query(text, start=None, end=None, length=4) == ["a", "b", ".", "c"]


def test_texts_without_a_query_are_skipped():
    assert select_query(["a", "b"], start=".", end=".", length=5) is None
    assert select_query(["a", "."], start=".", end=".", length=5) is None
    assert select_query([".", "a", "b", "c", "."], start=".", end=".", length=2) is None


def test_sampling_continues_past_the_end_of_sequence_and_seeds_differ():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=4, eos_token_id=1, pad_token_id=1))
    queries = [[2, 3], [2], [3, 3, 3]] * 10
    first = sample_responses(model, queries, length=12, temperature=1.0, seed=0)
    assert {len(response) for response in first} == {12}
    assert any(1 in response[:-1] for response in first)
    assert first == sample_responses(model, queries, length=12, temperature=1.0, seed=0)
    assert first != sample_responses(model, queries, length=12, temperature=1.0, seed=100_003)
    assert model.generation_config.eos_token_id == 1
