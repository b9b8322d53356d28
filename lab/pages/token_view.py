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

from lockstep.lab.diagnosis.case_distributions import CHOICE, finite
from lockstep.lab.diagnosis.diagnosis import WHOLE_COLUMNS, CaseReport, Diagnosis, conclude, general
from lockstep.lab.diagnosis.evidence import ScoredTokens
from lockstep.lab.diagnosis.examiner import report_step
from lockstep.lab.diagnosis.token_classes import CLASSES
from lockstep.lab.pages.chart import round_up
from lockstep.lab.pages.render import render, write_page
from lockstep.lab.pages.thumbnails import Thumbnails, run_image
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
    """Render the page as HTML, with images of the run of this process."""
    cases = diagnosis.distinct_cases
    thumbnails = Thumbnails(run_image)
    rollouts = _rollouts(cases, thumbnails)
    images = {one.digest: {"name": one.name, "url": one.url, "problem": one.problem} for one in thumbnails.all}
    return render(
        TEMPLATE,
        diagnosis=diagnosis,
        classes=CLASSES,
        worst_shown=WORST_SHOWN,
        num_turns=1 + max((turn for case in cases for turn in case.scored.batch.turns_N.tolist()), default=-1),
        note=thumbnails.note,
        whole=[case for case in cases if case.evidence.whole is not None],
        choice=CHOICE,
        columns=WHOLE_COLUMNS,
        general=general,
        finite=finite,
        data=script_json({"scale": color_scale(cases), "classes": CLASSES, "rollouts": rollouts, "images": images}),
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


def _rollouts(cases: Sequence[CaseReport], thumbnails: Thumbnails) -> list[dict[str, Any]]:
    """Return the rows of each rollout in the form that the page's script reads, and make thumbnails of their images."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for case in cases:
        for index, row in enumerate(case.scored.batch.rows):
            rows.setdefault((case.name, row.rollout_id), []).append(_row(case.scored, index))
    page_rollouts = [
        {"case": name, "id": number, "rows": own} for (name, number), own in islice(rows.items(), MAX_ROLLOUTS)
    ]
    for _, _, digest in (image for rollout in page_rollouts for row in rollout["rows"] for image in row["images"]):
        thumbnails.of(digest)
    return page_rollouts


def _row(scored: ScoredTokens, index: int) -> dict[str, Any]:
    """Return ids and texts of all tokens of a row, and the facts about its trained tokens, which stand at `at`.

    The first token of an image has the text `[image]`, the others none.
    """
    row = scored.batch.rows[index]
    ids = row.ids.tolist()
    texts = [scored.texts[token] for token in ids]
    for image in row.images:
        texts[image.start : image.end] = ["[image]", *[""] * (image.end - image.start - 1)]
    start, end = scored.batch.layout.token_start[index : index + 2]
    return {
        "ids": ids,
        "texts": texts,
        "images": [(image.start, image.end, image.digest) for image in row.images],
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
