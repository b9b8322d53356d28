"""Examination of environments with a real engine: those of Lockstep pass, and a step that blocks is named."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.demo.tokenizer import train_tokenizer
from lockstep.demo.warm_start import new_model
from lockstep.lab.environments.journal import Journal
from lockstep.lab.environments.kit import findings
from lockstep.lab.environments.subject import Options
from lockstep.lab.finding import Finding, Verdict
from lockstep.rollout.engine.pool import EnginePool
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.start import open_engine
from tests.fixtures.forked_python import forked_python, forks_for_spawns
from tests.fixtures.paths import ROOT

SUMS = [{"question": f"compute {n}*{n + 2}-5", "answer": str(n * (n + 2) - 5)} for n in range(11, 17)]
CHAIN = [
    {
        "question": f"find c{n}",
        "links": [{"key": f"c{n}", "value": f"go e{n}"}, {"key": f"e{n}", "value": f"value {70 * n + 1}"}],
        "answer": str(70 * n + 1),
    }
    for n in range(11, 17)
]
GAME = """
class Number:
    def reset(self, *, target: int, **row) -> None:
        self.target, self.found = target, False

    def guess(self, number: int) -> str:
        \"\"\"Guess.

        Args:
            number: between 0 and 9
        \"\"\"
        self.found = number == self.target
        return "right" if self.found else "wrong"

    def get_reward(self) -> float:
        return float(self.found)


def play(messages, row):
    if messages[-1]["role"] == "tool":
        return "done"
    call = {"name": "guess", "arguments": {"number": row["target"]}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def look(query: str) -> str:
    \"\"\"Look something up.

    Args:
        query: words
    \"\"\"
    return f"nothing about {query}"
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A random model of the demo's architecture with the demo's kind of tokenizer."""
    directory = tmp_path_factory.mktemp("kit")
    tokenizer = train_tokenizer(["The answer is 1353", "compute 64*22-55", "find c42 go e17 value 731"] * 8)
    new_model(tokenizer, seed=0).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "game.py").write_text(GAME)
    config = Config()
    config.model.path = str(directory / "model")
    config.data.heldout_path = None
    config.rollout.max_tokens_per_turn, config.rollout.max_model_len = 160, 1024
    config.rollout.kv_cache_gib = 0.125
    return config


@pytest.fixture(scope="module")
def engine(base: Config) -> Iterator[EnginePool]:
    with forks_for_spawns(), open_engine(base) as engine:
        yield engine


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "settings", "rows", "reward", "options"),
    [
        ("calculator", {}, SUMS, "demo_answer", {}),
        ("chain", {}, CHAIN, "demo_answer", {}),
        ("single_turn", {}, SUMS, "numeric", {}),
        ("single_turn", {}, SUMS, "exact_match", {}),
        ("tools", {"files": ["game.py:look"]}, SUMS, "numeric", {}),
        ("user", {"turns": ["Are you sure?"]}, SUMS, "contains", {}),
        ("subagents", {"files": ["game.py:look"], "max_calls": 8}, SUMS, "numeric", {}),
        (
            "mixed",
            {"environments": {"calculator": {}, "single_turn": {}}, "default": "calculator"},
            SUMS,
            "numeric",
            {},
        ),
        (
            "trl",
            {"factory": "game.py:Number"},
            [{"prompt": "Guess my number.", "target": n} for n in range(2, 8)],
            "environment_reward",
            {"player": "game.py:play", "reference": "target"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_our_environments_pass(
    base: Config, engine: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    settings: dict[str, Any], rows: list[dict[str, Any]], reward: str, options: dict[str, Any],
) -> None:  # fmt: skip
    monkeypatch.chdir(Path(base.model.path).parent)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = copy.deepcopy(base)
    config.data.path = str(tmp_path / "rows.jsonl")
    config.environment.name, config.environment.settings = name, settings
    config.reward.functions = [reward]

    @contextmanager
    def shared(config: Config, images: object) -> Iterator[EnginePool]:
        yield engine

    found = list(findings(config, Options(rows=5, samples=2, **options), Journal(), open_engine=shared))
    exploits = {"reward of several answers"} if reward == "contains" else set()  # it looks anywhere in the answer
    assert {one.check for one in found if one.verdict is Verdict.FAILS} == exploits
    by_check: dict[str, Finding] = {one.check: one for one in found}
    assert by_check["trained tokens are the sampled tokens"].measured.startswith("match 1.000")
    assert by_check["same seed, same episode"].measured == "10 of 10 episodes are the same twice"
    assert by_check["reward of the reference"].verdict is Verdict.OK


IN_FORKS = (
    "import runpy, sys; sys.executable, *sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""The process that examines is a fork, too."""


def check(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    python = forked_python()
    return subprocess.run(
        [python, "-c", IN_FORKS, python, ROOT / "scripts" / "check_environment.py", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def own(base: Config, tmp_path: Path) -> list[str]:
    """Return the command line for an environment whose step runs the text of the setting `code`."""
    (tmp_path / "own.py").write_text(
        "import os, time\n"
        "from lockstep.rollout.episode.environment import Step\n\n\n"
        "class Own:\n"
        "    tools = ()\n\n"
        "    def __init__(self, code='pass'):\n"
        "        self.code = code\n\n"
        "    async def reset(self, example):\n"
        "        return [{'role': 'user', 'content': example['question']}]\n\n"
        "    async def step(self, message):\n"
        "        exec(self.code)\n"
        "        return Step(done=True)\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    return [
        "own.py:Own", "--data", "rows.jsonl", "--rows", "4", "--samples", "2",
        f"model.path={base.model.path}", "model.dtype=float32", "reward.functions=[exact_match]",
        "rollout.kv_cache_gib=0.125",
    ]  # fmt: skip


@pytest.mark.engine
def test_the_command_examines_an_environment_of_a_file(own: list[str], tmp_path: Path) -> None:
    done = check([*own, "--json"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"]
    assert "cost of an episode" in {one["check"] for one in found["findings"]}


def test_a_step_that_blocks_the_loop_is_killed_and_named(own: list[str], tmp_path: Path) -> None:
    done = check([*own, "--deadline", "1", "environment.settings.code='time.sleep(1000)'"], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Own.step after " in done.stdout
    assert "did not return and blocked all episodes (line 15 of own.py, in step)" in done.stdout


def test_a_wrong_setting_is_one_line_and_status_2(own: list[str], tmp_path: Path) -> None:
    done = check([*own, "reward.functionz=[x]"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: reward.functionz is not a setting")
    assert done.stdout == ""
