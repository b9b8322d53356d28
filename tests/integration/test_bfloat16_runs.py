"""Runs of the demo in bfloat16, as GPUs compute: on one process, under DDP and under ZeRO-3 they learn and agree."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.rollout.weights.canary import canary_ids
from tests.integration.test_run import SMALL, demo, metrics, train  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(900)]

UPDATES = 12
MEAN_DIFFERENCE = 0.01
"""Measured: 0.0004 to 0.0032 nats per token, falling as the policy becomes certain."""
ROUNDINGS = 3.0
"""Largest difference of the canary, in changes of its logprobs by bfloat16. Measured: 0.3 to 1.8, by processor."""


@pytest.mark.parametrize(
    ("launcher_file", "ranks"),
    [
        pytest.param("zero3", 2, id="zero3"),
        pytest.param("ddp", 2, id="ddp", marks=pytest.mark.slow),
        pytest.param("zero2", 2, id="zero2", marks=pytest.mark.slow),
        pytest.param("zero3", None, id="one process", marks=pytest.mark.slow),
    ],
)
def test_the_demo_learns_in_bfloat16(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
    launcher_file: str,
    ranks: int | None,
) -> None:
    train(
        *demo, *SMALL, "model.dtype=bfloat16", f"updates={UPDATES}", f"run_root={tmp_path}", "run_name=half",
        "checkpoint.every=0", ranks=ranks, launcher_file=launcher_file, timeout_s=800,
    )  # fmt: skip
    lines = [line for line in metrics(tmp_path / "half") if "reward/mean" in line]
    rewards = [line["reward/mean"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.15, rewards
    assert_agreement(lines, tmp_path / "half/model")


@pytest.mark.v2
def test_two_ranks_agree_with_the_engine(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    """ZeRO-3 and bfloat16, and in `make test-v2` the V2 runner: the configuration of GPUs."""
    train(
        *demo, "model.dtype=bfloat16", "updates=2", f"run_root={tmp_path}", "run_name=half", "checkpoint.every=0",
        "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "logger.print_rollouts_every=0",
        "sync.distributions_every=1",
        ranks=2, launcher_file="zero3", timeout_s=800,
    )  # fmt: skip
    is_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    assert ("Using V2 Model Runner" in (tmp_path / "half/logs/engine.log").read_text()) == is_v2
    lines = [line for line in metrics(tmp_path / "half") if "reward/mean" in line]
    assert_agreement(lines, tmp_path / "half/model")
    for line in lines:
        assert line["sync/distribution_age"] == 0
        assert 0 < line["sync/distribution_kl"] < line["sync/distribution_kl_limit"] / 4
        assert 0 < line["sync/distribution_move"] < line["sync/distribution_move_limit"] / 4


def assert_agreement(lines: list[dict[str, float]], model: Path) -> None:
    """Compare the tokens and log-probabilities of engine and trainer in each update. model: trained by the run."""
    assert lines
    largest = ROUNDINGS * rounding(model)
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout_correction/logp_diff_abs_mean"] < MEAN_DIFFERENCE
        assert line["sync/canary_abs_diff"] < largest


@torch.no_grad()
def rounding(path: Path) -> float:
    """Return the largest change of the canary's logprobs if transformers computes in bfloat16 [nats]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([canary_ids(model.config.vocab_size)])
    exact, rounded = (
        one(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])
        for one in (model, copy.deepcopy(model).bfloat16())
    )
    return float((exact - rounded).abs().max())
