"""The token view: rollouts as text in one HTML page, every token coloured by how much engine and trainer disagree.

The page is self-contained (no network, no library) and may show anything that a model wrote: server-side text goes
through jinja's autoescape, the data through JSON in which no character can end the script element, and the script
puts text into the page as text only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from trainer.diagnosis.cases import REEXAMINED
from trainer.diagnosis.classes import CLASSES, TokenTexts
from trainer.diagnosis.report import CaseReport, Diagnosis
from trainer.diagnosis.scored import ScoredRow
from trainer.observe.pages.render import render

TEMPLATE = "token_view.html.jinja"
MAX_ROLLOUTS = 64
"""A page of this many stays below a few megabytes."""
WORST_SHOWN = 12
SMALLEST_SCALE = 0.01
"""Colours are full at this disagreement or above [nats]: rounding noise stays colourless."""


def write_token_view(path: Path, diagnosis: Diagnosis, texts: TokenTexts) -> None:
    """Write the page; directories are made. Raises OSError where the path cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(token_view(diagnosis, texts), encoding="utf-8")


def token_view(diagnosis: Diagnosis, texts: TokenTexts) -> str:
    """The page as HTML."""
    cases = [case for case in diagnosis.cases if case.name not in REEXAMINED]
    return render(
        TEMPLATE,
        diagnosis=diagnosis,
        classes=CLASSES,
        worst_shown=WORST_SHOWN,
        num_turns=1 + max((int(turn) for case in cases for turn in case.by_turn), default=-1),
        data=script_json({"scale": color_scale(cases), "classes": CLASSES, "rollouts": _rollouts(cases, texts)}),
    )


def script_json(value: Any) -> Markup:
    """JSON for a script element: nothing in it can be read as markup, and so nothing can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def color_scale(cases: Sequence[CaseReport]) -> float:
    """|d| at which colours are full [nats]: the 95th percentile, rounded up to 1, 2 or 5 times a power of ten."""
    diffs = np.concatenate([np.zeros(1), *(np.abs(s.diff_T) for case in cases for s in case.scored)])
    wanted = max(float(np.quantile(diffs, 0.95)), SMALLEST_SCALE)
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(float(f"{step * power:.6g}") for step in (1, 2, 5, 10) if step * power >= wanted * (1 - 1e-9))


def _rollouts(cases: Sequence[CaseReport], texts: TokenTexts) -> list[dict[str, Any]]:
    """What the page shows, rollout by rollout."""
    shown: list[dict[str, Any]] = []
    for case in cases:
        rows_of: dict[int, list[ScoredRow]] = {}
        for scored in case.scored:
            rows_of.setdefault(scored.row.rollout_id, []).append(scored)
        for rollout_id, rows in rows_of.items():
            shown.append({"case": case.name, "id": rollout_id, "rows": [_row(scored, texts) for scored in rows]})
    return shown[:MAX_ROLLOUTS]


def _row(scored: ScoredRow, texts: TokenTexts) -> dict[str, Any]:
    """Ids and texts of all tokens; what is known of the trained ones, at `at`."""
    ids = scored.row.ids.tolist()
    return {
        "ids": ids,
        "texts": [texts[token] for token in ids],
        "at": scored.position_T.tolist(),
        "samp": _rounded(scored.logp_samp_T),
        "train": _rounded(scored.logp_train_T),
        "diff": _rounded(scored.diff_T),
        "weight": _rounded(scored.weight_T),
        "version": scored.row.versions[scored.position_T].tolist(),
        "turn": scored.turn_T.tolist(),
        "class": scored.class_T.tolist(),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
