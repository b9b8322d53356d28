"""Split of made rows into training and held-out rows, by the prompt alone."""

from __future__ import annotations

import hashlib

HELDOUT_ONE_IN = 8
"""One prompt in eight is held out, chosen by its hash: the split does not depend on seed, order or number of rows."""


def is_heldout(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % HELDOUT_ONE_IN == 0
