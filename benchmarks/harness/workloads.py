"""Workloads that Lockstep and TRL both train on, and their models.

    equal       the demo: turns of nearly the same length (multi-turn), or exactly (single-turn, no end token)
    lognormal   turns with a log-normal number of tokens (`long_winded.py`)

In both trainers the model decides the lengths; only `fixed_tokens` forces them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from harness.long_winded import make_long_winded_model

ROOT = Path(__file__).resolve().parents[2]
PEER_ENGINES = ("transformers", "paged", "vllm")
"""Engines of TRL's generation; paged: its continuous batching."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task, a model and a batch, shared by both sides."""

    name: str
    task: str
    """Task of the demo: data, environment and reward."""
    max_turns: int
    is_long_winded: bool = False
    fixed_tokens: int | None = None
    """Every turn has exactly this many tokens; None: the model ends its turns."""
    max_tokens_per_turn: int = 48
    prompts: int = 16
    samples_per_prompt: int = 8
    learning_rate: float = 3e-4
    """Almost 0 where lengths must not change: at the demo's rate they fall to a third in four updates."""

    @property
    def batch(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def model_path(self) -> Path:
        return ROOT / "models" / (f"{self.task}-long-winded" if self.is_long_winded else self.task)

    @property
    def data_path(self) -> Path:
        return ROOT / "data" / "demo" / self.task / "train.jsonl"

    @property
    def horizon(self) -> int:
        """Maximal number of tokens after the prompt: turns, and tool answers between them."""
        return self.max_turns * (self.max_tokens_per_turn + 24)

    @property
    def max_model_len(self) -> int:
        return 160 + self.horizon

    def prepare(self) -> None:
        """Make the model and its data if they are missing."""
        from rich.console import Console

        from demo.make import make_demo

        console = Console(file=sys.stderr)
        make_demo(self.task, ROOT / "models" / self.task, self.data_path.parent, 0, console)
        if self.is_long_winded:
            make_long_winded_model(self.task, ROOT / "models" / self.task, self.model_path, console)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="single_equal", task="reverse", max_turns=1, fixed_tokens=64, max_tokens_per_turn=64),
        Workload(
            name="single_lognormal",
            task="reverse",
            max_turns=1,
            is_long_winded=True,
            max_tokens_per_turn=256,
            learning_rate=1e-8,
        ),
        Workload(name="multi_equal", task="calculator", max_turns=3),
        Workload(
            name="multi_lognormal",
            task="calculator",
            max_turns=3,
            is_long_winded=True,
            max_tokens_per_turn=256,
            learning_rate=1e-8,
        ),
    )
}
