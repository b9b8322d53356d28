"""Finding of one check of a loss or an advantage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Correct, but something is better said to the trainer."""
    FAILS = "FAILS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    """Name of the check in a few words."""
    verdict: Verdict = Verdict.OK
    sentence: str = ""
    """The fault, why it matters, and what to write instead; empty if there is none."""
    measured: str = ""


def failure(check: str, sentence: str, measured: str = "") -> Finding:
    return Finding(check=check, verdict=Verdict.FAILS, sentence=sentence, measured=measured)
