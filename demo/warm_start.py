"""Warm start of the demo model from random weights: it learns the task, then mistakes, to leave room for training.

Stage one trains on clean demonstrations until the model, sampled at temperature 1, earns `SKILLED`. Stage two trains on
noisy ones for a few dozen steps: the skill stays in the weights, and the reward falls into the range `MIDDLING`. The
supervised loss covers assistant tokens only, the tokens that a rollout samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from lockstep.demo.architectures import ARCHITECTURES
from lockstep.demo.manifest import DEFAULT_ARCHITECTURE
from lockstep.demo.play import Demonstration, demonstrate, sampled_reward, tokenize
from lockstep.demo.pretraining import IGNORED, descend, make_adam, next_token_loss, sample_from_everything
from lockstep.demo.tasks import DemoTask, draw_unique
from lockstep.demo.tokenizer import PAD, TURN_END
from lockstep.demo.vision import image_inputs, vision_config
from lockstep.rollout.errors import TrainingError

SKILLED = 0.9
MIDDLING = (0.1, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyperparameters of the warm start; they are part of the recipe hash."""

    batch: int = 32
    """Demonstrations per step."""
    clean_lr: float = 3e-3
    clean_lr_floor: float = 0.3
    """Fraction of `clean_lr` at the end of its linear decay."""
    clean_decay_steps: int = 400
    warmup_steps: int = 20
    max_clean_steps: int = 900
    check_from: int = 100
    check_every: int = 20
    noisy_lr: float = 1e-3
    noisy_steps: int = 60
    check_prompts: int = 128
    """Prompts of each sampled reward; its standard error is at most 0.045."""
    max_grad_norm: float = 1.0


Report = Callable[[str, int, float, float | None], None]
"""Function that is called after each step with stage, step, loss and, if it was measured, the sampled reward."""


def new_model(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    architecture: str = DEFAULT_ARCHITECTURE,
    *,
    sees_images: bool = False,
) -> PreTrainedModel:
    """Make a model with random weights, one of `ARCHITECTURES`; the Qwen3 has about 0.6 M parameters.

    sees_images: a Qwen2.5-VL instead.
    """
    vocabulary = tokenizer.get_vocab()
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": vocabulary[TURN_END], "pad_token_id": vocabulary[PAD]}
    config = vision_config(vocabulary, **tokens) if sees_images else ARCHITECTURES[architecture](**tokens)
    make = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = make.from_config(config)
    generation = model.generation_config
    assert generation is not None
    generation.eos_token_id, generation.pad_token_id = tokens["eos_token_id"], tokens["pad_token_id"]
    sample_from_everything(model)
    return model


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: DemoTask,
    *,
    seed: int,
    recipe: Recipe,
    report: Report,
) -> float:
    """Train `model` in place in both stages and return its final sampled reward.

    Raises:
        TrainingError: `SKILLED` was not reached in `max_clean_steps`, or the final reward is outside of `MIDDLING`.
    """
    rng = random.Random(seed)
    check_rows = draw_unique(task.draw, random.Random(seed + 1), recipe.check_prompts, heldout=False)
    optimizer = make_adam(model)

    def check(step: int) -> float:
        model.eval()
        reward = sampled_reward(model, tokenizer, task, check_rows, seed=seed + step)
        model.train()
        return reward

    def learn(step: int, lr: float, *, noisy: bool) -> float:
        rows = draw_unique(task.draw, rng, recipe.batch, heldout=False)
        episodes = demonstrate(task, rows, tokenizer, rng, noisy=noisy)
        loss = imitation_loss(model, [tokenize(episode, tokenizer) for episode in episodes])
        descend(model, optimizer, loss, lr=lr, max_grad_norm=recipe.max_grad_norm)
        return loss.item()

    model.train()
    for step in range(1, recipe.max_clean_steps + 1):
        progress = min(1.0, step / recipe.clean_decay_steps)
        decay = 1 - (1 - recipe.clean_lr_floor) * progress
        loss = learn(step, recipe.clean_lr * decay * min(1.0, step / recipe.warmup_steps), noisy=False)
        is_due = step >= recipe.check_from and step % recipe.check_every == 0
        reward = check(step) if is_due else None
        report("skill", step, loss, reward)
        if reward is not None and reward >= SKILLED:
            break
    else:
        raise TrainingError(
            f"the warm start of {task.name} did not reach a sampled reward of {SKILLED} in {recipe.max_clean_steps} "
            f"steps with seed {seed}; try another --seed"
        )
    for step in range(1, recipe.noisy_steps + 1):
        loss = learn(step, recipe.noisy_lr * (1 - step / (recipe.noisy_steps + 1)), noisy=True)
        reward = check(step) if step == recipe.noisy_steps else None
        report("noise", step, loss, reward)
    model.eval()
    final = check(0)
    if not MIDDLING[0] <= final <= MIDDLING[1]:
        raise TrainingError(
            f"the warm start of {task.name} ended with a sampled reward of {final:.2f}, expected {MIDDLING[0]} to "
            f"{MIDDLING[1]} with seed {seed}; try another --seed"
        )
    return final


def imitation_loss(model: PreTrainedModel, demonstrations: Sequence[Demonstration]) -> torch.Tensor:
    """Return the mean cross-entropy of the learned tokens."""
    length = max(len(item.ids) for item in demonstrations)
    ids_BT = torch.zeros(len(demonstrations), length, dtype=torch.long)
    labels_BT = torch.full((len(demonstrations), length), IGNORED)
    for index, item in enumerate(demonstrations):
        ids = torch.tensor(item.ids)
        ids_BT[index, : len(ids)] = ids
        labels_BT[index, : len(ids)] = torch.where(torch.tensor(item.is_learned), ids, IGNORED)
    images = [image for item in demonstrations for image in item.images]
    inputs = image_inputs(model, ids_BT, torch.ones_like(ids_BT), images) if images else {}
    return next_token_loss(model, ids_BT, labels_BT, **inputs)
