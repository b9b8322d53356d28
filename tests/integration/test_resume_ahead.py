"""A killed run with rollouts made ahead goes on as if it had not been killed: by its log, with the groups in flight."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.composed import DEMO
from tests.fixtures.kills import MEASURED, Recipe
from tests.fixtures.processes import descendants, wait_until_gone
from tests.integration.test_replay_ahead import RECORDED, SLOW, VARIANTS, followed
from tests.integration.test_run import demo  # noqa: F401  # a fixture

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1500)]

LONG = ("rollout.ignore_eos=true", "rollout.max_tokens_per_turn=440", "environment.max_turns=1")
"""Calls that take longer than an update, so that weight syncs interrupt them."""
NOT_AGAIN = (*MEASURED, "sync/")


def json_lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def log_of(run: Path) -> list[dict[str, Any]]:
    return json_lines(run / "asynchrony.jsonl")


def numbers_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each batch that do not measure time."""
    lines = [line for line in json_lines(run / "metrics.jsonl") if "rollout/batch" in line]
    return [{name: value for name, value in line.items() if not name.startswith(NOT_AGAIN)} for line in lines]


def kept_calls(run: Path) -> list[dict[str, Any]]:
    """Return the calls of the groups in flight, as they are kept."""
    groups = json_lines(run / "batches/calls.jsonl")
    return [call for group in groups if "calls" in group for call in group["calls"]["calls"]]


def has_partial_call(run: Path) -> bool:
    return any(call["finish_reason"] == "abort" for call in kept_calls(run))


class Killed:
    """A run that is killed when its files say so, and resumed; what it had is what it has afterwards."""

    def __init__(self, root: Path, *overrides: str, ranks: int | None = None) -> None:
        self._recipe = Recipe(overrides=overrides, root=root, ranks=ranks)
        self.run, self._log = root / "one", root / "one.log"
        self._before: tuple[list[Any], list[Any]] = ([], [])

    def kill(self, until: Callable[[Path], bool], *, after_s: float = 0.0) -> None:
        process = self._recipe.start("one")
        deadline = time.monotonic() + 300
        num_batches = len(log_of(self.run))
        while len(log_of(self.run)) <= num_batches or not until(self.run):
            assert process.poll() is None, f"the run ended before it was killed: {self.said()[-3000:]}"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(after_s)
        family = descendants(process.pid)
        process.kill()
        process.wait()
        wait_until_gone(family)
        self._compare()
        self._before = log_of(self.run), numbers_of(self.run)

    def finish(self, *, updates: int | None = None) -> None:
        """Run to the end. updates: in place of those before, of which only the kill needed more."""
        recipe = self._recipe
        if updates is not None:
            recipe = replace(recipe, overrides=(*recipe.overrides, f"updates={updates}"))
        recipe.finish("one")
        self._compare()

    def _compare(self) -> None:
        """Require that batches before the last kill are in the log and the metrics as they were."""
        lines, numbers = self._before
        now = numbers_of(self.run)
        for earlier, later in zip(numbers, now, strict=False):
            assert earlier == later
        # A kill may have torn the last batch; all others were repeated as they were.
        whole = lines[:-1]
        assert log_of(self.run)[: len(whole)] == whole

    def said(self) -> str:
        return self._log.read_text(errors="replace")


def test_a_killed_run_goes_on_with_its_rollouts_in_flight(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    own = (DEMO, *demo[:2], *RECORDED, *LONG, "checkpoint.every=2", "logger.print_rollouts=0")
    # Another number of updates would change a schedule, and with it what is trained.
    killed = Killed(tmp_path, *own, "optimizer.schedule=constant", "updates=60")
    killed.kill(lambda run: (run / "checkpoints/step-2").exists() and has_partial_call(run))
    num_tokens = sum(len(call["sampled_ids"]) for call in kept_calls(killed.run))
    assert num_tokens
    num_batches = len(log_of(killed.run)) + 3
    killed.finish(updates=num_batches)
    said = killed.said()
    assert re.search(r"\d groups were in flight: \d are complete, \d go on, with \d+ tokens", said), said
    again = re.findall(r"batch (\d+) is trained again from its 12 rollouts", said)
    print("trained again:", again, "tokens kept:", num_tokens)
    assert [line["begins"] for line in log_of(killed.run)] == ["start", *[None] * (num_batches - 1)]
    found = followed(killed.run)
    assert found["left out"] == 0, "no group was lost"
    assert found["interrupted"] > 0


def test_ranks_of_a_killed_run_go_on_with_their_groups(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    own = (DEMO, *demo[:2], *RECORDED[1:], *SLOW, "checkpoint.every=6", "logger.print_rollouts=0", "updates=12")
    killed = Killed(tmp_path, *own, "rollout=colocated", "rollout.sleep_level=0", ranks=2)
    killed.kill(lambda run: (run / "checkpoints/step-6").exists() and len(log_of(run)) >= 8)
    killed.finish()
    said = killed.said()
    assert "batch 7 is trained again from its 12 rollouts" in said
    assert "batch 8 is trained again from its 12 rollouts" in said
    assert re.search(r"\d groups were in flight: \d are complete, \d go on, with \d+ tokens of \d+ calls", said), said
    assert [line["begins"] for line in log_of(killed.run)] == ["start", *[None] * 11]


KILLED = {name: VARIANTS[name] for name in ("drop", "two updates", "dynamic sampling", "curriculum", "critic")} | {
    "truncated": (*LONG, "rollout.top_k=20", "rollout.replay_support=true"),
    "greedy answers": (*SLOW, "algorithm.advantage=remax"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", KILLED)
def test_other_killed_runs_go_on(variant: str, demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    own = (DEMO, *demo[:2], *RECORDED, *KILLED[variant], "checkpoint.every=4", "logger.print_rollouts=0")
    killed = Killed(tmp_path, *own, "updates=16" if variant == "two updates" else "updates=10")
    updates_per_batch = 2 if variant == "two updates" else 1

    def is_first_after_checkpoint(run: Path) -> bool:
        return updates_per_batch * len(log_of(run)) % 4 == updates_per_batch

    killed.kill(lambda run: (run / "checkpoints/step-4").exists() and bool(kept_calls(run)))
    killed.kill(is_first_after_checkpoint)
    killed.finish()
    assert [line["begins"] for line in log_of(killed.run)].count("start") == 1
    assert "is trained again from its" in killed.said()
    if variant != "greedy answers":  # which a replay refuses
        print(variant, followed(killed.run))


@pytest.mark.slow
def test_ten_kills_leave_one_run(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    own = (DEMO, *demo[:2], *RECORDED, *SLOW, "checkpoint.every=3", "logger.print_rollouts=0", "updates=24")
    killed, moments = Killed(tmp_path, *own), random.Random(11)
    killed.kill(lambda run: (run / "checkpoints/step-3").exists())
    for _ in range(9):
        killed.kill(lambda run: True, after_s=moments.uniform(0.0, 0.6))
    killed.finish()
    assert [line["begins"] for line in log_of(killed.run)] == ["start", *[None] * 23]
    found = followed(killed.run)
    assert found["left out"] == 0, "no group was lost"
    assert found["checkpoints"] == 8
