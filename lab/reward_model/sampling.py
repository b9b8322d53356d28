"""Samples of the pretrained model, on which a reward model is normalized, by transformers' own generation.

Responses have a fixed length and continue past an end of sequence, at which transformers would stop by default. Source:
"The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), "Response generation samples a fixed-length
response without padding".
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from lockstep.lab.reward_model.config import RewardModelConfig
from lockstep.lab.reward_model.data import Lengths, query_ids, read_tokenizer
from lockstep.rewards.model.reward import StopRule, token_id_of
from lockstep.rewards.model.tokenizing import text_ids
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import LANGUAGE_MODEL
from lockstep.trainer.data.datasets import load_rows

SEED_STRIDE = 100_003
"""Difference between the seeds of ranks ("Use different seeds for different processes", same source)."""
BATCH_SIZE = 256
"""Queries per call of `generate`; part of what a seed determines."""


def normalization_samples(config: RewardModelConfig) -> list[list[int]]:
    """Sample this process's share of query and response ids, cut at the stop; empty without normalization.

    Call it before the ranks meet: under ZeRO-3 models loaded later are sharded and cannot generate on one rank.

    Raises:
        ConfigError: the model cannot be loaded.
        DataError: the queries cannot be loaded.
    """
    settings = config.normalization
    if not settings.num_samples:
        return []
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    path = settings.model_path or config.model.path
    setting = "normalization.model_path" if settings.model_path else "model.path"
    tokenizer, context = read_tokenizer(path, setting=setting, trust_remote_code=config.model.trust_remote_code)
    rows = load_rows(settings.queries_path or config.data.path, config.data.split)
    order = np.random.default_rng([config.seed, 1]).permutation(len(rows))
    # With more samples than rows, queries are reused for further responses.
    own = [rows[int(order[i % len(order)])] for i in range(rank, settings.num_samples, ranks)]
    if not own:
        raise DataError(
            f"normalization.num_samples={settings.num_samples} leaves rank {rank} of {ranks} without samples; raise it"
        )
    lengths = Lengths(query=config.data.query_tokens)
    try:
        queries = [query_ids(row, tokenizer, lengths) for row in own]
    except DataError as error:
        raise DataError(
            f"normalization: {error}; set normalization.queries_path=<rows with prompt>, or normalization.num_samples=0"
        ) from error
    if all(isinstance(row.get("response"), str) for row in own):
        responses = [text_ids(tokenizer, row["response"], special_tokens=False) for row in own]
    else:
        longest = max(map(len, queries)) + settings.response_tokens
        if context is not None and longest > context:
            raise ConfigError(
                f"normalization.response_tokens={settings.response_tokens}: with the longest query that is {longest} "
                f"tokens, and {path} has positions for {context}; lower it, or data.query_tokens"
            )
        model = load_model(
            LANGUAGE_MODEL, path, setting=setting, dtype="float32", trust_remote_code=config.model.trust_remote_code
        )
        # The ranks have not met yet, so torch has no default GPU for this one.
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        model.to(device)  # type: ignore[arg-type]  # a union of auto classes
        responses = sample_responses(
            model,
            queries,
            length=settings.response_tokens,
            temperature=settings.temperature,
            seed=config.seed + rank * SEED_STRIDE,
        )
    if settings.stop is not None:
        rule = StopRule(token_ids=frozenset({token_id_of(tokenizer, settings.stop)}), after=settings.stop_after)
        responses = [rule.truncate(response) for response in responses]
    return [[*query, *response] for query, response in zip(queries, responses, strict=True)]


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel, queries: Sequence[Sequence[int]], *, length: int, temperature: float, seed: int
) -> list[list[int]]:
    """Sample `length` tokens for each query, over the whole vocabulary.

    The result depends on seed, order of queries and `BATCH_SIZE`. The process's random state is restored.
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
            for start in range(0, len(queries), BATCH_SIZE):
                ids_BT, mask_BT = _left_padded(queries[start : start + BATCH_SIZE])
                output = model.generate(  # type: ignore[operator]  # from the mixin of causal models
                    input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), generation_config=settings
                )
                responses += output[:, ids_BT.shape[1] :].tolist()
    finally:
        model.generation_config.eos_token_id = stops
        model.train(was_training)
    return responses


def _left_padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) ids and attention mask, padded on the left. Generation derives its own position ids."""
    width = max(map(len, rows))
    ids_BT, mask_BT = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        ids_BT[index, width - len(row) :] = torch.as_tensor(row)
        mask_BT[index, width - len(row) :] = 1
    return ids_BT, mask_BT
