"""Make a demo: data, tokenizer and warm-started model on disk, once.

Everything follows from the task, the seed and the recipe; a manifest with their hash, and with the hashes of the
files, makes a second call return at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollout.demo.play import MAX_TURN_TOKENS, demonstrate, sampled_reward
from rollout.demo.tasks import TASKS, DemoTask, Row, draw_unique
from rollout.demo.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, train_tokenizer, untrained
from rollout.demo.warm_start import Recipe, new_model, warm_start
from rollout.errors import ConfigError

# Raise it when code that a hash of the settings does not see changes what is made.
FORMAT = 1
TRAIN_ROWS, HELDOUT_ROWS = 4096, 256
CORPUS_EPISODES = 400
MANIFEST = "lockstep_demo.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoInfo:
    """What was made, and where it is."""

    task: str
    model_dir: Path
    data_dir: Path
    sampled_reward: float
    """Mean reward at temperature 1 on training prompts, after the warm start."""
    greedy_heldout_reward: float
    num_parameters: int
    vocab_size: int
    is_cached: bool
    """Whether it was there already."""


def make_demo(task: str, model_dir: Path | str, data_dir: Path | str, seed: int, console: Console) -> DemoInfo:
    """Write `train.jsonl` and `heldout.jsonl` to `data_dir` and a model with tokenizer to `model_dir`.

    `heldout_harder.jsonl` too, where the task has rows beyond its training distribution (chain: 3 and 4 hops).
    Deterministic on one machine for a given seed and number of threads. Takes about a minute; a second call with the
    same settings takes none.

    Raises:
        ConfigError: the task is unknown, or a directory holds something that this function did not make.
        TrainingError: the warm start did not end where it should.
    """
    if task not in TASKS:
        raise ConfigError(f"unknown demo task {task!r}; expected one of {', '.join(TASKS)}")
    chosen, model_dir, data_dir, recipe = TASKS[task], Path(model_dir), Path(data_dir), Recipe()
    key = _recipe_hash(task, seed, recipe)
    cached = _read_manifest(model_dir, data_dir, key)
    if cached is not None:
        console.print(f"{task}: using {model_dir} and {data_dir} (made before by the same recipe)", highlight=False)
        return _info(cached, model_dir, data_dir, is_cached=True)
    _refuse_foreign(model_dir)

    data = _write_data(chosen, data_dir, seed)
    rng = random.Random(seed)
    corpus = demonstrate(chosen, data["train.jsonl"][:CORPUS_EPISODES], untrained(), rng, noisy=True)
    tokenizer = train_tokenizer(episode.text for episode in corpus)
    model = new_model(tokenizer, seed)
    num_parameters = model.num_parameters()
    console.print(
        f"{task}: {len(data['train.jsonl'])} training rows, {len(data['heldout.jsonl'])} held out; "
        f"{len(tokenizer)} token ids; {num_parameters:,} parameters",
        highlight=False,
    )
    with _Bar(console, recipe) as bar:
        reward = warm_start(model, tokenizer, chosen, seed=seed, recipe=recipe, report=bar.report)
    greedy = sampled_reward(model, tokenizer, chosen, data["heldout.jsonl"][:128], seed=seed, greedy=True)
    # Made beside its place and moved there whole: nobody ever loads half a model.
    making = model_dir.with_name(f".{model_dir.name}.{os.getpid()}")
    model.save_pretrained(making)
    tokenizer.save_pretrained(making)
    manifest = {
        "recipe_hash": key,
        "task": task,
        "seed": seed,
        "sampled_reward": reward,
        "greedy_heldout_reward": greedy,
        "num_parameters": num_parameters,
        "vocab_size": len(tokenizer),
        "sha256": {
            **{f"model/{path.name}": _sha256(path) for path in sorted(making.iterdir())},
            **{f"data/{name}": _sha256(data_dir / name) for name in data},
        },
    }
    _write_atomically(making / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    if model_dir.exists():  # of another recipe, or damaged: `_refuse_foreign` has seen our manifest in it, or nothing
        shutil.rmtree(model_dir)
    making.replace(model_dir)
    console.print(
        f"{task}: reward {reward:.2f} sampled, {greedy:.2f} greedy on held-out prompts; saved to {model_dir}",
        highlight=False,
    )
    return _info(manifest, model_dir, data_dir, is_cached=False)


def make_rows(task: DemoTask, seed: int) -> dict[str, list[Row]]:
    """All data of a task by file name. No question of a held-out file is in `train.jsonl`."""
    # A generator for each file: changing the size of one leaves the others as they are.
    rows = {
        "train.jsonl": draw_unique(task.draw, random.Random(f"{seed}-train"), TRAIN_ROWS, heldout=False),
        "heldout.jsonl": draw_unique(task.draw, random.Random(f"{seed}-heldout"), HELDOUT_ROWS, heldout=True),
    }
    if task.draw_harder is not None:
        harder = draw_unique(task.draw_harder, random.Random(f"{seed}-harder"), HELDOUT_ROWS, heldout=True)
        rows["heldout_harder.jsonl"] = harder
    return rows


class _Bar:
    """A progress line for the warm start: stage, step, loss, last reward."""

    def __init__(self, console: Console, recipe: Recipe):
        self._progress = Progress(
            TextColumn("{task.description:<32}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self._lines = {
            # The skill comes when it comes: the bar runs to the step at which it usually has.
            "skill": self._progress.add_task(
                "warm start 1/2: learn the skill", total=recipe.clean_decay_steps, note=""
            ),
            "noise": self._progress.add_task("warm start 2/2: become sloppy", total=recipe.noisy_steps, note=""),
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
        if stage == "noise":  # the first stage is over, at whichever step
            done = self._progress.tasks[self._lines["skill"]].completed
            self._progress.update(self._lines["skill"], total=max(done, 1))
        self._progress.update(self._lines[stage], completed=step, note=note)


def _write_data(task: DemoTask, data_dir: Path, seed: int) -> dict[str, list[Row]]:
    data_dir.mkdir(parents=True, exist_ok=True)
    files = make_rows(task, seed)
    for name, rows in files.items():
        _write_atomically(data_dir / name, "".join(json.dumps(row) + "\n" for row in rows))
    return files


def _recipe_hash(task: str, seed: int, recipe: Recipe) -> str:
    settings = {
        "format": FORMAT,
        "task": task,
        "seed": seed,
        "recipe": asdict(recipe),
        "rows": [TRAIN_ROWS, HELDOUT_ROWS],
        "tokenizer": [VOCAB_SIZE, CHAT_TEMPLATE, CORPUS_EPISODES],
        "max_turn_tokens": MAX_TURN_TOKENS,
        "torch": torch.__version__.split("+")[0],
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _read_manifest(model_dir: Path, data_dir: Path, key: str) -> dict | None:
    """The manifest, if it is of this recipe and every file is still what it says."""
    path = model_dir / MANIFEST
    if not path.is_file():
        return None
    manifest = json.loads(path.read_text())
    roots = {"model": model_dir, "data": data_dir}
    files = [(roots[name.split("/")[0]] / name.split("/")[1], digest) for name, digest in manifest["sha256"].items()]
    is_intact = all(file.is_file() and _sha256(file) == digest for file, digest in files)
    return manifest if manifest["recipe_hash"] == key and is_intact else None


def _refuse_foreign(model_dir: Path) -> None:
    if model_dir.is_dir() and any(model_dir.iterdir()) and not (model_dir / MANIFEST).is_file():
        raise ConfigError(
            f"{model_dir} is not empty and was not made by this script; choose another --out, or remove it"
        )


def _info(manifest: dict, model_dir: Path, data_dir: Path, *, is_cached: bool) -> DemoInfo:
    names = ("task", "sampled_reward", "greedy_heldout_reward", "num_parameters", "vocab_size")
    return DemoInfo(
        **{name: manifest[name] for name in names}, model_dir=model_dir, data_dir=data_dir, is_cached=is_cached
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
