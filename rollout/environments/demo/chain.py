"""Environment `chain`: a chain of look-ups, a task of the demo. Each result names the next key, the last the value.

The reward comes after the last turn, so the task shows whether credit reaches the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message


class ChainEnvironment(ToolEnvironment):
    """`ToolEnvironment` with `lookup` in the row's column `links`, a list of {"key", "value"}."""

    declaration = Declaration(reads="prompt", max_turns=5, demo_task="chain")

    def __init__(self, **settings: Any):
        self._links: dict[str, str] = {}
        super().__init__([self.lookup], **settings)

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        try:
            self._links = {link["key"]: link["value"] for link in example.get("links") or ()}
        except (TypeError, KeyError):
            self._links = {}
        if not self._links:
            raise DataError("chain: the row has no links; expected a column links with a list of {key, value}")
        return super().read_row(example)

    async def lookup(self, key: str) -> str:
        """Look up what a key says.

        Args:
            key: for example c42
        """
        if key not in self._links:
            raise ValueError(f"nothing is known about {key}")
        return self._links[key]
