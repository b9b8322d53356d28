"""Reward models on disk, settings of their training, comparisons, queries and samples."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from demo.preferences.language import make_tokenizer
from demo.preferences.queries import select_query
from rewards.model.classifier import NORMALIZATION_FILE, RewardModel, load_reward_model
from rewards.model.padding import pad
from rollout.errors import ConfigError, DataError
from tests.fixtures.reward_models import CLASSIFIERS, chat_tokenizer, said
from trainer.reward_model.config import RewardModelConfig, check
from trainer.reward_model.data import Comparison, Lengths, query_ids, read_comparisons
from trainer.reward_model.normalization import Normalization
from trainer.reward_model.sampling import sample_responses
from trainer.reward_model.saving import bias_place, fold


@pytest.fixture(params=CLASSIFIERS)
def classifier(request):
    return CLASSIFIERS[request.param]()


# Normalisation in the weights


@torch.no_grad()
def test_auto_model_gives_normalised_rewards_where_the_architecture_can_hold_the_bias(classifier, tmp_path):
    module = RewardModel(classifier)
    normalization = Normalization(gain=3.5, bias=-1.25)
    rows = [[5, 6, 7], [9, 4, 8]]
    expected = normalization(module(*pad(rows)))
    place = bias_place(module)
    state = {name: tensor.clone() for name, tensor in classifier.state_dict().items()}
    classifier.save_pretrained(tmp_path, state_dict=fold(state, module, normalization))
    left = 0.0 if place else normalization.bias
    (tmp_path / NORMALIZATION_FILE).write_text(json.dumps({"gain": 3.5, "bias": -1.25, "remaining_bias": left}))

    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    found = plain(input_ids=torch.tensor(rows)).logits[:, 0]
    torch.testing.assert_close(found + left, expected, rtol=1e-5, atol=1e-5)
    assert (place is not None) == isinstance(classifier, GPT2ForSequenceClassification)

    ours, bias = load_reward_model(tmp_path)
    torch.testing.assert_close(ours.score(rows, batch_size=4) + bias, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("optimizer.schedule", "constnat", "optimizer.schedule=constnat is not one of .* 'constant'"),
        ("optimizer.name", "adamx", "optimizer.name=adamx is not one of"),
        ("model.dtype", "fp16", "model.dtype=fp16 is not one of float32, bfloat16"),
        ("optimizer.betas", [0.9, 1.0], "must be 2 numbers, each at least 0 and less than 1"),
        ("optimizer.lr", float("nan"), "optimizer.lr=nan is not a finite number"),
        ("optimizer.warmup_updates", -1, "must be at least 0"),
        ("optimizer.spike", "skip", "optimizer.spike=skip does nothing where a reward model is trained"),
        ("logger.print_rollouts", 3, "does nothing"),
    ],
)
def test_training_refuses_words_and_numbers_that_are_none_of_its_settings(path, value, sentence):
    config = RewardModelConfig()
    group, _, name = path.partition(".")
    setattr(getattr(config, group), name, value)
    with pytest.raises(ConfigError, match=sentence):
        check(config)


# Comparisons


def test_an_empty_name_of_a_run_is_refused():
    with pytest.raises(ConfigError, match="run_name= is empty"):
        check(RewardModelConfig(run_name=""))


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


def test_a_prompt_beside_whole_conversations_is_not_read_twice():
    tokenizer = chat_tokenizer()
    whole = {"chosen": said("he was", "happy ."), "rejected": said("he was", "sad .")}
    halves = {"prompt": said("he was"), "chosen": said("", "happy .")[1:], "rejected": said("", "sad .")[1:]}
    rows = [whole, {"prompt": "he was", **whole}, halves, {**halves, "prompt": "he was"}]
    found = read_comparisons(rows, tokenizer, Lengths())
    assert len({comparison.sequences for comparison in found}) == 1
    assert tokenizer.decode(found[0].sequences[0]).count("user") == 1
    queries = {tuple(query_ids(row, tokenizer, Lengths())) for row in rows}
    assert queries == {tuple(tokenizer.encode("<|endoftext|> user : he was <|endoftext|> assistant :"))}


def test_the_query_of_two_texts_is_the_text_as_comparisons_begin():
    row = {"prompt": "he was happy", "chosen": "sad .", "rejected": "tired ."}
    tokenizer = chat_tokenizer()
    assert query_ids(row, tokenizer, Lengths(query=2)) == tokenizer.encode("he was")
    with pytest.raises(DataError, match="no prompt to sample from, found columns chosen, rejected"):
        query_ids({"chosen": "a", "rejected": "b"}, tokenizer, Lengths())


# Queries and samples (P3, G4)


def test_a_query_begins_behind_the_first_start_and_ends_with_the_last_end_in_the_window():
    text = ["a", "b", ".", "c", "d", ".", "e", "f", ".", "g"]
    assert select_query(text, start=".", end=".", length=5) == ["c", "d", "."]
    assert select_query(text, start=".", end=".", length=6) == ["c", "d", ".", "e", "f", "."]
    assert select_query(text, start=None, end=None, length=4) == ["a", "b", ".", "c"]


def test_texts_without_a_query_are_skipped():
    assert select_query(["a", "b"], start=".", end=".", length=5) is None
    assert select_query(["a", "."], start=".", end=".", length=5) is None
    assert select_query([".", "a", "b", "c", "."], start=".", end=".", length=2) is None


def test_sampling_goes_on_past_the_end_of_sequence_and_seeds_differ():
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=4, eos_token_id=1, pad_token_id=1))
    queries = [[2, 3], [2], [3, 3, 3]] * 10
    first = sample_responses(model, queries, length=12, temperature=1.0, seed=0)
    assert {len(response) for response in first} == {12}
    assert any(1 in response[:-1] for response in first)
    assert first == sample_responses(model, queries, length=12, temperature=1.0, seed=0)
    assert first != sample_responses(model, queries, length=12, temperature=1.0, seed=100_003)
    assert model.generation_config.eos_token_id == 1
