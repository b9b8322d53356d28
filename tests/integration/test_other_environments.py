"""Episodes of other packages' environments with a real engine: their sampled tokens are trained with their logprobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from lockstep.integrations.environments.verifiers_tasks import PROGRAM
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.hosts.process import host
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.interpreters import python_with
from tests.fixtures.openenv import server
from tests.fixtures.paths import FIXTURES
from tests.fixtures.tokenizers import chat_tokenizer
from tests.integration.conftest import Served

pytestmark = pytest.mark.engine

CHAT = Chat(chat_tokenizer("qwen3"))
SAMPLING = Sampling(max_tokens=12, stop_token_ids=CHAT.stop_token_ids)
TASKSETS = str(FIXTURES / "verifiers_tasksets")


@pytest.fixture(params=["textarena", "openenv", "verifiers"])
def played(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of an environment."""
    if request.param == "openenv":
        with server("4") as url:
            yield "openenv", {"url": url, "action_field": None, "observation_field": "hint", "max_concurrent": 4}
    elif request.param == "textarena":
        yield "textarena", {"python": python_with("textarena", "textarena"), "env_id": "TowerOfHanoi-v0"}
    else:
        monkeypatch.setenv("PYTHONPATH", TASKSETS, prepend=os.pathsep)
        python = python_with("verifiers 0.4", "verifiers.v1")
        yield "verifiers", {"python": python, "env_id": "word-tasks"}
        host(python, PROGRAM).end()


def test_every_sampled_token_is_trained_with_the_logprob_of_the_engine(
    served: Served, played: tuple[str, dict[str, Any]]
):
    name, settings = played
    sampler = Sampler(
        engine=served.engine,
        chat=CHAT,
        make_environment=partial(make_environment, name, **settings),
        max_turns=2,
        seed=0,
    )
    rows = [{"seed": seed} for seed in range(3)]
    rollouts = served.loop.run(sampler.collect(rows, samples_per_prompt=2, sampling=SAMPLING, step=0), timeout=200)
    assert [rollout.error for rollout in rollouts] == [None] * 6
    assert all("environment_reward" in rollout.outcome for rollout in rollouts)
    for rollout in rollouts:
        (row,) = rows_from_calls(rollout.calls)
        sampled = [token for call in rollout.calls for token in call.sampled_ids]
        assert row.ids[row.loss_mask.astype(bool)].tolist() == sampled
        assert max(map(served.mismatch, rollout.calls)) < 1e-4
