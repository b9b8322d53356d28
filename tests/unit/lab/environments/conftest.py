"""An environment, rows and a scripted engine to plant faults in, and their examination."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.lab.environments.journal import Journal
from lockstep.lab.environments.kit import findings
from lockstep.lab.environments.subject import Options
from lockstep.lab.finding import Finding, Verdict
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.policies import TOKENIZER, Policy

ROWS = [
    {"question": f"What is {number} times 11?", "answer": str(11 * number), "level": f"level{number % 3}"}
    for number in range(3, 9)
]
RIGHT = """
from lockstep.rollout.episode.environment import Step


class Question:
    tools = ()

    async def reset(self, example):
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        return Step(done=True)


class Guess(Question):
    async def step(self, message):
        return Step(messages=({"role": "user", "content": "go on"},))
"""


class Pool(Policy):
    """A scripted engine with a loop, in place of a pool of real ones."""

    loop: BackgroundLoop


def says(prompt: str) -> str:
    return "33" if "3 times" in prompt else "I do not know"


@contextmanager
def scripted(config: Config, images: object) -> Iterator[Any]:
    with BackgroundLoop() as loop:
        pool = Pool(says)
        pool.loop = loop
        yield pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_qwen3(tied=True).config.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture
def examined(model: Path, tmp_path: Path):
    """Return a function that examines an environment of a file, or a built-in one, and returns findings by check."""

    def examine(
        source: str = RIGHT,
        environment: str = "Question",
        *,
        reward: str = "exact_match",
        rows: list[dict[str, Any]] = ROWS,
        settings: dict[str, Any] | None = None,
        max_turns: int = 3,
        **options: Any,
    ) -> dict[str, Finding]:
        file = tmp_path / "own.py"
        file.write_text(source)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = Config()
        config.model.path = str(model)
        config.data.path = str(tmp_path / "rows.jsonl")
        config.data.heldout_path = None
        in_file = f"class {environment}" in source or f"def {environment}" in source
        config.environment.name = f"{file}:{environment}" if in_file else environment
        config.environment.settings = {
            key: [value.format(file=file) for value in values] if isinstance(values, list) else values
            for key, values in (settings or {}).items()
        }
        config.environment.max_turns = max_turns
        config.reward.functions = [f"{file}:{reward}" if f"def {reward}" in source else reward]
        config.reward.isolation = "thread"
        config.rollout.max_tokens_per_turn, config.rollout.max_model_len = 256, 2048
        options = {name: str(value).format(file=file) if name == "player" else value for name, value in options.items()}
        given = Options(**{"rows": 6, "samples": 2, "deadline_s": 30.0, **options})
        return {one.check: one for one in findings(config, given, Journal(), open_engine=scripted)}

    return examine


def failed(found: dict[str, Finding]) -> set[str]:
    return {name for name, one in found.items() if one.verdict is Verdict.FAILS}
