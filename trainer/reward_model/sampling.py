"""Fixed-length samples of a causal language model by transformers' own generation.

For what is sampled once, outside of training: data, and the responses that a reward model is normalised on. It samples
past every end of sequence (G4): transformers stops at it unless the model's own generation config is told not to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

SEED_STRIDE = 100_003
"""Between the seeds of ranks (G6)."""


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    queries: Sequence[Sequence[int]],
    *,
    length: int,
    temperature: float,
    seed: int,
    batch_size: int = 256,
) -> list[list[int]]:
    """`length` sampled tokens for each query, over the whole vocabulary.

    The order of queries and the batch size are part of what the seed gives. The random state of the process is as
    before afterwards.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    stops = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    settings = GenerationConfig(
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
    )
    responses: list[list[int]] = []
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for start in range(0, len(queries), batch_size):
                ids_BT, mask_BT = _left_padded(queries[start : start + batch_size])
                output = model.generate(  # type: ignore[operator]  # of the mixin that causal models have
                    input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), generation_config=settings
                )
                responses += output[:, ids_BT.shape[1] :].tolist()
    finally:
        model.generation_config.eos_token_id = stops
        model.train(was_training)
    return responses


def _left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) ids and attention mask, the ends of all rows in one column. Generation makes its own position ids."""
    width = max(map(len, rows))
    ids_BT, mask_BT = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids_BT[index, width - len(row) :] = torch.as_tensor(row)
        mask_BT[index, width - len(row) :] = 1
    return ids_BT, mask_BT
