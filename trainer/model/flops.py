"""How much arithmetic an update asks for, and what share of the devices' that is (`perf/mfu`).

Counted is what the model needs for a forward and a backward pass over the rows (Kaplan et al. 2020, arXiv:2001.08361;
Chowdhery et al. 2022, arXiv:2204.02311, appendix B): not what gradient checkpointing computes again, no scoring passes.
Not covered: mixtures of experts, of which a token meets only some (runs report nothing for them); layers without
attention over the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.model.memory_plan import ModelShape


def update_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Of one pass forward and backward.

    A token takes 2 per parameter forward, 2 backward for what it came from, and 2 where the parameter has a gradient.
    Attention multiplies twice, for scores and for values: per layer and unit of its width 4 for a pair of tokens
    forward and 8 backward, of which the causal mask leaves half.

    Args:
        lengths: tokens of each row.
    """
    looked_up = 0 if shape.is_tied else shape.vocabulary * shape.hidden  # the embedding multiplies nothing
    is_embedding_trained = shape.trained == shape.parameters
    per_token = 4.0 * (shape.parameters - looked_up) + 2.0 * (shape.trained - looked_up * is_embedding_trained)
    pairs = sum(float(length) ** 2 for length in lengths)
    return per_token * sum(lengths) + 6.0 * shape.layers * shape.attention * pairs
