"""The token budget of a pack, halved when memory runs out, and the work done again: same gradient.

A step that runs out of memory is repeated whole, from cleared gradients. Because losses are divided by one denominator
of the step, smaller packs change nothing but the time. The budget stays halved for the rest of the run.

Covered: forward and backward, of updates and of scoring, in one process and under DDP. After each forward and each
backward all ranks learn over the control group whether memory ran out on one of them, and all give up together; what
DDP reduces, it reduces in an empty microbatch behind the last one, which no rank enters before all have room.
Not covered: ZeRO (DeepSpeed). Its forward and backward consist of collectives; a rank that fails inside of one leaves
the others waiting there, and no agreement can reach them. That rank ends with a sentence, and the launcher ends the
others. Nor memory that runs out in the optimizer's step: parameters may be changed by then.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from rollout.errors import TrainingError
from trainer.distributed.distributed import Distributed

T = TypeVar("T")

CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""What PyTorch's RuntimeError says when the CPU's memory is used up; on GPUs there is an exception of its own."""


class MemoryRanOut(Exception):
    """On some rank; raised on all of them by `TokenBudget.agreed` and answered by `TokenBudget.attempt`."""


class TokenBudget:
    """Largest number of tokens in a pack, as far as is known."""

    def __init__(self, tokens: int, distributed: Distributed) -> None:
        self.tokens = tokens
        self._distributed = distributed
        self.warn: Callable[[str], None] = logging.getLogger(__name__).warning
        """Told of every halving."""

    def attempt(
        self,
        work: Callable[[int], T],
        row_lengths: Sequence[int],
        *,
        at_most: int | None = None,
        discard: Callable[[], None] = lambda: None,
    ) -> T:
        """`work(token budget)`, done again with half the budget for as long as memory runs out; a collective.

        Args:
            work: must put everything that can run out of memory into `agreed`.
            row_lengths: of the rows that `work` packs; the longest one is the least that a budget can be.
            at_most: a budget for this work alone, if it is smaller.
            discard: clears what an attempt that failed has left.

        Raises:
            TrainingError: on all ranks, if packs of one row are too large; on one rank under DeepSpeed.
        """
        while True:
            budget = self.tokens if at_most is None else min(at_most, self.tokens)
            try:
                return work(budget)
            except MemoryRanOut:
                pass
            # Here the exception is gone, and with its traceback the tensors of the attempt.
            discard()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.tokens = self._smaller(min(budget, sum(row_lengths)), max(row_lengths, default=1))

    def agreed(self, work: Callable[[], T]) -> T:
        """`work()`; if memory runs out in it on any rank, `MemoryRanOut` on all of them."""
        result: T | None = None
        ran_out = False
        try:
            result = work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._distributed.uses_deepspeed:
                raise TrainingError(
                    f"out of memory in a pack of at most {self.tokens} tokens: {_first_line(error)}. Under DeepSpeed "
                    f"the step cannot be repeated; set token_budget={max(self.tokens // 2, 1)} and resume=auto"
                ) from error
            ran_out = True
        # Under DeepSpeed nobody would listen.
        if self._distributed.world_size == 1 or self._distributed.uses_deepspeed:
            any_ran_out = ran_out
        else:
            any_ran_out = bool(self._distributed.sum(torch.tensor([float(ran_out)])).item())
        if any_ran_out:
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
            f"out of memory with token_budget={self.tokens}; from here on it is {smaller}, and the work is done again "
            f"(set token_budget={smaller} to begin with it)"
        )
        return smaller


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or CPU_ALLOCATOR in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
