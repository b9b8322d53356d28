"""Rewards from a language model behind a URL."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from rewards.composition import FaultTolerance, RewardSet, make_reward_set
from rollout.errors import ConfigError
from rollout.records import Rollout, RolloutStatus
from tests.fixtures.cost import cpu_s
from tests.unit.rewards.workers.test_pool import rollout


class Judge:
    """Server with scripted replies that records its requests."""

    def __init__(self, *replies: tuple[int, object]) -> None:
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

    async def judge(self, given: Rollout, **settings: object) -> tuple[Rollout, RewardSet]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            rewards = make_reward_set(
                ["llm_judge"],
                settings={"llm_judge": {"url": f"http://127.0.0.1:{port}/v1", "model": "judge", **settings}},
                tolerance=FaultTolerance(max_error_rate=1.0),
            )
            (scored,) = await rewards.score([given])
            return scored, rewards
        finally:
            await runner.cleanup()

    def __call__(self, given: Rollout | None = None, **settings: object) -> tuple[Rollout, RewardSet]:
        return asyncio.run(self.judge(given or rollout("because"), **settings))


def test_the_score_of_a_judge_is_scaled():
    judge = Judge((200, "Good.\nScore: 7"))
    scored, _ = judge()
    assert scored.reward == pytest.approx(0.7)
    text = judge.requests[0]["messages"][0]["content"]
    assert "because" in text
    assert text.count("[") >= 4
    assert Judge((200, "Score: -1"))(low=-1.0, high=1.0)[0].reward == 0.0


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
        ((200, "Score: 11"), "not between 0 and 10", 1),
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


def test_judge_settings_are_checked():
    with pytest.raises(ConfigError, match="url"):
        make_reward_set(["llm_judge"])


def test_a_reply_of_spaces_costs_work_in_proportion_to_its_length():
    judge = Judge((200, "score:" + " " * 15_000 + "x\nScore: ** 7"))
    assert cpu_s(lambda: judge()) < 3  # 6 s for the pattern alone if it backtracks
    assert judge()[0].reward == pytest.approx(0.7)
