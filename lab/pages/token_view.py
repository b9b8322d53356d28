"""Token view: rollouts as text in one HTML page, every token colored by the disagreement of engine and trainer.

The page is self-contained (no network, no library). Model output in it is untrusted: the template escapes its values,
the data is JSON in which no character can end the script element, and the script inserts text as text only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lockstep.lab.diagnosis.diagnosis import CaseReport, Diagnosis, conclude
from lockstep.lab.diagnosis.evidence import ScoredTokens
from lockstep.lab.diagnosis.examiner import report_step
from lockstep.lab.diagnosis.token_classes import CLASSES
from lockstep.lab.pages.chart import round_up
from lockstep.lab.pages.render import render, write_page
from lockstep.trainer.config.schema import Config
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.observe.token_texts import TokenTexts

TEMPLATE = "token_view.html.jinja"
MAX_ROLLOUTS = 64
"""Keeps the page below a few megabytes."""
STEP_ROLLOUTS = 16
"""Rollouts of a step in a page for trackers: some hundred kilobytes."""
WORST_SHOWN = 12
SMALLEST_SCALE = 0.01
"""Smallest |d| of a fully colored token [nats], so that rounding noise stays colorless."""


def write_token_view(path: Path, diagnosis: Diagnosis) -> None:
    """Write the page and create its directories. Raises OSError if the path cannot be written."""
    write_page(path, token_view(diagnosis))


def token_view(diagnosis: Diagnosis) -> str:
    """Render the page as HTML."""
    cases = diagnosis.distinct_cases
    return render(
        TEMPLATE,
        diagnosis=diagnosis,
        classes=CLASSES,
        worst_shown=WORST_SHOWN,
        num_turns=1 + max((turn for case in cases for turn in case.scored.batch.turns_N.tolist()), default=-1),
        data=script_json({"scale": color_scale(cases), "classes": CLASSES, "rollouts": _rollouts(cases)}),
    )


def step_token_view(report: StepReport, config: Config, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render some trainable rollouts of a training step, with the logprobs that it was trained with."""
    rollouts = [rollout for rollout in report.rollouts if rollout.is_trainable][:STEP_ROLLOUTS]
    case = report_step(rollouts, report.batch, report.logp_train_N, TokenTexts(tokenizer), config.correction)
    return token_view(conclude([case], config.model, config.correction, temperature=config.rollout.temperature))


def script_json(value: Any) -> Markup:
    """Serialize JSON for a script element, with markup characters escaped so that nothing can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def color_scale(cases: Sequence[CaseReport]) -> float:
    """Return the |d| of full color [nats]: the 95th percentile, rounded up to 1, 2 or 5 times a power of ten."""
    diffs = np.concatenate([np.zeros(1), *(case.scored.diff_N.abs().numpy() for case in cases)])
    scale = max(float(np.quantile(diffs, 0.95)), SMALLEST_SCALE)
    return float(f"{round_up(scale):.6g}")


def _rollouts(cases: Sequence[CaseReport]) -> list[dict[str, Any]]:
    """Return the rows of each rollout in the form that the page's script reads."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for case in cases:
        for index, row in enumerate(case.scored.batch.rows):
            rows.setdefault((case.name, row.rollout_id), []).append(_row(case.scored, index))
    return [{"case": name, "id": number, "rows": own} for (name, number), own in islice(rows.items(), MAX_ROLLOUTS)]


def _row(scored: ScoredTokens, index: int) -> dict[str, Any]:
    """Return ids and texts of all tokens of a row, and the facts about its trained tokens, which stand at `at`."""
    ids = scored.batch.rows[index].ids.tolist()
    start, end = scored.batch.layout.token_start[index : index + 2]
    return {
        "ids": ids,
        "texts": [scored.texts[token] for token in ids],
        "at": scored.position_N[start:end].tolist(),
        "samp": _rounded(scored.samp_N[start:end]),
        "train": _rounded(scored.train_N[start:end]),
        "diff": _rounded(scored.diff_N[start:end]),
        "weight": _rounded(scored.weight_N[start:end]),
        "version": scored.batch.versions_N[start:end].tolist(),
        "turn": scored.batch.turns_N[start:end].tolist(),
        "class": scored.class_N[start:end].tolist(),
    }


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
