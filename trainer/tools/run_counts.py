"""How much a run does, from its settings alone: rollouts, optimizer updates, tokens. For `dry_run=true`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArithmetic:
    """Counts of a run. A step is one rollout batch, an update one step of the optimizer."""

    prompts: int
    """Per step."""
    samples: int
    """Per prompt."""
    updates_per_step: int
    rollouts_per_update: int
    steps: int
    """To reach `updates`; more if steps have nothing to train."""
    updates: int
    sampled_tokens: int
    """Of a step, at most."""
    row_tokens: int
    """Of a row, at most: prompt and completion."""
    packs: int
    """Forward passes of an update on each rank if every row were as long as it can be."""
    token_budget: int
    ranks: int
    extra_rollouts: int
    """Of a step beside those that are trained, at most: refills of dynamic sampling, greedy answers of remax."""

    @classmethod
    def of(cls, config: Config, *, ranks: int) -> RunArithmetic:
        rollout, algorithm = config.rollout, config.algorithm
        batch = rollout.prompts_per_step * rollout.samples_per_prompt
        updates_per_step = algorithm.epochs * algorithm.minibatches
        rows_per_pack = max(1, config.token_budget // rollout.max_model_len)
        rows_per_rank = math.ceil(batch / algorithm.minibatches / ranks)
        extra = algorithm.max_refills * batch if algorithm.dynamic_sampling else 0
        if config.needs_greedy:
            extra += rollout.prompts_per_step
        per_turns = config.environment.max_turns * rollout.max_tokens_per_turn
        return cls(
            prompts=rollout.prompts_per_step,
            samples=rollout.samples_per_prompt,
            updates_per_step=updates_per_step,
            rollouts_per_update=batch // algorithm.minibatches,
            steps=math.ceil(config.updates / updates_per_step),
            updates=config.updates,
            sampled_tokens=batch * min(per_turns, rollout.max_model_len),
            row_tokens=rollout.max_model_len,
            packs=math.ceil(rows_per_rank / rows_per_pack),
            token_budget=config.token_budget,
            ranks=ranks,
            extra_rollouts=extra,
        )

    @property
    def rollouts(self) -> int:
        """Of a step, that can be trained."""
        return self.prompts * self.samples

    def lines(self, *, data_rows: int) -> list[tuple[str, str]]:
        """What is counted, and the count in words."""
        taken = self.prompts * self.steps
        lines = [
            ("a step samples", f"{self.prompts} prompts x {self.samples} samples = {self.rollouts:,} rollouts"),
            ("", f"at most {self.sampled_tokens:,} sampled tokens"),
        ]
        if self.extra_rollouts:
            lines.append(("", f"and up to {self.extra_rollouts:,} more rollouts (refills or greedy answers)"))
        lines += [
            (
                "a step trains",
                f"{self.updates_per_step} optimizer updates on {self.rollouts_per_update:,} rollouts each",
            ),
            (
                "an update runs",
                f"at most {self.packs} packs of {self.token_budget:,} tokens on each of {self.ranks} rank(s), were all "
                f"rows as long as the context of {self.row_tokens:,}",
            ),
            (
                "the run makes",
                f"{self.updates:,} updates in {self.steps:,} steps, {self.steps * self.rollouts:,} rollouts",
            ),
            ("the run reads", f"{taken:,} prompts, {taken / data_rows:.2f} times the {data_rows:,} rows of the data"),
        ]
        return lines
