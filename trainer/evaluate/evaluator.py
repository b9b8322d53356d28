"""Evaluation on held-out rows, with its own sampling settings.

Runs between updates of a training run, or standalone (`lockstep evaluate`). A row of a data set gets the same seeds
in every evaluation with the same `seed`, so that sampling noise is common to compared models. Data sets of different
names have different seeds, so that they are independent samples.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.rewards.composition import Tally
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import BASE, POLICY, Sampling
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.rollout.rollout_lines import write_rollouts
from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.trainer.build import images_of_data, make_chat, make_rewards, make_sampler, make_sampling
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.collect.episodes import Episodes
from lockstep.trainer.config.groups.evaluation_settings import EvalConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import DataSet, heldout_data
from lockstep.trainer.engines.start import open_engine
from lockstep.trainer.evaluate.evaluation import Evaluation
from lockstep.trainer.evaluate.results import (
    Comparison,
    SetResult,
    compare,
    comparison_lines,
    prompt_results,
    read_results,
    result_lines,
    rollout_facts,
    write_results,
)
from lockstep.trainer.evaluate.task_results import TaskMetric, compare_tasks, read_tasks, task_lines
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.settings_file import describe_command

if TYPE_CHECKING:  # imports lm-eval, an extra
    from lockstep.trainer.evaluate.tasks import TaskRun, Tasks

EVALUATION_STEP = 2**31 - 1
"""Step in the sampling seeds of data.heldout_path, constant so that a row gets the same seeds in every evaluation."""
COMPARED = (
    *("seed", "environment.name", "environment.max_turns", "reward.functions", "eval.samples_per_prompt"),
    *("eval.temperature", "eval.top_p", "eval.top_k", "eval.min_p", "eval.pass_threshold", "eval.pass_reward"),
)
"""Settings that must be equal for a comparison: sampling, and the definition of a pass."""
TASK_SETTINGS = ("num_fewshot", "apply_chat_template", "fewshot_as_multiturn", "system_instruction", "gen_kwargs")
"""Settings of `eval.lm_eval` that must be equal for a comparison."""


class Evaluator:
    """Evaluator of the weights that the engine currently holds."""

    def __init__(
        self,
        settings: EvalConfig,
        data: Mapping[str, DataSet],
        *,
        episodes: Episodes,
        sampling: Sampling,
        model: str = POLICY,
    ) -> None:
        """data: `heldout_data`, on all ranks. sampling: that of training. model: adapter of the engine
        (`Sampling.model`)."""
        self._settings = settings
        self._episodes = episodes
        self._sampling = replace(
            sampling,
            max_tokens=settings.max_tokens_per_turn or sampling.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            is_trained=False,
            model=model,
        )
        self.data = data

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts of an evaluation, over all data sets."""
        return sum(map(self._num_prompts, self.data.values())) * self._settings.samples_per_prompt

    def evaluate(
        self, on_rollout: OnRollout = lambda rollout: None, on_stage: Callable[[str], None] = lambda name: None
    ) -> Evaluation:
        """Evaluate on all data sets; a collective, whose results are on rank 0. on_rollout: as in `Episodes.groups`.
        on_stage: called when the sampling or the scoring of one begins."""
        settings = self._settings
        groups = {}
        for name, data in self.data.items():
            of = f" of {name}" if name else ""
            groups[name] = self._episodes.groups(
                range(self._num_prompts(data)),
                lambda places, data=data: [data[place] for place in places],
                samples_per_prompt=settings.samples_per_prompt,
                sampling=self._sampling,
                step=evaluation_step(name),
                stage=lambda stage, of=of: nullcontext(on_stage(f"{stage}{of}")),
                on_rollout=on_rollout,
                tally=Tally(),
                is_shaped=False,
            )
        return self._episodes.drivers.together(lambda: self._evaluation(groups))

    def _evaluation(self, groups: Mapping[str, Sequence[Sequence[Rollout]]]) -> Evaluation:
        """Return the results of groups by data set; those without groups, as on other ranks than 0, have none."""
        results, all_rollouts = [], []
        for name in filter(groups.get, groups):
            rollouts = [rollout for group in groups[name] for rollout in group]
            prompts = prompt_results(
                rollouts,
                label_column=self._settings.by,
                pass_reward=self._settings.pass_reward,
                pass_threshold=self._settings.pass_threshold,
            )
            results.append(SetResult(name=name, prompts=prompts, facts=rollout_facts(rollouts)))
            all_rollouts += rollouts
        return Evaluation(results=tuple(results), rollouts=tuple(all_rollouts))

    def _num_prompts(self, data: DataSet) -> int:
        limit = self._settings.prompts
        return len(data) if limit is None else min(limit, len(data))


def evaluation_step(name: str) -> int:
    """Return the step in the sampling seeds of a data set: a function of its name, beyond all steps of training."""
    if not name:
        return EVALUATION_STEP
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return EVALUATION_STEP + 1 + int.from_bytes(digest, "big")


def comparable_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal for a comparison: those of sampling, and those of tasks of lm-eval."""
    settings = config.eval
    if not settings.lm_eval.tasks:
        names = COMPARED
    else:
        names = (
            *(COMPARED if config.heldout_sets() else ("seed",)),
            *(f"eval.lm_eval.{name}" for name in TASK_SETTINGS),
        )
    values = {name: attrgetter(name)(config) for name in names}
    if config.heldout_sets():
        values["environment.max_turns"] = config.max_turns
        values["eval.max_tokens_per_turn"] = settings.max_tokens_per_turn or config.rollout.max_tokens_per_turn
    return values


def run(config: Config) -> None:
    """Evaluate `model.path` in this process, and compare it with `eval.compare_to`, or with its adapters."""
    settings = config.eval
    other = settings.compare_to
    console = RunConsole(enabled=True, total_updates=0)
    if config.heldout_sets():
        console.say(describe_command(config, trains=False))
    process = _Process(config, console)
    if config.model.adapters:
        process.compare_adapters()
        return
    tasks = process.load_tasks() if settings.lm_eval.tasks else None
    sampled_with = comparable_settings(config)
    before: Sequence[SetResult] | None = None
    tasks_before: Sequence[TaskMetric] = ()
    if other is not None and other.endswith(".json"):
        before = read_results(Path(os.path.expanduser(other)), sampled_with)
        tasks_before = read_tasks(Path(os.path.expanduser(other))) if tasks is not None else ()
    elif other is not None:
        model = replace(config.model, path=other)
        baseline = _Process(replace(config, model=model), console).evaluate(tasks)
        before, tasks_before = baseline.results, () if baseline.tasks is None else baseline.tasks.metrics
    evaluation = process.evaluate(tasks)
    for rollout in evaluation.rollouts[: config.logger.print_rollouts]:
        console.sample(rollout)
    comparisons: list[Comparison] = []
    others: dict[str, Any] = {"chat_template": config.model.chat_template}
    if evaluation.results:
        for line in result_lines(evaluation.results):
            console.say(line)
        comparisons += [] if before is None else compare(before, evaluation.results)
    if evaluation.tasks is not None:
        _show_tasks(evaluation.tasks, console)
        comparisons += compare_tasks(tasks_before, evaluation.tasks.metrics) if tasks_before else []
        others |= evaluation.tasks.to_json()
    for line in comparison_lines(comparisons, str(other), config.model.path):
        console.say(line)
    if settings.output is not None:
        _write(
            evaluation, Path(os.path.expanduser(settings.output)), console,
            model=config.model.path, settings=sampled_with, comparisons=comparisons, compared_to=other, others=others,
        )  # fmt: skip
    differences = {name: value for one in comparisons for name, value in one.metrics().items()}
    print(json.dumps(evaluation.metrics | differences))


def _write(evaluation: Evaluation, path: Path, console: RunConsole, **written: Any) -> None:
    """Write results, rollouts and lm-eval's documents. written: arguments of `write_results`."""
    write_results(path, evaluation.results, **written)
    write_rollouts(path.with_suffix(".jsonl"), evaluation.rollouts)
    console.say(f"results        {path}\nrollouts       {path.with_suffix('.jsonl')}")
    if evaluation.tasks is not None:
        evaluation.tasks.write_samples(path.with_suffix(".tasks.jsonl"))
        console.say(f"documents      {path.with_suffix('.tasks.jsonl')}")


@dataclass(frozen=True, slots=True)
class _Process:
    """Evaluation of `model.path` in this process."""

    config: Config
    console: RunConsole

    def compare_adapters(self) -> None:
        """Evaluate the base and all adapters in one engine, and compare each adapter with the base.

        Raises `ConfigError` with settings for another comparison, or for tasks of lm-eval.
        """
        config, console = self.config, self.console
        settings, path = config.eval, config.model.path
        if settings.compare_to is not None or settings.lm_eval.tasks:
            raise ConfigError(
                "model.adapters are compared with the model without adapters, on rows of data sets; set "
                "eval.compare_to=null 'eval.lm_eval.tasks=[]', or evaluate merged models one by one"
            )
        sampled_with, metrics = comparable_settings(config), {}
        chat = self._chat()
        images = images_of_data(config.model, chat)
        data = heldout_data(config.heldout_sets(), config.environment, config.reward, **images, say=console.say)
        console.say(f"starting the engine with {path} and {len(config.model.adapters)} adapters ...")
        with open_engine(config, chat.images) as engine:
            base: Sequence[SetResult] = ()
            for name in (BASE, *config.model.adapters):
                evaluation = self._evaluate_sets(data, engine, chat, model=name)
                comparisons = compare(base, evaluation.results) if base else []
                base = base or evaluation.results
                console.say(f"{name}:")
                for line in (*result_lines(evaluation.results), *comparison_lines(comparisons, BASE, name)):
                    console.say(line)
                metrics |= {f"{name}/{key}": value for key, value in evaluation.metrics.items()}
                metrics |= {f"{name}/{key}": value for one in comparisons for key, value in one.metrics().items()}
                if settings.output is not None:
                    output = Path(os.path.expanduser(settings.output))
                    output = output.with_stem(f"{output.stem}.{name}")
                    label = path if name == BASE else f"{path} with {config.model.adapters[name]}"
                    others = {"comparisons": comparisons, "compared_to": BASE if comparisons else None}
                    _write(evaluation, output, console, model=label, settings=sampled_with, **others)
        print(json.dumps(metrics))

    def evaluate(self, tasks: Tasks | None) -> Evaluation:
        config, console = self.config, self.console
        chat = self._chat()
        images = images_of_data(config.model, chat)
        data = heldout_data(config.heldout_sets(), config.environment, config.reward, **images, say=console.say)
        path = config.model.path
        console.say(f"starting the engine with {path} ...")
        with open_engine(config, chat.images) as engine:
            evaluation = self._evaluate_sets(data, engine, chat) if data else Evaluation()
            if tasks is None:
                return evaluation
            with console.progress("lm-eval", 0) as lines:
                run = tasks.evaluate(engine, model_path=path, on_stage=lines.requests, on_answer=lines.answer)
                return replace(evaluation, tasks=run)

    def _chat(self) -> Chat:
        media = Path(os.path.expanduser(output)).parent / "media" if (output := self.config.eval.output) else None
        return make_chat(self.config.model, history=self.config.environment.history, media=media)

    def _evaluate_sets(
        self, data: Mapping[str, DataSet], engine: EnginePool, chat: Chat, *, model: str = POLICY
    ) -> Evaluation:
        config = self.config
        rewards = make_rewards(config)
        try:
            rewards.load()
            sampler = make_sampler(config, engine=engine, chat=chat)
            sampling = make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine)
            episodes = Episodes(drivers=Drivers(engine.loop), sampler=sampler, rewards=rewards)
            evaluator = Evaluator(config.eval, data, episodes=episodes, sampling=sampling, model=model)
            with self.console.progress("evaluation", evaluator.num_rollouts) as lines:
                return evaluator.evaluate(lines.rollout, lines.stage)
        finally:
            rewards.close()

    def load_tasks(self) -> Tasks:
        """Load the tasks of lm-eval, and check them with the tokenizer of every model that will be evaluated."""
        config = self.config
        self.console.say(f"loading {', '.join(config.eval.lm_eval.tasks)} of lm-eval ...")
        from lockstep.trainer.evaluate.tasks import Tasks  # here: lm-eval is an extra, and takes seconds to import

        tasks = Tasks(config.eval, config.model, config.rollout, seed=config.seed)
        other = config.eval.compare_to
        for path in (config.model.path, *(() if other is None or other.endswith(".json") else (other,))):
            tasks.check_tokenizer(path)
        return tasks


def _show_tasks(run: TaskRun, console: RunConsole) -> None:
    for line in task_lines(run.metrics):
        console.say(line)
    if run.num_truncated:
        console.warn(
            f"{run.num_truncated} of {run.num_requests} requests lost the beginning of their context, which did not "
            "fit into rollout.max_model_len; raise it for results that can be compared with published ones"
        )
