"""A whole run: build the parts, train, save. `scripts/train.py` calls `run` on every rank."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rollout.errors import DataError, HubError
from rollout.saved_rollouts import write_rollouts
from rollout.system.background_loop import BackgroundLoop
from rollout.system.gc_freeze import frozen
from rollout.weights.sync import WeightSync
from trainer.batch.step_batch import StepBatch
from trainer.build import load_policy, make_chat, make_rewards, make_sampler, make_sampling
from trainer.checkpoint import checkpoint
from trainer.checkpoint.checkpoint import TrainerState
from trainer.checkpoint.resume import restore
from trainer.checkpoint.run_dir import RunDirectory, open_run
from trainer.collect.async_source import Producer
from trainer.collect.source import Collector
from trainer.config.schema import Config
from trainer.config.tree import plain
from trainer.config.user_code import code_of_files
from trainer.credit.targets import Targets
from trainer.data.prompt_filter import make_prompts
from trainer.distributed.distributed import Distributed
from trainer.engines.recovery import Recovery
from trainer.engines.run_engines import Engines, start_engines
from trainer.evaluate.evaluator import Evaluator, comparable_settings
from trainer.evaluate.results import result_lines, write_results
from trainer.model.critic import ActorCritic, policy_of, save_critic, with_critic
from trainer.model.lora import is_adapted, save_merged
from trainer.model.memory_plan import advice, memory_plan
from trainer.model.shape import ModelShape, update_flops
from trainer.observe.alarms import K3_NEGLIGIBLE, AlarmThresholds, alarms
from trainer.observe.console import RunConsole
from trainer.observe.first_step import first_step_summary
from trainer.observe.metrics_log import MetricsLog
from trainer.observe.step_report import StepReport
from trainer.observe.wandb_media import step_media
from trainer.observe.wandb_run import Lineage
from trainer.run.heartbeat import Heartbeat, WallTime
from trainer.run.hub import last_metrics, push
from trainer.run.interrupt import Interrupt
from trainer.run.library_logs import ThirdPartyLog
from trainer.run.next_steps import next_steps
from trainer.run.profiling import StepProfiler
from trainer.run.provenance import provenance
from trainer.score.reference import make_reference
from trainer.step import Trainer
from trainer.update.batch_dumps import Attempt, write_dump
from trainer.update.optimizer import make_optimizer
from trainer.update.schedule import is_due
from trainer.update.updater import Updater


def run(config: Config, on_step: Callable[[StepReport], None] = lambda report: None) -> None:
    """Train as configured. Raises `LockstepError` on every rank when the run cannot go on.

    on_step: called on every rank when a step is over, logs and checkpoints included.
    """
    libraries = ThirdPartyLog()
    with libraries.held_output():  # DeepSpeed and the transports of a cluster print while ranks meet
        distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    try:
        directory, _lock = open_run(config, distributed)
        warn = RunConsole(enabled=distributed.is_main, total_updates=config.updates).warn
        libraries.open(directory.logs / f"libraries-rank-{distributed.rank}.log", warn)
        with libraries.shown_on_failure(), BackgroundLoop() as loop:
            parts = Run(config, distributed, directory, loop, libraries)
            with frozen():
                parts.train(on_step)
    finally:
        distributed.close()


class Run:
    """The parts of a run on this rank, and the life around `Trainer.step`: checkpoints, evaluation, reports."""

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        directory: RunDirectory,
        loop: BackgroundLoop,
        libraries: ThirdPartyLog,
    ) -> None:
        self._config = config
        self._distributed = distributed
        self._directory = directory
        self._loop = loop
        self._console = RunConsole(enabled=distributed.is_main, total_updates=config.updates)
        self._console.say(f"run directory  {directory.path}")
        if own_code := code_of_files(config):
            self._console.say(f"code of your files, run with your rights: {', '.join(own_code)}")
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
            say=self._console.say,
        )
        torch.manual_seed(config.seed)

        # The engine starts first: it forks workers, which must not inherit threads of a model that computes.
        self._engines = self._start_engines()
        policy = load_policy(config)
        module = with_critic(policy, config)
        optimizer = make_optimizer(module, config.optimizer, is_sharded=distributed.zero_stage > 0)
        with libraries.output_to_file():  # DeepSpeed prints, and compiles what an offloaded optimizer needs
            self._module = distributed.prepare(module, optimizer)
        self._shape = ModelShape.of(module, policy.model, policy.causal_lm.config)
        self._checkpoint_s = 0.0
        """What the last checkpoint took, until a line of metrics says so."""
        self._say_memory()
        self._updater = Updater(self._module, distributed, config)
        self._updater.scorer.budget.warn = self._console.warn
        self._rewards = make_rewards(config)
        distributed.together(self._load_reward_models)
        self._chat = make_chat(config)
        self._prompts = make_prompts(config, distributed, loop, self._chat, say=self._console.say)
        pool = self._engines.pool
        self._sampler = make_sampler(config, engine=pool, chat=self._chat) if pool else None
        self._evaluator = distributed.together(self._make_evaluator)
        make_source = Producer if config.rollout.max_staleness else Collector
        self._rollouts = make_source(
            config,
            distributed=distributed,
            loop=loop,
            sampler=self._sampler,
            sampling=make_sampling(config, self._chat, temperature=config.rollout.temperature),
            rewards=self._rewards,
            prompts=self._prompts,
        )
        sync = self._make_sync()
        self._recovery = Recovery(
            engines=self._engines,
            distributed=distributed,
            rollouts=self._rollouts,
            sync=sync,
            version=lambda: self._updater.num_updates,
            limit=config.rollout.engine_restarts,
            say=self._console.warn,
        )
        self._trainer = Trainer(
            config,
            distributed=distributed,
            updater=self._updater,
            rollouts=self._rollouts,
            reference=make_reference(config, distributed, self._module),
            sync=sync,
            recovery=self._recovery,
        )
        self._metrics = self._restore_or_begin()

    def train(self, on_step: Callable[[StepReport], None]) -> None:
        """All updates, then the final checkpoint and model."""
        try:
            self._console.say(
                f"engine ready; {self._config.rollout.prompts_per_step} prompts x "
                f"{self._config.rollout.samples_per_prompt} samples per update, {self._config.updates} updates, "
                f"{self._distributed.world_size} rank(s), ZeRO stage {self._distributed.zero_stage}"
            )
            self._trainer.push_weights()  # also after a resume: the engine has loaded the base model
            saved_at = self._trainer.version
            if self._config.eval.before_training and not self._trainer.num_steps:
                evaluation = self._evaluate(0)
                if self._metrics is not None:
                    self._metrics.write(0, evaluation)
            self._console.begin(self._trainer.version)
            while self._trainer.version < self._config.updates and not self._must_stop():
                self._heartbeat.beat("step", update=self._trainer.version + 1)
                before = self._trainer.version
                report = self._one_step()
                evaluation = {}
                is_last = report.update >= self._config.updates
                if is_due(self._config.eval.every, before=before, after=report.update) or is_last:
                    evaluation = self._evaluate(report.update)
                self._report(report, evaluation, before=before)
                if is_due(self._config.checkpoint.every, before=before, after=report.update):
                    self._save()
                    saved_at = report.update
                on_step(report)
            if saved_at != self._trainer.version:
                self._save()
            self._finish()
        finally:
            self._profiler.close()
            self._console.end()
            if self._metrics is not None:
                self._metrics.close()
            self._rollouts.close()
            self._rewards.close()
            self._heartbeat.close()
            self._engines.close()

    # Parts

    def _say_memory(self) -> None:
        """What the run is going to take, and what would help if the device has less."""
        zero_stage = self._distributed.zero_stage
        plan = memory_plan(
            self._shape,
            self._config,
            world_size=self._distributed.world_size,
            zero_stage=zero_stage,
            uses_deepspeed=self._distributed.uses_deepspeed,
        )
        self._console.say(plan.table())
        warning = advice(plan, self._config, available=self._distributed.device_memory, zero_stage=zero_stage)
        if warning is not None:
            self._console.warn(warning)

    @property
    def _evaluates(self) -> bool:
        return bool(self._config.eval.every or self._config.eval.before_training)

    def _make_evaluator(self) -> Evaluator | None:
        """On the rank with the engine, if there is anything to evaluate and a wish to."""
        if self._sampler is None or not self._evaluates:
            return None
        return Evaluator(self._config, sampler=self._sampler, rewards=self._rewards, loop=self._loop, chat=self._chat)

    def _start_engines(self) -> Engines:
        urls = ", ".join(self._config.rollout.urls)
        number = self._config.rollout.num_engines
        which = f"{number} engines" if number > 1 else "the engine"
        which += " of every rank" if self._config.rollout.engine == "colocated" else ""
        self._console.say(f"waiting for the engines at {urls} ..." if urls else f"starting {which} ...")
        return start_engines(self._config, self._distributed, loop=self._loop, logs=self._directory.logs)

    def _load_reward_models(self) -> None:
        """On the rank that scores, whole, also under ZeRO-3; nothing elsewhere."""
        if self._engines.pool is not None:
            with self._distributed.whole_models():
                self._rewards.load()

    def _make_sync(self) -> WeightSync:
        settings = self._config.sync
        return WeightSync(
            engines=self._engines.synced,
            sleepers=self._engines.colocated,
            sleep_level=self._config.rollout.sleep_level if self._engines.colocated else 0,
            module=policy_of(self._distributed.unwrapped).model,
            score_canary=self._updater.logprobs,
            canary_threshold=settings.canary_threshold,
            canary_share=settings.canary_share,
            pause_mode=self._config.pause_mode,
            bucket_bytes=int(settings.bucket_mib * 2**20),
            deadline_s=settings.timeout_s,
            address=settings.address,
        )

    # Life of a run

    def _restore_or_begin(self) -> MetricsLog | None:
        """Load the checkpoint that `resume` asks for, and open the logs."""
        settings = self._settings()
        resumed, passed_over = restore(self._config, settings, self._directory.checkpoints, self._distributed)
        for sentence in passed_over:
            self._console.warn(sentence)
        if resumed is not None:
            state, guard = resumed.state, self._updater.guard
            self._trainer.num_steps = state.step
            self._updater.num_updates = state.update
            self._trainer.kl_coef = resumed.kl_coef
            self._trainer.noise_floor = state.noise_floor
            self._prompts.restore(state.data_cursor, state.unfinished)
            self._prompts.resting = dict(state.resting_rows)
            guard.norms.extend(state.grad_norms)
            guard.skipped, guard.in_a_row = state.skipped_updates, state.skipped_in_a_row
            done = "forked" if resumed.is_fork else "resumed"
            self._console.say(f"{done} from {resumed.path} at update {state.update}")
            for sentence in resumed.warnings:
                self._console.warn(sentence)
        if not self._distributed.is_main:
            return None
        lineage = Lineage(run_id=self._config.logger.wandb_id)
        if resumed is not None and lineage.run_id is None:
            state = resumed.state
            lineage = Lineage(run_id=state.wandb_id, update=state.update, is_same_run=not resumed.is_fork)
        origin = provenance()
        self._directory.provenance.write_text(json.dumps(origin, indent=2) + "\n")
        metrics = MetricsLog(
            self._directory.metrics,
            self._config.logger,
            run_config={**settings, "provenance": origin},
            lineage=lineage,
        )
        if metrics.url is not None:
            self._console.say(f"W&B            {metrics.url}")
        metrics.truncate_after(update=self._updater.num_updates, batch=self._trainer.num_steps)
        self._updater.dump = partial(self._dump, metrics)
        return metrics

    def _settings(self) -> dict[str, Any]:
        """The configuration without secrets, as checkpoints and loggers keep it."""
        return plain(self._config)

    def _dump(self, metrics: MetricsLog, attempt: Attempt, batch: StepBatch, targets: Targets) -> None:
        """Keep the batch of an optimizer step that the guard objected to. A full disk does not end the run for it."""
        done = "skipped" if attempt.number else "made"
        self._console.warn(f"update {attempt.update} {done}: {attempt.reason}")
        with metrics.tolerating("dumping a batch"):
            path = write_dump(self._directory.dumps, attempt, batch, targets)
            self._console.warn(f"its batch is in {path}; python scripts/replay.py {shlex.quote(str(path))}")

    def _one_step(self) -> StepReport:
        batch_size = self._config.rollout.prompts_per_step * self._config.rollout.samples_per_prompt
        with self._profiler.step(), self._console.rollouts(batch_size) as on_rollout:
            return self._trainer.step(on_rollout)

    def _report(self, report: StepReport, evaluation: Mapping[str, float], *, before: int) -> None:
        """One line of metrics, one row on the console, the rollouts in a file; on rank 0."""
        if self._metrics is None:
            return
        thresholds = AlarmThresholds(
            kl=self._config.correction.alarm_kl,
            ess=self._config.correction.alarm_ess,
            k3_over_noise_floor=self._config.correction.alarm_k3,
            k3_negligible=K3_NEGLIGIBLE[self._config.model.dtype],
        )
        sentences = alarms(report.metrics, thresholds)
        line = {**report.metrics, **evaluation, **self._costs(report), "health/alarms": float(len(sentences))}
        self._metrics.write(report.update, line)
        if self._trainer.num_steps == 1:
            for line in first_step_summary(report.batch, report.logp_train_N, self._chat.tokenizer):
                self._console.say(line)
        self._console.row({**report.metrics, "step": report.update})
        self._console.alarms(sentences)
        if self._config.logger.save_rollouts:
            # A step that trained nothing has the update number of the one before it.
            untrained = f"-untrained-{self._trainer.num_steps}" if report.update == before else ""
            with self._metrics.tolerating("saving rollouts"):
                name = f"step-{report.update:06d}{untrained}.jsonl"
                write_rollouts(self._directory.rollouts / name, report.rollouts)
        every = self._config.logger.wandb_media_every
        if every and (is_due(every, before=before, after=report.update) or self._trainer.num_steps == 1):
            self._metrics.media(report.update, lambda: step_media(report, self._config, self._chat.tokenizer))
        every = self._config.logger.print_rollouts_every
        if is_due(every, before=before, after=report.update) or self._trainer.num_steps == 1:
            for rollout in report.rollouts[: self._config.logger.print_rollouts]:
                self._console.sample(rollout)

    def _costs(self, report: StepReport) -> dict[str, float]:
        """Seconds of the checkpoint before this step, and the update's share of what the devices can compute."""
        costs = {"time/checkpoint": self._checkpoint_s} if self._checkpoint_s else {}
        self._checkpoint_s = 0.0
        peak_tflops, seconds = self._config.logger.peak_tflops, report.metrics.get("time/update")
        if peak_tflops and seconds and report.batch.rows and not self._shape.has_experts:
            computed = 1 - report.metrics.get("perf/shared_tokens_frac", 0.0)
            flops = update_flops(self._shape, [len(row) for row in report.batch.rows])
            flops *= computed * self._config.algorithm.epochs
            costs["perf/mfu"] = flops / (seconds * peak_tflops * 1e12 * self._distributed.world_size)
        return costs

    def _evaluate(self, update: int) -> dict[str, float]:
        """Held-out rows on rank 0's engine; the other ranks wait for it. A collective."""
        if not self._evaluates:
            return {}
        self._heartbeat.beat("evaluation", update=update)
        started = time.perf_counter()
        evaluator = self._evaluator
        evaluation = self._recovery.attempt(
            lambda: self._distributed.together(lambda: None if evaluator is None else evaluator.evaluate())
        )
        if evaluation is None:
            return {}
        self._console.say(f"evaluation at update {update}")
        for line in result_lines(evaluation.results):
            self._console.say(line)
        path = self._directory.evaluations / f"update-{update:06d}.json"
        assert self._metrics is not None, "the rank with the engine writes the logs"
        with self._metrics.tolerating("saving an evaluation"):
            write_results(
                path, evaluation.results, model=f"{self._directory.path} at update {update}",
                settings=comparable_settings(self._config),
            )  # fmt: skip
            if self._config.logger.save_rollouts:
                write_rollouts(path.with_suffix(".jsonl"), evaluation.rollouts)
        return {**evaluation.metrics, "time/eval": time.perf_counter() - started}

    def _save(self) -> None:
        self._heartbeat.beat("checkpoint", update=self._trainer.version)
        started = time.perf_counter()
        state = TrainerState(
            step=self._trainer.num_steps,
            update=self._trainer.version,
            data_cursor=self._prompts.cursor,
            resting_rows=self._prompts.resting,
            unfinished=self._prompts.unfinished,
            kl_coef=self._trainer.kl_coef,
            wandb_id=self._metrics.wandb_id if self._metrics else None,
            noise_floor=self._trainer.noise_floor,
            grad_norms=tuple(self._updater.guard.norms),
            skipped_updates=self._updater.guard.skipped,
            skipped_in_a_row=self._updater.guard.in_a_row,
        )
        checkpoint.save(
            self._directory.checkpoints,
            state,
            self._distributed,
            keep=self._config.checkpoint.keep,
            config=self._settings(),
        )
        self._checkpoint_s = time.perf_counter() - started

    def _finish(self) -> None:
        """Write the model, and say what can be done with the run."""
        policy = policy_of(self._distributed.unwrapped)
        if is_adapted(policy.model):
            save_merged(policy.model, self._directory.model, self._distributed)
        else:
            prefix = "policy.model." if self._config.has_critic else "model."
            self._distributed.save_pretrained(self._directory.model, prefix=prefix)
        trained = self._distributed.unwrapped
        has_saved_critic = isinstance(trained, ActorCritic) and save_critic(
            trained, self._directory.critic, self._distributed
        )
        if not self._distributed.is_main:
            return
        self._chat.tokenizer.save_pretrained(self._directory.model)
        path = self._directory.path
        if self._trainer.version < self._config.updates:
            self._console.say(f"stopped after update {self._trainer.version}; everything is saved")
        launcher = "python"
        if self._distributed.world_size > 1 or self._distributed.zero_stage:
            file = f"zero{self._distributed.zero_stage}" if self._distributed.zero_stage else "ddp"
            processes = f"--num_processes {self._distributed.world_size}"
            launcher = f"accelerate launch --config_file configs/accelerate/{file}.yaml {processes}"
        self._console.say(
            next_steps(
                sys.argv[1:],
                run=path,
                model=self._directory.model,
                update=self._trainer.version,
                updates=self._config.updates,
                launcher=launcher,
                critic=self._directory.critic if has_saved_critic else None,
                has_heldout=bool(self._config.heldout_sets()),
            )
        )
        if self._config.hub.repo is not None and self._trainer.version >= self._config.updates:
            try:
                address = push(self._directory.model, self._config, last_metrics(self._directory.metrics))
                self._console.say(f"uploaded       {address}")
            except (HubError, DataError) as error:  # the run is over and its model saved: what is left to do is said
                self._console.warn(str(error))

    def _must_stop(self) -> bool:
        """Whether any rank was asked to stop or is out of time; agreed by all: the next step is a collective."""
        wish = self._interrupt.requested or self._wall_time.is_over
        return bool(self._distributed.sum(torch.tensor([float(wish)])).item())
