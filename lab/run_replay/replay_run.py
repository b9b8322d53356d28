"""Replay of a whole run with rollouts made ahead (`lockstep replay --run`): trained again, by the run's own log.

    log            ─► groups begin and arrive as in the run ─┐
    saved rollouts ─► versions of all tokens ─► engine ──────┴─► Trainer.step ─► all beside the numbers of the run

Everything is computed again: environments, rewards, sampling, training, weight syncs. From the run come the settings,
the data, and what the clock decided: the order in which groups arrived, and the weights that sampled each token. On a
CPU all else follows bit for bit. The first difference ends the replay.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
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
from lockstep.trainer.config.user_code import outside_of
from lockstep.trainer.data.prompts import Prompts
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.run_engines import Engines
from lockstep.trainer.model.families import FAMILIES
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.run.assembly import Assembly, RolloutParts
from lockstep.trainer.run.library_logs import ThirdPartyLog, quiet_third_parties
from lockstep.trainer.step import Trainer

NOT_COMPARED = (
    *("time/", "perf/", "sync/", "eval/", "health/", "judge/", "rollout/duration_s"),
    *("rollout/reissued", "rollout/groups_lost_to_engine", "rollout/engine_restarts"),
)
"""Prefixes of metrics that measure time, that a replay does not compute, or that count what became of groups that are
not trained. Those of single reward functions (`reward/<function>/mean`, `reward/errors/*`), too, are of the groups that
were scored since the step before; rewards themselves are compared."""


def replay_run(path: Path, *, overrides: Sequence[str], trusts_run: bool = False) -> bool:
    """Train a run again, and print what was compared. Returns False after a difference, which is printed.

    trusts_run: see `settings_of`. Raises `ConfigError`, before an engine starts, for a run that cannot be followed bit
    for bit, and `DataError` for damaged files.
    """
    quiet_third_parties()
    run = behind_link(path)
    recorded = RecordedRun(run)
    config = settings_of(run, overrides, sample=True, trusts_run=trusts_run)
    _refuse_inexact(lambda name: attrgetter(name)(config), recorded)
    config.rollout.engine_restarts = 0
    optimizer = config.optimizer
    distributed = Distributed.start(
        dtype=config.model.dtype, max_grad_norm=optimizer.max_grad_norm, reduce_dtype=optimizer.reduce_dtype
    )
    with distributed, tempfile.TemporaryDirectory(prefix="lockstep-replay-") as work, BackgroundLoop() as loop:
        if distributed.world_size > 1:
            raise ConfigError("a run is replayed in one process; start it with `lockstep replay`")
        console = RunConsole(enabled=True, total_updates=config.updates)
        console.say(f"replay of      {redact_text(str(run))}, {len(recorded.collections)} batches")
        if programs := outside_of(config):
            text = redact_text(", ".join(programs))
            console.say(f"code, programs, addresses and variables used with your rights: {text}")
        directory, libraries = RunDirectory(Path(work)), ThirdPartyLog()
        directory.media = recorded.directory.media
        directory.logs.mkdir()
        libraries.open(directory.logs / "libraries.log", console.warn)
        torch.manual_seed(config.seed)
        assembly = _Assembly(recorded, config, distributed, directory, loop, console, libraries)
        with libraries.shown_on_failure():
            parts = assembly.parts()
        try:
            return _Comparison(recorded, distributed, console, Path(work)).follow(parts.trainer, assembly)
        finally:
            parts.close_collection()
            parts.engines.close()


def _refuse_inexact(setting: Callable[[str], Any], recorded: RecordedRun) -> None:
    """Raise `ConfigError` for settings with which a replay could not give the same bits, or not follow at all.

    setting: returns the setting of a name.
    """
    rollout, plan, dtype = setting("rollout"), setting("plan"), setting("model.dtype")
    advantage, environment = setting("algorithm.advantage"), setting("environment.name")
    model = AutoConfig.from_pretrained(setting("model.path"), trust_remote_code=setting("model.trust_remote_code"))
    model_type = model.get_text_config().model_type
    recurrent_types = [name for family in FAMILIES if family.is_recurrent for name in family.model_types]
    beside = "the last bits of a logprob depend on what the engine computes beside it; record with"
    problems = {
        "this machine has a GPU, and runs are followed on CPUs; hide it: CUDA_VISIBLE_DEVICES= lockstep replay ...": (
            torch.cuda.is_available()
        ),
        f"rollout.engine={rollout.engine}: {beside} rollout=embedded": rollout.engine != "embedded",
        f"rollout.num_engines={rollout.num_engines}: which engine sampled a token is not recorded; record with "
        "rollout.num_engines=1": rollout.num_engines != 1,
        f"rollout.num_threads={'null' if rollout.num_threads is None else rollout.num_threads}: with several threads "
        f"{beside} rollout.num_threads=1": rollout.num_threads != 1,
        f"model.dtype={dtype}: {beside} model.dtype=float32": dtype != "float32",
        f"a model of type {model_type} carries a state from token to token, and after a sync the engine computes it "
        "by other sums; train it without rollout.max_staleness": model_type in recurrent_types,
        "the run had several ranks, whose sums round in another order here; record in one process": not all(
            line.is_alone for line in recorded.collections
        ),
        f"algorithm.advantage={advantage}: greedy answers are not saved": plan.needs_greedy,
        "teacher.path: a replay starts no teacher": setting("has_teacher"),
        "correction.routing_replay=engine: the experts of an interrupted call cannot be asked for again; record with "
        "correction.routing_replay=off": plan.replays_engine,
        f"environment={environment}: calls of an agent come from outside of its episode": (
            declaration(environment).uses_gateway
        ),
    }
    for sentence, holds in problems.items():
        if holds:
            raise ConfigError(f"{recorded.directory.path} cannot be followed bit for bit: {sentence}")


class _Assembly(Assembly):
    """Assembly of a run whose rollouts follow another run."""

    engine: PacedEngine
    source: FollowedSource

    def __init__(self, recorded: RecordedRun, *args: Any) -> None:
        super().__init__(*args)
        self._recorded = recorded

    def _rollout_parts(self, engines: Engines, drivers: Drivers, chat: Chat, prompts: Prompts) -> RolloutParts:
        parts, config = super()._rollout_parts(engines, drivers, chat, prompts), self._config
        assert engines.pool is not None
        patience_s = config.rollout.request_timeout_s + config.environment.call_timeout_s
        self.engine = PacedEngine(engines.pool, patience_s=patience_s)
        sampler = make_sampler(config, engine=self.engine, chat=chat)  # type: ignore[arg-type]  # `__getattr__`
        episodes = replace(parts.episodes, sampler=sampler)
        sampling = make_sampling(config.rollout, chat, with_routes=False)
        self.source = FollowedSource(
            self._recorded, self.engine, config, episodes=episodes, sampling=sampling, prompts=prompts
        )
        return RolloutParts(episodes=episodes, rollouts=self.source)


class _Comparison:
    """Comparison of the steps of a replay with those of the run."""

    def __init__(self, recorded: RecordedRun, distributed: Distributed, console: RunConsole, work: Path) -> None:
        self._recorded, self._distributed, self._work = recorded, distributed, work
        self._say = console.say
        self._num_metrics = self._num_checkpoints = 0

    def follow(self, trainer: Trainer, assembly: _Assembly) -> bool:
        """Train all batches, and say what was equal. Returns False after a difference."""
        num_equal, num_batches, problem = 0, len(self._recorded.collections), ""
        try:
            trainer.push_weights()
            for number in range(num_batches):
                report = trainer.step()
                self._compare_metrics(number, report.metrics)
                self._compare_state(report.update)
                num_equal += 1
                self._say(f"batch {num_equal}, update {report.update}: {len(report.rollouts)} rollouts are equal")
        except Difference as difference:
            problem = f"batch {num_equal + 1} differs: {safe_text(str(difference))}"
        engine, num_left_out = assembly.engine, assembly.source.num_left_out
        self._say(
            f"{num_equal} of {num_batches} batches are equal bit for bit: {engine.num_tokens} tokens with their "
            f"logprobs ({engine.num_interrupted} calls went on with other weights), {self._num_metrics} metrics, "
            f"{self._num_checkpoints} checkpoints"
        )
        if num_left_out:
            self._say(
                f"{num_left_out} groups were not sampled: the run ended them untrained, so nothing depends on them"
            )
        if not self._num_checkpoints:
            self._say("no weights were compared: the run kept no checkpoint of these updates (checkpoint.keep)")
        if problem:
            self._say(problem)
        return not problem

    def _compare_metrics(self, number: int, metrics: Mapping[str, float]) -> None:
        logged = self._recorded.metrics[number]
        for name in sorted(logged.keys() & metrics.keys()):
            if name.startswith(NOT_COMPARED) or (name.startswith("reward/") and name.count("/") > 1):
                continue
            now, then = metrics[name], math.nan if logged[name] is None else logged[name]
            if now != then and (math.isfinite(now) or math.isfinite(then)):
                raise Difference(f"{name} is {now!r}, in the run {then!r}")
            self._num_metrics += 1

    def _compare_state(self, update: int) -> None:
        """Compare parameters and the optimizer's state with the checkpoint of this update, if the run kept it."""
        path, place = self._recorded.directory.checkpoints / f"step-{update}", self._work / "state"
        if not (path / MANIFEST).is_file():
            return
        place.mkdir(exist_ok=True)
        self._distributed.save_state(place)
        for file in sorted(place.iterdir()):
            if fingerprint(file) != fingerprint(path / file.name):
                raise Difference(f"{file.name} after update {update} has other bytes than in {path}")
        self._num_checkpoints += 1
