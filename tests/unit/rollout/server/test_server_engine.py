"""Client of a vLLM server: answers that are wrong, late, cut off, or from other weights than the run's."""

from __future__ import annotations

import asyncio
import copy
import gzip
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

from lockstep.rollout.engine.engine_answers import Answer
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, EngineError, EvidenceError, RequestError
from lockstep.rollout.records import FinishReason, ImageSpan, VersionSpan
from lockstep.rollout.server import client as server_client
from lockstep.rollout.server.generate_route import ROUTE, encode_answer
from lockstep.rollout.server.server_engine import GENERATE, ServerEngine, read_facts
from lockstep.rollout.system.background_loop import BackgroundLoop
from tests.fixtures.fake_server import (
    KEY,
    SERVER_INFO,
    VOCAB_SIZE,
    FakeServer,
    breaks_off,
    completion,
    hangs_up,
    raw,
    says,
    waits,
)

SAMPLING = Sampling(max_tokens=8, seed=1)


class Connected:
    """A fake server and its client."""

    def __init__(self, loop: BackgroundLoop, server: FakeServer, engine: ServerEngine) -> None:
        self.loop, self.server, self.engine = loop, server, engine

    def generate(self, sampling: Sampling = SAMPLING, prompt: tuple[int, ...] = (5, 6)) -> Any:
        return self.loop.run(self.engine.generate(prompt, sampling), timeout=30)


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_PAUSE_S", 0.01)


def start(loop: BackgroundLoop, stack: ExitStack, server: FakeServer) -> FakeServer:
    context = server.running()
    loop.run(context.__aenter__())
    stack.callback(lambda: loop.run(context.__aexit__(None, None, None)))
    return server


@pytest.fixture
def connected(loop: BackgroundLoop) -> Iterator[Connected]:
    with ExitStack() as stack:
        server = start(loop, stack, FakeServer())
        engine = connect(loop, server)
        stack.callback(lambda: loop.run(engine.close()))
        yield Connected(loop, server, engine)


def connect(loop: BackgroundLoop, server: FakeServer, **changes: Any) -> ServerEngine:
    settings = {"api_key": KEY, "vocab_size": VOCAB_SIZE, "request_timeout_s": 5.0, "start_timeout_s": 2.0}
    return ServerEngine(server.url, loop=loop, **{**settings, "silence_timeout_s": 0.3, **changes})  # type: ignore[arg-type]


def test_a_completion_becomes_a_record_with_its_evidence(connected: Connected) -> None:
    call = connected.generate()
    assert call.sampled_ids == (7, 8, 9)
    assert call.sampled_logprobs == pytest.approx((-1.07, -1.08, -1.09))
    assert call.version_spans == (VersionSpan(version=0, start=0, end=3),)
    assert call.finish_reason is FinishReason.STOP
    (path, body) = connected.server.requests[0]
    assert path == GENERATE
    assert body["token_ids"] == [5, 6]
    assert body["sampling_params"]["seed"] == 1
    assert body["sampling_params"]["logprobs"] == 0


def test_images_are_refused_and_not_dropped(connected: Connected) -> None:
    images = [ImageSpan(start=0, end=1, digest="0" * 64)]
    num_requests = len(connected.server.requests)
    engine = connected.engine
    asked = (
        engine.generate((1, 2), SAMPLING, images),
        engine.score((1, 2), images),
        engine.score_top((1, 2), 1, images),
    )
    for call in asked:
        with pytest.raises(EngineError, match=r"does not take images; set model\.images\.max_per_prompt"):
            connected.loop.run(call)
    assert len(connected.server.requests) == num_requests


def test_the_engine_takes_its_facts_from_the_server(connected: Connected) -> None:
    engine = connected.engine
    assert (engine.max_model_len, engine.dtype, engine.num_workers) == (64, torch.float32, 1)
    assert (engine.weight_transfer_backend, engine.host) == ("gloo", "127.0.0.1")


def test_a_server_without_adapters_is_not_asked_for_one(connected: Connected) -> None:
    with pytest.raises(EngineError, match="was started without adapters, and a request is for last"):
        connected.generate(replace(SAMPLING, model="last"))
    assert connected.server.requests == []


def test_a_server_with_adapters_is_asked_by_name_and_for_its_base_without_one(loop: BackgroundLoop) -> None:
    with ExitStack() as stack:
        server = FakeServer()
        server.info = {"vllm_config": {**SERVER_INFO["vllm_config"], "lora_config": {"max_lora_rank": 8}}}
        engine = connect(loop, start(loop, stack, server))
        stack.callback(lambda: loop.run(engine.close()))
        for name in ("policy", "last", "base"):
            loop.run(engine.generate((5, 6), replace(SAMPLING, model=name)), timeout=30)
        assert [body.get("model") for _, body in server.requests] == ["policy", "last", None]


@pytest.mark.parametrize(
    "failure",
    [hangs_up, breaks_off, says({"error": {"message": "busy"}}, status=503), says("no", status=500)],
    ids=["reset", "half an answer", "503", "500"],
)
def test_a_passing_failure_is_retried_with_the_same_request(connected: Connected, failure: Any) -> None:
    connected.server.will(GENERATE, failure, failure, says(completion()))
    assert connected.generate().sampled_ids == (7, 8, 9)
    bodies = [body for _, body in connected.server.requests]
    assert len(bodies) == 3
    assert bodies[0] == bodies[1] == bodies[2]


@pytest.mark.parametrize(
    ("failure", "cause"),
    [(hangs_up, "isconnected"), (says({"error": {"message": "EngineCore died"}}, status=500), "EngineCore died")],
)
def test_a_lasting_failure_is_an_error_with_the_address_and_the_cause(
    connected: Connected, failure: Any, cause: str
) -> None:
    connected.server.will(GENERATE, failure)
    with pytest.raises(EngineError, match=cause) as raised:
        connected.generate()
    assert connected.server.url in str(raised.value)
    assert f"tried {server_client.ATTEMPTS} times" in str(raised.value)
    assert "resume" in str(raised.value)
    assert len(connected.server.requests) == server_client.ATTEMPTS


def test_a_request_that_fails_in_a_live_server_may_be_sent_again(connected: Connected) -> None:
    connected.server.will(GENERATE, says("no", status=500))
    with pytest.raises(RequestError):
        connected.generate()
    connected.server.will("/is_paused", says("no", status=500))  # the core is dead: no request can succeed
    with pytest.raises(EngineError, match="HTTP 500") as raised:
        connected.generate()
    assert not isinstance(raised.value, RequestError)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_retried(connected: Connected, status: int) -> None:
    connected.server.will(GENERATE, says({"error": {"message": "not like this"}}, status=status))
    with pytest.raises(EngineError, match=f"HTTP {status}: not like this"):
        connected.generate()
    assert len(connected.server.requests) == 1


def test_a_missing_route_names_the_missing_flag(connected: Connected) -> None:
    connected.server.will(GENERATE, says({"error": {"message": "Not Found"}}, status=404))
    with pytest.raises(EngineError, match="--enable-scale-out"):
        connected.generate()
    connected.server.will("/pause", says({"error": {"message": "Not Found"}}, status=404))
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        connected.loop.run(connected.engine.pause("wait"))


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_request_during_a_pause_that_refuses_requests_is_sent_after_it(connected: Connected, mode: str) -> None:
    async def pause_and_generate() -> asyncio.Task[Any]:
        await connected.engine.pause(mode)
        waiting = asyncio.ensure_future(connected.engine.generate((5, 6), SAMPLING))
        await asyncio.sleep(0.05)
        return waiting

    connected.server.will("/pause", says({"status": "paused"}))
    connected.server.will("/resume", says({"status": "resumed"}))
    connected.server.will(GENERATE, says({"error": {"message": "Generation is paused."}}, status=503))  # as vLLM 0.33
    waiting = connected.loop.run(pause_and_generate())
    connected.server.will(GENERATE, says(completion()))
    connected.loop.run(connected.engine.resume())
    assert connected.loop.run(asyncio.wait_for(waiting, 10)).sampled_ids == (7, 8, 9)
    paths = [path for path, _ in connected.server.requests]
    assert paths == [*["/pause"] * (2 if mode == "abort" else 1), "/resume", GENERATE]


def test_a_request_waits_for_the_end_of_a_pause_within_its_limit(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected.server.will("/pause", says({"status": "paused"}))
    connected.loop.run(connected.engine.pause("wait"))
    monkeypatch.setattr(connected.engine, "_request_timeout_s", 0.1)
    with pytest.raises(EngineError, match=r"stayed paused for 0.1 s.*request_timeout_s"):
        connected.generate()


def test_a_disabled_route_names_the_missing_flag_and_no_key(connected: Connected) -> None:
    """vLLM answers 403 where a server was started without the flag."""
    disabled = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    connected.server.will(GENERATE, says({"error": {"message": disabled}}, status=403))
    with pytest.raises(EngineError, match="start the server with --enable-scale-out") as failure:
        connected.generate()
    assert "key" not in str(failure.value)
    connected.server.will("/pause", says({"error": {"message": "Forbidden"}}, status=403))
    with pytest.raises(EngineError, match=r"rollout\.api_key_env or teacher\.api_key_env"):
        connected.loop.run(connected.engine.pause("wait"))


def test_a_step_of_a_weight_update_is_never_retried(connected: Connected) -> None:
    connected.server.will("/update_weights", says("no", status=500))
    with pytest.raises(EngineError, match="failed: HTTP 500"):
        connected.loop.run(connected.engine.update_weights({"names": []}))
    assert [path for path, _ in connected.server.requests] == ["/update_weights"]


def wrong(**changes: Any) -> Any:
    return says(completion(**changes))


LOGPROBS = completion()["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (raw(b'{"choices": [{"token_ids": [7, 8'), "not JSON"),
        (says([1, 2]), "not one completion"),
        (says({"choices": []}), "not one completion"),
        (wrong(logprobs=None), "not one completion"),
        (wrong(logprobs={"content": LOGPROBS[:2]}), "do not belong to the 3 sampled tokens"),
        (wrong(logprobs={"content": LOGPROBS[::-1]}), "do not belong to the 3 sampled tokens"),
        (wrong(logprobs={"content": [*LOGPROBS[:2], {**LOGPROBS[2], "logprob": -9999.0}]}), "logprob -9999"),
        (wrong(logprobs={"content": [*LOGPROBS[:2], {**LOGPROBS[2], "logprob": None}]}), "not one completion"),
        (wrong(logprobs={"content": [*LOGPROBS[:2], {**LOGPROBS[2], "logprob": "-0.5"}]}), "not one completion"),
        (wrong(logprobs={"content": [*LOGPROBS[:2], {**LOGPROBS[2], "logprob": False}]}), "not one completion"),
        (wrong(token_ids=[7, 8, True]), "not one completion"),
        (wrong(logprobs={"content": [{**LOGPROBS[0], "token_id": False}]}, token_ids=[0]), "not one completion"),
        (wrong(weight_versions=[{"version": "3", "start": False, "end": 3}]), "not one completion"),
        (wrong(finish_reason="error"), "unknown finish reason 'error'"),
        (wrong(finish_reason=None), "unknown finish reason"),
        (wrong(weight_versions=None), "no weight version"),
        (wrong(weight_versions=[{"version": "3", "start": 0, "end": 2}]), "3 tokens were sampled"),
        (wrong(weight_versions=[{"version": "3", "start": 1, "end": 3}]), "do not tile"),
        (wrong(token_ids=["7", "8", "9"]), "not one completion"),
        (says(completion((7, 8, VOCAB_SIZE))), "outside the vocabulary of 512"),
        (says(completion((7,) * 9)), "9 sampled tokens, 8 were requested"),
    ],
)
def test_inconsistent_evidence_is_refused(connected: Connected, reply: Any, message: str) -> None:
    connected.server.will(GENERATE, reply)
    with pytest.raises(EvidenceError, match=message):
        connected.generate()


def test_an_incomplete_support_is_refused(connected: Connected) -> None:
    def content(*probabilities: float) -> dict[str, Any]:
        top = [
            {"token_id": token, "logprob": float(torch.tensor(probability).log()) if probability else -9999.0}
            for token, probability in zip((7, 1, 2), probabilities, strict=True)
        ]
        return {"content": [{"token_id": 7, "logprob": top[0]["logprob"], "top_logprobs": top}]}

    versions = [{"version": "0", "start": 0, "end": 1}]
    truncated = Sampling(max_tokens=8, top_k=2)
    connected.server.will(GENERATE, says(completion((7,), logprobs=content(0.25, 0.75, 0.0), weight_versions=versions)))
    support = connected.generate(truncated).support
    assert support.token_ids.tolist() == [1, 7]
    connected.server.will(GENERATE, says(completion((7,), logprobs=content(0.25, 0.5, 0.0), weight_versions=versions)))
    with pytest.raises(EvidenceError, match=r"probability of 0\.7500"):
        connected.generate(truncated)


@pytest.mark.parametrize("outside", [-1, VOCAB_SIZE])
def test_a_support_with_an_id_outside_the_vocabulary_is_refused(loop: BackgroundLoop, outside: int) -> None:
    half = -0.6931472
    with ExitStack() as stack:
        server = start(loop, stack, FakeServer())
        answer = Answer(
            sampled_ids=[7],
            candidate_ids=[7, outside],
            candidate_logprobs=[half, half],
            starts=[0],
            finish_reason="length",
            versions=[("default", 0, 1)],
        )
        server.will(ROUTE, says(encode_answer(answer)))
        engine = connect(loop, server)
        stack.callback(lambda: loop.run(engine.close()))
        with pytest.raises(EvidenceError, match=f"token id {outside} is outside the vocabulary of 512"):
            loop.run(engine.generate((5, 6), Sampling(max_tokens=8, seed=1, top_p=0.9, top_k=2)))


@pytest.mark.parametrize("message", [None, 5, ["busy"], {"text": "busy"}])
def test_an_error_answer_of_any_form_is_shown(connected: Connected, message: Any) -> None:
    connected.server.will(GENERATE, says({"error": {"message": message}}, status=400))
    with pytest.raises(EngineError, match="refused: HTTP 400"):
        connected.generate()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(connected: Connected, loop: BackgroundLoop, status: int) -> None:
    with ExitStack() as stack:
        other = start(loop, stack, FakeServer())

        async def elsewhere(request: Any) -> Any:
            return web.Response(status=status, headers={"Location": other.url + GENERATE})

        connected.server.will(GENERATE, elsewhere)
        with pytest.raises(EngineError, match=f"HTTP {status}.*redirects are not followed"):
            connected.generate()
        assert other.requests == []


def test_an_answer_beyond_the_size_limit_is_refused(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "MAX_ANSWER_BYTES", 1000)
    connected.server.will(GENERATE, raw(b" " * 1001))
    with pytest.raises(EvidenceError, match="more than 1000 bytes"):
        connected.generate()


def test_a_compressed_answer_is_not_expanded(connected: Connected) -> None:
    async def bomb(request: Any) -> Any:
        return web.Response(body=gzip.compress(b" " * 10**7), headers={"Content-Encoding": "gzip"})

    connected.server.will(GENERATE, bomb)
    with pytest.raises(EvidenceError, match=r"answered \d{4,5} bytes that are not JSON"):
        connected.generate()


def test_scores_of_other_ids_are_refused(connected: Connected) -> None:
    def scored(*ids: int, first: Any = None) -> Any:
        return says({"prompt_logprobs": [first, *({str(token): {"logprob": -0.5 * token}} for token in ids)]})

    connected.server.will(GENERATE, scored(6, 7))
    assert connected.loop.run(connected.engine.score([5, 6, 7])) == [-3.0, -3.5]
    connected.server.will(GENERATE, scored(6, 7, first={}))
    assert connected.loop.run(connected.engine.score([5, 6, 7])) == [-3.0, -3.5]
    others = [scored(6), scored(6, 8), scored(6, 7, first={"5": {"logprob": -1.0}})]
    for value in ("-0.5", False, None):
        others.append(says({"prompt_logprobs": [None, {"6": {"logprob": -0.5}}, {"7": {"logprob": value}}]}))
    for other in (*others, says({"prompt_logprobs": None}), says(completion())):
        connected.server.will(GENERATE, other)
        with pytest.raises(EvidenceError, match="do not belong to the 3 ids"):
            connected.loop.run(connected.engine.score([5, 6, 7]))


def test_ranks_are_those_of_the_scored_tokens(connected: Connected) -> None:
    def ranked(rank: Any) -> Any:
        return says({"prompt_logprobs": [None, {"6": {"logprob": -0.5, "rank": rank}}]})

    connected.server.will(GENERATE, ranked(3))
    assert connected.loop.run(connected.engine.score_ranked([5, 6])) == ([-0.5], [3])
    for other in (ranked("3"), ranked(None), ranked(1.5), says({"prompt_logprobs": [None, {"6": {"logprob": -0.5}}]})):
        connected.server.will(GENERATE, other)
        with pytest.raises(EvidenceError, match="do not belong to the 2 ids"):
            connected.loop.run(connected.engine.score_ranked([5, 6]))


def ranked(*entries: tuple[int, float, int]) -> dict[str, Any]:
    """Return one position of vLLM's own route. entries: (id, logprob, rank)."""
    return {str(token): {"logprob": logprob, "rank": rank} for token, logprob, rank in entries}


def test_most_probable_tokens_are_read_in_their_order(connected: Connected) -> None:
    # Token 6 is the second most probable one, token 7 is beside the two.
    positions = [ranked((6, -1.5, 2), (9, -0.5, 1)), ranked((7, -4.0, 3), (2, -2.0, 2), (1, -0.25, 1))]
    connected.server.will(GENERATE, says({**completion(), "prompt_logprobs": [None, *positions]}))
    found = connected.loop.run(connected.engine.score_top([5, 6, 7], 2))
    assert connected.server.requests[-1][1]["sampling_params"]["prompt_logprobs"] == 2
    assert found.logprobs.tolist() == [-1.5, -4.0]
    assert found.top_ids.tolist() == [[9, 6], [1, 2]]
    assert found.top_logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]
    assert found.version == 0
    bad = [positions[:1], [positions[0], ranked((7, -4.0, 3), (1, -0.25, 1))], [positions[0], ranked((8, -1.0, 1))]]
    for other in bad:
        connected.server.will(GENERATE, says({**completion(), "prompt_logprobs": [None, *other]}))
        with pytest.raises(EvidenceError):
            connected.loop.run(connected.engine.score_top([5, 6, 7], 2))


def test_scores_of_several_weight_versions_are_refused(connected: Connected) -> None:
    position = ranked((6, -1.5, 1))
    spans = [{"version": label, "start": 0, "end": 1} for label in ("1", "2")]
    connected.server.will(GENERATE, says({**completion(weight_versions=spans), "prompt_logprobs": [None, position]}))
    with pytest.raises(EvidenceError, match=r"versions \['1', '2'\], expected one"):
        connected.loop.run(connected.engine.score_top([5, 6], 1))


@pytest.mark.parametrize("label", ["default", "2", "half-loaded-5"])
def test_tokens_of_weights_that_the_run_never_sent_are_refused(connected: Connected, label: str) -> None:
    """A restarted server answers normally, with the weights it loaded."""
    connected.loop.run(connected.engine.finish_weight_update("4"))
    connected.server.will(GENERATE, wrong(weight_versions=[{"version": "4", "start": 0, "end": 3}]))
    assert connected.generate().oldest_version == 4
    connected.server.will(GENERATE, wrong(weight_versions=[{"version": label, "start": 0, "end": 3}]))
    with pytest.raises(EngineError, match=f"labeled '{label}', which this run never sent"):
        connected.generate()


def test_half_loaded_weights_are_refused_by_a_client_that_sent_none(connected: Connected) -> None:
    connected.server.will(GENERATE, wrong(weight_versions=[{"version": "half-loaded-5", "start": 0, "end": 3}]))
    with pytest.raises(EngineError, match="a weight update did not finish"):
        connected.generate()
    connected.server.will("/weight_info", says({"weight_version": "half-loaded-5"}))
    with pytest.raises(EngineError, match="did not finish"):
        connected.loop.run(connected.engine.weight_version())


def test_a_silent_server_is_an_error_long_before_the_request_times_out(connected: Connected) -> None:
    connected.server.will(GENERATE, waits)
    connected.server.will("/is_paused", says({"is_paused": False}), waits)
    with pytest.raises(EngineError, match=r"answered nothing for 0\.3 s.*silence_timeout_s"):  # the other limit is 5 s
        connected.generate()


def test_a_slow_request_to_a_live_server_is_awaited(connected: Connected) -> None:
    async def slow(request: Any) -> Any:
        import asyncio

        await asyncio.sleep(1.0)
        return await says(completion())(request)

    connected.server.will(GENERATE, slow)
    assert connected.generate().sampled_ids == (7, 8, 9)


def test_a_request_past_its_limit_is_not_retried(loop: BackgroundLoop) -> None:
    with ExitStack() as stack:
        server = start(loop, stack, FakeServer())
        engine = connect(loop, server, request_timeout_s=0.3)
        stack.callback(lambda: loop.run(engine.close()))
        server.will(GENERATE, waits)
        with pytest.raises(EngineError, match=r"no answer within 0\.3 s"):
            loop.run(engine.generate((5, 6), SAMPLING), timeout=10)
        assert len(server.requests) == 1


def test_a_missing_server_is_an_error_within_the_limit(loop: BackgroundLoop) -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"no server was ready at http://127\.0\.0\.1:9 within 1 s"):
        ServerEngine("http://127.0.0.1:9", loop=loop, vocab_size=VOCAB_SIZE, start_timeout_s=1.0)
    assert time.monotonic() - started < 5


def test_a_wrong_key_names_the_setting(loop: BackgroundLoop) -> None:
    with ExitStack() as stack:
        server = start(loop, stack, FakeServer())
        with pytest.raises(
            EngineError,
            match=r"401: Unauthorized; put the server's key .* rollout\.api_key_env or teacher\.api_key_env",
        ):
            connect(loop, server, api_key="another")


@pytest.mark.parametrize(
    ("section", "changes", "flag"),
    [
        ("model_config", {"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ("scheduler_config", {"enable_chunked_prefill": True}, "--no-enable-chunked-prefill"),
        ("model_config", {"dtype": "strange"}, "lockstep serve-engine"),
        ("parallel_config", {"world_size": None}, "lockstep serve-engine"),
        ("parallel_config", {"world_size": -1}, "lockstep serve-engine"),
        ("model_config", {"dtype": "nn"}, "lockstep serve-engine"),
        ("model_config", {"max_model_len": 0}, "lockstep serve-engine"),
    ],
)
def test_a_server_with_unusable_samples_is_refused_with_the_flag(
    loop: BackgroundLoop, section: str, changes: dict[str, Any], flag: str
) -> None:
    with ExitStack() as stack:
        server = start(loop, stack, FakeServer())
        server.info = copy.deepcopy(SERVER_INFO)
        server.info["vllm_config"][section] |= changes
        with pytest.raises(ConfigError, match=flag):
            connect(loop, server)


def compact(**changes: Any) -> dict[str, Any]:
    """Return an answer of the compact route."""
    sent = encode_answer(
        Answer(
            sampled_ids=[7, 8],
            candidate_ids=[7, 8],
            candidate_logprobs=[-1.5, -0.1],
            starts=[0, 1],
            finish_reason="length",
            versions=[("default", 0, 2)],
        )
    )
    return {**sent, **changes}


def test_the_compact_route_is_used_if_the_server_has_it(loop: BackgroundLoop) -> None:
    with ExitStack() as stack:
        server = start(loop, stack, FakeServer())
        server.will(ROUTE, says(compact()))
        engine = connect(loop, server)
        stack.callback(lambda: loop.run(engine.close()))
        call = loop.run(engine.generate((5, 6), SAMPLING))
        assert (call.sampled_ids, call.finish_reason) == ((7, 8), FinishReason.LENGTH)
        assert call.sampled_logprobs == (-1.5, float(np.float32(-0.1)))
        assert [path for path, _ in server.requests] == [ROUTE]
        for wrong in (
            {},
            compact(starts="AAA"),
            compact(sampled_ids="not base64"),
            compact(candidate_logprobs=""),
            compact(versions=[["0", 0]]),
            compact(versions=[]),
        ):
            server.will(ROUTE, says(wrong))
            with pytest.raises(EvidenceError):
                loop.run(engine.generate((5, 6), SAMPLING))


def test_invalid_prompts_are_not_sent(connected: Connected) -> None:
    for prompt, message in (((5, VOCAB_SIZE), "outside"), ((), "empty"), (tuple(range(64)), "no room")):
        with pytest.raises(EngineError, match=message):
            connected.generate(prompt=prompt)
    assert connected.server.requests == []


@pytest.mark.parametrize(
    ("model", "device", "warns"),
    [
        ({"dtype": "torch.bfloat16"}, "cuda", True),
        ({"dtype": "torch.bfloat16", "hf_overrides": {"head_dtype": "float32"}}, "cuda", False),
        ({"dtype": "torch.float32", "hf_overrides": None}, "cuda", False),
        ({"dtype": "torch.bfloat16"}, "cpu", False),
    ],
)
def test_a_gpu_server_with_a_narrower_head_than_the_trainers_is_reported(
    model: dict[str, Any], device: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = SERVER_INFO["vllm_config"]
    described = {
        "vllm_config": {**config, "model_config": {**config["model_config"], **model}, "device_config": device}
    }
    read_facts("http://gpu:8000", described)
    assert ("head_dtype" in caplog.text) is warns
