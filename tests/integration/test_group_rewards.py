"""Runs of the demo with group-wise rewards: whole groups reach the functions, the policy learns, a resume agrees."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.kills import differences
from tests.integration.test_exact_resume import recipe, step_seconds
from tests.integration.test_run import demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SAMPLES = 8
BRIEF = """
def brief(rollouts):
    assert len({one.group_id for one in rollouts}) == 1
    if len(rollouts) == 1:  # in the evaluation
        return [None]
    lengths = [one.num_sampled for one in rollouts]
    return [sum(length < other for other in lengths) / (len(lengths) - 1) for length in lengths]
"""


def overrides(root: Path, *words: str) -> tuple[str, ...]:
    (root / "mine.py").write_text(BRIEF)
    return (
        f"run_root={root}", "rollout.prompts_per_step=8", f"rollout.samples_per_prompt={SAMPLES}",
        "logger.print_rollouts_every=0", *words,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Six updates whose only gradient is that shorter rollouts win, and that GDPO normalizes by function."""
    root = tmp_path_factory.mktemp("runs")
    train(
        *demo, *overrides(root), "updates=6", "run_name=brief", "algorithm=gdpo", "checkpoint.every=0",
        "eval.every=6", "eval.prompts=8",
        f"reward.functions=['{root}/mine.py:brief',majority_vote,demo_answer]", "reward.weights=[1,0,0]",
    )  # fmt: skip
    return root / "brief"


def check_groups(run: Path, *, updates: int) -> None:
    """Assert that the saved reward of each rollout compares its length with those of its own group."""
    files = sorted((run / "rollouts").glob("step-*.jsonl"))
    assert len(files) == updates
    for path in files:
        groups = defaultdict(list)
        for rollout in read_rollouts(path):
            groups[rollout.group_id].append(rollout)
        assert len(groups) == 8
        for group in groups.values():
            lengths = [rollout.num_sampled for rollout in group]
            expected = [sum(length < other for other in lengths) / (SAMPLES - 1) for length in lengths]
            assert [rollout.rewards["brief"] for rollout in group] == pytest.approx(expected)


def test_a_reward_that_only_compares_within_groups_trains(run: Path) -> None:
    lines = [line for line in metrics(run) if "reward/mean" in line]
    tokens = [line["rollout/sampled_tokens_mean"] for line in lines]
    assert np.mean(tokens[-2:]) < np.mean(tokens[:2]) - 3, tokens  # 12 to 5
    for line in lines:
        assert 0 <= line["reward/brief/mean"] <= 0.5, "ties count for none, so the mean is at most a half"
        assert line["reward/majority_vote/mean"] > 0
        assert line["reward/errors/exception"] == line["rollout/dropped_fraction"] == 0


def test_every_saved_group_has_the_rewards_of_its_own_lengths(run: Path) -> None:
    check_groups(run, updates=6)


def test_an_evaluation_of_one_sample_has_the_rewards_that_need_no_group(run: Path) -> None:
    evaluated = [line for line in metrics(run) if any(name.startswith("eval/") for name in line)]
    assert evaluated
    names = {name for line in evaluated for name in line}
    assert "eval/reward/demo_answer/mean" in names
    assert not any(name in names for name in ("eval/reward/brief/mean", "eval/reward/majority_vote/mean"))
    assert all(value == 0 for line in evaluated for name, value in line.items() if name.endswith("/failed_fraction"))


def test_groups_that_are_sampled_ahead_are_compared_within_themselves(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    train(
        *demo, *overrides(tmp_path), "updates=3", "run_name=ahead", "checkpoint.every=0", "rollout.max_staleness=1",
        f"reward.functions=['{tmp_path}/mine.py:brief']",
    )  # fmt: skip
    check_groups(tmp_path / "ahead", updates=3)


class ShorterAnswer(BaseHTTPRequestHandler):
    """A judge that prefers the shorter answer."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        first, second = re.findall(r"Answer [AB]:\n(\[\w+\])\n(.*?)\n\1", text, re.DOTALL)
        verdict = "A" if len(first[1]) < len(second[1]) else "B" if len(first[1]) > len(second[1]) else "tie"
        usage = {"prompt_tokens": 100, "completion_tokens": 3}
        reply = {"choices": [{"message": {"content": f"Verdict: {verdict}"}}], "usage": usage}
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def test_answers_that_a_judge_prefers_are_trained_and_its_cost_is_measured(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ShorterAnswer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        train(
            *demo, *overrides(tmp_path), "updates=2", "run_name=judged", "checkpoint.every=0",
            "reward.functions=[pairwise_judge]", "reward.settings.pairwise_judge.model=judge",
            f"reward.settings.pairwise_judge.url=http://127.0.0.1:{server.server_port}/v1",
            "reward.settings.pairwise_judge.comparisons=4",
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    for line in (line for line in metrics(tmp_path / "judged") if "reward/mean" in line):
        assert line["reward/mean"] == pytest.approx(0.5), "each comparison gives one point"
        assert line["reward/std"] > 0.1
        judge = {name.rpartition("/")[2]: value for name, value in line.items() if "judge/pairwise_judge/" in name}
        assert 0 < judge["calls"] <= 8 * SAMPLES * 4
        assert judge["prompt_tokens"] == 100 * judge["calls"]
        assert (judge["failed_fraction"], judge["first_fraction"]) == (0, 0.5)


@pytest.mark.slow
def test_a_kill_of_a_run_with_rewards_of_groups_changes_nothing(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "mine.py").write_text(BRIEF)
    runs = recipe(demo, tmp_path, f"reward.functions=['{tmp_path}/mine.py:brief',majority_vote]", "updates=4")
    whole = runs.finish("whole")
    runs.kill("killed", random.Random(1), span_s=step_seconds(whole), after_update=2)
    assert differences(whole, runs.finish("killed")) == []
