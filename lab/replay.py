"""Replay of one step of an earlier run: train it without sampling, or sample it without training.

    rollouts of a step ─► Trainer.step            ─► numbers beside those of the run
    demonstrations     ─► Trainer.step            ─► numbers beside those of the run
    a dumped batch     ─► Updater.optimizer_step  ─► numbers beside those of the run
    prompts of a step  ─► engine, rewards         ─► tokens beside those of the run

Each starts from the weights before the step and runs the code of training. With the exact weights on the same number of
ranks, results are equal bit for bit. Demonstrations, alone or beside rollouts, are read again from the files that the
configuration names, at the position of the step.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import check_ids, read_rollouts
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.plain_files import behind_link
from lockstep.trainer.batch.packed_images import ImageSource
from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, SavedScores
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.build import load_policy, make_chat, make_rewards, make_sampler, make_sampling
from lockstep.trainer.checkpoint import stored
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.collect.groups import Collected, is_kept
from lockstep.trainer.compose import schema, to_config, type_problem
from lockstep.trainer.config.groups.evaluation_settings import EvalConfig
from lockstep.trainer.config.groups.task_settings import RewardConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.redaction import redact_text, redact_words
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import outside_of, outside_of_update
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.run_engines import start_engines
from lockstep.trainer.model.critic import with_critic
from lockstep.trainer.model.decoder import decoder_setup
from lockstep.trainer.model.layers.vision import image_source
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.observe.metrics_log import BATCH, read_metrics
from lockstep.trainer.run.assembly import make_sync
from lockstep.trainer.run.library_logs import quiet_third_parties
from lockstep.trainer.score.reference import make_reference
from lockstep.trainer.sft.demonstration_rows import EPOCH, Demonstrations
from lockstep.trainer.step import Trainer
from lockstep.trainer.update.batch_dumps import read_attempt, read_dump, read_given
from lockstep.trainer.update.entropy_control import EntropyControl
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Minibatch, Updater

CHECKPOINT = re.compile(r"step-([1-9][0-9]{0,17})")
NOT_REPLAYED = (
    "time/",
    "perf/",
    "sync/",
    "eval/",
    "health/",
    "data/",
    "reward/errors/",
    "judge/",
    "rollout/engine_restarts",
)
"""Prefixes of metrics that a replay does not compute, or that measure time; but for `EPOCH`."""


def replay(path: Path, *, step: int | None, sample: bool, overrides: list[str], trusts_run: bool = False) -> bool:
    """Replay a step and print the result. Returns False if exact weights gave other numbers than the run.

    path: directory of a run or of a dumped batch. step: update after the step; None for a dumped batch. sample: sample
    the prompts instead of training on the rollouts. trusts_run: see `settings_of`.
    Raises `ConfigError`, `DataError` or `CheckpointError` if an input is missing or damaged.
    """
    quiet_third_parties()
    path = behind_link(path)
    run = path.resolve().parent.parent if step is None else path
    config = settings_of(run, overrides, sample=sample, trusts_run=trusts_run)
    if sample and not config.has_rollouts:
        raise ConfigError("--sample needs a run with rollouts; replay without --sample to train its demonstrations")
    if sample and config.rollout.max_staleness:
        raise ConfigError(
            "--sample needs a step whose rollouts come from one version of the weights; this run sampled ahead "
            f"(rollout.max_staleness={config.rollout.max_staleness}); replay without --sample to train on its rollouts"
        )
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    with distributed:
        replayer = Replay(run, config, distributed)
        replayer.say(f"replay of      {redact_text(str(path))}")
        demonstrations = config.demonstration_sets()
        if programs := outside_of(config) if sample else outside_of_update(demonstrations, config.algorithm):
            text = redact_text(", ".join(programs))
            replayer.say(f"code, programs, addresses and variables used with your rights: {text}")
        if step is None:
            return replayer.train_dump(path)
        record = saved_step(run, step, has_rollouts=config.has_rollouts)
        return replayer.sample(record) if sample else replayer.train(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """One rollout batch of a run, or one update on demonstrations alone."""

    rollouts: tuple[Rollout, ...]
    """Empty without rollouts."""
    logged: Mapping[str, float]
    """Its line in metrics.jsonl."""
    weights_update: int
    """Update of the weights that scored it and were trained."""
    num_steps: int
    """Number of rollout batches before it."""
    teacher_path: Path
    """File with the scores of the teacher, if it has one."""
    epoch: float | None
    """Passes over the demonstrations before it; None: not logged."""

    @property
    def groups(self) -> list[list[Rollout]]:
        return [list(group) for _, group in groupby(self.rollouts, key=lambda rollout: rollout.group_id)]


def settings_of(run: Path, overrides: Sequence[str], *, sample: bool, trusts_run: bool = False) -> Config:
    """Return the configuration of a run, with overrides as on the command line.

    Others may have written the run, so code of its models is trusted only if an override says so. sample: keep
    environment and rewards, which a replay that trains does not use. trusts_run: accept code, programs, addresses and
    environment variables that the configuration names and the replay uses; else they are a `ConfigError`. Raises
    `ConfigError`.
    """
    path = run / "config.yaml"
    run_settings = read_saved(path)
    _distrust(run_settings)
    try:
        user_settings = OmegaConf.from_dotlist(list(overrides))
        config = to_config(OmegaConf.merge(schema(), run_settings, user_settings))  # type: ignore[arg-type]
        own_names = outside_of(to_config(OmegaConf.merge(schema(), user_settings)))  # type: ignore[arg-type]
    except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        first, _, _ = str(error).partition("\n")
        words = " ".join([str(path), *redact_words(overrides)])
        raise ConfigError(
            f"{words} is not a valid configuration: {getattr(error, 'full_key', None) or 'it'}: {type_problem(first)}"
        ) from error
    config.resume, config.run_name = "never", None
    config.eval, config.data.heldout_path = EvalConfig(), None  # a replay evaluates nothing
    reward = config.reward
    if not sample:
        config.environment = replace(config.environment, name="single_turn", settings={})
        config.reward = RewardConfig()
    if config.has_teacher:  # its scores are saved, so it is not started
        config.teacher = TeacherConfig(path=config.model.path)
    demonstrations = config.demonstration_sets()
    run_names = outside_of(config) if sample else outside_of_update(demonstrations, config.algorithm)
    extras = [name for name in run_names if name not in own_names]
    if extras and not trusts_run:
        raise ConfigError(
            f"{path} names {', '.join(extras)}: a replay would run this code and these programs, and use these "
            "addresses and variables, with your rights; add --trust-run if you trust all who could write this directory"
        )
    validate(config, needs_data=False)
    if not sample:  # nothing is scored again, but an advantage may read the weights of the functions
        if reward.weights is not None and len(reward.weights) != len(reward.functions):
            raise ConfigError(
                f"{path}: reward.weights has {len(reward.weights)} entries for {len(reward.functions)} "
                "reward.functions, expected one each"
            )
        config.reward.functions, config.reward.weights = reward.functions, reward.weights
    return config


def _distrust(node: Any) -> None:
    """Set `trust_remote_code` to false at every depth."""
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if key == "trust_remote_code":
            node[key] = False
        elif isinstance(node[key], DictConfig | ListConfig):
            _distrust(node[key])


def saved_step(run: Path, update: int, *, has_rollouts: bool = True) -> SavedStep:
    """Read the step that ended with this update. Raises `ConfigError` or, for damaged files, `DataError`."""
    path = run / "rollouts" / f"step-{update:06d}.jsonl"
    if has_rollouts and not path.is_file():
        paths = sorted((run / "rollouts").glob("step-*.jsonl"))
        hint = f"found {paths[0].stem} to {paths[-1].stem}" if paths else "found no saved rollouts"
        raise ConfigError(f"{path} is missing, {hint}; name another --step, or train with logger.save_rollouts=true")
    rollouts = tuple(read_rollouts(path)) if has_rollouts else ()
    if has_rollouts and not rollouts:
        raise ConfigError(f"{path} has no rollouts; name another --step")
    lines = read_metrics(run / "metrics.jsonl")
    # A batch that trained nothing repeats the update of the batch before it, so the first line is the right one.
    place = next((i for i, line in enumerate(lines) if line["step"] == update and line.get(BATCH) is not None), None)
    if place is None:
        raise ConfigError(f"{run / 'metrics.jsonl'} has no line for update {update}; name another --step")
    spans = [span.version for rollout in rollouts for call in rollout.calls for span in call.version_spans]
    before = lines[place - 1]["step"] if place else min(spans, default=0)
    step_metrics = lines[place]
    return SavedStep(
        rollouts=rollouts,
        logged=step_metrics,
        weights_update=int(before),
        num_steps=int(step_metrics[BATCH]) - 1,
        teacher_path=path.with_suffix(FILE_SUFFIX),
        epoch=next((line[EPOCH] for line in reversed(lines[:place]) if line.get(EPOCH) is not None), None),
    )


def checkpoints_up_to(run: Path, update: int) -> list[tuple[int, Path]]:
    """Return (update, path) of the checkpoints of a run up to an update by name, the newest first."""
    matches = [(CHECKPOINT.fullmatch(path.name), path) for path in (run / "checkpoints").glob("step-*")]
    checkpoints = [(int(name[1]), path) for name, path in matches if name and int(name[1]) <= update]
    return sorted(checkpoints, reverse=True)


@dataclass(frozen=True, slots=True)
class SavedTeacher:
    """A teacher that has scored the step before, on rank 0, which has its rows."""

    saved: SavedScores
    measured: Mapping[str, float] = field(default_factory=dict)

    def scored(self, batch: StepBatch, rollouts: Sequence[Rollout], *, measures_floor: bool) -> StepBatch:
        return replace(batch, teacher=self.saved.of(batch.rows)) if rollouts else batch


class Replay:
    """A step of a run with the weights, moments and counters before it."""

    def __init__(self, run: Path, config: Config, distributed: Distributed) -> None:
        self._run, self._config, self._distributed = run, config, distributed
        self._console = RunConsole(enabled=distributed.is_main, total_updates=0)
        self.say = self._console.say
        self._state: TrainerState | None = None
        self._images: ImageSource | None = None

    def train(self, step: SavedStep) -> bool:
        config, distributed = self._config, self._distributed
        demonstrations = self._demonstrations()
        run_metrics = {
            name: value for name, value in step.logged.items() if name == EPOCH or not name.startswith(NOT_REPLAYED)
        }
        if not config.has_rollouts:
            assert demonstrations is not None, "a run without rollouts trains on demonstrations"
            self._restore(step.weights_update, demonstrations)
            self._continue(demonstrations, step)
            alone = Trainer(config, distributed=distributed, updater=self._updater, rollouts=None)
            alone.num_steps = step.num_steps
            return self._compare(run_metrics, alone.step().metrics)
        if config.plan.needs_greedy:
            raise ConfigError(
                f"algorithm.advantage={config.algorithm.advantage} needs greedy answers, which are not saved; replay "
                "with --sample, or add algorithm.advantage=rloo to see this batch under another estimator"
            )
        kept_groups = [group for group in step.groups if is_kept(group, config.algorithm)]
        dropped_groups = [group for group in step.groups if not is_kept(group, config.algorithm)]
        collection = Collected.of(kept_groups, dropped_groups, (), config.algorithm)
        teacher = None
        if config.plan.teaches_rollouts:
            scores = SavedScores.open(step.teacher_path)
            teacher = SavedTeacher(scores)
            self.say(f"teacher        {redact_text(scores.teacher)}, weights of version {scores.version}")
        self._restore(step.weights_update, demonstrations)
        if demonstrations is not None:
            self._continue(demonstrations, step)
        check_ids(step.rollouts, vocab_size=self._vocab_size)
        trainer = Trainer(
            config,
            distributed=distributed,
            updater=self._updater,
            # A stand-in with the method that a step calls.
            rollouts=SimpleNamespace(collect=lambda *_: collection if distributed.is_main else Collected()),  # type: ignore[arg-type]
            reference=make_reference(config, distributed, self._module, self._images),
            teacher=teacher,  # type: ignore[arg-type]
        )
        trainer.num_steps = step.num_steps
        if self._state is not None:
            trainer.noise_floor = self._state.noise_floor
            trainer.kl_coef = config.algorithm.kl_coef if self._state.kl_coef is None else self._state.kl_coef
        return self._compare(run_metrics, trainer.step().metrics)

    def _demonstrations(self) -> Demonstrations | None:
        """Load the demonstrations of the run, if it has any. Raises `ConfigError` if a teacher scored them."""
        config = self._config
        if not config.demonstration_sets():
            return None
        if config.demonstrations.teacher_divergence != "off":
            without = "" if config.plan.teaches_rollouts else " teacher.path=null"
            raise ConfigError(
                "the teacher's scores of demonstrations (demonstrations.teacher_divergence) are not saved with a step; "
                f"replay a dumped batch of this run, or add demonstrations.teacher_divergence=off{without} to see the "
                "step with their cross-entropy"
            )
        chat = make_chat(config.model, history=config.environment.history, media=RunDirectory(self._run).media)
        return Demonstrations.load(config, self._distributed, chat, say=self.say)

    def _continue(self, demonstrations: Demonstrations, step: SavedStep) -> None:
        """Go to the position before the step, after `_restore`. Warns if the demonstrations are others than then."""
        if not self._distributed.is_main:  # only rank 0 has the demonstrations
            return
        count, epoch = demonstrations.count, step.epoch or 0.0
        if self._state is not None and self._state.step == step.num_steps:
            demonstrations.cursor = self._state.demonstrations_cursor
        else:  # older weights, or batches since whose updates were skipped
            demonstrations.cursor = round(epoch * count)
        if step.epoch is not None and demonstrations.cursor / count != epoch:
            self._console.warn(
                f"there are {count} demonstrations, of which {demonstrations.cursor} had been taken, but the run had "
                f"made {epoch:g} passes over its own: files or settings have changed since, so numbers differ"
            )

    def train_dump(self, path: Path) -> bool:
        attempt, given_batches = read_attempt(path), read_given(path)
        demonstrations = None
        if self._config.demonstration_sets():  # with the rows of the dump, so none are loaded
            demonstrations = Demonstrations(self._config, self._distributed, None)
        self._console.say(f"dumped because {attempt.reason}")
        # The step was judged in the run. Here it may be skipped again, but not end the replay.
        self._config.optimizer.spike, self._config.optimizer.max_skipped_updates = "off", 2
        self._restore(attempt.update - 1, demonstrations)
        if not self._config.has_rollouts:
            self._check_ids(path, given_batches.values())
            report = self._updater.optimizer_step(None, given_batches, lr=attempt.lr)
            return self._compare({"optim/grad_norm": attempt.grad_norm}, report)
        _, batch, targets = read_dump(path, self._config.correction)
        self._check_ids(path, [batch, *given_batches.values()])
        minibatch = Minibatch(
            batch=batch,
            targets=targets,
            rollouts=np.array(attempt.rollouts),
            seen_N=torch.full((batch.layout.num_tokens,), torch.nan),
            is_first=attempt.is_first,
        )
        report = self._updater.optimizer_step(minibatch, given_batches, lr=attempt.lr)
        run_metrics = {"policy/loss": attempt.sums["policy/loss"], "optim/grad_norm": attempt.grad_norm}
        return self._compare(run_metrics, report)

    def _check_ids(self, path: Path, batches: Iterable[StepBatch]) -> None:
        """Raise `DataError` if rows have ids that the model lacks, or a teacher's scores name such."""
        batches = list(batches)
        largest = max((int(row.ids.max()) for batch in batches for row in batch.rows), default=0)
        for batch in batches:
            if batch.teacher is not None and batch.teacher.top_ids.size:
                largest = max(largest, int(batch.teacher.top_ids.max()))
        if largest >= self._vocab_size:
            raise DataError(f"{path} has the token id {largest}, but the model has {self._vocab_size} ids")

    def sample(self, step: SavedStep) -> bool:
        config, distributed, say = self._config, self._distributed, self._console.say
        if distributed.world_size > 1:
            raise ConfigError("--sample runs in one process; start it with `lockstep replay`")
        with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as logs, BackgroundLoop() as loop:
            chat = make_chat(config.model, history=config.environment.history, media=RunDirectory(self._run).media)
            engines = start_engines(config, distributed, loop=loop, logs=Path(logs), images=chat.images)
            assert engines.pool is not None
            rewards = make_rewards(config)
            try:
                rewards.load()
                self._restore(step.weights_update)
                make_sync(config, distributed, self._updater, engines=engines.synced, images=chat.images).push(
                    step.weights_update
                )
                samples = loop.run(
                    make_sampler(config, engine=engines.pool, chat=chat).collect(
                        [group[0].example for group in step.groups],
                        samples_per_prompt=config.rollout.samples_per_prompt,
                        sampling=make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine),
                        step=step.num_steps,
                    )
                )
                scored_rollouts = loop.run(rewards.score(samples))
            finally:
                rewards.close()
                engines.close()
        same = sum(
            [call.sampled_ids for call in before.calls] == [call.sampled_ids for call in now.calls]
            for before, now in zip(step.rollouts, scored_rollouts, strict=False)
        )
        for rollout in scored_rollouts[: config.logger.print_rollouts]:
            self._console.sample(rollout)
        for name, rollouts in (("run", step.rollouts), ("replay", scored_rollouts)):
            values = [rollout.reward for rollout in rollouts if rollout.is_trainable]
            mean = sum(values) / max(len(values), 1)
            say(f"{name:<8} {len(rollouts)} rollouts, {len(values)} with a reward, mean {mean:.6g}")
        say(f"{same} of {len(step.rollouts)} rollouts have the same tokens")
        return same == len(step.rollouts) == len(scored_rollouts) or not self._is_exact

    def _restore(self, update: int, demonstrations: Demonstrations | None = None) -> None:
        """Load the newest weights up to this update. Warns if results are not comparable bit for bit."""
        run, config, distributed, warn = self._run, self._config, self._distributed, self._console.warn
        torch.manual_seed(config.seed)
        policy = load_policy(config.model, decoder_setup(config.model, config.rotary_context))
        self._vocab_size = policy.vocab_size
        has_critic, context = config.plan.has_critic, config.rotary_context
        module = with_critic(policy, config.model, has_critic=has_critic, engine_context=context)
        optimizer = make_optimizer(module, config.optimizer, is_sharded=distributed.zero_stage > 0)
        self._module = distributed.prepare(module, optimizer)
        sources = [] if demonstrations is None else [demonstrations]
        if config.model.sees_images:
            chat = make_chat(config.model, history=config.environment.history, media=RunDirectory(run).media)
            assert chat.images is not None
            self._images = image_source(policy.causal_lm.config, chat.images.prepared)
        self._updater = Updater(self._module, distributed, config, given=sources, images=self._images)
        self._updater.num_updates = update
        candidates = checkpoints_up_to(run, update)
        newest, path = next((one for one in candidates if stored.check(one[1]) is None), (0, None))
        self._console.say(f"weights        {path or config.model.path}")
        self._is_exact = newest == update
        if path is not None:
            self._state = stored.load(path, distributed)
            self._updater.guard.norms.extend(self._state.grad_norms)
            if config.algorithm.entropy_target is not None and self._state.entropy_coef is not None:
                self._updater.entropy = EntropyControl(coef=self._state.entropy_coef, entropy=self._state.entropy)
            if stored.is_resharded(path, distributed):
                self._is_exact = False
                warn("the run had other ranks: sums are rounded in another order here, so numbers differ a little")
        if newest != update:
            warn(
                f"these weights are {update - newest} updates older than those of the step, so numbers differ; train "
                "with checkpoint.every=1 and a large checkpoint.keep to replay any step exactly"
            )

    def _compare(self, logged: Mapping[str, float | None], found: Mapping[str, float]) -> bool:
        """Print both numbers of each common metric. Returns False if exact weights gave another one."""
        common, num_equal = sorted(logged.keys() & found.keys()), 0
        self._console.say(f"{'':<44} {'run':>14} {'replay':>14}")
        for name in common:
            value, now = logged[name], found[name]
            before = math.nan if value is None else value  # metrics.jsonl has null for numbers that are not finite
            is_equal = before == now or not (math.isfinite(before) or math.isfinite(now))
            num_equal += is_equal
            self._console.say(f"{name:<44} {before:>14.7g} {now:>14.7g}{'' if is_equal else '   differs'}")
        self._console.say(f"{num_equal} of {len(common)} numbers are equal bit for bit")
        return num_equal == len(common) or not self._is_exact
