"""Diagnosis of a model (`lockstep diagnose`): sample or load rollouts, examine them or locate an operator, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from lockstep.lab.diagnosis.cases import Case, sample_cases
from lockstep.lab.diagnosis.causes import Cause
from lockstep.lab.diagnosis.diagnosis import Diagnosis, print_diagnosis
from lockstep.lab.diagnosis.examiner import Examiner
from lockstep.lab.diagnosis.saved import load_rollouts
from lockstep.lab.diagnosis.whole_case import compare_case
from lockstep.lab.locate.location import Location
from lockstep.lab.locate.location_report import print_location, to_json
from lockstep.lab.locate.setup import Subject, locate_run, refuse_unfit
from lockstep.lab.pages.location_page import write_location_page
from lockstep.lab.pages.token_view import write_token_view
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.saved_rollouts import check_ids
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.build import load_policy, make_chat
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.start import open_engine
from lockstep.trainer.model.decoder import decoder_setup
from lockstep.trainer.model.layers.vision import image_source
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.run.library_logs import quiet_third_parties
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.optimizers.optimizer import make_optimizer

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

WIDTH = 1000
"""Columns of the console. In a log file rich would otherwise cut tables at 80."""


def run(
    config: Config,
    *,
    as_json: bool = False,
    html: Path | None = None,
    rollouts: Path | None = None,
    variant: Cause | None = None,
) -> Diagnosis:
    """Diagnose and report. Raises `LockstepError` if model, data or engine cannot be used.

    rollouts: file to diagnose without an engine; None: sample new ones.
    """
    quiet_third_parties()
    console = Console(highlight=False, soft_wrap=True, width=WIDTH, quiet=as_json)
    media = None if rollouts is None else rollouts.resolve().parent.parent / "media"  # of the run that saved them
    chat = make_chat(config.model, history=config.environment.history, media=media)
    examiner = partial(
        Examiner, model=config.model, correction=config.correction, temperature=config.rollout.temperature,
        with_routes=config.plan.replays_engine, chat=chat,
    )  # fmt: skip
    if rollouts is not None:
        console.print(f"rollouts     {rollouts}", markup=False)
        case = Case(name="saved_rollouts", purpose="rollouts saved by a run", rollouts=load_rollouts(rollouts))
        with open_scorer(config, chat.images) as (policy, score):
            check_ids(case.rollouts, vocab_size=policy.vocab_size)
            diagnosis = examiner(policy=policy, score=score, engine=None).examine([case], variant)
    else:
        console.print(f"starting the engine with {config.model.path} ...", markup=False)
        # As in training, the engine starts first, so that it does not inherit threads of a computing model.
        with open_engine(config, chat.images) as engine:
            cases = engine.loop.run(sample_cases(config, engine=engine, chat=chat))
            with open_scorer(config, chat.images) as (policy, score):
                whole = partial(
                    compare_case, policy=policy, score=score, engine=engine, dtype=getattr(torch, config.model.dtype),
                    is_quantized=config.rollout.quantization is not None,
                )  # fmt: skip
                diagnosis = examiner(policy=policy, score=score, engine=engine, whole=whole).examine(cases, variant)
    if html is not None:
        _write(html, lambda: write_token_view(html, diagnosis))
        console.print(f"token view   {html}", markup=False)
    if as_json:
        print(json.dumps(diagnosis.to_json(), allow_nan=False))
    else:
        print_diagnosis(diagnosis, console)
    return diagnosis


def run_location(subject: Subject, *, as_json: bool = False, html: Path | None = None) -> Location:
    """Name the operator at which engine and trainer part, and report. Raises `LockstepError` if it cannot be done."""
    quiet_third_parties()
    console = Console(highlight=False, soft_wrap=True, width=WIDTH, quiet=as_json)
    refuse_unfit(subject)
    console.print(f"starting the engine with {subject.model.path} in this process ...", markup=False)
    location = locate_run(subject)
    settings = {"model": subject.model.path, "engine_dtype": subject.model.dtype, "trainer_dtype": "float32"}
    if html is not None:
        _write(html, lambda: write_location_page(html, location, settings))
        console.print(f"heat map     {html}", markup=False)
    if as_json:
        print(json.dumps(to_json(location, settings), allow_nan=False))
    else:
        print_location(location, console)
    return location


def _write(html: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"--html {html} cannot be written: {error}") from error


@contextmanager
def open_scorer(config: Config, processing: ImageProcessing | None) -> Iterator[tuple[Policy, Callable[..., Tensor]]]:
    """Load and wrap the policy as a run does, and yield it with `Examiner.score`.

    processing: of images; None: rows have none. Raises `ConfigError` if there are several ranks.
    """
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    with distributed:
        if distributed.world_size > 1:
            raise ConfigError("the diagnosis runs in one process; start it with `lockstep diagnose`")
        policy = load_policy(config.model, decoder_setup(config.model, config.rotary_context))
        module = distributed.prepare(policy, make_optimizer(policy, config.optimizer))
        images = None if processing is None else image_source(policy.causal_lm.config, processing.prepared)

        def score(batch: StepBatch, *, temperature: float, alone: bool = False) -> Tensor:
            budget = 1 if alone else config.pack_tokens  # rows above the budget are packed alone
            settings = {"token_budget": budget, "share_prefixes": config.share_prefixes, "images": images}
            return Scorer(module, distributed, temperature=temperature, **settings).score(batch)

        yield policy, score
