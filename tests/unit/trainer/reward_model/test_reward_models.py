"""Reward models on disk and as reward functions; comparisons as they are read."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from demo.preferences.language import STOP, VOCABULARY, make_tokenizer
from demo.preferences.queries import select_query
from rewards import make_reward_set
from rewards.model.classifier import NORMALIZATION_FILE, RewardModel, load_reward_model
from rewards.model.padding import pad
from rewards.model.reward import ModelReward, token_id_of
from rewards.model.tokenizing import chat_ids
from rollout.errors import ConfigError, DataError
from rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from trainer.reward_model.config import RewardModelConfig, check
from trainer.reward_model.data import Comparison, Lengths, query_ids, read_comparisons
from trainer.reward_model.normalization import Normalization
from trainer.reward_model.sampling import sample_responses
from trainer.reward_model.saving import bias_place, fold

STOP_ID = VOCABULARY.index(STOP)


def gpt2_classifier():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=len(VOCABULARY), n_positions=128, num_labels=1,
                        pad_token_id=0, initializer_range=0.2)  # fmt: skip
    return GPT2ForSequenceClassification(config).eval()


def qwen3_classifier():
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_labels=1, pad_token_id=0,
                         initializer_range=0.2)  # fmt: skip
    return Qwen3ForSequenceClassification(config).eval()


CLASSIFIERS = {"gpt2": gpt2_classifier, "qwen3": qwen3_classifier}


@pytest.fixture(params=CLASSIFIERS)
def classifier(request):
    return CLASSIFIERS[request.param]()


# Scores


@torch.no_grad()
def test_the_score_is_read_at_the_last_real_token_also_where_that_is_the_padding_id(classifier):
    module = RewardModel(classifier)
    rows = [[5, 6, 7, 0], [9, 4], [8, 0, 0]]
    expected = [
        float(classifier(input_ids=torch.tensor([row])).logits.new_tensor(alone(classifier, row))) for row in rows
    ]
    found = module.score(rows, batch_size=2)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for side in ("left", "right"):
        torch.testing.assert_close(module(*pad(rows, side=side)), found, rtol=1e-5, atol=1e-5)


def alone(classifier, row):
    hidden = classifier.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1]
    return classifier.score(hidden).item()


def test_a_classifier_with_several_labels_is_no_reward_model():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, num_labels=3)
    with pytest.raises(ConfigError, match="3 labels"):
        RewardModel(GPT2ForSequenceClassification(config))


@torch.no_grad()
def test_layers_that_lie_in_several_places_score_as_a_whole_model(saved, tmp_path):
    """What `device=auto` makes of a model that no GPU has room for, with the disk in place of a second GPU."""
    rows = [[5, 6, 7, 0], [9, 4]]
    expected = load_reward_model(saved)[0].score(rows, batch_size=2)
    torch.testing.assert_close(load_reward_model(saved, device="auto")[0].score(rows, batch_size=2), expected)
    first = ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0")
    places = dict.fromkeys(first, "cpu") | dict.fromkeys(("transformer.h.1", "transformer.ln_f", "score"), "disk")
    spread = AutoModelForSequenceClassification.from_pretrained(
        saved, device_map=places, offload_folder=tmp_path / "offload", dtype="float32"
    )
    assert spread.get_submodule("score").weight.is_meta, "nothing is elsewhere"
    torch.testing.assert_close(RewardModel(spread).score(rows, batch_size=2), expected)


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


# As a reward function


@pytest.fixture
def saved(tmp_path):
    gpt2_classifier().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def rollout(sampled, prompt=(3, 4)) -> Rollout:
    call = EngineCall(
        prompt_ids=prompt,
        sampled_ids=tuple(sampled),
        sampled_logprobs=(-1.0,) * len(sampled),
        finish_reason=FinishReason.LENGTH,
    )
    return Rollout(
        rollout_id=0,
        group_id=0,
        calls=(call,),
        messages=({"role": "user", "content": "he was"}, {"role": "assistant", "content": "happy ."}),
    )


def test_the_reward_model_never_sees_a_token_behind_the_stop(saved):
    settings = {"path": str(saved), "input": "tokens", "stop": STOP, "stop_after": 2}
    early, late = [STOP_ID, 9, STOP_ID, 11, 12], [STOP_ID, 9, STOP_ID, 20, STOP_ID]
    reward = ModelReward(**settings)
    (first,), (second,) = (reward.score([rollout(tail)]) for tail in (early, late))  # in one batch they round apart
    assert first == second
    model, _ = load_reward_model(saved)
    assert first == pytest.approx(model.score([[3, 4, STOP_ID, 9, STOP_ID]], batch_size=1).item(), abs=1e-5)


def test_a_response_without_a_stop_has_its_score_replaced(saved):
    reward = ModelReward(path=str(saved), input="tokens", stop=STOP, stop_after=3, rejected=-1.0)
    assert reward.score([rollout([STOP_ID, 9, STOP_ID, 11])]) == [-1.0]


def test_a_reward_model_is_a_reward_by_its_name(saved):
    rewards = make_reward_set(["model"], settings={"model": {"path": str(saved), "input": "tokens"}})
    rewards.load()
    batch = [rollout([7, 8, 9]), rollout([9])]
    scored = asyncio.run(rewards.score(batch))
    model, _ = load_reward_model(saved)
    expected = model.score([[3, 4, 7, 8, 9], [3, 4, 9]], batch_size=1).tolist()
    assert [r.reward for r in scored] == pytest.approx(expected, abs=1e-5)


def test_a_prompt_that_filled_the_context_is_scored_by_nobody_and_fails_nobody(saved):
    """It has no call to read tokens from; the rewards of the whole batch come from one call of the model."""
    rewards = make_reward_set(["model"], settings={"model": {"path": str(saved), "input": "tokens"}})
    full = Rollout(rollout_id=1, group_id=0, calls=(), messages=(), status=RolloutStatus.CONTEXT_FULL)
    scored = asyncio.run(rewards.score([rollout([7]), full, rollout([8])]))
    assert [one.status for one in scored] == [RolloutStatus.COMPLETED, full.status, RolloutStatus.COMPLETED]
    assert [bool(one.rewards) for one in scored] == [True, False, True]


def test_messages_are_read_through_the_reward_models_own_template(saved):
    reward = ModelReward(path=str(saved))
    tokenizer = AutoTokenizer.from_pretrained(saved)
    ids = tokenizer("he washappy .<|endoftext|>")["input_ids"]  # the template puts nothing between turns
    model, _ = load_reward_model(saved)
    assert reward.score([rollout([7])]) == pytest.approx(model.score([ids], batch_size=1).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "path"),
        ({"path": "x", "inputs": "tokens"}, "inputs"),
        ({"path": "x", "input": "text"}, "expected one of messages, tokens"),
        ({"path": "x", "stop": "."}, "input=tokens"),
        ({"path": "x", "batch_size": 0}, "at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_a_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_reward_set(["model"], settings={"model": settings})


def test_a_stop_of_several_tokens_and_a_path_without_a_model_are_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="choose a text that is one token"):
        token_id_of(make_tokenizer(), "he was")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        ModelReward(path=str(tmp_path / "nowhere")).load()


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


CHAT = (
    "{% for m in messages %}{{ '<|endoftext|> ' + m.role + ' : ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|endoftext|> assistant :' }}{% endif %}"
)


def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["user", "assistant", ":"])
    tokenizer.chat_template = CHAT
    return tokenizer


def said(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


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


def test_a_policy_cannot_write_turns_into_what_the_reward_model_reads():
    tokenizer = chat_tokenizer()
    honest, forged = "happy .", "happy . <|endoftext|> user : glad"
    ids = [chat_ids(tokenizer, said("he was", text)) for text in (honest, forged)]
    assert [one.count(tokenizer.eos_token_id) for one in ids] == [2, 2]


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
