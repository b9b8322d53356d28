"""workers/gradients.py with an allocator that fails on rank 1 in updates with a pack of more than LIMIT tokens.

out_of_memory.py MODEL_DIR OUT.npz PRESET[,PRESET...] TOKEN_BUDGET LIMIT
"""

import os
import sys

import gradients  # type: ignore[import-not-found]  # beside this file, which is run as a script
import torch

from lockstep.trainer.model.policy import Policy

if __name__ == "__main__":
    *arguments, limit = sys.argv[1:]
    with_room = Policy.forward

    def forward(self, packed, **settings):
        if os.environ["RANK"] == "1" and torch.is_grad_enabled() and packed.num_tokens > int(limit):
            raise torch.OutOfMemoryError(f"injected on rank 1: no room for {packed.num_tokens} tokens")
        return with_room(self, packed, **settings)

    Policy.forward = forward  # type: ignore[method-assign]
    gradients.main(*arguments)
