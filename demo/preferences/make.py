"""Make a preference task: a language model, queries to continue, and comparisons of four continuations each.

    data/preferences/<task>/train.jsonl, heldout.jsonl                    {"prompt"}
    data/preferences/<task>/comparisons.jsonl, comparisons_heldout.jsonl  {"prompt", "responses", "best"}
    models/<task>_lm                                                      a GPT-2 of 0.4 M parameters, pretrained

Raters see continuations cut at the stop and prefer the one with the highest true score plus Gumbel noise: they prefer
response i with probability softmax(score / noise)_i, the model that best-of-n training fits.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lockstep.demo.preferences.language import END_OF_TEXT, JUDGES, STOP, make_tokenizer, write_text
from lockstep.demo.preferences.queries import select_query
from lockstep.demo.pretraining import descend, make_adam, next_token_loss, sample_from_everything
from lockstep.lab.reward_model.sampling import sample_responses
from lockstep.rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRecipe:
    """Sizes and hyperparameters; lengths and temperature are those of lm-human-preferences (OpenAI, 2019)."""

    query_length: int = 64
    """[tokens]"""
    response_length: int = 24
    """[tokens]"""
    stop_after: int = 16
    temperature: float = 0.7
    num_queries: int = 4096
    num_heldout: int = 256
    num_comparisons: int = 2048
    responses_per_query: int = 4
    rater_noise: float = 0.25
    """Scale of the Gumbel noise, in the unit of the true score."""
    pretraining_steps: int = 300
    batch: int = 32
    lr: float = 3e-3
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4


def make_preferences(
    task: str, model_dir: Path, data_dir: Path, *, seed: int = 0, recipe: PreferenceRecipe | None = None
) -> None:
    """Write model and data. Deterministic on one machine for a given seed; about 90 s of CPU time.

    Raises:
        ConfigError: the task is unknown.
    """
    if task not in JUDGES:
        raise ConfigError(f"unknown preference task {task!r}; expected one of {', '.join(JUDGES)}")
    recipe = recipe or PreferenceRecipe()
    tokenizer = make_tokenizer()
    model = pretrain(tokenizer, recipe, seed=seed)
    model.save_pretrained(model_dir)
    tokenizer.save_pretrained(model_dir)

    data_dir.mkdir(parents=True, exist_ok=True)
    sizes = {"": (recipe.num_queries, recipe.num_comparisons), "heldout": (recipe.num_heldout, recipe.num_heldout)}
    for part, (num_queries, num_comparisons) in sizes.items():
        rng = random.Random(f"{seed}-{part}")
        queries = draw_queries(rng, num_queries + num_comparisons, recipe.query_length)
        prompts, pair_queries = queries[:num_queries], queries[num_queries:]
        comparisons = compare(model, tokenizer, pair_queries, task, recipe, seed=rng.randrange(2**31))
        _write(data_dir / f"{part or 'train'}.jsonl", [{"prompt": " ".join(words)} for words in prompts])
        _write(data_dir / ("comparisons_heldout.jsonl" if part else "comparisons.jsonl"), comparisons)


def pretrain(tokenizer: PreTrainedTokenizerFast, recipe: PreferenceRecipe, *, seed: int) -> GPT2LMHeadModel:
    """Train a GPT-2 from random weights on the language."""
    vocabulary = tokenizer.get_vocab()
    end = vocabulary[END_OF_TEXT]
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=4 * recipe.query_length,
        n_embd=recipe.hidden_size,
        n_layer=recipe.num_layers,
        n_head=recipe.num_heads,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
    sample_from_everything(model)
    rng = random.Random(f"{seed}-pretraining")
    optimizer = make_adam(model)
    length = recipe.query_length + recipe.response_length
    model.eval()  # no dropout
    for step in range(recipe.pretraining_steps):
        texts = [[vocabulary[word] for word in write_text(rng, length)[:length]] for _ in range(recipe.batch)]
        lr = recipe.lr * min(1.0, (step + 1) / 20) * (1 - step / recipe.pretraining_steps)
        descend(model, optimizer, next_token_loss(model, torch.tensor(texts)), lr=lr)
    return model


def draw_queries(rng: random.Random, count: int, length: int) -> list[list[str]]:
    """Cut queries of whole sentences out of running text ("The N Implementation Details of RLHF with PPO", 2023)."""
    queries: list[list[str]] = []
    while len(queries) < count:
        text = write_text(rng, length + 40)
        # Windows of all lengths up to the historical one, so that a policy does not rely on a single length.
        query = select_query(text, start=STOP, end=STOP, length=rng.randint(length // 4, length))
        if query is not None:
            queries.append(query)
    return queries


def compare(
    model: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    queries: Sequence[Sequence[str]],
    task: str,
    recipe: PreferenceRecipe,
    *,
    seed: int,
) -> list[dict]:
    """Compare samples of the pretrained model, labeled by a noisy judge. Responses are cut at the stop."""
    count = recipe.responses_per_query
    vocabulary = tokenizer.get_vocab()
    query_ids = [[vocabulary[word] for word in words] for words in queries for _ in range(count)]
    response_ids = sample_responses(
        model, query_ids, length=recipe.response_length, temperature=recipe.temperature, seed=seed
    )
    words_of = {index: word for word, index in vocabulary.items()}
    cut = [cut_at_stop([words_of[index] for index in ids], recipe.stop_after) for ids in response_ids]
    noise = random.Random(seed)
    judge = JUDGES[task]

    def perceived(words: Sequence[str]) -> float:
        return judge(words) - recipe.rater_noise * math.log(max(noise.expovariate(1.0), 1e-12))  # Gumbel: −log Exp(1)

    comparisons = []
    for index, query in enumerate(queries):
        responses = cut[index * count : (index + 1) * count]
        scores = [perceived(words) for words in responses]
        comparisons.append(
            {
                "prompt": " ".join(query),
                "responses": [" ".join(words) for words in responses],
                "best": scores.index(max(scores)),
            }
        )
    return comparisons


def cut_at_stop(words: Sequence[str], after: int) -> list[str]:
    """Return the words up to and with the first full stop at index `after` or later; all of them without one."""
    end = next((i + 1 for i in range(after, len(words)) if words[i] == STOP), None)
    return list(words[:end])


def _write(path: Path, rows: Sequence[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
