"""Evaluation: rollouts of held-out rows, with their rewards. In a run between updates, or of a model by itself."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rewards.composition import RewardSet
from rollout.engine import Sampling
from rollout.errors import ConfigError
from rollout.loop import BackgroundLoop
from rollout.records import Rollout, RolloutStatus
from rollout.sampler import Sampler
from trainer.config import Config
from trainer.console import RunConsole
from trainer.data import Row, load_rows
from trainer.parts import make_chat, make_rewards, make_sampler, make_sampling, start_engine

EVALUATION_STEP = 2**31 - 1
"""Stands for the training step in sampling seeds: the same prompts get the same samples in every evaluation."""


def heldout_rows(config: Config) -> list[Row]:
    """The first `eval.prompts` rows of the held-out data."""
    if config.data.heldout_path is None:
        raise ConfigError("data.heldout_path is not set; set data.heldout_path=<file or hub id>")
    rows = load_rows(config.data.heldout_path, config.data.heldout_split)
    return [rows[i] for i in range(min(config.eval.prompts, len(rows)))]


def sample_and_score(
    rows: Sequence[Row],
    *,
    sampler: Sampler,
    rewards: RewardSet,
    loop: BackgroundLoop,
    sampling: Sampling,
    samples_per_prompt: int,
) -> list[Rollout]:
    rollouts = loop.run(
        sampler.collect(rows, samples_per_prompt=samples_per_prompt, sampling=sampling, step=EVALUATION_STEP)
    )
    return loop.run(rewards.score(rollouts))


def summary(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`eval/*`: mean reward over prompts with its standard error, and how episodes ended. Failed rollouts score 0."""
    by_prompt: dict[int, list[float]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.group_id, []).append(rollout.reward if rollout.is_trainable else 0.0)
    means = [sum(rewards) / len(rewards) for rewards in by_prompt.values()]
    mean = sum(means) / len(means)
    variance = sum((x - mean) ** 2 for x in means) / max(len(means) - 1, 1)
    return {
        "eval/reward_mean": mean,
        "eval/reward_stderr": math.sqrt(variance / len(means)),
        "eval/prompts": float(len(means)),
        "eval/rollouts": float(len(rollouts)),
        "eval/sampled_tokens_mean": sum(rollout.num_sampled for rollout in rollouts) / len(rollouts),
        **{
            f"eval/{status}_fraction": sum(rollout.status is status for rollout in rollouts) / len(rollouts)
            for status in RolloutStatus
        },
    }


def run(config: Config) -> None:
    """Evaluate `model.path` by itself, on this process."""
    rows = heldout_rows(config)
    console = RunConsole(enabled=True, total_updates=0)
    with tempfile.TemporaryDirectory(prefix="lockstep-evaluate-") as logs, BackgroundLoop() as loop:
        console.say(f"starting the engine with {config.model.path} ...")
        engine = start_engine(config, loop=loop, log_path=Path(logs) / "engine.log")
        try:
            chat = make_chat(config)
            rollouts = sample_and_score(
                rows,
                sampler=make_sampler(config, engine=engine, chat=chat),
                rewards=make_rewards(config),
                loop=loop,
                sampling=make_sampling(config, chat, temperature=config.eval.temperature),
                samples_per_prompt=config.eval.samples_per_prompt,
            )
        finally:
            loop.run(engine.close())
    for rollout in rollouts[: config.logger.print_rollouts]:
        console.sample(rollout)
    metrics = summary(rollouts)
    for name, value in metrics.items():
        console.say(f"{name:32} {value:.4g}")
    print(json.dumps(metrics))
