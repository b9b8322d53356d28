"""Media of a step for trackers: a table of rollouts, histograms, and pages that other packages make of a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lockstep.rollout.records import content_text
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.kl import bounded
from lockstep.trainer.objective.per_rollout import rollout_mean
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.observe.trackers.tracker import Histogram, Medium, Page, Table
from lockstep.trainer.observe.transcript import image_mark, tool_calls

BINS = 64
PAGES = "lockstep.media"
"""Group of entry points, each a function of a step's report, the settings and the tokenizer that returns HTML."""
COLUMNS = (
    *("update", "rollout", "group", "prompt", "turns", "reward", "rewards", "advantage", "tokens", "num_turns"),
    *("status", "finish", "error"),
)


def step_media(
    report: StepReport,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    tolerating: Callable[[str], AbstractContextManager[None]],
) -> dict[str, Medium]:
    """Return the media of one step by name. tolerating: that of `MetricsLog`; a page that fails is left out."""
    rows = table_rows(report)[: config.logger.wandb_rollouts]
    media: dict[str, Medium] = {"media/rollouts": Table(columns=COLUMNS, rows=rows)}
    if config.model.sees_images:
        from lockstep.trainer.observe.trackers.image_table import ImageTable, strip_of  # other runs do not load it

        strips = [strip_of(rollout, tolerating) for rollout in report.rollouts[: len(rows)]]
        media["media/rollouts"] = ImageTable(columns=COLUMNS, rows=rows, strips=strips)
    for name, values in distributions(report).items():
        if len(values):
            counts, edges = np.histogram(values, bins=BINS)
            media[f"histograms/{name}"] = Histogram(counts=counts, edges=edges)
    if report.batch.layout.num_tokens:
        for page in entry_points(group=PAGES):
            with tolerating(f"media/{page.name} (entry point {PAGES}: {page.value})"):
                media[f"media/{page.name}"] = Page(html=_html(page.load()(report, config, tokenizer)))
    return media


def table_rows(report: StepReport) -> list[list[Any]]:
    """Return one row per rollout, in the order of `COLUMNS`."""
    advantages = mean_advantages(report)
    return [
        [
            report.update,
            rollout.rollout_id,
            rollout.group_id,
            _lines(rollout.prompt),
            _lines(rollout.completion),
            rollout.reward,
            json.dumps(dict(rollout.rewards)),
            advantages.get(rollout.rollout_id),
            rollout.num_sampled,
            rollout.num_turns,
            str(rollout.status),
            str(rollout.calls[-1].finish_reason) if rollout.calls else None,
            rollout.error,
        ]
        for rollout in report.rollouts
    ]


def mean_advantages(report: StepReport) -> dict[int, float]:
    """Return the mean advantage over each rollout's trained tokens, by rollout id; untrained ones are absent."""
    batch = report.batch
    if not batch.layout.num_tokens:
        return {}
    means_S = rollout_mean(report.advantages_N.double(), batch.rollout_N, batch.num_rollouts)
    present = set(batch.rollout_N.tolist())
    return {
        int(rollout_id): mean
        for index, (rollout_id, mean) in enumerate(zip(batch.rollout_ids, means_S.tolist(), strict=True))
        if index in present
    }


def distributions(report: StepReport) -> Mapping[str, np.ndarray]:
    """Return the values of each histogram: over trained tokens, or over rollouts."""
    log_ratio_N = bounded(report.logp_train_N.double() - report.batch.sampling_logprobs_N.double())
    return {
        "log_ratio": log_ratio_N.numpy(),
        "correction_weight": report.weights_N.double().numpy(),
        "advantage": report.advantages_N.double().numpy(),
        "sampling_logprob": report.batch.sampling_logprobs_N.double().numpy(),
        "reward": np.array([rollout.reward for rollout in report.rollouts if rollout.is_trainable]),
        "tokens": np.array([float(rollout.num_sampled) for rollout in report.rollouts]),
    }


def _html(page: Any) -> str:
    """Return a page that other code made. Raises TypeError."""
    if not isinstance(page, str):
        raise TypeError(f"it returned {type(page).__name__}, expected HTML as a str")
    return page


def _lines(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"{message['role']}: "
        + " ".join([content_text(message, image_mark), *(f"→ {call}" for call in tool_calls(message))]).strip()
        for message in messages
    )
