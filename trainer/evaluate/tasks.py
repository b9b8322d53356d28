"""Tasks of lm-eval (lm-evaluation-harness): loaded and checked before an engine starts, then evaluated through it.

lm-eval has the tasks, prompts, few-shot examples, filters and metrics; `trainer/evaluate/engine_model.py` is the model
that it asks. Imported only if `eval.lm_eval.tasks` names tasks, because lm-eval is an extra.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.rollout.chat.chat import generation_stops, load_tokenizer
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.errors import ConfigError, DataError, LockstepError
from lockstep.rollout.safe_text import error_text
from lockstep.trainer.config.groups.evaluation_settings import EvalConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.evaluate.engine_model import EngineModel, Generation
from lockstep.trainer.evaluate.task_results import TaskMetric, task_metrics, tasks_to_json

SUPPORTED = ("generate_until", "multiple_choice", "loglikelihood", "loglikelihood_rolling")
NEAREST = 5
"""Number of names offered for an unknown task."""
BOOTSTRAPS = 1000
"""Resamples of a corpus metric for its standard error; other metrics need none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """Results of one model on all tasks."""

    metrics: tuple[TaskMetric, ...]
    samples: Mapping[str, list[dict[str, Any]]]
    """lm-eval's record of each document by task: prompt, answers, extracted answers, metrics."""
    num_requests: int
    num_truncated: int
    """Requests that lost the beginning of their context."""

    def facts(self) -> dict[str, float]:
        """Return `eval/task_*`."""
        return {"eval/task_requests": float(self.num_requests), "eval/task_truncated": float(self.num_truncated)}

    def to_json(self) -> dict[str, Any]:
        """Return the entries of a result file."""
        return {"tasks": tasks_to_json(self.metrics), "task_facts": self.facts()}

    def write_samples(self, path: Path) -> None:
        """Write lm-eval's record of each document as a line of JSON."""
        with path.open("w", encoding="utf-8") as file:
            for task, samples in self.samples.items():
                file.writelines(json.dumps({"task": task, **sample}, default=str) + "\n" for sample in samples)


class Tasks:
    """The tasks of `eval.lm_eval.tasks`."""

    def __init__(self, evaluation: EvalConfig, model: ModelConfig, rollout: RolloutConfig, *, seed: int) -> None:
        """Load tasks and their data.

        Raises:
            ConfigError: an unknown task, or one that this configuration cannot evaluate.
            DataError: the data of a task cannot be loaded.
        """
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

        settings = evaluation.lm_eval
        include = None if settings.include_path is None else str(Path(os.path.expanduser(settings.include_path)))
        manager = TaskManager(include_path=include)
        names: list[str] = []
        for name in settings.tasks:
            matches = [name] if name.endswith((".yaml", ".yml")) else manager.match_tasks([name])
            if not matches:
                near = difflib.get_close_matches(name, manager.all_tasks, n=NEAREST, cutoff=0.5)
                hint = f"the nearest are {', '.join(near)}" if near else "`lm-eval ls tasks` lists all"
                raise ConfigError(
                    f"eval.lm_eval.tasks: lm-eval has no task {name}; {hint}; set "
                    "eval.lm_eval.include_path=<directory> for tasks of your own"
                )
            names += matches
        try:
            self._loaded = manager.load(list(dict.fromkeys(names)))
        except Exception as error:  # task files and data loaders may raise anything
            raise DataError(
                f"eval.lm_eval.tasks={','.join(settings.tasks)}: a task or its data cannot be loaded: "
                f"{type(error).__name__}: {error_text(error)}; without the hub, point dataset_path of the task at "
                "local files (docs/evaluation.md)"
            ) from error
        self._evaluation, self._model, self._rollout, self._seed = evaluation, model, rollout, seed
        for name, task in self._loaded["tasks"].items():
            self._prepare(name, task)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded["tasks"])

    def _prepare(self, name: str, task: Any) -> None:
        """Apply the settings to a task. Raises `ConfigError` for one that cannot be evaluated."""
        settings = self._evaluation.lm_eval
        if task.OUTPUT_TYPE not in SUPPORTED or getattr(task, "MULTIMODAL", False):
            kind = "images or audio" if getattr(task, "MULTIMODAL", False) else task.OUTPUT_TYPE
            raise ConfigError(f"eval.lm_eval.tasks: {name} needs {kind}, expected one of {', '.join(SUPPORTED)}")
        if getattr(task, "UNSAFE_CODE", False) and not settings.confirm_run_unsafe_code:
            raise ConfigError(
                f"eval.lm_eval.tasks: {name} runs programs of the model without isolation; set "
                "eval.lm_eval.confirm_run_unsafe_code=true on a machine where it may"
            )
        if settings.num_fewshot is not None and task.get_config("num_fewshot") != 0:  # 0 of a task is final in lm-eval
            task.set_config(key="num_fewshot", value=settings.num_fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=self._seed)
        if task.OUTPUT_TYPE != "generate_until":
            return
        if settings.gen_kwargs:
            task.set_config(key="generation_kwargs", value=dict(settings.gen_kwargs), update=True)
        try:
            generation = Generation.of(task.config.generation_kwargs or {})
        except ConfigError as error:
            raise ConfigError(f"eval.lm_eval.tasks: {name} has {error}") from error
        room = self._rollout.max_model_len
        if generation.max_tokens >= room:
            raise ConfigError(
                f"eval.lm_eval.tasks: {name} samples up to {generation.max_tokens} tokens, and "
                f"rollout.max_model_len={room} leaves no room for its prompts; set "
                f"rollout.max_model_len={2 * generation.max_tokens}, or 'eval.lm_eval.gen_kwargs={{max_gen_toks: "
                f"{room // 2}}}'"
            )

    def check_tokenizer(self, path: str) -> None:
        """Raise `ConfigError` if a chat template is to be applied, and the tokenizer of this model has none."""
        if self._evaluation.lm_eval.apply_chat_template and self._tokenizer(path).chat_template is None:
            raise ConfigError(
                f"eval.lm_eval.apply_chat_template=true, and the tokenizer of {path} has no chat template; set "
                "eval.lm_eval.apply_chat_template=false, or model.chat_template=<file.jinja>"
            )

    def _tokenizer(self, path: str) -> Any:
        model = self._model
        return load_tokenizer(path, trust_remote_code=model.trust_remote_code, template=model.chat_template)

    def evaluate(
        self,
        engine: EnginePool,
        *,
        model_path: str,
        on_stage: Callable[[str, int], None],
        on_answer: Callable[[int], None],
    ) -> TaskRun:
        """Evaluate the engine's model. on_stage, on_answer: see `EngineModel`. Raises `DataError`, `EngineError`."""
        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # a bootstrap would fork the process of an engine
        from lm_eval.evaluator import evaluate  # type: ignore[import-not-found]

        settings, tokenizer = self._evaluation.lm_eval, self._tokenizer(model_path)
        stops = [tokenizer.eos_token_id, *generation_stops(model_path)]
        model = EngineModel(
            engine=engine,
            tokenizer=tokenizer,
            stop_token_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
            seed=self._seed,
            max_concurrent=self._rollout.max_num_seqs * len(engine.members),
            on_stage=on_stage,
            on_answer=on_answer,
        )
        on_stage("prompts", 0)
        try:
            results = evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=self._evaluation.prompts,
                bootstrap_iters=BOOTSTRAPS,
                system_instruction=settings.system_instruction,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.fewshot_as_multiturn,
                confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            )
        except LockstepError:
            raise
        except Exception as error:  # prompts and metrics are code of a task, which may raise anything
            raise DataError(
                f"lm-eval failed on {', '.join(self.names)}: {type(error).__name__}: {error_text(error)}"
            ) from error
        assert results is not None, "only other ranks of lm-eval have none"
        report: dict[str, Any] = dict(results)
        return TaskRun(
            metrics=task_metrics(report),
            samples=report["samples"],
            num_requests=model.num_requests,
            num_truncated=model.num_truncated,
        )
