"""The token budget of a pack, which is halved when memory runs out.

The step is then repeated whole, from cleared gradients. Because losses are divided by one denominator of the step,
smaller packs give the same gradient. The budget stays halved for the rest of the run.

Covered: forward and backward, of updates and of scoring, in one process and under DDP. After each forward and each
backward all ranks agree over the control group if memory ran out on one of them, and stop together. DDP reduces in an
empty microbatch after the last one, which no rank enters before all others have succeeded.
Not covered: ZeRO (DeepSpeed). Its forward and backward consist of collectives; a rank that fails inside one leaves the
others waiting there, where no agreement reaches them. That rank ends with a message, and the launcher ends the others.
Memory that runs out in the optimizer's step: parameters may be changed by then.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lockstep.rollout.errors import TrainingError
from lockstep.rollout.system.device_memory import is_out_of_memory
from lockstep.trainer.distributed.distributed import Distributed

T = TypeVar("T")


class MemoryRanOut(Exception):
    """Memory ran out on some rank; `TokenBudget.agreed` raises it on all, `TokenBudget.attempt` handles it."""


class TokenBudget:
    """Largest number of tokens in a pack, as far as known."""

    def __init__(self, tokens: int, distributed: Distributed) -> None:
        self.tokens = tokens
        self._distributed = distributed
        self.warn: Callable[[str], None] = logging.getLogger(__name__).warning
        """Called with a message at every halving."""

    def attempt(
        self,
        work: Callable[[int], T],
        row_lengths: Sequence[int],
        *,
        at_most: int | None = None,
        discard: Callable[[], None] = lambda: None,
    ) -> T:
        """Call `work(token budget)`, again with half the budget as long as memory runs out; a collective.

        Args:
            work: must wrap everything that can run out of memory in `agreed`.
            row_lengths: of the rows that `work` packs; the longest one is the smallest possible budget.
            at_most: smaller budget for this work alone.
            discard: clears the remains of a failed attempt.

        Raises `TrainingError` on all ranks if packs of one row are too large; on one rank under DeepSpeed.
        """
        while True:
            budget = self.tokens if at_most is None else min(at_most, self.tokens)
            try:
                return work(budget)
            except MemoryRanOut:
                pass
            # Here the exception is released, and with its traceback the tensors of the attempt.
            discard()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.tokens = self._smaller(min(budget, sum(row_lengths)), max(row_lengths, default=1))

    def agreed(self, work: Callable[[], T]) -> T:
        """Call `work()`; raise `MemoryRanOut` on all ranks if memory runs out on any."""
        result: T | None = None
        ran_out = False
        try:
            result = work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._distributed.uses_deepspeed:
                cause = str(error).partition("\n")[0]
                raise TrainingError(
                    f"out of memory in a pack of at most {self.tokens} tokens: {cause}. Under DeepSpeed "
                    f"the step cannot be repeated; set token_budget={max(self.tokens // 2, 1)} and resume=auto"
                ) from error
            ran_out = True
        if not self._distributed.uses_deepspeed:  # there, the failed rank has ended
            ran_out = bool(self._distributed.sum(torch.tensor([float(ran_out)])).item())
        if ran_out:
            raise MemoryRanOut
        return result  # type: ignore[return-value]

    def _smaller(self, largest_pack: int, longest_row: int) -> int:
        if largest_pack <= longest_row:
            raise TrainingError(
                f"out of memory with packs of one row each, of up to {longest_row} tokens; shorten rows "
                "(rollout.max_model_len, rollout.max_tokens_per_turn, environment.max_turns), or set "
                "model.gradient_checkpointing=true, model.dtype=bfloat16, or model.lora.rank=16"
            )
        smaller = max(largest_pack // 2, longest_row)
        self.warn(
            f"out of memory with token_budget={self.tokens}; from now on it is {smaller}, and the work is repeated "
            f"(set token_budget={smaller} to begin with it)"
        )
        return smaller
