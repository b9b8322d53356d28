"""The record of one client: order, forks, limits and endings, without a server."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.integrations.gateway import session as module
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.prefix_chain import Prefix
from lockstep.integrations.gateway.session import (
    CONTEXT_FULL,
    RECORD_FULL,
    TOO_MANY_REQUESTS,
    Answer,
    Session,
    TurnMark,
)
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import EngineCall, FinishReason

ROOT = Prefix.root()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **more}


def talk(*messages: dict[str, str]) -> Prefix:
    prefix = ROOT
    for message in messages:
        prefix = prefix.then(message)
    return prefix


def answer(conversation: Prefix, *, number: int, choice: int = 0, ids: Sequence[int] = (7,), **more: Any) -> Answer:
    """Return an answer of a prompt of 3 ids; the conversation ends with it."""
    call = EngineCall(
        prompt_ids=(1, 2, 3),
        sampled_ids=tuple(ids),
        sampled_logprobs=(-0.5,) * len(ids),
        finish_reason=FinishReason.STOP,
    )
    return Answer(call=call, conversation=conversation, order=(number, choice), **more)


def session(**settings: Any) -> Session:
    return Session("x", offered=[Sampling(max_tokens=8)], **settings)


def ask(session: Session, conversation: Prefix, kind: str = "root", **more: Any) -> Answer:
    """Record one answer to one request."""
    made = answer(conversation, number=session.begin_request(), **more)
    session.record([made], kind)
    return made


# Turns


def test_calls_are_in_the_order_of_their_requests_whichever_answer_comes_first() -> None:
    record = session()
    first, second = record.begin_request(), record.begin_request()
    record.record([answer(talk(user("b"), said("2")), number=second, ids=(2,))], "root")
    record.record(
        [answer(talk(user("a"), said(text)), number=first, choice=i, ids=(i,)) for i, text in enumerate("cd")], "root"
    )
    assert [call.sampled_ids for call in record.calls] == [(0,), (1,), (2,)]
    assert record.last_conversation == (user("b"), said("2"))


def test_the_last_conversation_is_that_of_the_first_choice() -> None:
    record = session()
    assert record.last_conversation == record.call_messages == record.calls == ()
    number = record.begin_request()
    record.record([answer(talk(user("a"), said(text)), number=number, choice=i) for i, text in enumerate("cd")], "root")
    assert record.last_conversation == (user("a"), said("c"))
    assert record.call_messages == (1, None)


def test_facts_count_prompts_by_kind_and_calls_that_were_asked_for() -> None:
    record = session()
    ask(record, talk(user("a"), said("1")))
    ask(record, talk(user("a"), said("1"), user("b"), said("2")), "extended", must_call=True)
    assert record.facts == {"prompts_root": 1, "prompts_extended": 1, "unforced_calls": 1}


# Forks


def test_equal_words_in_two_conversations_are_two_answers() -> None:
    record = session()
    one = ask(record, talk(user("a"), said("yes")), ids=(7,))
    other = ask(record, talk(user("b"), said("yes")), ids=(8,))
    assert record.find(talk(user("a"), said("yes"))) == [one]
    assert record.find(talk(user("b"), said("yes"))) == [other]
    assert record.find(talk(user("c"), said("yes"))) == []
    assert record.has_sampled(said("yes"))
    assert not record.has_sampled(said("no"))


def test_samples_of_one_request_with_equal_words_are_told_apart_by_ids_and_name() -> None:
    record = session()
    number = record.begin_request()
    conversation = talk(user("a"), said("yes"))
    both = [answer(conversation, number=number, choice=i, ids=(i,)) for i in range(2)]
    record.record(both, "root")
    assert record.find(conversation) == both
    for one, other in (both, reversed(both)):
        for mark in (TurnMark(name=one.name), TurnMark(sampled_ids=one.call.sampled_ids)):
            assert record.has_marked(mark)
            assert mark.fits(one)
            assert not mark.fits(other)
        assert record.answer_named(one.name) is one
    assert not record.has_marked(TurnMark(sampled_ids=(9,)))
    assert not record.has_marked(TurnMark())
    assert record.answer_named(None) is None


def test_a_turn_without_its_reasoning_is_found_in_the_conversation_and_a_call_of_a_branch_is_not() -> None:
    record = session()
    ask(record, talk(user("a"), said(" yes ", reasoning_content="hm")))
    ask(record, talk(user("elsewhere"), said("other")))
    ask(record, talk(user("a"), said("yes"), user("b"), said("2")), "branched")
    assert record.call_messages == (1, None, 3)


def test_a_turn_of_the_first_request_is_not_a_call() -> None:
    record = session()
    ask(record, talk(user("a"), said("yes"), user("again"), said("yes")))
    ask(record, talk(user("a"), said("yes"), user("again"), said("yes"), user("b"), said("2")), "extended")
    assert record.call_messages == (3, 5)


# Limits


def test_the_turn_limit_refuses_a_request_and_a_request_without_an_answer_does_not_count() -> None:
    record = session(max_requests=2)
    assert [record.begin_request(), record.begin_request()] == [0, 1]
    with pytest.raises(ApiError, match=r"2 requests.*environment\.max_turns") as refused:
        record.begin_request()
    assert refused.value.code == record.refusal == TOO_MANY_REQUESTS
    record.give_back(0)
    assert record.begin_request() == 0, "the next request gets the number, and with it the seed"
    assert record.refusal is None


def test_without_a_bound_of_tokens_a_full_record_refuses_so_that_no_trained_token_is_lost() -> None:
    record = session(max_calls=1)
    kept = ask(record, talk(user("a"), said("1")))
    with pytest.raises(ApiError, match="recorded 1 answers") as refused:
        record.begin_request()
    assert refused.value.code == record.refusal == RECORD_FULL
    assert record.calls == (kept.call,)


def test_the_code_of_a_limit_of_the_model_is_remembered() -> None:
    record = session()
    assert record.refused("too long", code=CONTEXT_FULL).code == record.refusal == CONTEXT_FULL


@pytest.mark.parametrize("limits", [{"max_calls": 2, "max_tokens": 99}, {"max_tokens": 8}], ids=["answers", "tokens"])
def test_with_a_bound_of_tokens_the_oldest_answer_is_forgotten(
    limits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    record = session(**limits)
    conversations = [talk(user(name), said(name)) for name in "abc"]
    oldest, *kept = [ask(record, one, ids=(number,)) for number, one in enumerate(conversations)]
    assert record.calls == tuple(one.call for one in kept)
    assert record.find(oldest.conversation) == []
    assert not record.has_sampled(said("a"))
    assert not record.has_marked(TurnMark(name=oldest.name, sampled_ids=(0,)))
    with caplog.at_level(logging.WARNING):
        assert [record.has_forgotten(one) for one in conversations * 2] == [True, False, False] * 2
    assert len(caplog.records) == 1


def test_an_answer_larger_than_the_bound_is_kept_alone() -> None:
    record = session(max_tokens=4)
    ask(record, talk(user("a"), said("1")))
    large = ask(record, talk(user("b"), said("2")), ids=range(9))
    assert record.calls == (large.call,)


def test_the_memory_of_forgotten_answers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FORGOTTEN", 2)
    record = session(max_calls=1, max_tokens=99)
    conversations = [talk(user(name), said(name)) for name in "abcd"]
    for one in conversations:
        ask(record, one)
    assert [record.has_forgotten(one) for one in conversations] == [False, True, True, False]


# Endings


def test_an_answer_that_did_not_reach_the_client_leaves_no_trace() -> None:
    record = session(max_requests=1)
    lost = ask(record, talk(user("a"), said("1")))
    record.remove([lost], "root")
    assert record.is_unused
    assert (record.calls, record.facts, record.find(lost.conversation)) == ((), {}, [])
    assert not record.has_marked(TurnMark(name=lost.name))
    assert record.begin_request() == 0


def test_after_the_end_nothing_is_recorded_or_removed() -> None:
    record = session()
    kept = ask(record, talk(user("a"), said("1")))
    late = answer(talk(user("b"), said("2")), number=record.begin_request())
    record.close()
    record.record([late], "root")
    record.remove([kept], "root")
    assert record.calls == (kept.call,)


def test_the_first_failure_is_kept() -> None:
    record = session()
    first = EngineError("first")
    for failure in (first, EngineError("second")):
        record.failed(failure)
    assert record.failure is first


def test_each_session_has_a_key_and_an_address_of_its_own() -> None:
    named, others = session(), [Session("", offered=[]) for _ in range(2)]
    assert named.place == "x"
    assert len({one.place for one in others} | {""}) == 3
    assert len({one.key for one in (named, *others)}) == 3
    assert all(len(one.key) >= 32 for one in others)
