"""Whole distributions of engine and trainer at some positions of a case: distances, and the tokens that move.

Compared are the distributions at temperature 1, before top-k, top-p and min-p: those that the weights define.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.rollout.weights.whole.distributions import MOST_MOVED, WholeResult
from lockstep.rollout.weights.whole.heard_logits import MAX_TOKENS

WORST, SPREAD = 8, 8
"""Positions with the largest |Δ log π| of the sampled token, and evenly spaced ones, of one row per case."""
CHOICE = (
    f"temperature 1, before masks; per case the row with the largest |Δ log π|, within its first {MAX_TOKENS} tokens: "
    f"its {WORST} worst positions and {SPREAD} evenly spaced"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseDistributions:
    """Distributions at n positions of one row."""

    rollout_id: int
    positions: tuple[int, ...]
    """Places in the row of the tokens that are predicted."""
    ids: tuple[int, ...]
    """Those tokens."""
    whole: WholeResult

    @property
    def explanation(self) -> str:
        numbers = {name: f"{number:.2g}" for name, number in self.whole.numbers().items()}
        return (
            "the distributions over the vocabulary differ: KL {kl} in the median, rounding explains {kl_limit}; log p "
            "of token {token} by {move}, rounding explains {move_limit}"
        ).format(token=self.moved[0]["token_id"], **numbers)

    @property
    def moved(self) -> list[dict[str, Any]]:
        """Tokens whose log p differs most in the median of the positions, where it differs most."""
        return [self._token(*one) for one in self.whole.moved()]

    def _token(self, n: int, token: int, logp: float, logq: float) -> dict[str, Any]:
        place = {"token_id": token, "position": self.positions[n]}
        return place | {"logp_engine": finite(logp), "logp_trainer": finite(logq)}

    def to_json(self, text: Callable[[int], str]) -> dict[str, Any]:
        """Return all numbers; those that are not finite are None. text: of a token."""

        def with_text(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [token | {"text": text(token["token_id"])} for token in tokens]

        (logp_nV, logq_nV), distance = self.whole.logprobs(), self.whole.distance
        mass_nV = (logp_nV.exp() - logq_nV.exp()).abs()
        rows = []
        for n, position in enumerate(self.positions):
            tokens = mass_nV[n].topk(min(MOST_MOVED, mass_nV.shape[1])).indices.tolist()
            row = {"kl": distance.kl_N[n], "kl_reverse": distance.reverse_kl_N[n], "tv": distance.tv_N[n]}
            moved = [self._token(n, token, logp_nV[n, token].item(), logq_nV[n, token].item()) for token in tokens]
            tops = {"top_engine": int(logp_nV[n].argmax()), "top_trainer": int(logq_nV[n].argmax())}
            place = {"position": position, "token_id": self.ids[n]}
            rows.append(place | {k: finite(v) for k, v in row.items()} | tops | {"moved": with_text(moved)})
        numbers = {name: finite(number) for name, number in self.whole.numbers().items()}
        about = {"rollout_id": self.rollout_id, "choice": CHOICE}
        return about | numbers | {"moved": with_text(self.moved), "positions": rows}


def finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
