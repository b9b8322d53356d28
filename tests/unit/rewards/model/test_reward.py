"""Reward models as reward functions: their input, rejection, and settings."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from lockstep.demo.preferences.language import STOP, VOCABULARY, make_tokenizer
from lockstep.rewards.composition import make_reward_set
from lockstep.rewards.model.classifier import load_reward_model
from lockstep.rewards.model.reward import ModelReward, StopRule, messages_up_to, token_id_of
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from tests.fixtures.reward_models import gpt2_classifier

STOP_ID = VOCABULARY.index(STOP)


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


def test_the_reward_model_sees_no_token_after_the_stop(saved):
    settings = {"path": str(saved), "input": "tokens", "stop": STOP, "stop_after": 2}
    early, late = [STOP_ID, 9, STOP_ID, 11, 12], [STOP_ID, 9, STOP_ID, 20, STOP_ID]
    reward = ModelReward(**settings)
    (first,), (second,) = (reward.score([rollout(tail)]) for tail in (early, late))  # in one batch they round apart
    assert first == second
    model, _ = load_reward_model(saved)
    assert first == pytest.approx(model.score([[3, 4, STOP_ID, 9, STOP_ID]], batch_size=1).item(), abs=1e-5)


@pytest.mark.parametrize("rejected", [-100.0, 100.0])
def test_a_rejected_response_has_its_score_replaced_and_no_other(saved, rejected):
    settings = {"path": str(saved), "input": "tokens", "stop": STOP, "stop_after": 3}
    reward = ModelReward(**settings, rejected=rejected)
    without_stop, with_stop = rollout([STOP_ID, 9, STOP_ID, 11]), rollout([9, 9, 9, STOP_ID])
    found = reward.score([without_stop, with_stop, without_stop])
    assert found[0] == found[2] == rejected
    assert abs(found[1]) < 50


def test_a_reward_model_is_a_reward_by_its_name(saved):
    rewards = make_reward_set(["model"], settings={"model": {"path": str(saved), "input": "tokens"}})
    rewards.load()
    batch = [rollout([7, 8, 9]), rollout([9])]
    scored = asyncio.run(rewards.score(batch))
    model, _ = load_reward_model(saved)
    expected = model.score([[3, 4, 7, 8, 9], [3, 4, 9]], batch_size=1).tolist()
    assert [r.reward for r in scored] == pytest.approx(expected, abs=1e-5)


def test_a_prompt_that_filled_the_context_is_not_scored_and_fails_no_other(saved):
    """It has no call to read tokens from, and one call of the model scores the whole batch."""
    rewards = make_reward_set(["model"], settings={"model": {"path": str(saved), "input": "tokens"}})
    full = Rollout(rollout_id=1, group_id=0, calls=(), messages=(), status=RolloutStatus.CONTEXT_FULL)
    scored = asyncio.run(rewards.score([rollout([7]), full, rollout([8])]))
    assert [one.status for one in scored] == [RolloutStatus.COMPLETED, full.status, RolloutStatus.COMPLETED]
    assert [bool(one.rewards) for one in scored] == [True, False, True]


def test_messages_go_through_the_template_of_the_reward_model(saved):
    reward = ModelReward(path=str(saved))
    tokenizer = AutoTokenizer.from_pretrained(saved)
    ids = tokenizer("he washappy .<|endoftext|>")["input_ids"]  # the template puts nothing between turns
    model, _ = load_reward_model(saved)
    assert reward.score([rollout([7])]) == pytest.approx(model.score([ids], batch_size=1).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "path"),
        ({"path": "x", "inputs": "tokens"}, "inputs"),
        ({"path": "x", "input": "text"}, "expected one of messages, tokens"),
        ({"path": "x", "stop": "."}, "input=tokens"),
        ({"path": "x", "batch_size": 0}, "at least 1"),
        ({"path": "x", "max_tokens": True}, "at least 1"),
        ({"path": "x", "stop_after": -1}, "at least 0"),
        ({"path": "x", "rejected": float("nan")}, "expected a number"),
        ({"path": "x", "dtype": "int8"}, "expected one of float32"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        make_reward_set(["model"], settings={"model": settings})


def test_a_stop_of_several_tokens_and_a_path_without_a_model_are_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="choose a text that is one token"):
        token_id_of(make_tokenizer(), "he was")
    with pytest.raises(ConfigError, match="no loadable model config"):
        ModelReward(path=str(tmp_path / "nowhere")).load()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "has no chat template"),
        ({"input": "tokens", "device": "foo"}, "device=foo: found 0 GPUs"),
        ({"input": "tokens", "device": "cuda:7"}, "device=cuda:7: found 0 GPUs"),
        ({"input": "tokens", "policy_path": "/nowhere"}, r"policy_path=/nowhere: no loadable tokenizer"),
    ],
)
def test_tokenizers_and_device_are_checked_without_the_model(saved, monkeypatch, settings, says):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (saved / "model.safetensors").unlink()
    (saved / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=says):
        ModelReward(path=str(saved), **settings).check()
    ModelReward(path=str(saved), input="tokens", device="cpu").check()


RULE = StopRule(token_ids=frozenset({13}), after=16)


def test_the_first_stop_token_at_or_after_the_minimum_ends_the_response():
    response = [13] * 3 + [1] * 13 + [13, 2, 13, 2, 2, 2, 2, 2]
    assert RULE.end(response) == 17
    assert RULE.truncate(response) == response[:17]
    assert RULE.accepts(response)


def test_stop_tokens_before_the_minimum_do_not_count():
    response = [1] * 15 + [13] + [1] * 8
    assert not RULE.accepts(response)
    assert RULE.truncate(response) == response
    assert RULE.accepts([1] * 23 + [13])


def test_a_stop_rule_without_stop_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one stop token"):
        StopRule(token_ids=frozenset())


def turns(*sampled: tuple[int, ...]) -> Rollout:
    calls = [rollout(ids, prompt=(3, 4, number + 5)).calls[0] for number, ids in enumerate(sampled)]
    messages = [{"role": "user", "content": "he was"}, {"role": "assistant", "content": "an example"}]
    for number in range(len(sampled)):
        messages += [{"role": "user", "content": "and"}, {"role": "assistant", "content": f"turn {number}"}]
    return Rollout(rollout_id=0, group_id=0, calls=tuple(calls), messages=tuple(messages))


def test_each_turn_is_scored_from_its_own_prompt_and_tokens(saved):
    reward = ModelReward(path=str(saved), input="tokens", by_turn=True, stop=STOP, rejected=-7.0)
    found = reward.score([turns((9, STOP_ID), (10, 11)), turns((12, STOP_ID))])
    model, _ = load_reward_model(saved)
    expected = [model.score([[3, 4, 5, token, STOP_ID]], batch_size=1).item() for token in (9, 12)]
    assert [len(of_one) for of_one in found] == [2, 1]
    assert found[0] == pytest.approx([expected[0], -7.0], abs=1e-5)
    assert found[1] == pytest.approx([expected[1]], abs=1e-5)


def test_the_conversation_of_a_turn_ends_with_it_and_begins_with_the_prompt():
    given = turns((9,), (10,))
    assert messages_up_to(given, 0) == given.messages[:4], "the prompt has an assistant message of its own"
    assert messages_up_to(given, 1) == given.messages
    branched = replace(given, messages=given.messages[:2])
    with pytest.raises(
        ValueError, match=r"1 of 2 calls are in a message of the conversation; set reward.settings.model.input=tokens"
    ):
        messages_up_to(branched, 1)
