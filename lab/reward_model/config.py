"""Settings of `lockstep train-reward-model`. Values are in configs/train_reward_model.yaml."""

from __future__ import annotations

import operator
import os.path
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.declared import value_problems
from lockstep.trainer.checks.names import run_name_problems
from lockstep.trainer.checks.tracking import package_problems
from lockstep.trainer.config.groups.optimizer_settings import SMALL_MODEL_LR, OptimizerConfig
from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.data.datasets import path_problem
from lockstep.trainer.setting import setting


@dataclass
class RewardModelSettings:
    path: str = setting(
        "models/sentiment_lm", "pretrained model, or a sequence classifier to continue from", is_path=True
    )
    new_head: bool = setting(True, "start from a new head, N(0, 1/sqrt(d + 1)); false: the checkpoint's own")
    dtype: str = setting("float32", "dtype of the computation", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    trust_remote_code: bool = setting(False, "run code that ships with the model")


@dataclass
class ComparisonData:
    path: str = setting(
        "data/preferences/sentiment/comparisons.jsonl", "comparisons: a file, or a hub data set id", is_path=True
    )
    split: str = setting("train", "split of a hub data set")
    heldout_path: str | None = setting(None, "comparisons for evaluation; null: none", is_path=True)
    heldout_split: str = setting("test", "split of a hub data set for evaluation")
    max_comparisons: int | None = setting(None, "number of comparisons used, after shuffling; null: all", low=1)
    query_tokens: int | None = setting(None, "longer queries keep their beginning [tokens]; null: no limit", low=1)
    response_tokens: int | None = setting(None, "longer responses keep their beginning [tokens]; null: no limit", low=1)
    max_tokens: int | None = setting(2048, "longer sequences keep their end [tokens]; null: no limit", low=1)


@dataclass
class NormalizationConfig:
    """Normalization of rewards: mean 0 and variance 1 on samples of the pretrained model."""

    num_samples: int = setting(256, "number of responses to normalize on, over all ranks; 0: no normalization", low=0)
    queries_path: str | None = setting(None, "rows with `prompt`, and `response` if already sampled; null: the "
                                             "prompts of data.path", is_path=True)  # fmt: skip
    model_path: str | None = setting(None, "model to sample from; null: model.path", is_path=True)
    response_tokens: int = setting(24, "length of a sampled response [tokens]", low=1)
    temperature: float = setting(0.7, "sampling temperature", above=0)
    stop: str | None = setting(None, "token that ends a response for the score; null: none")
    stop_after: int = setting(0, "first index at which the stop counts [tokens]", low=0)


@dataclass
class RewardModelConfig:
    seed: int = setting(0, "seed of data order, head and sampling; ranks sample with seed + rank x 100003", low=0)
    run_root: str = setting("runs", "directory that holds run directories")
    run_name: str | None = setting(None, "name of the run directory; null: reward_model and the time")
    epochs: int = setting(1, "epochs over the comparisons; more than one overfits the labels", low=1)
    batch_size: int = setting(32, "comparisons per optimizer step, over all ranks", low=1)
    microbatch_size: int = setting(8, "maximal number of comparisons per forward pass on one rank", low=1)
    eval_every: int = setting(0, "optimizer steps between evaluations on data.heldout_path; 0: only at the end", low=0)
    model: RewardModelSettings = field(default_factory=RewardModelSettings)
    data: ComparisonData = field(default_factory=ComparisonData)
    normalization: NormalizationConfig = field(default_factory=NormalizationConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=SMALL_MODEL_LR))
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def check(config: RewardModelConfig) -> None:
    """Raise `ConfigError` with one line per problem, or return."""
    problems = list(_problems(config))
    if problems:
        raise ConfigError("\n".join(problems))


UNUSED = (
    *("optimizer.critic_lr", "optimizer.spike", "optimizer.spike_factor", "optimizer.spike_window"),
    *("optimizer.max_skipped_updates", "logger.wandb_media_every", "logger.wandb_rollouts", "logger.print_rollouts"),
    *("logger.print_rollouts_every", "logger.peak_tflops", "logger.save_rollouts"),
)
"""Settings of shared groups that reward model training ignores."""


def _problems(config: RewardModelConfig) -> Iterator[str]:
    yield from value_problems(config)
    yield from package_problems(config.logger)
    for name in UNUSED:
        value = operator.attrgetter(name)(config)
        if value != operator.attrgetter(name)(RewardModelConfig()):
            yield f"{name}={value} has no effect on reward model training; leave it out"
    if config.optimizer.lr is None:
        yield "optimizer.lr=null is chosen by size for policies only; set optimizer.lr=1e-5"
    yield from run_name_problems(config.run_name)
    if config.normalization.num_samples == 1:
        yield (
            f"normalization.num_samples={config.normalization.num_samples} has no variance; "
            "set normalization.num_samples=256, or 0 for no normalization"
        )
    paths = {
        "data.path": config.data.path,
        "data.heldout_path": config.data.heldout_path,
        "normalization.queries_path": config.normalization.queries_path,
    }
    for name, path in paths.items():
        if path is not None and (problem := path_problem(path)):
            yield (
                f"{name}={path} {problem}; set {name}=<file or hub id>, or make the synthetic task with `python "
                "lockstep make-preference-data`"
            )
    model = config.model.path
    if model.startswith(("/", ".", "~", "models/")) and not (Path(os.path.expanduser(model)) / "config.json").is_file():
        yield f"model.path={model} has no config.json; set model.path=<directory or hub id>"
