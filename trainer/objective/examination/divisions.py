"""Divisions of a step that must not change gradients: of the toy step, and of the trainer's update."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """Parts of a step that stay whole in a microbatch."""

    TOKEN = "token"
    ROLLOUT = "rollout"
    ROW = "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A step on several ranks and in several microbatches."""

    ranks: int = 1
    microbatches: int | None = None
    """Number per rank; None: one per part."""
    part: Part = Part.TOKEN
    shares_prefixes: bool = False
    """True if the rows of a microbatch share their prefixes, which the tokens of the toy step do not have."""
    in_update: bool = False
    """True if the trainer's update is compared, too; its microbatches hold whole rows."""
    other_name: str | None = None

    @property
    def name(self) -> str:
        if self.other_name is not None:
            return self.other_name
        if self.shares_prefixes:
            return "shared prefixes" if self.ranks == 1 else f"shared prefixes on {self.ranks} ranks"
        if self.microbatches is None:
            return f"a microbatch per {self.part}"
        count = f"{self.ranks} rank{'s' * (self.ranks > 1)} x {self.microbatches} microbatch"
        return f"{count}{'es' * (self.microbatches > 1)}"


ONE_MICROBATCH = Division(microbatches=1)
DIVISIONS = (
    Division(ranks=1, microbatches=2, in_update=True),
    Division(ranks=1, microbatches=18),
    Division(ranks=2, microbatches=1, in_update=True),
    Division(ranks=2, microbatches=3, in_update=True),
    Division(ranks=3, microbatches=1),
    Division(ranks=3, microbatches=7),
    Division(microbatches=1, other_name="tokens in another order"),
    Division(part=Part.ROLLOUT),
    Division(part=Part.ROW, in_update=True, other_name="a microbatch per row (branches apart)"),
    Division(ranks=2, part=Part.ROW, in_update=True, other_name="branches on different ranks"),
    Division(microbatches=1, shares_prefixes=True, in_update=True),
    Division(ranks=2, microbatches=2, shares_prefixes=True, in_update=True),
)
"""Each is compared with `ONE_MICROBATCH`."""
