"""Reports of a run: metrics, console, trackers, saved rollouts, alarms and evaluations, written by rank 0."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.rollout.records import Cause, Rollout
from lockstep.rollout.rollout_lines import write_rollouts
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.memory_plan import GIB
from lockstep.trainer.model.shape import update_flops
from lockstep.trainer.observe.alarms import TOOL_ERRORS, AlarmThresholds, alarms, notes
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.observe.first_step import first_demonstrations, first_step_summary
from lockstep.trainer.observe.metrics_log import MetricsLog, metrics_lines, run_seconds
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.observe.trackers.view import lockstep, short_path
from lockstep.trainer.run.assembly import Parts
from lockstep.trainer.run.next_steps import outcome
from lockstep.trainer.update.schedule import is_due
from lockstep.trainer.update.update_guard import Attempt

if TYPE_CHECKING:
    from lockstep.trainer.evaluate.evaluation import Evaluation
    from lockstep.trainer.model.layers.compiled import GraphCount
    from lockstep.trainer.observe.trackers.tracker import Medium

COMPARISON = "comparing with the evaluation before training"


class Reporter:
    """Everything that a run writes for people, on rank 0."""

    def __init__(self, parts: Parts, directory: RunDirectory, console: RunConsole, metrics: MetricsLog) -> None:
        self._parts = parts
        self._config = parts.config
        self._directory = directory
        self._console = console
        self.log = metrics
        self._explained: set[Cause | None] = set()
        """Causes of dropped rollouts of which the first was printed."""
        self._has_shown_failed_call = False
        self._graphs: GraphCount | None = None
        if parts.config.model.is_compiled:
            from lockstep.trainer.model.layers.compiled import GraphCount  # other runs do not load it

            self._graphs = GraphCount(console.warn)
        parts.updater.dump = self._dump

    def step(self, report: StepReport, evaluation: Mapping[str, float], *, before: int, checkpoint_s: float) -> None:
        """Report one step. before: update before it. checkpoint_s: seconds of the checkpoint before it; 0 without."""
        is_first = self._parts.trainer.num_steps == 1
        thresholds = AlarmThresholds.of(lambda name: attrgetter(name)(self._config))
        sentences = alarms(report.metrics, thresholds)
        costs = {"time/checkpoint": checkpoint_s} if checkpoint_s else {}
        health = {"health/alarms": float(len(sentences))}
        health |= self._memory()
        if self._graphs is not None:
            health |= self._graphs.metrics()
        self.log.write(report.update, {**report.metrics, **evaluation, **costs, **self._mfu(report), **health})
        if is_first:
            tokenizer = self._parts.chat.tokenizer
            lines = (
                first_step_summary(report.batch, report.logp_train_N, tokenizer) if self._config.has_rollouts else []
            )
            for batch in report.given.values():
                lines += first_demonstrations(batch, tokenizer)
            for line in lines:
                self._console.say(line)
        self._console.row({**report.metrics, "step": report.update})
        self._console.alarms(sentences, notes(report.metrics, thresholds))
        for rollout in report.rollouts:
            if rollout.error is not None and rollout.dropped_by not in self._explained:
                self._explained.add(rollout.dropped_by)
                self._console.warn(f"rollouts are dropped ({rollout.dropped_by}), this one because: {rollout.error}")
        if any(sentence.startswith(TOOL_ERRORS) for sentence in sentences) and not self._has_shown_failed_call:
            from lockstep.rollout.environments.toolbox import failed_call  # runs without tools do not load it

            if answer := failed_call(report.rollouts):
                self._has_shown_failed_call = True
                self._console.warn(f"most tool calls fail, one of them with: {answer}")
        # A step that trained nothing has the update number of the one before it.
        suffix = f"-untrained-{self._parts.trainer.num_steps}" if report.update == before else ""
        if self._config.has_rollouts:
            name = f"rollouts/step-{report.update:06d}{suffix}.jsonl"
            self._save_rollouts(name, report.rollouts)
            batch, path = report.batch, self._directory.path / name
            if batch.teacher is not None and self._config.logger.save_rollouts:
                from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, write_scores  # other runs do not load it

                with self.log.tolerating("saving scores of the teacher"):
                    identity = self._config.teacher.identity
                    write_scores(path.with_suffix(FILE_SUFFIX), batch.rows, batch.teacher, teacher=identity)
        settings = self._config.logger
        every = settings.wandb_media_every
        if report.rollouts and every and (is_due(every, before=before, after=report.update) or is_first):
            start = time.perf_counter()
            self.log.media(report.update, lambda: self._media(report))
            self._console.did("media", time.perf_counter() - start)
        if is_due(settings.print_rollouts_every, before=before, after=report.update) or is_first:
            for rollout in report.rollouts[: settings.print_rollouts]:
                self._console.sample(rollout)

    def _media(self, report: StepReport) -> Mapping[str, Medium]:
        from lockstep.trainer.observe.step_media import step_media  # runs without a tracker do not load it

        return step_media(report, self._config, self._parts.chat.tokenizer, self.log.tolerating)

    def evaluation(self, evaluation: Evaluation, update: int) -> None:
        """Print an evaluation, and write its results and rollouts."""
        self._console.say(f"evaluation at update {update}")
        for name, value in evaluation.losses.items():
            self._console.say(f"{name} {value:.6g}")
        if not evaluation.results:
            return
        # Other runs do not load these modules.
        from lockstep.trainer.evaluate.evaluator import comparable_settings
        from lockstep.trainer.evaluate.results import result_lines, write_results

        for line in result_lines(evaluation.results):
            self._console.say(line)
        path = self._directory.evaluations / f"update-{update:06d}.json"
        with self.log.tolerating("saving an evaluation"):
            write_results(
                path,
                evaluation.results,
                model=f"{self._directory.path} at update {update}",
                settings=comparable_settings(self._config),
            )
        self._save_rollouts(f"evaluations/{path.stem}.jsonl", evaluation.rollouts)
        first = path.with_name("update-000000.json")
        if update and update >= self._config.updates and first.is_file():
            self._compare(first, evaluation, update)

    def _compare(self, first: Path, evaluation: Evaluation, update: int) -> None:
        """Print the gain of the whole run: its last evaluation and the one before training, paired by prompt."""
        from lockstep.trainer.evaluate.evaluator import comparable_settings
        from lockstep.trainer.evaluate.results import compare, comparison_lines, read_results, title

        with self.log.tolerating(COMPARISON):
            before = read_results(first, comparable_settings(self._config))
            comparisons = compare(before, evaluation.results)
            by_name = {result.name: result for result in before}
            for result in evaluation.results:
                if result.name in by_name:
                    was, now = by_name[result.name].rewards(), result.rewards()
                    self._console.say(f"{title(result.name)}  mean reward {was} before training -> {now}")
            for line in comparison_lines(comparisons, "update 0", f"update {update}"):
                self._console.say(line)

    def outcome(self, update: int) -> str:
        """Return what the run has reached, for one sentence; "" if its records cannot be read."""
        with self.log.tolerating("summing up the run"):
            lines = metrics_lines(self._directory.metrics) if self._directory.metrics.is_file() else ()
            return outcome(lines, update, self._heldout(update), seconds=run_seconds())
        return ""

    def _heldout(self, update: int) -> list[str]:
        """Return the rewards on each held-out set before training and at the last evaluation, with their intervals."""
        paths = {int(path.stem[len("update-") :]): path for path in self._directory.evaluations.glob("update-*.json")}
        last = max((number for number in paths if number <= update), default=None)
        if last is None:
            return []
        from lockstep.trainer.evaluate.evaluator import comparable_settings  # other runs do not load these
        from lockstep.trainer.evaluate.results import read_results, title

        settings, before = comparable_settings(self._config), {}
        if last and 0 in paths:
            with self.log.tolerating(COMPARISON):
                before = {one.name: f"{one.rewards()} before training and " for one in read_results(paths[0], settings)}
        when = f"after update {last}" if last else "before training"
        return [
            f"{title(one.name)} {before.get(one.name, '')}{one.rewards()} {when}"
            for one in read_results(paths[last], {})
        ]

    def _save_rollouts(self, name: str, rollouts: Sequence[Rollout]) -> None:
        if self._config.logger.save_rollouts:
            with self.log.tolerating("saving rollouts"):
                write_rollouts(self._directory.path / name, rollouts)

    def _mfu(self, report: StepReport) -> dict[str, float]:
        """Return the share of the devices' arithmetic that the update used, where the peak is known."""
        peak_tflops, seconds = self._config.logger.peak_tflops, report.metrics.get("time/update")
        shape = self._parts.shape
        rows = [*report.batch.rows] or [row for batch in report.given.values() for row in batch.rows]
        if not (peak_tflops and seconds and rows) or shape.experts:
            return {}
        computed_share = 1 - report.metrics.get("perf/shared_tokens_frac", 0.0)
        flops = update_flops(shape, [len(row) for row in rows])
        flops *= computed_share * self._config.algorithm.epochs
        return {"perf/mfu": flops / (seconds * peak_tflops * 1e12 * self._parts.distributed.world_size)}

    def _memory(self) -> dict[str, float]:
        """Return the memory of this process, and the most that this step allocated on the device [GiB]."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        metrics = {"perf/process_gib": pages * os.sysconf("SC_PAGE_SIZE") / GIB}
        if (device := self._parts.distributed.device).type == "cuda":
            metrics["perf/device_gib"] = torch.cuda.max_memory_allocated(device) / GIB
            torch.cuda.reset_peak_memory_stats(device)
        return metrics

    def _dump(
        self,
        attempt: Attempt,
        batch: StepBatch | None,
        targets: Targets | None,
        given: Mapping[str, StepBatch],
    ) -> None:
        """Keep the batch of an optimizer step that the guard objected to. A full disk does not end the run."""
        from lockstep.trainer.update.batch_dumps import write_dump  # other runs do not load it

        outcome = "skipped" if attempt.number else "made"
        self._console.warn(f"update {attempt.update} {outcome}: {attempt.reason}")
        with self.log.tolerating("dumping a batch"):
            path = write_dump(self._directory.dumps, attempt, batch, targets, given)
            self._console.warn(f"its batch is in {path}; {lockstep()} replay {shlex.quote(short_path(path))}")
