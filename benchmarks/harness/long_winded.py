"""A demo model whose turns have a log-normal number of tokens, as uneven as those of real models.

It is the demo's model after further imitation of turns that end with a line of dots. So the policy itself decides the
lengths, every trainer samples from the same distribution, and the tokens to copy from the prompt stay near.
"""

from __future__ import annotations

import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.demo.play import demonstrate, tokenize
from lockstep.demo.tasks import TASKS, Player, Row, draw_unique
from lockstep.demo.warm_start import imitation_loss

MEDIAN, SIGMA = 24, 1.0
"""Number of dots; the mean is 40, and one turn in a hundred has 246."""
MAX_DOTS = 220
STEPS, BATCH, LEARNING_RATE = 60, 16, 1e-3
RECIPE = f"{MEDIAN} {SIGMA} {MAX_DOTS} {STEPS} {BATCH} {LEARNING_RATE}"
RECIPE_FILE = "long_winded_recipe.txt"


def num_dots(rng: random.Random) -> int:
    return min(MAX_DOTS, max(1, round(rng.lognormvariate(math.log(MEDIAN), SIGMA))))


def make_long_winded_model(task: str, base: Path, path: Path, console: Console) -> None:
    """Write model and tokenizer to `path`, unless made by this recipe already. Takes half a minute."""
    if (path / RECIPE_FILE).is_file() and (path / RECIPE_FILE).read_text() == RECIPE:
        return
    console.print(f"{path.name}: training the demo's model to give long answers ...", highlight=False)
    demo = TASKS[task]

    def play(row: Row, rng: random.Random, noisy: bool) -> Player:
        turns = demo.play(row, rng, noisy)
        turn = next(turns)
        while True:
            reply = yield f"{turn}\n{'.' * num_dots(rng)}"
            try:
                turn = turns.send(reply)
            except StopIteration:
                return

    long_winded_task = replace(demo, play=play)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(0)
    model.train()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
        rows = draw_unique(long_winded_task.draw, rng, BATCH, heldout=False)
        episodes = demonstrate(long_winded_task, rows, tokenizer, rng, noisy=True)
        loss = imitation_loss(model, [tokenize(episode, tokenizer) for episode in episodes])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    console.print(f"{path.name}: loss {loss.item():.3f}; saved to {path}", highlight=False)
    making = path.with_name(f".{path.name}")
    shutil.rmtree(making, ignore_errors=True)
    model.eval().save_pretrained(making)
    tokenizer.save_pretrained(making)
    (making / RECIPE_FILE).write_text(RECIPE)
    shutil.rmtree(path, ignore_errors=True)
    making.rename(path)
