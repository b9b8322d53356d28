"""The diagnosis in one command: start what is needed, sample or read, examine, report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from rollout.engine.pool import EnginePool
from rollout.errors import ConfigError
from rollout.system.background_loop import BackgroundLoop
from trainer.build import make_chat
from trainer.config.schema import Config
from trainer.diagnosis.bench import Bench, EngineScores
from trainer.diagnosis.cases import Case, sample_cases, saved_cases
from trainer.diagnosis.classes import TokenTexts
from trainer.diagnosis.report import Diagnosis, print_report
from trainer.diagnosis.saved import load_rollouts
from trainer.diagnosis.scored import CorrectionSettings
from trainer.diagnosis.scorer import EmbeddedScores, TrainerScorer
from trainer.diagnosis.variants import Variant
from trainer.distributed.distributed import Distributed
from trainer.engines.start import start_engine
from trainer.model.policy import Policy
from trainer.observe.pages.token_view import write_token_view
from trainer.run.library_logs import quiet_third_parties
from trainer.update.optimizer import make_optimizer

SAVED_ROLLOUTS = 64
"""Rollouts read from a file: enough for stable numbers, few enough for a laptop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for beside the settings of the run."""

    as_json: bool = False
    html: Path | None = None
    rollouts: Path | None = None
    """Saved rollouts to diagnose instead of new ones; then no engine is started."""
    variant: Variant | None = None


def run(config: Config, options: Options) -> Diagnosis:
    """Diagnose as configured and report. Raises `LockstepError` when model, data or engine cannot be used."""
    quiet_third_parties()
    console = Console(highlight=False, soft_wrap=True, quiet=options.as_json)
    diagnosis = diagnose(config, options, console)
    if options.html is not None:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        write_token_view(options.html, diagnosis, TokenTexts(tokenizer))
        console.print(f"token view   {options.html}", markup=False)
    if options.as_json:
        print(json.dumps(diagnosis.to_json(), allow_nan=False))
    else:
        print_report(diagnosis, console)
    return diagnosis


def diagnose(config: Config, options: Options, console: Console) -> Diagnosis:
    """The diagnosis alone, without its report."""
    if options.rollouts is not None:
        cases = saved_cases(load_rollouts(options.rollouts, limit=SAVED_ROLLOUTS))
        with open_bench(config, engine_scores=None) as bench:
            return bench.examine(cases, options.variant)
    with tempfile.TemporaryDirectory(prefix="lockstep-diagnose-") as logs, BackgroundLoop() as loop:
        console.print(f"starting the engine with {config.model.path} ...", markup=False)
        # The engine starts first, as in training: it must not inherit threads of a model that computes.
        engine = start_engine(config, loop=loop, log_path=Path(logs) / "engine.log")
        try:
            cases = sample(config, engine)
            with open_bench(config, engine_scores=EmbeddedScores(engine=engine, loop=loop)) as bench:
                return bench.examine(cases, options.variant)
        finally:
            loop.run(engine.close())


def sample(config: Config, engine: EnginePool) -> list[Case]:
    return engine.loop.run(sample_cases(config, engine=engine, chat=make_chat(config)))


@contextmanager
def open_bench(config: Config, *, engine_scores: EngineScores | None) -> Iterator[Bench]:
    """The policy as a run loads and wraps it, and what it is examined with.

    Raises `ConfigError` under `accelerate launch`: the diagnosis is one process.
    """
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    try:
        if distributed.world_size > 1:
            raise ConfigError("the diagnosis runs in one process; start it with `python scripts/diagnose.py`")
        policy = Policy.from_pretrained(
            config.model.path,
            dtype="float32",  # as in training: master weights, with precision left to the framework
            attn_implementation=config.attention,
            trust_remote_code=config.model.trust_remote_code,
        )
        module = distributed.prepare(policy, make_optimizer(policy, config.optimizer))
        correction = config.correction
        yield Bench(
            policy=policy,
            scorer=TrainerScorer(module=module, distributed=distributed, config=config),
            tokenizer=AutoTokenizer.from_pretrained(
                config.model.path, trust_remote_code=config.model.trust_remote_code
            ),
            engine_scores=engine_scores,
            temperature=config.rollout.temperature,
            correction=CorrectionSettings(mode=correction.mode, low=correction.low, high=correction.high),
            parity=make_chat(config).parity,
            settings={"model": config.model.path, "dtype": config.model.dtype, "correction": correction.mode},
        )
    finally:
        distributed.close()
