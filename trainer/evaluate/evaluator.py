"""Evaluation on held-out rows, with its own sampling settings.

Runs between updates of a training run, or standalone (`scripts/evaluate.py`). A row of a data set gets the same seeds
in every evaluation with the same `seed`, so that sampling noise is common to compared models. Data sets of different
names have different seeds, so that they are independent samples.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rewards.composition import RewardSet
from rollout.chat.chat import Chat
from rollout.records import Rollout
from rollout.sampler.sampler import OnRollout, Sampler
from rollout.saved_rollouts import write_rollouts
from rollout.system.background_loop import BackgroundLoop
from trainer.build import make_chat, make_rewards, make_sampler, make_sampling
from trainer.config.schema import Config
from trainer.data.prompts import DataSet, heldout_data
from trainer.engines.start import start_engine
from trainer.evaluate.results import (
    PairedComparison,
    SetResult,
    compare,
    comparison_lines,
    prompt_results,
    read_results,
    result_lines,
    rollout_facts,
    write_results,
)
from trainer.observe.console import RunConsole

EVALUATION_STEP = 2**31 - 1
"""Step in the sampling seeds of data.heldout_path, constant so that a row gets the same seeds in every evaluation."""
COMPARED = (
    *("seed", "environment.name", "environment.max_turns", "reward.functions", "eval.samples_per_prompt"),
    *("eval.temperature", "eval.top_p", "eval.top_k", "eval.min_p", "eval.pass_threshold", "eval.pass_reward"),
)
"""Settings that must be equal for a comparison: sampling, and the definition of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of one model on all held-out data."""

    results: tuple[SetResult, ...]
    rollouts: tuple[Rollout, ...]

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for result in self.results for name, value in result.metrics().items()}


class Evaluator:
    """Evaluator of the weights that the engine currently holds."""

    def __init__(
        self, config: Config, *, sampler: Sampler, rewards: RewardSet, loop: BackgroundLoop, chat: Chat
    ) -> None:
        """Raises `DataError` if held-out data cannot be loaded."""
        self._config = config
        self._sampler = sampler
        self._rewards = rewards
        self._loop = loop
        self._sampling = replace(
            make_sampling(config, chat, temperature=config.eval.temperature),
            max_tokens=config.eval.max_tokens_per_turn or config.rollout.max_tokens_per_turn,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            min_p=config.eval.min_p,
            is_trained=False,
        )
        self.data = heldout_data(config)

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts of an evaluation, over all data sets."""
        return sum(map(self._num_prompts, self.data.values())) * self._config.eval.samples_per_prompt

    def evaluate(
        self, on_rollout: OnRollout = lambda rollout: None, on_stage: Callable[[str], None] = lambda name: None
    ) -> Evaluation:
        """Evaluate on all data sets. on_stage: called when the sampling or the scoring of one begins."""
        settings = self._config.eval
        results, kept = [], []
        for name, data in self.data.items():
            of = f" of {name}" if name else ""
            on_stage(f"rollout{of}")
            sampled = self._sample(data, step=evaluation_step(name), on_rollout=on_rollout)
            on_stage(f"reward{of}")
            rollouts = self._loop.run(self._rewards.score(sampled, in_metrics=False, is_shaped=False))
            prompts = prompt_results(
                rollouts,
                label_column=settings.by,
                pass_reward=settings.pass_reward,
                pass_threshold=settings.pass_threshold,
            )
            results.append(SetResult(name=name, prompts=prompts, facts=rollout_facts(rollouts)))
            kept += rollouts
        return Evaluation(results=tuple(results), rollouts=tuple(kept))

    def _num_prompts(self, data: DataSet) -> int:
        limit = self._config.eval.prompts
        return len(data) if limit is None else min(limit, len(data))

    def _sample(self, data: DataSet, *, step: int, on_rollout: OnRollout) -> list[Rollout]:
        return self._loop.run(
            self._sampler.collect(
                [data[index] for index in range(self._num_prompts(data))],
                samples_per_prompt=self._config.eval.samples_per_prompt,
                sampling=self._sampling,
                step=step,
                on_rollout=on_rollout,
            )
        )


def evaluation_step(name: str) -> int:
    """Return the step in the sampling seeds of a data set: a function of its name, beyond all steps of training."""
    if not name:
        return EVALUATION_STEP
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return EVALUATION_STEP + 1 + int.from_bytes(digest, "big")


def comparable_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal for a comparison."""
    max_tokens = config.eval.max_tokens_per_turn or config.rollout.max_tokens_per_turn
    return {name: attrgetter(name)(config) for name in COMPARED} | {"eval.max_tokens_per_turn": max_tokens}


def run(config: Config) -> None:
    """Evaluate `model.path` in this process, and compare it with `eval.compare_to`."""
    settings = config.eval
    other = settings.compare_to
    console = RunConsole(enabled=True, total_updates=0)
    sampled_with = comparable_settings(config)
    before: Sequence[SetResult] | None = None
    if other is not None and other.endswith(".json"):
        before = read_results(Path(other).expanduser(), sampled_with)
    elif other is not None:
        before = _evaluate_model(replace(config, model=replace(config.model, path=other)), console).results
    evaluation = _evaluate_model(config, console)
    for rollout in evaluation.rollouts[: config.logger.print_rollouts]:
        console.sample(rollout)
    for line in result_lines(evaluation.results):
        console.say(line)
    comparisons: Sequence[PairedComparison] = ()
    if before is not None:
        comparisons = compare(before, evaluation.results)
        for line in comparison_lines(comparisons, str(other), config.model.path):
            console.say(line)
    if settings.output is not None:
        path = Path(settings.output).expanduser()
        write_results(
            path,
            evaluation.results,
            model=config.model.path,
            settings=sampled_with,
            comparisons=comparisons,
            compared_to=other,
        )
        write_rollouts(path.with_suffix(".jsonl"), evaluation.rollouts)
        console.say(f"results        {path}\nrollouts       {path.with_suffix('.jsonl')}")
    print(
        json.dumps(evaluation.metrics | {name: value for item in comparisons for name, value in item.metrics().items()})
    )


def _evaluate_model(config: Config, console: RunConsole) -> Evaluation:
    with tempfile.TemporaryDirectory(prefix="lockstep-evaluate-") as logs, BackgroundLoop() as loop:
        console.say(f"starting the engine with {config.model.path} ...")
        engine = start_engine(config, loop=loop, log_path=Path(logs) / "engine.log")
        rewards = make_rewards(config)
        try:
            rewards.load()
            chat = make_chat(config)
            sampler = make_sampler(config, engine=engine, chat=chat)
            evaluator = Evaluator(config, sampler=sampler, rewards=rewards, loop=loop, chat=chat)
            with console.progress("evaluation", evaluator.num_rollouts) as lines:
                return evaluator.evaluate(lines.rollout, lines.stage)
        finally:
            rewards.close()
            loop.run(engine.close())
