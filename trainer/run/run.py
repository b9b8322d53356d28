"""A whole run: assemble the parts, train, save. `lockstep train` calls `run` on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.rollout.errors import RankLostError, TrainingError
from lockstep.rollout.records import Rollout
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.gc_freeze import gc_frozen
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.checkpoint.run_dir import RunDirectory, open_run
from lockstep.trainer.checkpoint.user_files import UserFiles
from lockstep.trainer.checks.algorithm import algorithm_warnings
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import code_of_files, unisolated_settings
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.observe.alarms import AlarmThresholds, disagreement
from lockstep.trainer.observe.console import PeriodicWork, RunConsole
from lockstep.trainer.observe.metrics_log import begin_run
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.run.assembly import Assembly, Parts, choose
from lockstep.trainer.run.heartbeat import Heartbeat, WallTime
from lockstep.trainer.run.interrupt import TERMINATED, Interrupt
from lockstep.trainer.run.library_logs import ThirdPartyLog
from lockstep.trainer.run.next_steps import all_words, described_task, resume_command
from lockstep.trainer.run.provenance import with_hashes
from lockstep.trainer.run.report import Reporter
from lockstep.trainer.run.state import launcher_of, open_metrics, restore_state, save_model, save_state, state_of
from lockstep.trainer.setting import declarations
from lockstep.trainer.update.schedule import is_due

if TYPE_CHECKING:
    from lockstep.trainer.run.profiling import StepProfiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Functions of the program that called for a run."""

    on_step: Callable[[StepReport], None] = lambda report: None
    """Called on all ranks after each step and its logs."""
    on_rollout: Callable[[Rollout], None] = lambda rollout: None
    """Called on rank 0, with its rewards or before them, as it arrives; with those of its group from other drivers."""
    on_evaluation: Callable[[int, Mapping[str, float]], None] = lambda update, metrics: None
    """Called on rank 0 with the number of the update and the metrics."""
    stops: Callable[[], bool] = lambda: False
    """Asked on all ranks before each step; the run ends in order if one says True."""
    ends_process: bool = True
    """False if the program goes on after the run: signals are then its own again."""


def run(
    config: Config, on_step: Callable[[StepReport], None] | None = None, callbacks: Callbacks | None = None
) -> Path:
    """Train as configured, and return the run directory. on_step: short for `Callbacks(on_step=...)`.

    Raises `LockstepError` on all ranks, and `SystemExit` on all ranks if SIGTERM to one of them stopped the run.
    """
    callbacks = callbacks or Callbacks(on_step=on_step or Callbacks().on_step)
    if not callbacks.ends_process:
        begin_run()
    libraries = ThirdPartyLog()
    with libraries.held_output():  # DeepSpeed and the transports of a cluster print while ranks meet
        distributed = Distributed.start(
            dtype=config.model.dtype,
            max_grad_norm=config.optimizer.max_grad_norm,
            reduce_dtype=config.optimizer.reduce_dtype,
        )
    with distributed:
        console = RunConsole(
            enabled=distributed.is_main,
            total_updates=config.updates,
            rewards=list(config.reward.weight_by_name),
            periodic=periodic_works(config),
        )
        distributed.together(lambda: refuse_unfit_models(config, console.say))
        config = choose(config, distributed, console)
        config = replace(config, algorithm=with_hashes(config.algorithm, distributed))
        checkpoints = Path(config.run_root) / str(config.run_name) / "checkpoints"
        start, messages = None, []
        if config.resume != "never":
            from lockstep.trainer.checkpoint import stored  # a new run does not load it

            start, messages = distributed.together(lambda: stored.find(config.resume, checkpoints))
        directory, lock = open_run(config, distributed)
        # A traceback that a program keeps holds the lock file, which would stay open.
        with lock or nullcontext(), libraries.shown_on_failure(), BackgroundLoop() as loop:
            libraries.open(directory.logs / f"libraries-rank-{distributed.rank}.log", console.warn)
            console.say(f"run directory  {directory.path}\n{described_task(config)}")
            for sentence in messages:
                console.warn(f"checkpoint skipped: {sentence}")
            if config.resume == "auto" and start is None:
                console.say(f"resume=auto: no checkpoint in {directory.checkpoints}, so the run begins at update 0")
            if user_code := code_of_files(config.environment, config.reward, config.algorithm):
                console.say(f"code of your files, run with your rights: {', '.join(user_code)}")
            for name in unisolated_settings(config.environment, config.reward):
                console.warn(f"programs of the model run with your rights ({name}=true)")
            for sentence in algorithm_warnings(config.algorithm, config.correction):
                console.warn(sentence)
            life = Life(config, distributed, directory, console, callbacks)
            torch.manual_seed(config.seed)
            parts = Assembly(config, distributed, directory, loop, console, libraries).parts()
            life.begin(parts, start)
            with gc_frozen():
                life.train(parts)
        if life.is_terminated:
            distributed.barrier()  # at the first status that is not 0, a launcher ends its other ranks
            life.close()
    if life.is_terminated:
        raise SystemExit(TERMINATED)
    return directory.path


def periodic_works(config: Config) -> dict[str, PeriodicWork]:
    """Return what a run does between updates, by name."""
    works = {"checkpoint": PeriodicWork(every=config.checkpoint.every, is_after_line=True)}
    if config.evaluates:
        works["evaluation"] = PeriodicWork(every=config.eval.every)
    if config.has_rollouts:
        every = config.logger.wandb_media_every
        works["media"] = PeriodicWork(every=every, is_at_end=False, is_after_line=True)
    return works


class Life:
    """The life of a run around `Trainer.step`: stops, checkpoints, evaluations, reports."""

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        directory: RunDirectory,
        console: RunConsole,
        callbacks: Callbacks,
    ) -> None:
        self._config = config
        self._callbacks = callbacks
        self._distributed = distributed
        self._directory = directory
        self._console = console
        self._wall_time = WallTime(config.max_hours)
        self._heartbeat = Heartbeat(
            directory.path,
            rank=distributed.rank,
            step_timeout_s=config.step_timeout_s,
            ends_run=config.on_step_timeout == "end",
        )
        code = code_of_files(config.environment, config.reward, config.algorithm)
        sets = [config.data.training_sets(), config.heldout_sets(), config.demonstration_sets()]
        paths = [one.path for by_name in sets for one in by_name.values()]
        paths += [value for declared, value in declarations(config).values() if declared.is_path and value]
        # Now, before they are loaded; rank 0 writes the record.
        self._files = distributed.together(lambda: UserFiles.of(code, paths if distributed.is_main else ()))
        self._profiler: StepProfiler | None = None
        if config.profile:
            from lockstep.trainer.run.profiling import StepProfiler  # other runs do not load it

            steps = config.profile_steps
            self._profiler = StepProfiler(directory.profile, rank=distributed.rank, steps=steps, say=console.say)
        self._reporter: Reporter | None = None
        """None on ranks other than 0."""
        self._saved_at = 0
        """Update of the last checkpoint; -1: this run has none."""
        self._checkpoint_s = 0.0
        """Seconds of the last checkpoint, until they are reported."""
        self.is_terminated = False
        """True on every rank if SIGTERM to one of them stopped the run before its last update."""

    def begin(self, parts: Parts, start: Path | None) -> None:
        """Restore the checkpoint to start from, and open the logs; from here on signals wait for an update."""
        self._interrupt = Interrupt(ends_process=self._callbacks.ends_process)
        resumption = None
        if start is not None:
            resumption, self._files = restore_state(start, parts, self._directory, self._console, self._files)
        if self._distributed.is_main:
            metrics = open_metrics(parts, self._directory, self._console, resumption, self._files)
            self._reporter = Reporter(parts, self._directory, self._console, metrics)

    def train(self, parts: Parts) -> None:
        """Make all updates, then write the final checkpoint and model."""
        trainer, settings = parts.trainer, self._config
        is_saved = not trainer.version or (self._directory.checkpoints / f"step-{trainer.version}").is_dir()
        self._saved_at, whole = trainer.version if is_saved else -1, self._state(parts)
        try:
            self._console.say(
                f"{self._batch}, {settings.updates} updates, {self._distributed.world_size} rank(s), "
                f"ZeRO stage {self._distributed.zero_stage}"
            )
            trainer.push_weights()  # also after a resume: the engine has loaded the base model
            if settings.eval.before_training and not trainer.num_steps:
                evaluation = self._evaluate(parts, 0)
                if self._reporter is not None:
                    self._reporter.log.write(0, evaluation)
            self._console.begin(trainer.version)
            while trainer.version < settings.updates and not self._must_stop():
                before, whole = trainer.version, self._state(parts)
                report = self._step(parts)
                evaluation = {}
                is_last = report.update >= settings.updates
                if is_due(settings.eval.every, before=before, after=report.update) or is_last:
                    evaluation = self._evaluate(parts, report.update)
                if self._reporter is not None:
                    with self._reporter.log.tolerating("the report of a step"):
                        self._reporter.step(report, evaluation, before=before, checkpoint_s=self._checkpoint_s)
                self._checkpoint_s = 0.0
                if is_due(settings.checkpoint.every, before=before, after=report.update):
                    self._save(parts, self._state(parts))
                self._callbacks.on_step(report)
                self._refuse_disagreement(report)
                del report  # its rollouts would live on while the next ones are sampled
            if self._saved_at != trainer.version:
                self._save(parts, self._state(parts))
            places, outcome = {}, ""
            if self._reporter is not None:
                places, outcome = self._reporter.log.places, self._reporter.outcome(trainer.version)
            save_model(parts, self._directory, self._console, trackers=places, outcome=outcome)
        except Exception as error:
            error.add_note(self._rescue(parts, whole, error))
            raise
        finally:
            if self._profiler is not None:
                self._profiler.close()
            self._console.end()
            if self._reporter is not None:
                self._reporter.log.close()
            parts.close_collection()
            self._heartbeat.close()
            parts.engines.close()
            if parts.teacher is not None:
                parts.teacher.close()

    def close(self) -> None:
        """End the handling of signals, after everything is saved on all ranks."""
        self._interrupt.close()

    def _step(self, parts: Parts) -> StepReport:
        self._heartbeat.beat("step", update=parts.trainer.version + 1)
        settings = self._config.rollout
        batch_size = settings.prompts_per_step * settings.samples_per_prompt if self._config.has_rollouts else 0
        with (
            self._profiler.step() if self._profiler else nullcontext(),
            self._console.rollouts(batch_size) as on_bar,
            self._console.progress(f"update {parts.trainer.version + 1}", batch_size) as lines,
        ):

            def on_rollout(rollout: Rollout) -> None:
                on_bar(rollout)
                lines.rollout(rollout)
                self._callbacks.on_rollout(rollout)

            return parts.trainer.step(on_rollout, lines.stage)

    def _refuse_disagreement(self, report: StepReport) -> None:
        """Raise `TrainingError` on all ranks if the engine does not compute what the trainer does."""
        if self._config.correction.on_disagreement == "end":
            thresholds = AlarmThresholds.of(lambda name: attrgetter(name)(self._config))
            device_type = self._distributed.device.type
            if sentence := disagreement(report.metrics, thresholds, device_type=device_type):
                raise TrainingError(f"update {report.update}: {sentence}")

    def _evaluate(self, parts: Parts, update: int) -> Mapping[str, float]:
        """Evaluate on held-out rows; a collective."""
        if (evaluate := parts.evaluate) is None:
            return {}
        self._heartbeat.beat("evaluation", update=update)
        start = time.perf_counter()
        evaluation, failure = None, None
        try:
            evaluation = evaluate(self._console)
        except (Exception, SystemExit) as error:
            if isinstance(error, RankLostError) or not self._distributed.meets(b"evaluation"):
                raise
            failure = error
        metrics: Mapping[str, float] = {}
        if self._reporter is not None:
            with self._reporter.log.tolerating("an evaluation"):
                if failure is not None:
                    raise failure
                if evaluation is not None:
                    metrics = {**evaluation.metrics, "time/eval": time.perf_counter() - start}
                    self._reporter.evaluation(evaluation, update)
        if failure is None:
            self._console.did("evaluation", time.perf_counter() - start)
        if metrics:
            self._callbacks.on_evaluation(update, metrics)
        return metrics

    def _state(self, parts: Parts) -> TrainerState:
        return state_of(parts, wandb_id=self._reporter.log.wandb_id if self._reporter else None)

    def _save(self, parts: Parts, state: TrainerState) -> None:
        self._heartbeat.beat("checkpoint", update=state.update)
        start = time.perf_counter()
        save_state(parts, self._directory, state, self._files)
        self._checkpoint_s, self._saved_at = time.perf_counter() - start, state.update
        self._console.did("checkpoint", self._checkpoint_s)

    def _rescue(self, parts: Parts, whole: TrainerState, error: Exception) -> str:
        """Save the last completed update after an error, and return how to go on; a collective, if all ranks failed.

        whole: state before the step that failed.
        """
        if parts.trainer.num_steps > whole.step:
            whole = self._state(parts)  # what failed came after the update
        problem = ""
        if whole.update not in (0, self._saved_at):
            if isinstance(error, RankLostError) or not self._distributed.meets(str(whole.update).encode()):
                problem = "the ranks did not fail together"
            elif whole.update != parts.trainer.version or self._distributed.is_stepping:
                problem = "the next one failed halfway"
            else:
                try:
                    self._save(parts, whole)
                except Exception as failure:
                    problem = f"of an error: {failure}"
        status = f"update {self._saved_at} is saved" if self._saved_at > 0 else "no update is saved"
        status += f" (update {whole.update} is not, because {problem})" if problem else ""
        command = resume_command(
            all_words(),
            run=self._directory.path,
            updates=self._config.updates,
            launcher=launcher_of(self._distributed),
        )
        return f"{status}; to go on: {command}"

    def _must_stop(self) -> bool:
        """Return True if any rank was asked to stop or is out of time; agreed by all: the next step is a collective."""
        stops = self._interrupt.requested or self._wall_time.is_over or self._callbacks.stops()
        votes = self._distributed.sum(torch.tensor([float(stops), float(self._interrupt.terminated)])).tolist()
        self.is_terminated = votes[1] > 0
        return votes[0] > 0

    @property
    def _batch(self) -> str:
        """The size of a batch in words."""
        if not self._config.has_rollouts:
            return f"model ready; {self._config.demonstrations.rows_per_update} demonstrations per update"
        rollout = self._config.rollout
        return f"engine ready; {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples per update"
