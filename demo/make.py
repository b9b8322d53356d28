"""Make a demo: data, tokenizer and warm-started model on disk, once.

The task, the seed and the code determine all files; `manifest.py` detects a change of them. A model directory is
replaced atomically, data files one by one.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lockstep.demo.manifest import DEFAULT_ARCHITECTURE, DemoInfo, find_made, recipe_hash, write_manifest
from lockstep.demo.play import demonstrate, sampled_reward
from lockstep.demo.tasks import TASKS, DemoTask, Row, draw_unique
from lockstep.demo.tokenizer import train_tokenizer, untrained
from lockstep.demo.vision import save_processor
from lockstep.demo.warm_start import Recipe, new_model, warm_start
from lockstep.rollout.errors import ConfigError

HELDOUT_ROWS = 256
CORPUS_EPISODES = 400


def make_demo(
    task: str,
    model_dir: Path | str,
    data_dir: Path | str,
    seed: int,
    console: Console,
    architecture: str = DEFAULT_ARCHITECTURE,
) -> DemoInfo:
    """Write `train.jsonl` and `heldout.jsonl` to `data_dir` and a model with tokenizer to `model_dir`.

    Also writes `heldout_harder.jsonl` if the task has rows beyond its training distribution (chain: 3 and 4 hops), and
    for a task with images their files and `heldout_swapped.jsonl`, in which each row has the image of the next one.
    Deterministic on one machine for a given seed. Takes about a minute; a second call with the same settings returns
    at once.

    Raises:
        ConfigError: the task is unknown or has its own architecture, or a directory holds files that this function did
            not make.
        TrainingError: the warm start missed its reward.
    """
    if task not in TASKS:
        raise ConfigError(f"unknown demo task {task!r}; expected one of {', '.join(TASKS)}")
    if TASKS[task].draw_image is not None and architecture != DEFAULT_ARCHITECTURE:
        raise ConfigError(f"task {task} has images, which {architecture} does not see; leave --architecture out")
    model_dir, data_dir = Path(model_dir), Path(data_dir)
    demo = find_made(task, model_dir, data_dir, seed, architecture)
    if demo is not None:
        return demo
    with _only_maker(model_dir):
        # Another process may have made it meanwhile.
        demo = find_made(task, model_dir, data_dir, seed, architecture)
        return demo or _make(TASKS[task], model_dir, data_dir, seed, console, architecture)


def _make(
    chosen: DemoTask, model_dir: Path, data_dir: Path, seed: int, console: Console, architecture: str
) -> DemoInfo:
    task, recipe, sees_images = chosen.name, Recipe(), chosen.draw_image is not None
    recipe_key = recipe_hash(task, seed, architecture)  # now, because the code may be edited while this runs

    data = _write_data(chosen, data_dir, seed)
    rng = random.Random(seed)
    corpus = demonstrate(
        chosen, data["train.jsonl"][:CORPUS_EPISODES], untrained(sees_images=sees_images), rng, noisy=True
    )
    tokenizer = train_tokenizer((episode.text for episode in corpus), sees_images=sees_images)
    model = new_model(tokenizer, seed, architecture, sees_images=sees_images)
    num_parameters = model.num_parameters()
    console.print(
        f"{task}: {len(data['train.jsonl'])} training rows, {len(data['heldout.jsonl'])} held out; "
        f"{len(tokenizer)} token ids; {num_parameters:,} parameters",
        highlight=False,
    )
    with _one_thread(), _Bar(console, recipe) as bar:
        reward = warm_start(model, tokenizer, chosen, seed=seed, recipe=recipe, report=bar.report)
        greedy = sampled_reward(model, tokenizer, chosen, data["heldout.jsonl"][:128], seed=seed, greedy=True)
    info = {
        "task": task,
        "sampled_reward": reward,
        "greedy_heldout_reward": greedy,
        "num_parameters": num_parameters,
        "vocab_size": len(tokenizer),
    }
    # Written to a temporary name and renamed: no process ever loads half a model.
    making = model_dir.with_name(f".{model_dir.name}.{os.getpid()}")
    model.save_pretrained(making)
    tokenizer.save_pretrained(making)
    if sees_images:
        save_processor(tokenizer, making)
    data_files = [*data, *(image for rows in data.values() for row in rows for image in row.get("images", ()))]
    write_manifest(making, recipe_key, info=info, model=list(making.iterdir()), data_dir=data_dir, data=data_files)
    if model_dir.exists():  # a demo of another recipe, or an empty directory: `find_made` has refused anything else
        shutil.rmtree(model_dir)
    making.replace(model_dir)
    console.print(
        f"{task}: reward {reward:.2f} sampled, {greedy:.2f} greedy on held-out prompts; saved to {model_dir}",
        highlight=False,
    )
    return DemoInfo(**info, model_dir=model_dir, data_dir=data_dir, is_cached=False)


def make_rows(task: DemoTask, seed: int) -> dict[str, list[Row]]:
    """Return the rows of a task by file name. No question of a held-out file is in `train.jsonl`."""
    # One generator per file, so that a change of one size leaves the other files as they are.
    rows = {
        "train.jsonl": draw_unique(task.draw, random.Random(f"{seed}-train"), task.train_rows, heldout=False),
        "heldout.jsonl": draw_unique(task.draw, random.Random(f"{seed}-heldout"), HELDOUT_ROWS, heldout=True),
    }
    if task.draw_harder is not None:
        harder = draw_unique(task.draw_harder, random.Random(f"{seed}-harder"), HELDOUT_ROWS, heldout=True)
        rows["heldout_harder.jsonl"] = harder
    if task.draw_image is not None:
        for name, file in rows.items():
            for number, row in enumerate(file):
                row["images"] = [f"images/{Path(name).stem}-{number:04}.png"]
        heldout = rows["heldout.jsonl"]
        others = [*heldout[1:], heldout[0]]
        pictures = [{name: other[name] for name in ("square", "images")} for other in others]
        rows["heldout_swapped.jsonl"] = [row | picture for row, picture in zip(heldout, pictures, strict=True)]
    return rows


@contextmanager
def _only_maker(model_dir: Path) -> Iterator[None]:
    """Hold the lock of a directory: one process makes the demo and the others wait."""
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    with (model_dir.parent / f".{model_dir.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also when the process is killed
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, so that the order of sums and the model do not depend on the number of cores.

    A process with a pool of OpenMP threads also could not fork an engine. A second thread would save a third of the
    time at most, because the matrices are small, and would take twice as long on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Bar:
    """Progress bar of the warm start: stage, step, loss, last reward."""

    def __init__(self, console: Console, recipe: Recipe):
        self._progress = Progress(
            TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self._lines = {
            # The number of steps of the first stage varies: its bar runs to the usual one.
            "skill": self._progress.add_task(
                "warm start 1/2: learn the skill", total=recipe.clean_decay_steps, note=""
            ),
            "noise": self._progress.add_task("warm start 2/2: learn from noise", total=recipe.noisy_steps, note=""),
        }
        self._reward: float | None = None

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, stage: str, step: int, loss: float, reward: float | None) -> None:
        self._reward = reward if reward is not None else self._reward
        note = f"loss {loss:.3f}" + (f"  reward {self._reward:.2f}" if self._reward is not None else "")
        if stage == "noise":  # the first stage has ended, after any number of steps
            num_done = self._progress.tasks[self._lines["skill"]].completed
            self._progress.update(self._lines["skill"], total=max(num_done, 1))
        self._progress.update(self._lines[stage], completed=step, note=note)


def _write_data(task: DemoTask, data_dir: Path, seed: int) -> dict[str, list[Row]]:
    data_dir.mkdir(parents=True, exist_ok=True)
    files = make_rows(task, seed)
    for name, rows in files.items():
        _write_atomically(data_dir / name, "".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:
            if task.draw_image is not None:
                path = data_dir / row["images"][0]
                path.parent.mkdir(exist_ok=True)
                task.draw_image(row).save(path)
    return files


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
