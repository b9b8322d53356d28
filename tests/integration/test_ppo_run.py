"""Runs of PPO: the demo with a critic, resumed in the middle, and the historical experiment on a small model."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.demo.preferences.make import make_preferences
from lockstep.trainer.checkpoint import stored
from lockstep.trainer.model.critic import Critic
from tests.integration.test_run import demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

QUIET = ("logger.print_rollouts=0", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=8")
ADAPTIVE = (
    "algorithm=ppo", "algorithm.minibatches=2", "algorithm.kl_coef=0.05", "algorithm.kl_target=0.5",
    "algorithm.kl_horizon=100", "optimizer=adamw_tf", "optimizer.schedule=linear",
)  # fmt: skip


@pytest.fixture(scope="module")
def adaptive(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Four rollout batches of two updates each, with a reference, a controller and a checkpoint after each batch."""
    root = tmp_path_factory.mktemp("runs")
    train(*demo, *QUIET, *ADAPTIVE, "updates=8", f"run_root={root}", "run_name=whole", "checkpoint.every=2",
          "checkpoint.keep=9")  # fmt: skip
    return root / "whole"


def test_the_first_step_starts_from_the_reference_with_values_of_zero(adaptive: Path) -> None:
    first = metrics(adaptive)[0]
    assert first["objective/kl"] == 0
    assert first["objective/kl_coef"] == 0.05
    assert first["ppo/value/mean"] == first["ppo/value/var"] == 0
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-9)


def test_the_controller_moves_the_coefficient_by_its_rule(adaptive: Path) -> None:
    lines = metrics(adaptive)
    for before, after in pairwise(lines):
        error = np.clip(before["objective/kl"] / 0.5 - 1, -0.2, 0.2)
        expected = before["objective/kl_coef"] * (1 + error * before["rollout/delivered"] / 100)
        assert after["objective/kl_coef"] == pytest.approx(expected, rel=1e-6)


def test_score_kl_and_their_sum_are_reported(adaptive: Path) -> None:
    for line in metrics(adaptive):
        assert line["objective/score"] == pytest.approx(line["reward/mean"], abs=1e-6)
        assert line["objective/score_total"] == pytest.approx(
            line["objective/score"] + line["objective/non_score_reward"], abs=1e-6
        )
        assert line["objective/non_score_reward"] == pytest.approx(
            -line["objective/kl_coef"] * line["objective/kl"], abs=1e-6
        )


def test_a_resumed_run_has_the_coefficient_the_learning_rate_and_the_step_of_adam(
    adaptive: Path,
    demo: tuple[str, ...],  # noqa: F811
) -> None:
    root = adaptive.parent
    train(*demo, *QUIET, *ADAPTIVE, "updates=8", f"run_root={root}", "run_name=again", "checkpoint.every=2",
          f"resume={adaptive}/checkpoints/step-4")  # fmt: skip
    whole = {line["step"]: line for line in metrics(adaptive)}
    resumed = metrics(root / "again")
    assert [line["step"] for line in resumed] == [6, 8]
    for line in resumed:
        expected = whole[line["step"]]
        assert line["optim/lr"] == expected["optim/lr"]
        for name in ("objective/kl_coef", "objective/kl", "objective/score", "ppo/value/mean", "ppo/value/loss"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    state = json.loads((adaptive / "checkpoints/step-4/manifest.json").read_text())["state"]
    assert state["kl_coef"] == whole[6]["objective/kl_coef"]
    moments = torch.load(root / "again/checkpoints/step-8/optimizer.pt", weights_only=True)["state"]
    assert {int(entry["step"]) for entry in moments.values()} == {8}


def test_the_critic_is_in_checkpoints_and_in_a_directory_of_its_own_but_not_in_the_model(adaptive: Path) -> None:
    whole, _ = stored.complete(adaptive / "checkpoints")
    saved = load_file(whole[-1] / "parameters.safetensors")
    assert not any("critic" in name for name in load_file(adaptive / "model/model.safetensors"))
    critic = Critic.from_pretrained(adaptive / "critic")
    for name, tensor in critic.state_dict().items():
        torch.testing.assert_close(tensor, saved[f"critic.{name}"], rtol=0, atol=0, msg=name)
    assert critic.head.linear.weight.abs().max() > 0, "a head that is still zero would be equal for the wrong reason"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [None, 2], ids=["one process", "two ranks of ZeRO-3"])
def test_ppo_learns_the_demo_and_its_values_explain_the_returns(
    ranks: int | None,
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Recorded in docs/ppo.md."""
    train(
        *demo, "algorithm=ppo", "algorithm.minibatches=4", "optimizer.lr=1e-4", "optimizer.critic_lr=2e-3",
        "updates=160", f"run_root={tmp_path}", "run_name=ppo", "logger.print_rollouts=0", ranks=ranks, timeout_s=1700,
    )  # fmt: skip
    lines = metrics(tmp_path / "ppo")
    for line in lines[::5] + lines[-1:]:
        print({name: round(line[name], 3) for name in ("step", "reward/mean", "value/explained_variance")})
    assert np.mean([line["reward/mean"] for line in lines[-5:]]) >= 0.9
    assert max(np.convolve([line["value/explained_variance"] for line in lines], np.ones(3) / 3, "valid")) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2], ids=["one process", "two ranks of ZeRO-3"])
def test_one_update_per_batch_is_on_policy_exactly(ranks: int | None, demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    train(*demo, "algorithm=ppo", "optimizer.critic_lr=1e-3", "updates=4", f"run_root={tmp_path}", "run_name=ppo",
          "logger.print_rollouts=0", ranks=ranks)  # fmt: skip
    lines = metrics(tmp_path / "ppo")
    assert len(lines) == 4
    assert all(line["policy/ratio_mean"] == 1.0 for line in lines)
    assert all(line["policy/approx_kl"] == 0.0 for line in lines)


@pytest.fixture(scope="module")
def historical(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Data, reward model, policy: the whole experiment, 100 rollout batches of four epochs."""
    from tests.integration.test_reward_model import train as train_reward_model

    root = tmp_path_factory.mktemp("historical")
    make_preferences("sentiment", root / "model", root / "data")
    train_reward_model(root, "rm", "batch_size=16", "optimizer.lr=1e-3")
    train(
        "experiment=lm_human_preferences", f"model.path={root}/model", f"data.path={root}/data/train.jsonl",
        "data.heldout_path=null", f"reward.settings.model.path={root}/rm/model", f"run_root={root}", "run_name=policy",
        "logger.print_rollouts=0", timeout_s=3000,
    )  # fmt: skip
    return metrics(root / "policy")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_historical_experiment_runs_end_to_end_and_raises_its_score(historical: list[dict[str, float]]) -> None:
    """All 24 tokens of a response are trained, also those behind the end that the score assumes."""
    assert [line["step"] for line in historical] == list(range(4, 404, 4)), "four epochs per batch"
    assert all(line["rollout/sampled_tokens_mean"] == 24 for line in historical)
    assert all(line["rollout/trained_tokens"] == 64 * 24 for line in historical)
    assert historical[0]["objective/kl"] == 0
    assert historical[0]["ppo/value/var"] == 0
    assert np.mean([line["objective/score"] for line in historical[-10:]]) > historical[0]["objective/score"] + 0.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_controller_holds_the_kl_within_a_fifth_of_its_target(historical: list[dict[str, float]]) -> None:
    at_the_end = np.mean([line["objective/kl"] for line in historical[-20:]])
    assert at_the_end == pytest.approx(6, rel=0.2)
