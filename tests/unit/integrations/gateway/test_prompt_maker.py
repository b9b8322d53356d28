"""Tests of tokenization beside the event loop, and of text that cannot fit in the context."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from lockstep.integrations.gateway.prefix_chain import Prefixes
from lockstep.integrations.gateway.prompt_maker import longest_token
from tests.fixtures.gateway import running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
USER = {"role": "user", "content": "say it"}


async def test_other_sessions_go_on_while_a_long_text_is_tokenized(monkeypatch):
    async with running(QWEN, "hello<|im_end|>") as server:
        goes_on, render = threading.Event(), server.chat.prompt

        def slow_prompt(messages, tools=()):
            if messages[0]["content"] == "long":
                assert goes_on.wait(timeout=20)
            return render(messages, tools)

        monkeypatch.setattr(server.chat, "prompt", slow_prompt)
        long = asyncio.create_task(server.ask([{"role": "user", "content": "long"}]))
        for session in ("a", "b", "a"):
            client = server.client_of(session)
            await asyncio.wait_for(client.chat.completions.create(model="policy", messages=[USER]), timeout=10)
        assert not long.done()
        goes_on.set()
        await long


@pytest.mark.parametrize("text", ["word " * 150_000, "a<|im_end|>" * 60_000], ids=["plain", "control tokens"])
async def test_the_loop_goes_on_during_a_real_tokenization(text):
    async with running(QWEN, "hello<|im_end|>", max_model_len=200_000) as server:
        loop, worst, stop = asyncio.get_running_loop(), 0.0, asyncio.Event()

        async def watch() -> None:
            nonlocal worst
            while not stop.is_set():
                before = loop.time()
                await asyncio.sleep(0.01)
                worst = max(worst, loop.time() - before - 0.01)

        watcher = asyncio.create_task(watch())
        before = loop.time()
        await server.gateway._prompts.text_ids(text)
        took = loop.time() - before
        stop.set()
        await watcher
        assert worst < max(0.5, took / 2), f"the loop stood still for {worst:.1f} s of {took:.1f} s"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x" * 100_000},
        {"role": "assistant", "content": "x", "reasoning_content": "x" * 100_000},
        {"role": "tool", "tool_call_id": "a", "content": "<|im_end|>" * 10_000},
    ],
    ids=["text", "reasoning", "tool result"],
)
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch, message):
    async with running(QWEN, "hello<|im_end|>", max_model_len=64) as server:
        monkeypatch.setattr(server.chat, "prompt", lambda *_: pytest.fail("it was tokenized"))
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask([USER, message, USER])
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.body["type"] == "invalid_request_error"
        assert "at most" in caught.value.message
        with pytest.raises(openai.BadRequestError, match="at most"):
            await server.client.post("/tokenize", body={"prompt": "x" * 100_000}, cast_to=object)


async def test_white_space_that_a_template_may_drop_counts_a_quarter():
    async with running(QWEN, "hello<|im_end|>", max_model_len=1024) as server:
        most = longest_token(QWEN) * 1024
        for spaces, error in ((2 * most, "one must be left for the answer"), (5 * most, "can fit")):
            with pytest.raises(openai.BadRequestError, match=error):
                await server.ask([{"role": "user", "content": "a" + " " * spaces + "b"}])


def test_reasoning_of_earlier_turns_counts_for_its_message_only():
    turn = {"role": "assistant", "content": "<think>\nlong thought\n</think>\n\nyes", "reasoning_content": "r" * 50}
    conversation = Prefixes().read([turn, USER, turn, USER], ())
    assert conversation.num_characters == len("[]") + 2 * len("yes" + "sayit")
    assert conversation.longest_message == len("yes") + 50
