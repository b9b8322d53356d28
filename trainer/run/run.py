"""A whole run: assemble the parts, train, save. `scripts/train.py` calls `run` on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from lockstep.rollout.records import Rollout
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.gc_freeze import gc_frozen
from lockstep.trainer.checkpoint.run_dir import RunDirectory, open_run
from lockstep.trainer.checks.algorithm import algorithm_warnings
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import code_of_files, unisolated_settings
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.run.assembly import Parts, assemble, choose
from lockstep.trainer.run.heartbeat import Heartbeat, WallTime
from lockstep.trainer.run.interrupt import TERMINATED, Interrupt
from lockstep.trainer.run.library_logs import ThirdPartyLog
from lockstep.trainer.run.profiling import StepProfiler
from lockstep.trainer.run.provenance import with_hashes
from lockstep.trainer.run.report import Reporter
from lockstep.trainer.run.state import open_metrics, restore_state, save_model, save_state
from lockstep.trainer.update.schedule import is_due


def run(config: Config, on_step: Callable[[StepReport], None] = lambda report: None) -> None:
    """Train as configured. on_step: called on all ranks after step and logs.

    Raises `LockstepError` on all ranks, and `SystemExit` on all ranks if SIGTERM to one of them stopped the run.
    """
    libraries = ThirdPartyLog()
    with libraries.held_output():  # DeepSpeed and the transports of a cluster print while ranks meet
        distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    with distributed:
        console = RunConsole(enabled=distributed.is_main, total_updates=config.updates)
        distributed.together(lambda: refuse_unfit_models(config, console.say))
        config = with_hashes(choose(config, distributed, console), distributed)
        directory, _lock = open_run(config, distributed)
        libraries.open(directory.logs / f"libraries-rank-{distributed.rank}.log", console.warn)
        with libraries.shown_on_failure(), BackgroundLoop() as loop:
            console.say(f"run directory  {directory.path}")
            if user_code := code_of_files(config):
                console.say(f"code of your files, run with your rights: {', '.join(user_code)}")
            for name in unisolated_settings(config):
                console.warn(f"programs of the model run with your rights ({name}=true)")
            for sentence in algorithm_warnings(config):
                console.warn(sentence)
            life = Life(config, distributed, directory, console)
            torch.manual_seed(config.seed)
            parts = assemble(config, distributed, directory, loop, console, libraries)
            life.begin(parts)
            with gc_frozen():
                life.train(parts, on_step)
        if life.is_terminated:
            distributed.barrier()  # at the first status that is not 0, a launcher ends its other ranks
            life.close()
    if life.is_terminated:
        raise SystemExit(TERMINATED)


class Life:
    """The life of a run around `Trainer.step`: stops, checkpoints, evaluations, reports."""

    def __init__(self, config: Config, distributed: Distributed, directory: RunDirectory, console: RunConsole) -> None:
        self._config = config
        self._distributed = distributed
        self._directory = directory
        self._console = console
        self._interrupt = Interrupt()
        self._wall_time = WallTime(config.max_hours)
        self._heartbeat = Heartbeat(
            directory.path,
            rank=distributed.rank,
            step_timeout_s=config.step_timeout_s,
            ends_run=config.on_step_timeout == "end",
        )
        self._profiler = StepProfiler(
            directory.profile,
            rank=distributed.rank,
            steps=config.profile_steps if config.profile else 0,
            say=console.say,
        )
        self._reporter: Reporter | None = None
        """None on ranks other than 0."""
        self._checkpoint_s = 0.0
        """Seconds of the last checkpoint, until they are reported."""
        self.is_terminated = False
        """True on every rank if SIGTERM to one of them stopped the run before its last update."""

    def begin(self, parts: Parts) -> None:
        """Restore the checkpoint that `resume` asks for, and open the logs."""
        resumed = restore_state(parts, self._directory, self._console)
        if self._distributed.is_main:
            metrics = open_metrics(parts, self._directory, self._console, resumed)
            self._reporter = Reporter(parts, self._directory, self._console, metrics)

    def train(self, parts: Parts, on_step: Callable[[StepReport], None]) -> None:
        """Make all updates, then write the final checkpoint and model."""
        trainer, settings = parts.trainer, self._config
        try:
            self._console.say(
                f"{_batch(settings)}, {settings.updates} updates, {self._distributed.world_size} rank(s), "
                f"ZeRO stage {self._distributed.zero_stage}"
            )
            trainer.push_weights()  # also after a resume: the engine has loaded the base model
            saved_at = trainer.version
            if settings.eval.before_training and not trainer.num_steps:
                evaluation = self._evaluate(parts, 0)
                if self._reporter is not None:
                    self._reporter.log.write(0, evaluation)
            self._console.begin(trainer.version)
            while trainer.version < settings.updates and not self._must_stop():
                before = trainer.version
                report = self._step(parts)
                evaluation = {}
                is_last = report.update >= settings.updates
                if is_due(settings.eval.every, before=before, after=report.update) or is_last:
                    evaluation = self._evaluate(parts, report.update)
                if self._reporter is not None:
                    self._reporter.step(report, evaluation, before=before, checkpoint_s=self._checkpoint_s)
                self._checkpoint_s = 0.0
                if is_due(settings.checkpoint.every, before=before, after=report.update):
                    self._save(parts)
                    saved_at = report.update
                on_step(report)
            if saved_at != trainer.version:
                self._save(parts)
            places = self._reporter.log.places if self._reporter else {}
            save_model(parts, self._directory, self._console, trackers=places)
        finally:
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
            self._profiler.step(),
            self._console.rollouts(batch_size) as on_bar,
            self._console.progress(f"update {parts.trainer.version + 1}", batch_size) as lines,
        ):

            def on_rollout(rollout: Rollout) -> None:
                on_bar(rollout)
                lines.rollout(rollout)

            return parts.trainer.step(on_rollout, lines.stage)

    def _evaluate(self, parts: Parts, update: int) -> Mapping[str, float]:
        """Evaluate on held-out rows; a collective."""
        if not self._config.evaluates:
            return {}
        self._heartbeat.beat("evaluation", update=update)
        started = time.perf_counter()
        evaluation = parts.evaluate(self._console)
        if evaluation is None:
            return {}
        assert self._reporter is not None, "the rank with the engine writes the logs"
        self._reporter.evaluation(evaluation, update)
        return {**evaluation.metrics, "time/eval": time.perf_counter() - started}

    def _save(self, parts: Parts) -> None:
        self._heartbeat.beat("checkpoint", update=parts.trainer.version)
        started = time.perf_counter()
        save_state(parts, self._directory, wandb_id=self._reporter.log.wandb_id if self._reporter else None)
        self._checkpoint_s = time.perf_counter() - started

    def _must_stop(self) -> bool:
        """Return True if any rank was asked to stop or is out of time; agreed by all: the next step is a collective."""
        stops = self._interrupt.requested or self._wall_time.is_over
        asked = self._distributed.sum(torch.tensor([float(stops), float(self._interrupt.terminated)])).tolist()
        self.is_terminated = asked[1] > 0
        return asked[0] > 0


def _batch(config: Config) -> str:
    """Return the size of a batch in words."""
    if not config.has_rollouts:
        return f"model ready; {config.demonstrations.rows_per_update} demonstrations per update"
    rollout = config.rollout
    return f"engine ready; {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples per update"
