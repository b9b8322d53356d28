"""Tests of the server with the real `openai` client, over a scripted engine."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.errors import EngineError, EvidenceError
from lockstep.rollout.records import FinishReason
from lockstep.rollout.saved_rollouts import from_json
from tests.fixtures.gateway import Running, running, says
from tests.fixtures.tokenizers import chat_tokenizer

QWEN, LLAMA = chat_tokenizer("qwen3"), chat_tokenizer("llama3")
USER = {"role": "user", "content": "say it"}
CALLS = (
    "<think>\nhm\n</think>\n\nlooking"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


async def refusal(server: Running, **options) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        await server.ask(options.pop("messages", [USER]), **options)
    assert server.engine.prompts == [], "nothing was sampled"
    return caught.value


async def test_an_answer_carries_ids_and_logprobs_of_every_sampled_token():
    async with running(QWEN, "hello there<|im_end|>") as server:
        answer = await server.ask([USER], logprobs=True)
        choice, sampled = answer.choices[0], QWEN.encode("hello there<|im_end|>")
        extra = choice.message.model_extra
        assert choice.message.content == "hello there"
        assert choice.finish_reason == "stop"
        assert answer.model_extra["prompt_token_ids"] == list(server.engine.prompts[0])
        assert extra["generation_token_ids"] == sampled
        assert extra["generation_log_probs"] == [pytest.approx(-0.01 * (i + 1)) for i in range(len(sampled))]
        assert [token.logprob for token in choice.logprobs.content] == extra["generation_log_probs"]
        assert "".join(token.token for token in choice.logprobs.content) == "hello there<|im_end|>"
        assert answer.usage.prompt_tokens == len(server.engine.prompts[0])
        assert answer.usage.completion_tokens == len(sampled)


async def test_tool_calls_and_reasoning_have_the_form_of_the_api():
    async with running(QWEN, CALLS) as server:
        choice = (await server.ask([USER], tools=TOOLS)).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
            {"city": "Paris"},
            {"city": "Rome"},
        ]
        assert choice.message.content == "looking"
        assert choice.message.model_extra["reasoning_content"] == "hm"


@pytest.mark.parametrize("turn", ["hello there<|im_end|>", CALLS], ids=["text", "calls"])
async def test_a_stream_adds_up_to_the_whole_answer(turn):
    async with running(QWEN, turn) as server:
        whole = await server.ask([USER], tools=TOOLS, n=2, logprobs=True)
        stream = server.client.chat.completions.stream(
            model="policy", messages=[USER], tools=TOOLS, n=2, logprobs=True, stream_options={"include_usage": True}
        )
        async with stream as events:
            final = (await events.get_final_completion()).model_dump()
        expected = whole.model_dump()
        for got, want in zip(final["choices"], expected["choices"], strict=True):
            assert got["finish_reason"] == want["finish_reason"]
            for field, value in want["message"].items():
                if field == "tool_calls" and value:
                    value = [{**call, "index": i} for i, call in enumerate(value)]
                    for call in got["message"]["tool_calls"]:
                        call["function"].pop("parsed_arguments", None)
                assert got["message"][field] == value, field
            assert got["logprobs"]["content"] == want["logprobs"]["content"]
        assert final["usage"] == expected["usage"]


async def test_a_streamed_turn_sent_back_is_spliced():
    async with running(QWEN, CALLS, "done<|im_end|>") as server:
        message: dict = {"role": "assistant", "content": "", "tool_calls": {}}
        reasons = []
        async for chunk in await server.ask([USER], tools=TOOLS, stream=True):
            delta = chunk.choices[0].delta
            reasons.append(chunk.choices[0].finish_reason)
            message["content"] += delta.content or ""
            if (delta.model_extra or {}).get("reasoning_content"):
                message["reasoning_content"] = delta.model_extra["reasoning_content"]
            for piece in delta.tool_calls or ():
                call = message["tool_calls"].setdefault(
                    piece.index, {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
        assert reasons[-1] == "tool_calls"
        assert set(reasons[:-1]) == {None}, "only the last chunk ends a choice"
        message["tool_calls"] = list(message["tool_calls"].values())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in message["tool_calls"]]
        answer = await server.ask([USER, message, *results], tools=TOOLS)
        assert answer.model_extra["prompt_kind"] == "extended"


async def test_stop_strings_cut_the_answer_and_their_tokens_stay():
    async with running(QWEN, "one two STOP three four<|im_end|>") as server:
        answer = await server.ask([USER], stop=["STOP", "never"])
        choice = answer.choices[0]
        kept = server.text(choice.message.model_extra["generation_token_ids"])
        assert choice.message.content == "one two "
        assert choice.finish_reason == "stop"
        assert "STOP" in kept
        assert "three" not in kept
        second = await server.ask([USER, choice.message, USER])
        assert second.model_extra["prompt_kind"] == "extended"
        assert f"{kept}<|im_end|>\n<|im_start|>user" in server.text(server.engine.prompts[1])


async def test_stop_token_ids_and_a_lower_limit_reach_the_engine():
    async with running(QWEN, "hello<|im_end|>") as server:
        await server.ask([USER], max_tokens=7, extra_body={"stop_token_ids": [5], "top_k": -1}, temperature=1, top_p=1)
        sampling = server.engine.samplings[0]
        assert sampling.max_tokens == 7
        assert sampling.stop_token_ids == (*server.chat.stop_token_ids, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.7}, ("temperature=0.7", "temperature=1")),
        ({"temperature": 0}, ("temperature=0", "temperature=1")),
        ({"top_p": 0.9}, ("top_p=0.9", "top_p=1")),
        ({"extra_body": {"top_k": 40}}, ("top_k=40", "top_k=0")),
        ({"extra_body": {"min_p": 0.1}}, ("min_p=0.1", "min_p=0")),
        ({"max_tokens": 0}, ("max_tokens", "1 and")),
        ({"logprobs": True, "top_logprobs": 5}, ("top_logprobs", "leave it out")),
        ({"presence_penalty": 0.5}, ("presence_penalty", "0")),
        ({"logit_bias": {"5": 1}}, ("logit_bias", "{}")),
        ({"extra_body": {"repetition_penalty": 1.1}}, ("repetition_penalty", "1")),
        ({"response_format": {"type": "json_object"}}, ("response_format", "text")),
        ({"tools": TOOLS, "tool_choice": "none"}, ("tool_choice", "leave out")),
        ({"extra_body": {"prompt_token_ids": [1, 2]}}, ("prompt_token_ids", "messages")),
        ({"extra_body": {"required_prefix_token_ids": [1, 2]}}, ("required_prefix_token_ids", "messages")),
        ({"extra_body": {"chat_template": "x"}}, ("chat_template", "unrecognized")),
        ({"n": 0}, ("n=0", "1 and 128")),
        ({"messages": []}, ("messages", "at least one")),
        ({"messages": [{"role": "wizard", "content": "x"}]}, ("messages[0].role", "user")),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ("image_url", "text")),
        ({"messages": [{"role": "user", "content": "x", "generation_token_ids": [1]}]}, ("messages[0]", "user")),
        ({"messages": [USER, {"role": "assistant", "content": "x", "generation_token_ids": ["a"]}]}, ("messages[1]",)),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
async def test_requests_that_cannot_be_sampled_on_policy_are_refused_with_the_expected_value(options, words):
    async with running(QWEN, "hello<|im_end|>") as server:
        error = await refusal(server, **options)
        assert all(word in error.message for word in words), error.message
        assert error.body["type"] == "invalid_request_error"
        assert set(error.body) == {"message", "type", "param", "code"}


async def test_errors_become_exceptions_of_the_openai_client():
    async with running(QWEN, "hello<|im_end|>", max_model_len=64) as server:
        wrong = server.client.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError) as caught:
            await wrong.chat.completions.create(model="policy", messages=[USER])
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as caught:
            await server.client.chat.completions.create(model="gpt-4o", messages=[USER])
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await server.client.embeddings.create(model="policy", input="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask([{"role": "user", "content": "word " * 100}])
        assert caught.value.code == "context_length_exceeded"
        assert [model.id async for model in server.client.models.list()] == ["policy"]
        assert (await server.client.models.retrieve("policy")).id == "policy"


@pytest.mark.parametrize("error", [EngineError("dead\nlog line"), EvidenceError("no ids"), RuntimeError("secret")])
async def test_an_internal_failure_is_a_server_error_without_internal_details(error):
    async with running(QWEN, "hello<|im_end|>") as server:
        server.engine.error = error
        with pytest.raises(openai.InternalServerError) as caught:
            await server.ask([USER])
        text = caught.value.response.text
        assert "Traceback" not in text
        assert "secret" not in text
        assert "log line" not in text
        assert caught.value.body["type"] == "server_error"


async def test_an_aborted_answer_is_not_recorded_and_may_be_requested_again():
    async with running(QWEN, "hello<|im_end|>") as server:
        server.engine.finish = FinishReason.ABORT
        with pytest.raises(openai.InternalServerError) as caught:
            await server.client_of("x").chat.completions.create(model="policy", messages=[USER])
        assert caught.value.status_code == 503
        assert "x" not in server.gateway._named
        server.engine.finish = None
        await server.client_of("x").chat.completions.create(model="policy", messages=[USER])
        assert [answer.order for answer in server.gateway._named["x"]._answers] == [(0, 0)], "it did not count"


async def test_without_a_key_only_health_answers():
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        root = server.gateway.base_url.removesuffix("/v1")
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/s/x/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/s/x/rollout"),
            ("DELETE", "/s/x"),
        ):
            for headers in ({}, {"Authorization": server.gateway.api_key}, {"Authorization": "Bearer "}):
                async with http.request(method, root + path, json={}, headers=headers) as response:
                    assert response.status == 401, path
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with http.get(f"{root}/health") as response:
            assert response.status == 200


async def test_the_key_of_an_episode_opens_only_its_own_session_and_expires_with_it():
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        session = server.gateway.open_session(sampling=Sampling(max_tokens=9), seed=3, max_requests=2)
        root, headers = server.gateway.base_url.removesuffix("/v1"), {"Authorization": f"Bearer {session.key}"}
        body = {"model": "any name at all", "messages": [USER]}
        statuses = []
        for path in ("/v1", "/v1", "/v1", "/s/other/v1"):
            async with http.post(f"{root}{path}/chat/completions", json=body, headers=headers) as response:
                statuses.append(response.status)
        assert statuses == [200, 200, 400, 403]
        assert session.refusal == "max_turns_exceeded"
        async with http.get(f"{root}/s/other/rollout", headers=headers) as response:
            assert response.status == 403
        server.gateway.close_session(session)
        async with http.post(f"{root}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 401
        assert len(session.calls) == 2


async def test_an_answer_after_the_end_of_its_episode_is_not_recorded():
    async with running(QWEN, "hello<|im_end|>") as server:
        session = server.gateway.open_session(sampling=Sampling(max_tokens=9), seed=3, max_requests=2)
        script = server.engine.script

        def ends_the_episode(*arguments):
            server.gateway.close_session(session)
            return script(*arguments)

        server.engine.script = ends_the_episode
        client = server.client.with_options(api_key=session.key, max_retries=2)
        await client.chat.completions.create(model="m", messages=[USER])
        assert session.calls == ()


async def test_requests_of_an_episode_are_seeded_by_its_seed_and_their_number():
    async def seeds(seed: int) -> list[int | None]:
        async with running(QWEN, "hello<|im_end|>") as server:
            session = server.gateway.open_session(sampling=Sampling(max_tokens=9), seed=seed, max_requests=9)
            client = server.client.with_options(api_key=session.key, max_retries=2)
            await client.chat.completions.create(model="m", messages=[USER], seed=1)
            await client.chat.completions.create(model="m", messages=[USER], n=2, seed=1)
            return [sampling.seed for sampling in server.engine.samplings]

    first = await seeds(3)
    assert len(set(first)) == 3
    assert await seeds(3) == first
    assert set(await seeds(4)).isdisjoint(first)


async def test_the_seed_of_a_client_is_used_outside_of_episodes():
    async with running(QWEN, "hello<|im_end|>") as server:
        for seed in (1, 1, 2, None):
            await server.ask([USER], **({} if seed is None else {"seed": seed}))
        seeds = [sampling.seed for sampling in server.engine.samplings]
        assert seeds[0] == seeds[1] != seeds[2]
        assert seeds[3] is None


async def test_the_record_of_a_named_session_is_read_as_a_rollout_and_can_be_deleted():
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        client = server.client_of("rollout-7")
        message = (await client.chat.completions.create(model="policy", messages=[USER])).choices[0].message
        await client.chat.completions.create(model="policy", messages=[USER, message, USER])
        url = server.gateway.base_url.replace("/v1", "/s/rollout-7")
        headers = {"Authorization": f"Bearer {server.gateway.api_key}"}
        async with http.get(f"{url}/rollout", headers=headers) as response:
            rollout = from_json(await response.json())
        assert rollout.calls == server.gateway._named["rollout-7"].calls
        assert rollout.calls[1].prompt_ids[: len(rollout.calls[0].all_ids)] == rollout.calls[0].all_ids
        assert [message["role"] for message in rollout.messages] == ["user", "assistant", "user", "assistant"]
        assert not any("token_ids" in key for message in rollout.messages for key in message)
        statuses = []
        for method in ("DELETE", "DELETE", "GET"):
            async with http.request(method, url + ("/rollout" if method == "GET" else ""), headers=headers) as response:
                statuses.append(response.status)
        assert statuses == [200, 404, 404]


async def test_tokenize_returns_the_prompt_ids_of_a_completion():
    async with running(QWEN, "_Ski<|im_end|>") as server, aiohttp.ClientSession() as http:
        message = (await server.ask([USER])).choices[0].message.model_dump()
        root = server.gateway.base_url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {server.gateway.api_key}"}
        messages = [USER, message, USER]
        async with http.post(f"{root}/tokenize", json={"messages": messages}, headers=headers) as response:
            answer = await response.json()
        await server.ask(messages)
        prompt = list(server.engine.prompts[1])
        assert answer == {"count": len(prompt), "max_model_len": 4096, "tokens": prompt}
        async with http.post(f"{root}/tokenize", json={"prompt": "a<|im_end|>b"}, headers=headers) as response:
            tokens = (await response.json())["tokens"]
        assert QWEN.convert_tokens_to_ids("<|im_end|>") not in tokens
        assert server.text(tokens) == "a<|im_end|>b"


async def test_a_request_that_is_too_large_is_refused():
    limits = GatewaySettings(max_request_mib=0.01)
    async with running(QWEN, "hello<|im_end|>", settings=limits) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            await server.ask([{"role": "user", "content": "x" * 20_000}])
        assert caught.value.status_code == 413


async def test_requests_without_a_session_forget_the_oldest_turns_and_continue(monkeypatch):
    monkeypatch.setattr("lockstep.integrations.gateway.server.MAX_CALLS_WITHOUT_SESSION", 2)
    async with running(QWEN, *(f"turn {i}<|im_end|>" for i in range(4))) as server:
        messages = [(await server.ask([USER])).choices[0].message for _ in range(3)]
        kinds = [(await server.ask([USER, m, USER])).model_extra["prompt_kind"] for m in (messages[0], messages[2])]
        assert kinds == ["forgotten", "extended"]


async def test_requests_without_a_session_remember_many_agents_and_say_when_they_forget_one(monkeypatch, caplog):
    monkeypatch.setattr("lockstep.integrations.gateway.server.MAX_TOKENS_WITHOUT_SESSION", 6000)
    async with running(QWEN, "hello<|im_end|>") as server:
        starts = [[{"role": "user", "content": f"agent {i}"}] for i in range(300)]
        messages = [[*start, (await server.ask(start)).choices[0].message, USER] for start in starts]
        assert server.gateway._anonymous._num_tokens <= 6000
        kept = len(server.gateway._anonymous._answers)
        assert 10 < kept < 300
        assert (await server.ask(messages[-1])).model_extra["prompt_kind"] == "extended"
        assert caplog.text == ""
        for i in (0, 1):
            assert (await server.ask(messages[i])).model_extra["prompt_kind"] == "forgotten"
        assert caplog.text.count("its last answer was forgotten") == 1
        assert "/s/<name>/v1" in caplog.text


async def test_three_hundred_agents_continue_without_sessions():
    async with running(QWEN, "hello<|im_end|>") as server:
        starts = [[{"role": "user", "content": f"agent {i}"}] for i in range(300)]
        messages = [[*start, (await server.ask(start)).choices[0].message, USER] for start in starts]
        assert (await server.ask(messages[0])).model_extra["prompt_kind"] == "extended"


async def test_one_tool_call_per_turn_is_the_sampled_turn_up_to_its_first_call():
    async with running(QWEN, CALLS, "done<|im_end|>") as server:
        whole = (await server.ask([USER], tools=TOOLS, parallel_tool_calls=True)).choices[0].message
        assert len(whole.tool_calls) == 2
        server.engine.script = says(QWEN, CALLS, "done<|im_end|>")
        choice = (await server.ask([USER], tools=TOOLS, parallel_tool_calls=False, logprobs=True)).choices[0]
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Paris"}']
        assert choice.finish_reason == "tool_calls"
        kept = choice.message.model_extra["generation_token_ids"]
        assert server.text(kept).endswith("</tool_call>")
        assert kept == whole.model_extra["generation_token_ids"][: len(kept)]
        assert choice.message.content == "looking"
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "sun"}
        answer = await server.ask([USER, choice.message, result], tools=TOOLS, parallel_tool_calls=False)
        assert answer.model_extra["prompt_kind"] == "extended"
        assert "</tool_call><|im_end|>\n<|im_start|>user" in server.text(server.engine.prompts[-1])


async def test_one_tool_call_per_turn_is_the_first_also_where_the_next_is_incomplete_for_long():
    calls = [json.dumps({"name": "get_weather", "parameters": {"city": city}}) for city in ("Rome", "Oslo " * 30)]
    async with running(LLAMA, "; ".join(calls) + "<|eot_id|>") as server:
        choice = (await server.ask([USER], tools=TOOLS, parallel_tool_calls=False)).choices[0]
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Rome"}']
        assert server.text(choice.message.model_extra["generation_token_ids"]) == calls[0]


async def test_a_higher_token_limit_than_the_runs_is_the_runs():
    async with running(QWEN, "hello there<|im_end|>", sampling=Sampling(max_tokens=2)) as server:
        choice = (await server.ask([USER], max_tokens=4096)).choices[0]
        assert server.engine.samplings[0].max_tokens == 2
        assert choice.finish_reason == "length"


async def test_all_concurrent_requests_are_recorded():
    async with running(QWEN, "hello<|im_end|>") as server:
        client = server.client_of("x")
        await asyncio.gather(*(client.chat.completions.create(model="policy", messages=[USER]) for _ in range(32)))
        assert len(server.gateway._named["x"].calls) == 32


async def test_lone_surrogates_and_odd_text_are_answered():
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {server.gateway.api_key}", "Content-Type": "application/json"}
        for text in ("\ud800", "\x00", "\u202e", "a\ud83d"):
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}], "tools": TOOLS})
            url = f"{server.gateway.base_url}/chat/completions"
            async with http.post(url, data=body, headers=headers) as response:
                assert response.status == 200, await response.text()


async def test_an_adapter_is_a_model_of_its_own():
    settings = GatewaySettings(adapters=("step20",))
    async with running(QWEN, "hello there<|im_end|>", settings=settings) as server:
        assert [one.id for one in (await server.client.models.list()).data] == ["policy", "step20"]
        assert (await server.client.models.retrieve("step20")).id == "step20"
        for name in ("policy", "step20"):
            answer = await server.client.chat.completions.create(model=name, messages=[USER])
            assert answer.model == name
            assert server.engine.samplings[-1].model == name
        with pytest.raises(openai.NotFoundError, match="this gateway serves 'policy', 'step20'"):
            await server.client.chat.completions.create(model="step21", messages=[USER])
