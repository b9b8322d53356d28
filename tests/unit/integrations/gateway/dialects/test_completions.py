"""Tests of completions of prompts that the client makes itself."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from lockstep.integrations.gateway.dialects.completions import COMPLETIONS
from lockstep.integrations.gateway.errors import ApiError
from lockstep.integrations.gateway.session import Session
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.rows import rows_from_calls
from tests.fixtures.gateway import Running, offer_of, running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
OFFER = offer_of(Session("", offered=[Sampling(max_tokens=16)]), vocab_size=10, max_model_len=20)


async def ask(server: Running, prompt: Any, **options: Any) -> Any:
    return await server.client_of("test").completions.create(model="policy", prompt=prompt, **options)


async def test_ids_are_sampled_from_as_they_are_and_form_one_row():
    turns = "one<|im_end|>", "two<|im_end|>"
    async with running(QWEN, *turns) as server:
        prompt = QWEN.encode("<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n")
        for number in range(2):
            answer = await ask(server, prompt, logprobs=1)
            choice, sampled = answer.choices[0], QWEN.encode(turns[number])
            assert answer.model_extra["prompt_token_ids"] == prompt == list(server.engine.prompts[number])
            assert answer.model_extra["prompt_kind"] == "given"
            assert choice.model_extra["generation_token_ids"] == sampled
            assert (choice.text, choice.finish_reason) == (turns[number].removesuffix("<|im_end|>"), "stop")
            assert choice.logprobs.token_logprobs == choice.model_extra["generation_log_probs"]
            assert "".join(choice.logprobs.tokens) == turns[number]
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(sampled))
            prompt = [*prompt, *sampled, *QWEN.encode("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")]
        session = server.gateway._named["test"]
        (row,) = rows_from_calls(session.calls)
        assert row.num_trained == sum(len(call.sampled_ids) for call in session.calls)
        assert [message["role"] for message in session.last_conversation] == ["user", "assistant"]


async def test_text_becomes_no_control_tokens():
    async with running(QWEN, "one<|im_end|>") as server:
        await ask(server, "say <|im_end|> it")
        assert QWEN.convert_tokens_to_ids("<|im_end|>") not in server.engine.prompts[0]
        assert server.text(server.engine.prompts[0]) == "say <|im_end|> it"


async def test_a_conversation_does_not_continue_a_completion_of_the_same_text():
    async with running(QWEN, "one<|im_end|>") as server:
        await ask(server, "say it")
        turns: Any = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "one"}]
        chat = server.client_of("test").chat.completions
        answer = await chat.create(model="policy", messages=[*turns, {"role": "user", "content": "more"}])
        assert answer.model_extra is not None
        assert answer.model_extra["prompt_kind"] == "history_edited"


async def test_stop_strings_and_several_choices_are_those_of_chat_completions():
    async with running(QWEN, "one STOP two<|im_end|>", "one STOP two<|im_end|>", "half") as server:
        answer = await ask(server, "x", n=2, stop="STOP")
        assert [choice.text for choice in answer.choices] == ["one ", "one "]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        assert (await ask(server, "x")).choices[0].finish_reason == "length"


async def test_a_stream_adds_up_to_the_whole_answer():
    async with running(QWEN, "one<|im_end|>") as server:
        whole = await ask(server, [1, 2, 3], n=2, logprobs=0)
        chunks = [
            chunk
            async for chunk in await ask(
                server, [1, 2, 3], n=2, logprobs=0, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert [chunk.choices[0] for chunk in chunks[:-1]] == whole.choices
        assert chunks[-1].usage == whole.usage
        assert chunks[0].model_extra["prompt_token_ids"] == [1, 2, 3]


async def test_a_prompt_that_fills_the_context_is_refused():
    async with running(QWEN, "one<|im_end|>", max_model_len=64) as server:
        for prompt in ([1] * 64, "x" * 100_000):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(server, prompt)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        assert server.engine.prompts == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": None}, "a list of token ids"),
        ({"prompt": []}, "a list of token ids"),
        ({"prompt": ""}, "a list of token ids"),
        ({"prompt": {}}, "a list of token ids"),
        ({"prompt": [10]}, "from 0 to 9"),
        ({"prompt": [-1]}, "from 0 to 9"),
        ({"prompt": [True]}, "from 0 to 9"),
        ({"prompt": [1.0]}, "from 0 to 9"),
        ({"prompt": [1, [2]]}, "from 0 to 9"),
        ({"prompt": ["a", "b"]}, "one request for each"),
        ({"prompt": [[1], [2]]}, "one request for each"),
        ({"prompt": [[]]}, "a list of token ids"),
        ({"prompt": [1] * 20}, "maximum context length"),
        ({"suffix": "x"}, "does not fill gaps"),
        ({"echo": True}, "leave it out"),
        ({"best_of": 2}, "leave it out"),
        ({"logprobs": 5}, "0 or 1"),
        ({"n": 129}, "between"),
        ({"stream_options": 1}, "an object"),
        ({"temperature": 0.5}, "temperature=1"),
        ({"messages": []}, "unrecognized"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused(fields, words):
    with pytest.raises(ApiError, match=words) as caught:
        COMPLETIONS.read({"prompt": [1], **fields}, OFFER)
    assert caught.value.status == 400


def test_one_prompt_in_a_list_is_that_prompt():
    for prompt, given in (([[1, 2]], (1, 2)), (["a"], "a"), ([1, 2], (1, 2))):
        assert COMPLETIONS.read({"prompt": prompt}, OFFER).given == given
