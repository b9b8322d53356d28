"""Environments of the verifiers package, run as agents."""

from __future__ import annotations

import importlib.util
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.integrations.environments import verifiers as adapter
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import heldout_data
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.paths import FIXTURES
from tests.fixtures.policies import CHAT, TOKENIZER, sampling

ENVIRONMENTS = FIXTURES / "verifiers_environments"
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="pip install 'verifiers<0.3' to run its environments"
)


def test_a_missing_id_package_or_environment_is_refused_when_it_is_made():
    with pytest.raises(ConfigError, match=r"settings\.env_id="):
        make_environment("verifiers")
    missing = "pip install 'verifiers<0.3'" if importlib.util.find_spec("verifiers") is None else "is not installed"
    with pytest.raises(ConfigError, match=missing):
        make_environment("verifiers", env_id="owner/no-such-environment")


@needs_verifiers
async def test_every_token_sampled_for_a_verifiers_environment_is_trained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    handler = signal.getsignal(signal.SIGINT)
    make_environment("verifiers", env_id="verifiers-word-env", args={"turns": 2})
    assert signal.getsignal(signal.SIGINT) is handler, "the run keeps its own handler of Ctrl-C"
    engine = ScriptedEngine(says(TOKENIZER, "two it is<|im_end|>"))
    sampler = Sampler(
        engine=engine,
        chat=CHAT,
        make_environment=partial(make_environment, "verifiers", env_id="verifiers-word-env", args={"turns": 2}),
        max_turns=4,
        seed=0,
    )
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in ("one", "two")]
    rollouts = await sampler.collect(rows, samples_per_prompt=2, sampling=sampling(), step=0)
    assert [rollout.error for rollout in rollouts] == [None] * 4
    assert [rollout.outcome["environment_reward"] for rollout in rollouts] == [0.0, 0.0, 1.0, 1.0]
    assert [rollout.outcome["verifiers_begins_with"] for rollout in rollouts] == [0.0, 0.0, 1.0, 1.0]
    for rollout in rollouts:
        assert len(rollout.calls) == 2
        (row,) = rows_from_calls(rollout.calls)
        assert row.num_trained == rollout.num_sampled


@needs_verifiers
async def test_a_rollout_at_the_limit_of_turns_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    sampler = Sampler(
        engine=ScriptedEngine(says(TOKENIZER, "two it is<|im_end|>")),
        chat=CHAT,
        make_environment=partial(make_environment, "verifiers", env_id="verifiers-word-env", args={"turns": 3}),
        max_turns=2,
        seed=0,
    )
    rows = [{"prompt": [{"role": "user", "content": "say two"}], "answer": "two"}]
    (rollout,) = await sampler.collect(rows, samples_per_prompt=1, sampling=sampling(), step=0)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert len(rollout.calls) == 2


def environment_with(monkeypatch: pytest.MonkeyPatch, rows: list[Any] | Exception) -> None:
    """Stand in for an installed environment with this evaluation data."""

    def get_eval_dataset() -> list[Any]:
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setattr(adapter, "_check_installed", lambda env_id: None)
    monkeypatch.setattr(adapter, "_load", lambda env_id, args: SimpleNamespace(get_eval_dataset=get_eval_dataset))


def test_the_evaluation_data_of_an_environment_is_held_out_data(monkeypatch: pytest.MonkeyPatch):
    rows = [{"prompt": [{"role": "user", "content": "say one"}], "answer": "one"}]
    environment_with(monkeypatch, rows)
    config = Config()
    config.environment.name, config.environment.settings = "verifiers", {"env_id": "word", "timeout_s": 5.0}
    config.data.heldout_path = "environment"
    (data,) = heldout_data(config.heldout_sets(), config.environment, config.reward).values()
    assert [data[0]] == rows


@pytest.mark.parametrize("rows", [[], ValueError("no data")])
def test_an_environment_without_evaluation_data_is_refused(monkeypatch: pytest.MonkeyPatch, rows: Any):
    environment_with(monkeypatch, rows)
    with pytest.raises(DataError, match="evaluation data"):
        adapter.evaluation_rows("word")


@needs_verifiers
def test_a_real_environment_gives_its_evaluation_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ENVIRONMENTS)
    rows = adapter.evaluation_rows("verifiers-word-env")
    assert [row["answer"] for row in rows] == ["one", "two", "three"]
