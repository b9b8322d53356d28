"""A run that is killed at random moments and resumed equals, bit for bit, an uninterrupted run.

It crosses epochs, accumulates over microbatches and decays its learning rate, so that a loss of any state shows.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.composed import DEMO
from tests.fixtures.kills import Kill, Recipe, differences
from tests.integration.test_run import demo, metrics  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine]

SMALL = (
    "rollout.prompts_per_step=3", "rollout.samples_per_prompt=2", "token_budget=256", "optimizer.lr=1e-3",
    "optimizer.schedule=linear", "checkpoint.every=1", "checkpoint.keep=999", "correction.noise_floor_every=3",
    "logger.print_rollouts=0",
)  # fmt: skip
PPO = (
    "algorithm=ppo", "algorithm.minibatches=2", "algorithm.kl_coef=0.05", "algorithm.kl_target=0.5",
    "algorithm.kl_horizon=100", "optimizer=adamw_tf",
)  # fmt: skip


def recipe(demo: tuple[str, ...], root: Path, *overrides: str, **more: int) -> Recipe:  # noqa: F811
    """Settings with seven rows of data and three per step: every other step crosses the end of an epoch."""
    rows = Path(demo[1].removeprefix("data.path=")).read_text().splitlines()[:7]
    data = root / "data/demo"
    data.mkdir(parents=True, exist_ok=True)
    (data / "rows.jsonl").write_text("\n".join(rows) + "\n")
    own = (DEMO, demo[0], f"data.path={data}/rows.jsonl", "data.heldout_path=null")
    return Recipe(overrides=(*own, *overrides, *SMALL), root=root, **more)


def step_seconds(run: Path) -> float:
    return float(np.median([line["time/step"] for line in metrics(run)]))


@pytest.mark.timeout(600)
def test_one_kill_changes_nothing(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    runs = recipe(demo, tmp_path, "updates=4")
    whole = runs.finish("whole")
    runs.kill("killed", random.Random(1), span_s=step_seconds(whole), after_update=2)
    assert differences(whole, runs.finish("killed")) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=8", "model.lora.alpha=16")], ids=["whole model", "lora"])
def test_a_kill_of_a_run_that_averages_its_teacher_changes_nothing(
    lora: tuple[str, ...],
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    average = ("algorithm=opd_topk", "teacher.source=average", "teacher.average_decay=0.5", *lora)
    runs = recipe(demo, tmp_path, *average, 'teacher.context="Say {answer}."', "updates=4")
    whole = runs.finish("whole")
    runs.kill("killed", random.Random(1), span_s=step_seconds(whole), after_update=2)
    assert differences(whole, runs.finish("killed")) == []


def kill_and_compare(runs: Recipe, *, kills: int, seed: int) -> list[Kill]:
    """Kill one run repeatedly, sometimes while it starts, and let it end."""
    whole = runs.finish("whole")
    span_s = 2.5 * step_seconds(whole)
    moments = random.Random(seed)
    found = []
    for number in range(kills):
        in_start = number > 0 and moments.random() < 0.15
        found.append(runs.kill("killed", moments, span_s=span_s, in_start=in_start))
        print(found[-1], flush=True)
    assert differences(whole, runs.finish("killed")) == []
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_change_nothing(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    found = kill_and_compare(recipe(demo, tmp_path, "updates=45"), kills=20, seed=2)
    assert {"start", "step"} <= {kill.stage for kill in found}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_kills_of_ppo_change_nothing(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    kill_and_compare(recipe(demo, tmp_path, *PPO, "updates=32", updates_per_batch=2), kills=5, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_kills_of_mixed_data_with_a_curriculum_change_nothing(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    """Two weighted data sets, rows that rest and rows with weights, several epochs of both sets."""
    lines = Path(demo[1].removeprefix("data.path=")).read_text().splitlines()
    for name, rows in (("few", lines[:3]), ("many", lines[3:10])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    sources = f"{{few: {{path: {tmp_path}/few.jsonl, weight: 1}}, many: {{path: {tmp_path}/many.jsonl, weight: 2}}}}"
    overrides = (
        demo[0], "environment=calculator", "reward=calculator",
        "data.heldout_path=null", f"data.sources={sources}", "data.curriculum.rest_epochs=1",
        "data.curriculum.weighting=learnability", "data.curriculum.window=2", "updates=12", *SMALL,
        "rollout.samples_per_prompt=4",
    )  # fmt: skip
    runs = Recipe(overrides=overrides, root=tmp_path)
    kill_and_compare(runs, kills=2, seed=5)
    whole = tmp_path / "whole"
    assert max(line["data/resting_rows"] for line in metrics(whole)) > 0
    for step in range(1, 13):
        taken = [rollout.example["dataset"] for rollout in read_rollouts(whole / f"rollouts/step-{step:06}.jsonl")]
        assert taken.count("few") == taken.count("many") / 2 == 4, "one prompt of three, whichever rows rest"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_five_kills_of_two_zero3_ranks_change_nothing(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    kill_and_compare(recipe(demo, tmp_path, "updates=16", ranks=2), kills=5, seed=4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_with_rollouts_made_ahead_train_every_prompt_once(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    """Rollouts are trained in the order in which they finish, so runs differ; no prompt is lost or trained twice."""
    updates, moments = 48, random.Random(5)
    runs = recipe(
        demo, tmp_path, "rollout.max_staleness=1", "environment=slow_calculator",
        "environment.settings.max_delay_s=0.5", f"updates={updates}",
    )  # fmt: skip
    for _ in range(6):
        print(runs.kill("ahead", moments, span_s=5.0, after_update=1), flush=True)
    run = runs.finish("ahead")
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, updates + 1))
    assert max(line["rollout_correction/version_lag_max"] for line in lines) == 1
    for line in lines:
        assert line["rollout/delivered"] == 6, "groups are whole"
        assert line["rollout/token_match_rate"] == line["rollout/trained_fraction"] == 1.0
        assert line["rollout/dropped_stale"] == 0
    files = sorted((run / "rollouts").glob("step-*.jsonl"))
    assert len(files) == updates
    trained = [sorted({rollout.group_id for rollout in read_rollouts(file)}) for file in files]
    assert sorted(place for step in trained for place in step) == list(range(3 * updates))
    for update, file in enumerate(files, start=1):
        spans = [span for rollout in read_rollouts(file) for call in rollout.calls for span in call.version_spans]
        assert {span.version for span in spans} <= {update - 2, update - 1}, "weights that this update may train on"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_ranks_end_with_their_launcher_and_the_run_can_be_launched_again_at_once(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    runs = recipe(demo, tmp_path, "updates=24", ranks=2, port=29517)  # the same at every launch, as by default
    moments = random.Random(6)
    for number in range(10):
        found = runs.kill("killed", moments, span_s=4.0, in_start=number % 4 == 3, launcher_alone=True)
        print(found, flush=True)
    assert [line["step"] for line in metrics(runs.finish("killed"))] == list(range(1, 25))
