"""Comparisons read from rows, and the queries of their samples."""

from __future__ import annotations

import json

import pytest

from lockstep.demo.preferences.language import make_tokenizer
from lockstep.lab.reward_model.config import RewardModelConfig
from lockstep.lab.reward_model.data import Comparison, Lengths, query_ids, read_comparisons, read_tokenizer
from lockstep.lab.reward_model.sampling import normalization_samples
from lockstep.rollout.errors import ConfigError, DataError, LockstepError
from tests.fixtures.reward_models import chat_tokenizer, gpt2_classifier, said


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


def test_responses_that_are_the_same_tokens_in_every_row_are_refused():
    rows = [{"prompt": "he was", "chosen": "happy .", "rejected": "happy sad"}] * 2
    assert len(read_comparisons(rows, make_tokenizer(), Lengths())) == 2
    with pytest.raises(DataError, match="there is nothing to learn"):
        read_comparisons(rows, make_tokenizer(), Lengths(response=1))


def test_a_tokenizer_is_read_with_the_context_of_its_model(tmp_path):
    source = {"setting": "model.path", "trust_remote_code": False}
    gpt2_classifier().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        read_tokenizer(str(tmp_path), **source)
    make_tokenizer().save_pretrained(tmp_path)
    assert read_tokenizer(str(tmp_path), **source)[1] == 128
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="ids beyond the 5 of the model"):
        read_tokenizer(str(tmp_path), **source)


def test_samples_that_exceed_the_context_and_empty_prompts_are_refused(tmp_path):
    gpt2_classifier().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    config = RewardModelConfig()
    config.model.path, config.data.path = str(tmp_path), str(tmp_path / "rows.jsonl")
    config.normalization.num_samples, config.normalization.response_tokens = 2, 127
    for prompt, says in (("he was", "longest query"), ("", "empty prompt")):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "chosen": "happy", "rejected": "sad"}))
        with pytest.raises(LockstepError, match=says):
            normalization_samples(config)


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
