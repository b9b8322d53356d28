"""Engine of another rank over real HTTP: answers, errors, and the key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.engine.token_scores import TokenScores, token_scores
from lockstep.rollout.errors import EngineError, EvidenceError, RequestError
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, SamplingSupport, VersionSpan
from lockstep.rollout.saved_rollouts import call_to_json
from lockstep.rollout.server import remote_rank_engine
from lockstep.rollout.server.remote_rank_engine import EngineService, RemoteRankEngine
from lockstep.rollout.system.background_loop import BackgroundLoop

SAMPLING = Sampling(max_tokens=7, stop_token_ids=(3, 4), seed=11, affinity=(0, 5), top_k=2)
CALL = EngineCall(
    prompt_ids=(1, 2),
    sampled_ids=(5, 6),
    sampled_logprobs=(-0.1, -1 / 3),
    finish_reason=FinishReason.STOP,
    version_spans=(VersionSpan(version=4, start=0, end=2),),
    support=SamplingSupport(offsets=np.array([0, 1, 3]), token_ids=np.array([5, 6, 9], dtype=np.int32)),
)


class FakeEngine:
    """An engine that records its requests, with a scripted answer."""

    max_model_len, vocab_size, dtype = 64, 512, torch.bfloat16

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[int], Sampling]] = []
        self.images: list[Sequence[ImageSpan]] = []
        self.failure: Exception | None = None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        self.asked.append((prompt_ids, sampling))
        self.images.append(images)
        if self.failure is not None:
            raise self.failure
        return CALL

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        self.images.append(images)
        return [-float(token) for token in ids[1:]], list(ids[1:])

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        self.images.append(images)
        flat = [(token, -float(token)) for token in ids[1:] for _ in range(top_k + 1)]
        return token_scores(ids, *zip(*flat, strict=True), top_k=top_k, version=4, vocab_size=512, source="it")


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


@pytest.fixture
def own() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def service(loop: BackgroundLoop, own: FakeEngine) -> Iterator[EngineService]:
    service = loop.run(EngineService.start(own, host="127.0.0.1", key="secret"))  # type: ignore[arg-type]
    yield service
    loop.run(service.close())


@pytest.fixture
def peer(loop: BackgroundLoop, service: EngineService) -> Iterator[RemoteRankEngine]:
    peer = RemoteRankEngine(service.url, key="secret", rank=1, loop=loop, timeout_s=5)
    yield peer
    loop.run(peer.close())


def test_a_call_and_its_answer_arrive_unchanged(loop: BackgroundLoop, own: FakeEngine, peer: RemoteRankEngine) -> None:
    found = loop.run(peer.generate((1, 2), SAMPLING))
    assert own.asked == [([1, 2], SAMPLING)]
    for name in ("prompt_ids", "sampled_ids", "sampled_logprobs", "finish_reason", "version_spans"):
        assert getattr(found, name) == getattr(CALL, name)
    assert found.support is not None
    assert CALL.support is not None
    assert found.support.token_ids.tolist() == CALL.support.token_ids.tolist()
    assert loop.run(peer.score([1, 2, 3])) == [-2.0, -3.0]
    assert loop.run(peer.score_ranked([1, 2, 3])) == ([-2.0, -3.0], [2, 3])
    scores = loop.run(peer.score_top([1, 2, 3], 1))
    assert (scores.ids.tolist(), scores.logprobs.tolist(), scores.version) == ([1, 2, 3], [-2.0, -3.0], 4)
    assert (scores.top_ids.tolist(), scores.top_logprobs.tolist()) == ([[2], [3]], [[-2.0], [-3.0]])
    assert (peer.dtype, peer.vocab_size, peer.max_model_len) == (torch.bfloat16, 512, 64)


def test_images_of_prompts_and_rows_reach_the_engine(
    loop: BackgroundLoop, own: FakeEngine, peer: RemoteRankEngine
) -> None:
    images = [ImageSpan(start=0, end=1, digest="0" * 64), ImageSpan(start=1, end=2, digest="1" * 64)]
    loop.run(peer.generate((1, 2), SAMPLING, images))
    loop.run(peer.score([1, 2], images))
    loop.run(peer.score_top([1, 2], 1, images))
    assert own.images == [images] * 3


@pytest.mark.parametrize("kind", [EngineError, RequestError, EvidenceError])
def test_an_error_keeps_its_type_and_names_the_rank(
    loop: BackgroundLoop, own: FakeEngine, peer: RemoteRankEngine, kind: type[Exception]
) -> None:
    own.failure = kind("out of memory")
    with pytest.raises(kind, match="the engine of rank 1: out of memory") as caught:
        loop.run(peer.generate((1, 2), SAMPLING))
    assert type(caught.value) is kind


def test_a_lost_rank_is_an_error_of_its_engine(
    loop: BackgroundLoop, service: EngineService, peer: RemoteRankEngine
) -> None:
    loop.run(service.close())
    with pytest.raises(EngineError, match="the engine of rank 1 does not answer"):
        loop.run(peer.generate((1, 2), SAMPLING))


def test_a_request_without_the_key_is_refused(loop: BackgroundLoop, own: FakeEngine, service: EngineService) -> None:
    async def status(headers: dict[str, str]) -> int:
        async with aiohttp.ClientSession() as session:
            body = {"prompt_ids": [1], "sampling": asdict(SAMPLING)}
            async with session.post(f"{service.url}/generate", json=body, headers=headers) as response:
                return response.status

    assert loop.run(status({})) == loop.run(status({"Authorization": "Bearer wrong"})) == 401
    assert own.asked == []
    assert loop.run(status({"Authorization": "Bearer secret"})) == 200


@pytest.mark.parametrize(
    "change",
    [
        {"sampled_logprobs": ["-0.1", -0.2]},
        {"sampled_logprobs": [False, -0.2]},
        {"sampled_ids": [True, 6]},
        {"prompt_ids": ["1", 2]},
        {"version_spans": [["4", 0, 2]]},
        {"support": {"offsets": ["0", "1", "3"], "token_ids": [5, 6, 9]}},
        {"support": {"offsets": [0, 1, 3], "token_ids": [5, 6, "9"]}},
        {"support": {"offsets": [False, True, 3], "token_ids": [5, 6, 9]}},
        {"support": {"offsets": [0, 1, 3], "token_ids": [5, 6, 9.0]}},
    ],
)
def test_evidence_in_another_form_is_refused(
    loop: BackgroundLoop, peer: RemoteRankEngine, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(remote_rank_engine, "call_to_json", lambda call: call_to_json(call) | change)
    with pytest.raises(EvidenceError):
        loop.run(peer.generate((1, 2), SAMPLING))


@pytest.mark.parametrize(
    "scores", [[["-0.5"], [1]], [[False], [1]], [[None], [1]], [[-0.5], ["1"]], [[-0.5], [0.5]], [[-0.5]], "0", None]
)
def test_scores_in_another_form_are_refused(
    loop: BackgroundLoop, own: FakeEngine, peer: RemoteRankEngine, monkeypatch: pytest.MonkeyPatch, scores: Any
) -> None:
    async def score_ranked(ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> Any:
        return scores

    monkeypatch.setattr(own, "score_ranked", score_ranked)
    with pytest.raises(EvidenceError, match="the engine of rank 1"):
        loop.run(peer.score([1, 2]))
