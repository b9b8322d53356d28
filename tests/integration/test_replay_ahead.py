"""`lockstep replay --run` follows a run with rollouts made ahead, bit for bit."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.composed import DEMO
from tests.fixtures.kills import Recipe
from tests.integration.test_replay_run import replay
from tests.integration.test_run import ROOT, demo, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

RECORDED = (
    *("rollout.num_threads=1", "rollout.max_staleness=2", "rollout.prompts_per_step=3", "rollout.samples_per_prompt=4"),
    *("checkpoint.every=1", "checkpoint.keep=9", "logger.print_rollouts_every=0", "data.heldout_path=null"),
)
SLOW = ("environment=slow_calculator", "environment.settings.max_delay_s=0.3")


def followed(run: Path) -> dict[str, int]:
    """Replay a run, require that all is equal, and return the numbers of the last lines."""
    status, said = replay("--run", run)
    assert status == 0, said
    numbers = re.findall(
        r"(\d+) of (\d+) batches .*: (\d+) tokens .* \((\d+) calls .*\), (\d+) metrics, (\d+) checkpoints", said
    )
    equal, batches, tokens, interrupted, metrics, checkpoints = map(int, numbers[0])
    assert equal == batches
    assert metrics > 60 * batches
    left_out = re.findall(r"(\d+) groups were not sampled", said)
    return {
        "tokens": tokens,
        "interrupted": interrupted,
        "checkpoints": checkpoints,
        "left out": int([*left_out, 0][0]),
    }


@pytest.fixture(scope="module")
def run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    root = tmp_path_factory.mktemp("recorded")
    # The engine samples a batch in four waves of three calls, which take longer than an update on any machine.
    long_calls = (
        *("rollout.ignore_eos=true", "rollout.max_tokens_per_turn=440", "environment.max_turns=1"),
        "rollout.max_num_seqs=3",
    )
    train(*demo, *RECORDED, *long_calls, "updates=4", f"run_root={root}", "run_name=whole")
    return root / "whole"


def test_a_run_with_interrupted_calls_is_followed(run: Path) -> None:
    found = followed(run)
    sampled = [
        len(call.sampled_ids)
        for path in (run / "rollouts").iterdir()
        for rollout in read_rollouts(path)
        for call in rollout.calls
    ]
    assert found["tokens"] == sum(sampled)
    assert found["interrupted"] > 0, "no call was sampled by several weights, so nothing was proven"
    assert found["checkpoints"] == 4


VARIANTS = {
    "turns": ("rollout.max_staleness=1",),
    "slow tools": SLOW,
    "drop": (
        *("environment=slow_calculator", "environment.settings.max_delay_s=2.0", "rollout.max_staleness=1"),
        *("rollout.stragglers=drop", "rollout.samples_per_prompt=2"),
    ),
    "two updates": (*SLOW, "algorithm.minibatches=2", "rollout.max_staleness=4"),
    "dynamic sampling": (*SLOW, "algorithm.dynamic_sampling=true", "algorithm.max_refills=3"),
    "curriculum": (*SLOW, "data.curriculum.weighting=learnability", "data.curriculum.window=4"),
    "truncated": (*SLOW, "rollout.top_k=20", "rollout.replay_support=true"),
    "critic": (*SLOW, "algorithm=ppo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_runs_are_followed(variant: str, demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    data = tmp_path / "data/demo/rows.jsonl"
    data.parent.mkdir(parents=True)
    rows = Path(demo[1].removeprefix("data.path=")).read_text().splitlines(keepends=True)[:12]
    data.write_text("".join(rows))  # so that rows come again
    own = (*VARIANTS[variant], *([f"data.path={data}"] if variant == "curriculum" else []))
    train(*demo, *RECORDED, *own, "updates=6", f"run_root={tmp_path}", "run_name=one")
    found = followed(tmp_path / "one")
    lines = [json.loads(line) for line in (tmp_path / "one/asynchrony.jsonl").read_text().splitlines()]
    print(variant, found)
    rounds = [one for line in lines for one in line["rounds"]]
    if variant == "drop":
        assert found["left out"] == sum(len(one["dropped"]) for one in rounds) > 0
    if variant == "dynamic sampling":
        assert any(one["silent"] for one in rounds)
    if variant == "two updates":
        assert [line["version"] for line in lines] == [0, 2, 4]


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed_is_followed(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    own = (DEMO, *demo[:2], *RECORDED, *SLOW, "updates=8", "logger.print_rollouts=0")
    runs = Recipe(overrides=own, root=tmp_path)
    moments = random.Random(3)
    for _ in range(2):
        print(runs.kill("killed", moments, span_s=2.0, after_update=2), flush=True)
    run = runs.finish("killed")
    lines = [json.loads(line) for line in (run / "asynchrony.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["begins"] for line in lines].count("start") > 1
    found = followed(run)
    assert found["left out"] > 0, "groups in flight at a kill begin again"


@pytest.mark.slow
def test_the_first_difference_is_named(run: Path, tmp_path: Path) -> None:
    for name, change, expected in (
        ("logprob", lambda call: call["sampled_logprobs"].__setitem__(1, call["sampled_logprobs"][1] - 1e-7), 1),
        ("token", lambda call: call["sampled_ids"].__setitem__(0, 1 + call["sampled_ids"][0]), 0),
    ):
        copy = tmp_path / name
        shutil.copytree(run, copy, symlinks=True)
        path = copy / "rollouts/step-000002.jsonl"
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        change(rollouts[3]["calls"][0])
        path.write_text("".join(json.dumps(one) + "\n" for one in rollouts))
        status, said = replay("--run", copy)
        assert status == 1, said
        place = f"rollout {rollouts[3]['rollout_id']}, call 1, position {expected}: {name} "
        assert place in said, said
