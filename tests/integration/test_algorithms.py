"""Algorithms in runs of the demo: refills and the reference on one and two ranks, and every preset learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.integration.test_run import SMALL, demo, metrics, train

__all__ = ["demo"]  # the fixture: the demo's model and data

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(
    file.stem
    for file in (ROOT / "configs" / "algorithm").glob("*.yaml")
    if "advantage: gae" not in file.read_text() and file.stem != "sft"
)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CAREFUL = ("algorithm=dapo", "algorithm.kl_coef=0.05", "algorithm.max_refills=2", "correction.noise_floor_every=2",
           "rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "logger.print_rollouts_every=0")  # fmt: skip
"""With groups of four, some groups have equal rewards from the first step on."""


@pytest.mark.distributed
def test_refills_and_the_reference_are_equal_on_two_zero3_ranks_and_on_one_process(
    demo: tuple[str, ...], tmp_path: Path
) -> None:
    settings = (*demo, *CAREFUL, f"run_root={tmp_path}", "updates=3")
    train(*settings, "run_name=one")
    train(*settings, "run_name=two", ranks=2)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for name in ("reward/mean", "rollout/refill_factor", "reward/zero_std_fraction", "data/epoch"):
        assert [line[name] for line in one[:1]] == [line[name] for line in two[:1]], name
    assert two[0]["optim/grad_norm"] == pytest.approx(one[0]["optim/grad_norm"], rel=1e-4)
    assert one[0]["rollout/refill_factor"] > 1, "some groups must have equal rewards, or nothing is tested"
    for lines in (one, two):
        assert lines[0]["objective/kl"] == pytest.approx(0, abs=1e-4), (
            "before the first update policy and reference agree"
        )
        assert lines[2]["policy/ref_kl_k3"] > 10 * lines[0]["policy/ref_kl_k3"]
        assert lines[0]["rollout_correction/noise_floor_k3"] < 1e-9
        assert not any(line["health/alarms"] for line in lines)


def test_dropped_groups_are_recorded_and_not_trained(demo: tuple[str, ...], tmp_path: Path) -> None:
    train(*demo, *CAREFUL, f"run_root={tmp_path}", "run_name=dropped", "updates=1")
    (line,) = metrics(tmp_path / "dropped")
    rollouts = list(read_rollouts(tmp_path / "dropped/rollouts/step-000001.jsonl"))
    assert len(rollouts) == round(line["rollout/refill_factor"] * line["rollout/delivered"])
    groups: dict[int, set[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, set()).add(rollout.reward)
    assert sum(len(rewards) > 1 for rewards in groups.values()) * 4 == line["rollout/delivered"]
    assert line["rollout/token_match_rate"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns(preset: str, demo: tuple[str, ...], tmp_path: Path) -> None:
    """Recorded in docs/algorithms.md."""
    settings = ("algorithm.minibatches=2", "updates=30") if preset == "gspo" else ("updates=15",)
    train(*demo, *SMALL, *settings, f"run_root={tmp_path}", f"run_name={preset}", f"algorithm={preset}")
    rewards = [line["reward/mean"] for line in metrics(tmp_path / preset)]
    print(preset, [round(reward, 2) for reward in rewards])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
