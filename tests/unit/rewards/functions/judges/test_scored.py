"""Rewards from a language model behind a URL."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lockstep.rewards.composition import FaultTolerance, RewardSet, make_reward_set
from lockstep.rewards.resolve import check_built_in
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.media.run_images import image_url
from lockstep.rollout.records import Rollout, RolloutStatus
from tests.fixtures.cost import cpu_s
from tests.fixtures.vision import images_in, picture
from tests.unit.rewards.workers.test_pool import rollout


class Judge:
    """Server with scripted replies that records its requests."""

    def __init__(self, *replies: tuple[int, object], name: str = "llm_judge") -> None:
        self.name = name
        self.replies = list(replies)
        self.requests: list[dict] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        status, body = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(body, str):
            body = {"choices": [{"message": {"content": body}}]}
        return web.json_response(body, status=status)

    async def judge(self, *batches: list[Rollout], **settings: Any) -> tuple[Rollout, RewardSet]:
        scored, rewards = await self.judge_all(*batches, **settings)
        return scored[-1], rewards

    async def judge_all(
        self, *batches: list[Rollout], timeout_s: float = 30.0, **settings: object
    ) -> tuple[list[Rollout], RewardSet]:
        """Score batches one after the other. Returns the last one."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            rewards = make_reward_set(
                [self.name],
                settings={self.name: {"url": f"http://127.0.0.1:{port}/v1", "model": "judge", **settings}},
                tolerance=FaultTolerance(max_error_rate=1.0, timeout_s=timeout_s),
            )
            for batch in batches:
                scored = await rewards.score(batch)
            return scored, rewards
        finally:
            await runner.cleanup()

    def __call__(self, given: Rollout | None = None, **settings: object) -> tuple[Rollout, RewardSet]:
        return asyncio.run(self.judge([given or rollout("because")], **settings))

    def score(self, *batches: list[Rollout], **settings: object) -> dict[str, float]:
        """Score batches one after the other and return the metrics of the judge, without their prefix."""
        _, rewards = asyncio.run(self.judge(*batches, **settings))
        prefix = "judge/llm_judge/"
        metrics = rewards.take_metrics()
        return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def test_the_score_of_a_judge_is_scaled():
    judge = Judge((200, "Good.\nScore: 7"))
    scored, _ = judge()
    assert scored.reward == pytest.approx(0.7)
    text = judge.requests[0]["messages"][0]["content"]
    assert "because" in text
    assert text.count("[") >= 4
    assert Judge((200, "Score: -1"))(low=-1.0, high=1.0)[0].reward == 0.0


@pytest.mark.parametrize(
    ("reply", "reward"),
    [("Score: 7.5", 0.75), ("**Score**: 8", 0.8), ("Score: **8**", 0.8), ("Score: 8/10", 0.8),
     ("Score: 8 out of 10.", 0.8),
     ("Score: 8 (good)", 0.8), ("Score: 7\nScore: 8.", 0.8), ("Score:\n8", 0.8), ("Score: [8]", 0.8),
     (r"Score: $\boxed{8}$", 0.8), ("Score: 1e1", 1.0),
     ("Score: 4/5", None), ("Score: 7-8", None), ("Score: 7,5", None), ("Score: 3\nScore: −5", None),
     ("Score: 80%", None), ("Score: 7 to 8", None), ("Score: >= 8", None), ("Score: 8\nSubscore: 1", 0.8),
     ("Score: good, 8", None)],
)  # fmt: skip
def test_a_score_is_a_whole_number_and_never_the_beginning_of_another(reply, reward):
    scored, _ = Judge((200, reply))()
    assert scored.reward == reward if reward is not None else "expected a number from 0 to 10" in (scored.error or "")


def test_a_request_to_a_busy_judge_is_retried():
    judge = Judge((503, {}), (429, {}), (200, "Score: 10"))
    assert judge()[0].reward == 1.0
    assert len(judge.requests) == 3


@pytest.mark.parametrize(
    ("reply", "says", "asked"),
    [
        ((500, {}), "no answer in 2 attempts", 2),
        ((401, {}), "status 401", 1),
        ((200, "It is fine."), "no line 'Score", 1),
        ((200, "Score: 11"), "expected a number from 0 to 10", 1),
        ((200, {"choices": []}), "not a chat completion", 1),
        ((200, ["x"]), "not a chat completion", 1),
    ],
)
def test_a_judge_that_gives_no_score_is_an_error_and_never_a_zero(reply, says, asked):
    judge = Judge(reply)
    scored, rewards = judge(attempts=2)
    assert scored.status is RolloutStatus.FAILED
    assert says in (scored.error or "")
    assert rewards.take_metrics()["reward/errors/exception"] == 1
    assert len(judge.requests) == asked


def test_the_key_comes_from_the_environment_and_is_in_no_error(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    judge = Judge((403, {}))
    scored, _ = judge(api_key_env="JUDGE_KEY")
    assert judge.keys == ["Bearer hunter2"]
    assert "hunter2" not in (scored.error or "")
    monkeypatch.delenv("JUDGE_KEY")
    assert "JUDGE_KEY is not set" in (Judge((200, "Score: 1"))(api_key_env="JUDGE_KEY")[0].error or "")


def test_the_judge_sees_the_reference_if_a_column_is_set():
    judge = Judge((200, "Score: 1"))
    judge(rollout("x", answer="forty-two"), column="answer")
    assert "forty-two" in judge.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "url"),
        ({"url": 8000, "model": "m"}, "url=8000: expected a text"),
        ({"url": "u", "model": "m", "low": 2.0, "high": 2.0}, "high=2.0: expected a number above low=2; .*high=12"),
        ({"url": "u", "model": "m", "high": "ten"}, "high='ten': expected a number; .*high=10"),
        ({"url": "u", "model": "m", "attempts": 0}, "attempts=0: expected a whole number of at least 1"),
        ({"url": "u", "model": "m", "attempts": 1.5}, "attempts=1.5: expected a whole number"),
        ({"url": "u", "model": "m", "attempts": "many"}, "attempts='many': expected a number"),
        ({"url": "u", "model": "m", "max_tokens": True}, "max_tokens=True: expected a number"),
        ({"url": "u", "model": "m", "attempt_timeout_s": float("nan")}, "attempt_timeout_s=nan: expected a number"),
        ({"url": "u", "model": "m", "attempt_timeout_s": 0}, "attempt_timeout_s=0: expected a number above 0"),
        ({"url": "u", "model": "m", "temperature": -1.0}, "temperature=-1.0: expected a number of at least 0"),
        ({"url": "u", "model": "m", "cache": -1}, "cache=0"),
        ({"url": "u", "model": "m", "cache": True}, "cache=0"),
    ],
)
def test_judge_settings_are_checked_before_the_run(settings, says):
    with pytest.raises(ConfigError, match=says):
        make_reward_set(["llm_judge"], settings={"llm_judge": settings})
    with pytest.raises(ConfigError, match=says):
        check_built_in("llm_judge", settings)


def test_equal_rollouts_are_judged_once_and_the_costs_are_measured():
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    judge = Judge((200, {"choices": [{"message": {"content": "Score: 5"}}], "usage": usage}))
    batch = [rollout("a"), rollout("a"), rollout("b")]
    measured = judge.score(batch, batch)
    assert len(judge.requests) == 2
    assert measured.pop("seconds") > 0
    assert measured == {
        "calls": 2.0,
        "hit_fraction": pytest.approx(4 / 6),
        "prompt_tokens": 200.0,
        "completion_tokens": 14.0,
    }


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"temperature": 0.5}, 4), ({"temperature": 0.5, "cache": 8}, 1), ({"cache": 0}, 4), ({"cache": 1}, 1)],
)
def test_sampled_judges_are_asked_each_time_unless_a_cache_is_set(settings, asked):
    judge = Judge((200, "Score: 5"))
    batch = [rollout("a"), rollout("a")]
    assert judge.score(batch, batch, **settings)["hit_fraction"] == 1 - asked / 4
    assert len(judge.requests) == asked
    assert judge.requests[0]["temperature"] == settings.get("temperature", 0.0)


@pytest.mark.parametrize("failure", [(401, {}), (200, "No score."), (200, "Score: 11"), (200, {"choices": []})])
def test_a_failure_of_a_judge_is_not_kept(failure):
    judge = Judge(failure, (200, "Score: 5"))
    scored, _ = asyncio.run(judge.judge([rollout("a")], [rollout("a")]))
    assert scored.reward == 0.5
    assert len(judge.requests) == 2


def test_a_step_whose_rollouts_are_all_answered_from_the_cache_has_zero_calls():
    judge = Judge((200, "Score: 5"))

    async def play() -> dict[str, float]:
        _, rewards = await judge.judge([rollout("a")])
        rewards.take_metrics()
        await rewards.score([rollout("a")])  # the server is gone
        return rewards.take_metrics()

    metrics = asyncio.run(play())
    assert (metrics["judge/llm_judge/calls"], metrics["judge/llm_judge/hit_fraction"]) == (0.0, 1.0)
    assert "judge/llm_judge/seconds" not in metrics


@pytest.mark.parametrize(
    "usage", [None, [], {"prompt_tokens": -1, "completion_tokens": "7"}, {"prompt_tokens": 10**400}]
)
def test_a_usage_that_holds_no_counts_is_left_out(usage):
    judge = Judge((200, {"choices": [{"message": {"content": "Score: 5"}}], "usage": usage}))
    assert set(judge.score([rollout("a")])) == {"calls", "hit_fraction", "seconds"}


def test_markers_depend_on_the_texts_and_on_the_run():
    judge = Judge((200, "Score: 5"))
    judge.score([rollout("a"), rollout("b")])
    judge.score([rollout("a")])
    marked = [re.findall(r"\[[0-9a-f]{16}\]", request["messages"][0]["content"]) for request in judge.requests]
    assert all(len(set(found)) == 1 for found in marked)
    assert len({found[0] for found in marked}) == 3


def test_a_reply_of_spaces_costs_work_in_proportion_to_its_length():
    judge = Judge((200, "score:" + " " * 15_000 + "x\nScore: ** 7"))
    assert cpu_s(lambda: judge()) < 3  # 6 s for the pattern alone if it backtracks
    assert judge()[0].reward == pytest.approx(0.7)


def with_images(*digests: str) -> Rollout:
    given = rollout("because")
    parts = [{"type": "image", "digest": digest} for digest in digests]
    prompt = {"role": "user", "content": [{"type": "text", "text": "compare"}, *parts]}
    return replace(given, messages=(prompt, *given.messages[1:]))


def test_a_judge_that_sees_images_gets_those_of_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = images_in(tmp_path, monkeypatch)
    digests = [store.add(picture(number)) for number in (1, 2)]
    judge = Judge((200, "Score: 7"))
    scored, _ = judge(with_images(*digests), sees_images=True)
    assert scored.reward == pytest.approx(0.7)
    text, *rest = judge.requests[0]["messages"][0]["content"]
    assert "compare [image 1] [image 2]" in text["text"]
    assert rest == [
        {"type": "text", "text": "[image 1]:"},
        {"type": "image_url", "image_url": {"url": image_url({"digest": digests[0]})}},
        {"type": "text", "text": "[image 2]:"},
        {"type": "image_url", "image_url": {"url": image_url({"digest": digests[1]})}},
    ]


def test_a_judge_that_sees_none_reads_that_there_are_images_and_warns_once(caplog: pytest.LogCaptureFixture):
    judge = Judge((200, "Score: 7"))
    asyncio.run(judge.judge([with_images("a" * 64)], [with_images("b" * 64, "c" * 64)]))
    contents = [request["messages"][0]["content"] for request in judge.requests]
    assert "compare [image]\n" in contents[0]
    assert "compare [image] [image]\n" in contents[1]
    assert [record.getMessage() for record in caplog.records if "images" in record.getMessage()] == [
        "llm_judge: the prompts hold images, and the judge reads [image] in their places; set "
        "reward.settings.llm_judge.sees_images=true for a judge that sees images"
    ]


def test_an_image_that_cannot_be_read_is_an_error_and_never_a_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images_in(tmp_path, monkeypatch)
    scored, _ = Judge((200, "Score: 7"))(with_images("a" * 64), sees_images=True)
    assert scored.status is RolloutStatus.FAILED
    assert "the image aaaa" in (scored.error or "")
