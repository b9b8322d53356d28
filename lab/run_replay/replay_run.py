"""Replay of a whole run with rollouts made ahead (`lockstep replay --run`): trained again, by the run's own log.

    log ─► groups begin and arrive as in the run ─► Trainer.step ─► metrics, rollouts, weights beside those of the run
    saved rollouts ─► versions of all tokens ─► engine ─► ids and logprobs beside those of the run

Everything is computed again: environments, rewards, sampling, training, weight syncs. From the run come the settings,
the data, and what the clock decided: the order in which groups arrived, and the weights that sampled each token. On a
CPU all else follows bit for bit. The first difference ends the replay.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lockstep.lab.replay import settings_of
from lockstep.lab.run_replay.followed_source import FollowedSource
from lockstep.lab.run_replay.paced_engine import Difference, PacedEngine
from lockstep.lab.run_replay.recorded_run import RecordedRun
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.environments import declaration
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.plain_files import behind_link
from lockstep.trainer.build import make_sampler, make_sampling
from lockstep.trainer.checkpoint.checkpoint import MANIFEST, fingerprint
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.collect.driving import Drivers
from lockstep.trainer.config.redaction import redact_text
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import outside_of
from lockstep.trainer.data.prompts import Prompts
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.run_engines import Engines
from lockstep.trainer.model.families import FAMILIES
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.run.assembly import Assembly, RolloutParts
from lockstep.trainer.run.library_logs import ThirdPartyLog, quiet_third_parties

NOT_COMPARED = (
    *("time/", "perf/", "sync/", "eval/", "health/", "judge/"),
    *("rollout/reissued", "rollout/groups_lost_to_engine", "rollout/engine_restarts", "rollout/duration_s"),
)
"""Prefixes of metrics that measure time, that a replay does not compute, or that count what dropped groups did.

Those of single reward functions (`reward/<function>/mean`, `reward/errors/*`), too, are of the groups that were scored
since the step before, whether they are trained or not. The rewards themselves are compared.
"""


def replay_run(path: Path, *, overrides: Sequence[str], trusts_run: bool = False) -> bool:
    """Train a run again, and print what was compared. Returns False at the first difference, which is printed.

    trusts_run: see `settings_of`. Raises `ConfigError`, before an engine starts, for a run that cannot be followed bit
    for bit, and `DataError` for damaged files.
    """
    quiet_third_parties()
    run = behind_link(path)
    recorded = RecordedRun(run)
    config = settings_of(run, overrides, sample=True, trusts_run=trusts_run)
    _refuse_inexact(config, recorded)
    config.rollout.engine_restarts = 0
    distributed = Distributed.start(
        dtype=config.model.dtype,
        max_grad_norm=config.optimizer.max_grad_norm,
        reduce_dtype=config.optimizer.reduce_dtype,
    )
    with distributed, tempfile.TemporaryDirectory(prefix="lockstep-replay-") as work, BackgroundLoop() as loop:
        if distributed.world_size > 1:
            raise ConfigError("a run is replayed in one process; start it with `lockstep replay`")
        console = RunConsole(enabled=True, total_updates=config.updates)
        console.say(f"replay of      {redact_text(str(run))}, {len(recorded.collections)} batches")
        if programs := outside_of(config):
            text = redact_text(", ".join(programs))
            console.say(f"code, programs, addresses and variables used with your rights: {text}")
        directory = RunDirectory(Path(work))
        directory.media = recorded.directory.media
        directory.logs.mkdir()
        torch.manual_seed(config.seed)
        libraries = ThirdPartyLog()
        libraries.open(directory.logs / "libraries.log", console.warn)
        assembly = _Assembly(recorded, config, distributed, directory, loop, console, libraries)
        parts = assembly.parts()
        try:
            return _Comparison(recorded, distributed, console, Path(work)).follow(parts.trainer, assembly)
        finally:
            parts.close_collection()
            parts.engines.close()


def _refuse_inexact(config: Config, recorded: RecordedRun) -> None:
    """Raise `ConfigError` for settings with which a replay could not give the same bits, or follow at all."""
    rollout = config.rollout
    model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    model_type = model.get_text_config().model_type
    is_recurrent = any(model_type in family.model_types for family in FAMILIES if family.is_recurrent)
    problems = {
        "this machine has a GPU, and runs are replayed on CPUs: to hide it, set CUDA_VISIBLE_DEVICES=": (
            torch.cuda.is_available()
        ),
        f"rollout.engine={rollout.engine}: the bits of a token depend on what a server or another rank's engine "
        "computes beside it; record with rollout=embedded": rollout.engine != "embedded",
        f"rollout.num_engines={rollout.num_engines}: record with rollout.num_engines=1": rollout.num_engines != 1,
        f"rollout.num_threads={rollout.num_threads}: with more than one thread the last bits of a logprob depend on "
        "what the engine computes beside it; record with rollout.num_threads=1": rollout.num_threads != 1,
        f"{model_type} carries a state from token to token, which the engine computes by other sums when it goes on "
        "after a weight sync than when it samples in one go; train it without rollout.max_staleness": is_recurrent,
        "the run had several ranks, whose sums round in another order here; record in one process": not all(
            line.is_alone for line in recorded.collections
        ),
        f"algorithm.advantage={config.algorithm.advantage} needs greedy answers, which are not saved": (
            config.plan.needs_greedy
        ),
        "teacher.path: the scores of a teacher are of its own engine, which a replay does not start": (
            config.has_teacher
        ),
        "correction.routing_replay=engine: experts of an interrupted call are not saved by version; record with "
        "correction.routing_replay=off": config.plan.replays_engine,
        f"environment={config.environment.name}: the calls of an agent come from outside of its episode": (
            declaration(config.environment.name).uses_gateway
        ),
    }
    for sentence, holds in problems.items():
        if holds:
            raise ConfigError(f"{recorded.directory.path} cannot be replayed bit for bit: {sentence}")


class _Assembly(Assembly):
    """Assembly of a run whose rollouts follow another run."""

    engine: PacedEngine
    source: FollowedSource

    def __init__(self, recorded: RecordedRun, config: Config, *args: Any) -> None:
        super().__init__(config, *args)
        self._recorded = recorded

    def _rollout_parts(self, engines: Engines, drivers: Drivers, chat: Chat, prompts: Prompts) -> RolloutParts:
        parts, config = super()._rollout_parts(engines, drivers, chat, prompts), self._config
        assert engines.pool is not None
        self.engine = PacedEngine(engines.pool)
        episodes = parts.episodes.__class__(
            drivers=drivers,
            sampler=make_sampler(config, engine=self.engine, chat=chat),
            rewards=parts.episodes.rewards,
        )
        sampling = make_sampling(config.rollout, chat, with_routes=False)
        self.source = FollowedSource(
            config, run=self._recorded, engine=self.engine, episodes=episodes, sampling=sampling, prompts=prompts
        )
        return RolloutParts(episodes=episodes, rollouts=self.source)


class _Comparison:
    """Comparison of the steps of a replay with those of the run."""

    def __init__(self, recorded: RecordedRun, distributed: Distributed, console: RunConsole, work: Path) -> None:
        self._recorded, self._distributed, self._work = recorded, distributed, work
        self._say = console.say
        self._num_metrics = self._num_checkpoints = 0

    def follow(self, trainer: Any, assembly: _Assembly) -> bool:
        """Train all batches, and say what was equal. Returns False after a difference."""
        num_batches, problem = 0, ""
        try:
            trainer.push_weights()
            for number in range(len(self._recorded.collections)):
                report = trainer.step()
                self._compare_metrics(number, report.metrics)
                self._compare_weights(report.update)
                num_batches += 1
                self._say(f"batch {num_batches}, update {report.update}: {len(report.rollouts)} rollouts are equal")
        except Difference as difference:
            problem = f"batch {num_batches + 1} differs: {safe_text(str(difference))}"
        engine = assembly.engine
        self._say(
            f"{num_batches} of {len(self._recorded.collections)} batches are equal bit for bit: {engine.num_tokens} "
            f"tokens with their logprobs ({engine.num_interrupted} calls went on with other weights), "
            f"{self._num_metrics} metrics, {self._num_checkpoints} checkpoints"
        )
        if assembly.source.num_left_out:
            self._say(
                f"{assembly.source.num_left_out} groups were not sampled: the run dropped them as too old, or was "
                "stopped before it trained them, so nothing depends on them"
            )
        if problem:
            self._say(problem)
        elif not self._num_checkpoints:
            self._say("no weights were compared: the run has no checkpoint (record with checkpoint.every=1)")
        return not problem

    def _compare_metrics(self, number: int, metrics: Mapping[str, float]) -> None:
        logged = self._recorded.metrics[number]
        for name in sorted(logged.keys() & metrics.keys()):
            if name.startswith(NOT_COMPARED) or (name.startswith("reward/") and name.count("/") > 1):
                continue
            now, then = metrics[name], math.nan if logged[name] is None else logged[name]
            if now != then and (math.isfinite(now) or math.isfinite(then)):
                raise Difference(f"{name} {now!r}, in the run {then!r}")
            self._num_metrics += 1

    def _compare_weights(self, update: int) -> None:
        """Compare parameters and the optimizer's state with the checkpoint of this update, if the run kept it."""
        path = self._recorded.directory.checkpoints / f"step-{update}"
        if not (path / MANIFEST).is_file():
            return
        place = self._work / "state"
        place.mkdir(exist_ok=True)
        self._distributed.save_state(place)
        for file in sorted(place.iterdir()):
            if fingerprint(file) != fingerprint(path / file.name):
                raise Difference(f"{file.name} of the state after update {update} has other bytes than in {path}")
        self._num_checkpoints += 1
