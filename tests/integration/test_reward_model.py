"""Reward models trained by the script, on one process and on two ranks of ZeRO-3, and loaded again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.demo.preferences.make import PreferenceRecipe, make_preferences
from lockstep.rewards.model.classifier import load_reward_model
from tests.fixtures.ranks import accelerate, run_ranks
from tests.integration.test_run import metrics as metrics_of
from tests.integration.test_run import train as train_policy

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
RECIPE = PreferenceRecipe(
    query_length=24,
    num_queries=8,
    num_heldout=16,
    num_comparisons=100,
    pretraining_steps=30,
    rater_noise=0.0,
    hidden_size=32,
    num_heads=1,  # vLLM has no attention for heads of 16 on a CPU
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("preferences")
    make_preferences("sentiment", directory / "model", directory / "data", recipe=RECIPE)
    return directory


def train(task: Path, name: str, *overrides: str, ranks: int = 1) -> list[dict]:
    """Train a reward model and return its metrics; the model is in task/name/model."""
    command = [str(ROOT / "scripts/train_reward_model.py")]
    command += [f"run_root={task}", f"run_name={name}", f"model.path={task}/model"]
    command += [f"data.path={task}/data/comparisons.jsonl", f"data.heldout_path={task}/data/comparisons_heldout.jsonl"]
    command += ["microbatch_size=8", "optimizer.lr=3e-3", "optimizer.warmup_updates=0", *overrides]
    result = run_ranks(accelerate("zero3", ranks) if ranks > 1 else (), *command, timeout_s=280)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return [json.loads(line) for line in (task / name / "metrics.jsonl").read_text().splitlines()]


@torch.no_grad()
def test_a_trained_reward_model_is_normalized_saved_and_loads_as_a_sequence_classifier(task):
    metrics = train(task, "one", "normalization.num_samples=64", "batch_size=8")
    final = metrics[-1]
    assert final["reward_model/normalized_mean"] == pytest.approx(0, abs=1e-6)
    assert final["reward_model/normalized_var"] == pytest.approx(1, abs=1e-6)
    assert len(metrics) == 13 + 1, "one epoch of 100 comparisons, eight a step, the rest in a smaller one"
    rates = [line["optim/lr"] for line in metrics[:-1]]
    assert rates == pytest.approx([3e-3 * (1 - step / 13) for step in range(13)]), "to zero, one step after the last"
    assert 0 <= final["eval/accuracy"] <= 1

    path = task / "one" / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("anna was happy . he was sad .")["input_ids"]
    ours, bias = load_reward_model(path)
    assert bias == 0, "GPT-2's last LayerNorm holds it"
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    expected = ours.score([ids], batch_size=1).item()
    assert plain(input_ids=torch.tensor([ids])).logits.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.distributed
def test_two_ranks_of_zero3_train_the_reward_model_of_one_process(task):
    """Nine comparisons per step divide neither by two ranks nor by the microbatch: none is dropped or counted twice."""
    settings = ("normalization.num_samples=0", "batch_size=9", "data.max_comparisons=30", "microbatch_size=2")
    one = train(task, "single", *settings)
    two = train(task, "pair", *settings, ranks=2)
    assert [m["step"] for m in one] == [m["step"] for m in two]
    for mine, theirs in zip(one, two, strict=True):
        for name in ("reward_model/loss", "reward_model/accuracy", "reward_model/margin", "eval/loss"):
            if name in mine:
                assert theirs[name] == pytest.approx(mine[name], abs=2e-4), (mine["step"], name)


@pytest.mark.distributed
def test_normalization_on_two_ranks_is_over_all_samples(task):
    final = train(task, "normalized", "normalization.num_samples=33", "data.max_comparisons=8", ranks=2)[-1]
    assert final["reward_model/normalized_mean"] == pytest.approx(0, abs=1e-6)
    assert final["reward_model/normalized_var"] == pytest.approx(1, abs=1e-6)


@pytest.mark.engine
@pytest.mark.distributed
def test_a_run_on_two_zero3_ranks_is_scored_as_on_one_and_leaves_a_critic_to_start_from(task):
    """The reward model is whole on rank 0, while other models under ZeRO-3 are sharded."""
    train(task, "scorer", "normalization.num_samples=0", "data.max_comparisons=32")
    settings = (
        "experiment=lm_human_preferences", f"model.path={task}/model", f"data.path={task}/data/train.jsonl",
        "data.heldout_path=null", f"reward.settings.model.path={task}/scorer/model", f"run_root={task}",
        "rollout.prompts_per_step=16", "rollout.max_model_len=96", "updates=8", "logger.print_rollouts=0",
    )  # fmt: skip
    train_policy(*settings, "run_name=policy_one")
    train_policy(*settings, "run_name=policy_two", ranks=2)
    one, two = metrics_of(task / "policy_one"), metrics_of(task / "policy_two")
    assert [line["step"] for line in two] == [4, 8]
    for mine, theirs in zip(one, two, strict=True):
        for name in ("objective/score", "objective/kl", "objective/kl_coef", "optim/lr", "ppo/value/mean"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-2, abs=1e-3), (mine["step"], name)
    assert len({line["objective/score"] for line in two}) == 2

    critic = ("model.critic=separate", f"model.critic_path={task}/policy_two/critic")
    train_policy(*settings, *critic, "run_name=policy_three", "updates=4")
    first = metrics_of(task / "policy_three")[0]
    assert two[0]["ppo/value/var"] == 0
    assert first["ppo/value/var"] > 0, "the values start from those of the other run"


def test_mistakes_in_settings_are_one_line(tmp_path):
    script = ROOT / "scripts/train_reward_model.py"
    result = run_ranks((), script, f"run_root={tmp_path}", "data.path=missing.jsonl", "batch_size=0", timeout_s=120)
    assert result.returncode == 2
    assert "data.path=missing.jsonl does not exist" in result.stderr
    assert "batch_size=0 must be at least 1" in result.stderr
    assert "Traceback" not in result.stderr
