"""Comparisons read from rows, and the queries of their samples."""

from __future__ import annotations

import pytest

from lockstep.demo.preferences.language import make_tokenizer
from lockstep.rollout.errors import DataError
from lockstep.trainer.reward_model.data import Comparison, Lengths, query_ids, read_comparisons
from tests.fixtures.reward_models import chat_tokenizer, said


def test_all_forms_of_comparisons_are_read():
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    rows = [
        {"prompt": "he was", "responses": ["happy .", "sad .", "tired ."], "best": 2},
        {"query": "he was", "chosen": "happy .", "rejected": "sad .", "margin": 0.5},
        {"prompt": None, "chosen": [{"role": "user", "content": "he "}, {"role": "assistant", "content": "was"}],
         "rejected": [{"role": "user", "content": "he "}, {"role": "assistant", "content": "sad"}]},
    ]  # fmt: skip
    found = read_comparisons(rows, tokenizer, Lengths(query=1, response=1))
    assert found[0].best == 2
    assert found[0].sequences[1] == tuple(ids(["he", "sad"]))
    assert found[1] == Comparison(
        sequences=(tuple(ids(["he", "happy"])), tuple(ids(["he", "sad"]))), best=0, margin=0.5
    )
    assert found[2].sequences[0] == tuple(ids(["he", "was<|endoftext|>"])) or len(found[2].sequences) == 2


def test_rows_that_are_no_comparison_are_refused_by_number():
    with pytest.raises(DataError, match="row 1: found columns text"):
        read_comparisons(
            [{"prompt": "he", "chosen": "was", "rejected": "sad"}, {"text": "x"}], make_tokenizer(), Lengths()
        )
    with pytest.raises(DataError, match="best=7"):
        Comparison(sequences=((1,), (2,)), best=7)


def test_a_prompt_beside_whole_conversations_is_ignored():
    tokenizer = chat_tokenizer()
    whole = {"chosen": said("he was", "happy ."), "rejected": said("he was", "sad .")}
    halves = {"prompt": said("he was"), "chosen": said("", "happy .")[1:], "rejected": said("", "sad .")[1:]}
    rows = [whole, {"prompt": "he was", **whole}, halves, {**halves, "prompt": "he was"}]
    found = read_comparisons(rows, tokenizer, Lengths())
    assert len({comparison.sequences for comparison in found}) == 1
    assert tokenizer.decode(found[0].sequences[0]).count("user") == 1
    queries = {tuple(query_ids(row, tokenizer, Lengths())) for row in rows}
    assert queries == {tuple(tokenizer.encode("<|endoftext|> user : he was <|endoftext|> assistant :"))}


def test_the_query_of_two_texts_is_the_beginning_of_the_comparisons():
    row = {"prompt": "he was happy", "chosen": "sad .", "rejected": "tired ."}
    tokenizer = chat_tokenizer()
    assert query_ids(row, tokenizer, Lengths(query=2)) == tokenizer.encode("he was")
    with pytest.raises(DataError, match="no prompt to sample from; found columns chosen, rejected"):
        query_ids({"chosen": "a", "rejected": "b"}, tokenizer, Lengths())
