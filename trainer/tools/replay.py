"""Run a step of an earlier run again, without the run: train it without sampling, or sample it without training.

    saved rollouts + weights before them ─► Trainer.step, with rollouts from the file ─► numbers beside what was logged
    a dumped batch + weights before it   ─► Updater.optimizer_step                    ─► numbers beside the dumped ones
    prompts of a step + weights          ─► engine, rewards                           ─► tokens beside the saved ones

The code is the run's own. Where the weights are those of the step, on as many ranks, the numbers are the same bits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rollout.engine.pool import EnginePool
from rollout.errors import ConfigError
from rollout.records import Rollout
from rollout.sampler.sampler import OnRollout
from rollout.system.background_loop import BackgroundLoop
from rollout.weights.sync import WeightSync
from trainer.build import load_policy, make_chat, make_rewards, make_sampler, make_sampling
from trainer.checkpoint import checkpoint
from trainer.collect.groups import Collected, Group, is_kept
from trainer.config.schema import Config
from trainer.distributed.distributed import Distributed
from trainer.engines.start import start_members
from trainer.model.critic import policy_of, with_critic
from trainer.observe.console import RunConsole
from trainer.run.library_logs import quiet_third_parties
from trainer.score.reference import make_reference
from trainer.step import Trainer
from trainer.stopwatch import Stopwatch
from trainer.tools.saved_step import SavedStep, newest_checkpoint, saved_step, settings_of
from trainer.update.batch_dumps import read_dump
from trainer.update.optimizer import make_optimizer
from trainer.update.updater import Updater

NOT_REPLAYED = ("time/", "perf/", "sync/", "eval/", "health/", "data/", "reward/errors/", "rollout/engine_restarts")
"""Metrics of what a replay does not do, or of how long it takes."""


class _FromFile:
    """In place of a collector: rollouts that were sampled and scored before."""

    def __init__(self, step: SavedStep, config: Config) -> None:
        if config.needs_greedy:
            raise ConfigError(
                f"algorithm.advantage={config.algorithm.advantage} needs greedy answers, which are not saved; replay "
                "with --sample, or add "
                "algorithm.advantage=rloo to see this batch under another estimator"
            )
        kept: list[Group] = []
        dropped: list[Group] = []
        for _, rollouts in groupby(step.rollouts, key=lambda rollout: rollout.group_id):
            group = list(rollouts)
            (kept if is_kept(group, config) else dropped).append(group)
        self._collected = Collected.of(kept, dropped, (), config)

    def collect(
        self, step: int, version: int, watch: Stopwatch, on_rollout: OnRollout = lambda rollout: None
    ) -> Collected:
        with watch.stage("rollout"):
            return self._collected

    def close(self) -> None: ...


class _NoEngine:
    """In place of weight sync."""

    def sleep(self) -> None:
        """Do nothing."""

    def push(self, version: int) -> _NoEngine:
        return self

    def metrics(self) -> dict[str, float]:
        return {}


class _Model:
    """What was trained, with the weights, moments and counters that it had at a moment of the run."""

    def __init__(self, run: Path, config: Config, update: int, distributed: Distributed, console: RunConsole) -> None:
        torch.manual_seed(config.seed)
        self.policy = load_policy(config)
        module = with_critic(self.policy, config)
        optimizer = make_optimizer(module, config.optimizer, is_sharded=distributed.zero_stage > 0)
        self.module: nn.Module = distributed.prepare(module, optimizer)
        path, found = newest_checkpoint(run, update)
        self.state = None if path is None else checkpoint.load(path, distributed)
        has_other_ranks = path is not None and checkpoint.is_resharded(path, distributed)
        self.is_exact = found == update and not has_other_ranks
        """Whether numbers are to be those of the run."""
        console.say(f"weights        {path or config.model.path}")
        if has_other_ranks:
            console.warn("the run had other ranks: sums are rounded in another order here, so numbers differ a little")
        if found != update:
            console.warn(
                f"these weights are {update - found} updates older than those of the step, so numbers differ; set "
                "checkpoint.every=1 and checkpoint.keep in a run that is to be replayed"
            )
        self.updater = Updater(self.module, distributed, config)
        self.updater.num_updates = update
        if self.state is not None:
            self.updater.guard.norms.extend(self.state.grad_norms)


def replay(path: Path, *, step: int | None, sample: bool, overrides: list[str]) -> bool:
    """Run a step again and print what came of it. Returns False if exact weights gave other numbers than the run.

    Args:
        path: directory of a run, or of a dumped batch in its `dumps/`.
        step: the update that the step ended with; None for a dumped batch.
        sample: sample its prompts instead of training on its rollouts.

    Raises `ConfigError`, `DataError` or `CheckpointError` where something that is needed is missing or damaged.
    """
    quiet_third_parties()
    is_dump = step is None
    run = path.resolve().parent.parent if is_dump else path
    config = settings_of(run, overrides)
    if sample:
        if step is None:
            raise ConfigError("--sample needs a run and --step; a dumped batch holds no prompts")
        if config.rollout.max_staleness:
            raise ConfigError(
                "--sample repeats a step that one version of the weights has sampled; this run made its rollouts ahead "
                f"(rollout.max_staleness={config.rollout.max_staleness}): replay without --sample, which trains on "
                "the saved ones"
            )
        return _sample(run, saved_step(run, step), config)
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    console = RunConsole(enabled=distributed.is_main, total_updates=0)
    try:
        if step is None:
            return _train_dump(run, path, config, distributed, console)
        return _train(run, saved_step(run, step), config, distributed, console)
    finally:
        distributed.close()


def _train(run: Path, step: SavedStep, config: Config, distributed: Distributed, console: RunConsole) -> bool:
    source = _FromFile(step, config)
    model = _Model(run, config, step.weights_update, distributed, console)
    trainer = Trainer(
        config,
        distributed=distributed,
        updater=model.updater,
        rollouts=source,  # type: ignore[arg-type]  # it has what a step asks of a source
        reference=make_reference(config, distributed, model.module),
        sync=_NoEngine(),  # type: ignore[arg-type]
    )
    trainer.num_steps = step.num_steps
    if model.state is not None:
        trainer.noise_floor = model.state.noise_floor
        trainer.kl_coef = config.algorithm.kl_coef if model.state.kl_coef is None else model.state.kl_coef
    report = trainer.step()
    logged = {name: value for name, value in step.logged.items() if not name.startswith(NOT_REPLAYED)}
    return _compare(logged, report.metrics, console) or not model.is_exact


def _train_dump(run: Path, path: Path, config: Config, distributed: Distributed, console: RunConsole) -> bool:
    attempt, batch, targets = read_dump(path, config.correction)
    console.say(f"dumped because {attempt.reason}")
    # It was judged then; here the step itself is looked at, and may be skipped again.
    config.optimizer.spike, config.optimizer.max_skipped_updates = "off", 2
    model = _Model(run, config, attempt.update - 1, distributed, console)
    seen_N = torch.full((batch.layout.num_tokens,), torch.nan)
    report = model.updater.optimizer_step(
        batch, targets, np.array(attempt.rollouts), seen_N, lr=attempt.lr, is_first=attempt.is_first
    )
    then = {"policy/loss": attempt.sums["policy/loss"], "optim/grad_norm": attempt.grad_norm}
    return _compare(then, report, console) or not model.is_exact


def _compare(logged: Mapping[str, float | None], found: Mapping[str, float], console: RunConsole) -> bool:
    """Print both side by side; whether all that both have are equal. null stands for a number that is not finite."""
    common = sorted(logged.keys() & found.keys())
    num_equal = 0
    console.say(f"{'':<44} {'run':>14} {'replay':>14}")
    for name in common:
        before, now = logged[name], found[name]
        is_equal = before == now or ((before is None or not math.isfinite(before)) and not math.isfinite(now))
        num_equal += is_equal
        shown = "not finite" if before is None else f"{before:.7g}"
        console.say(f"{name:<44} {shown:>14} {now:>14.7g}{'' if is_equal else '   differs'}")
    console.say(f"{num_equal} of {len(common)} numbers are equal bit for bit")
    return num_equal == len(common)


def _sample(run: Path, step: SavedStep, config: Config) -> bool:
    console = RunConsole(enabled=True, total_updates=0)
    groups = [list(group) for _, group in groupby(step.rollouts, key=lambda rollout: rollout.group_id)]
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as logs, BackgroundLoop() as loop:
        members = start_members(config, loop=loop, log_path=Path(logs) / "engine.log")
        engine = EnginePool(members)
        distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
        rewards = make_rewards(config)
        try:
            rewards.load()
            model = _Model(run, config, step.weights_update, distributed, console)
            sync = WeightSync(
                engines=members,
                module=policy_of(distributed.unwrapped).model,
                score_canary=model.updater.logprobs,
                canary_threshold=config.sync.canary_threshold,
                pause_mode=config.pause_mode,
                bucket_bytes=int(config.sync.bucket_mib * 2**20),
                deadline_s=config.sync.timeout_s,
                address=config.sync.address,
            )
            sync.push(step.weights_update)
            chat = make_chat(config)
            sampled = loop.run(
                make_sampler(config, engine=engine, chat=chat).collect(
                    [group[0].example for group in groups],
                    samples_per_prompt=config.rollout.samples_per_prompt,
                    sampling=make_sampling(config, chat, temperature=config.rollout.temperature),
                    step=step.num_steps,
                )
            )
            scored = loop.run(rewards.score(sampled))
        finally:
            rewards.close()
            loop.run(engine.close())
            distributed.close()
    same = sum(_ids(before) == _ids(now) for before, now in zip(step.rollouts, scored, strict=False))
    for rollout in scored[: config.logger.print_rollouts]:
        console.sample(rollout)
    for name, rollouts in (("run", step.rollouts), ("replay", scored)):
        values = [rollout.reward for rollout in rollouts if rollout.is_trainable]
        mean = sum(values) / max(len(values), 1)
        console.say(f"{name:<8} {len(rollouts)} rollouts, {len(values)} with a reward, mean {mean:.6g}")
    console.say(f"{same} of {len(step.rollouts)} rollouts have the same tokens")
    return same == len(step.rollouts) == len(scored) or not model.is_exact


def _ids(rollout: Rollout) -> list[tuple[int, ...]]:
    return [call.sampled_ids for call in rollout.calls]
