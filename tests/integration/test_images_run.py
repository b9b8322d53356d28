"""Whole runs on prompts with images: rows with pictures, an environment that shows another one in turn 2."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT
from tests.fixtures.servers import KEY, KEY_ENV, running
from tests.fixtures.vision import picture, save_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ENVIRONMENT = """
from PIL import Image
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.environment import Step

class LooksAgain:
    tools = ()
    max_turns = 3

    async def reset(self, row):
        self.turns = 0
        self.color = (row["number"] * 20, 0, 200)
        return PromptReader().messages(row)

    async def step(self, message):
        self.turns += 1
        if self.turns == 2:
            return Step(done=True)
        crop = {"type": "image", "image": Image.new("RGB", (56, 56), self.color)}
        return Step(messages=({"role": "user", "content": [crop, {"type": "text", "text": "and now?"}]},))
"""
REWARD = """
def odd_ids(rollout):
    ids = rollout.calls[-1].sampled_ids
    return sum(id % 2 for id in ids) / max(1, len(ids))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, rows of 0 to 2 pictures, an environment and a reward."""
    directory = tmp_path_factory.mktemp("images")
    save_tiny("qwen2_5_vl", directory / "model")
    rows = []
    for number in range(12):
        names = [f"{number}-{index}.png" for index in range(number % 3)]
        for index, name in enumerate(names):
            picture(number + index, 56 + 28 * index, 84).save(directory / name)
        rows.append({"prompt": "what is here?", "images": names, "number": number})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "environment.py").write_text(ENVIRONMENT)
    (directory / "reward.py").write_text(REWARD)
    return directory


def train(directory: Path, run_name: str, *, ranks: int = 1, **changes: Any) -> list[dict[str, float]]:
    """Return the metrics of the steps of a run that succeeds."""
    settings = {
        "model.path": directory / "model",
        "model.images.max_per_prompt": 3,
        "environment.name": f"{directory}/environment.py:LooksAgain",
        "data.path": directory / "rows.jsonl",
        "reward.functions": f"[{directory}/reward.py:odd_ids]",
        "rollout.max_model_len": 256,
        "rollout.max_tokens_per_turn": 6,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 4,
        "optimizer.lr": "1e-3",
        "updates": 2,
        "run_root": directory / "runs",
        "run_name": run_name,
        **changes,
    }
    python = forked_python()
    launcher = [python]
    if ranks > 1:
        launcher += ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/zero3.yaml"]
        launcher += ["--num_processes", str(ranks), "--main_process_port", "0"]
    done = subprocess.run(
        [*launcher, "scripts/train.py", *(f"{name}={value}" for name, value in settings.items())],
        cwd=ROOT, capture_output=True, text=True, timeout=800,
        env={**os.environ, "PYTHON_EXEC": python, "OMP_NUM_THREADS": "1", KEY_ENV: KEY},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = (directory / "runs" / run_name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def largest_difference(steps: list[dict[str, float]]) -> float:
    return max(step["rollout_correction/logp_diff_abs_max"] for step in steps)


def tower_change(directory: Path, run_name: str) -> float:
    """Return the largest change of a weight of the tower, of the model that a run has left."""
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (directory / "model", directory / "runs" / run_name / "model")
    )
    return max(float((after[name] - before[name]).abs().max()) for name in before if "visual" in name)


def test_engine_and_trainer_agree_while_the_tower_is_trained(directory: Path) -> None:
    steps = train(directory, "tower", **{"model.images.train_tower": "true"})
    assert largest_difference(steps) < 1e-4  # of updates 2 and later, too: the engine saw images with the new tower
    assert tower_change(directory, "tower") > 1e-4

    run = directory / "runs/tower"
    files = {path.stem for path in (run / "media").glob("*.png")}
    rollouts = [rollout for file in sorted((run / "rollouts").glob("*.jsonl")) for rollout in read_rollouts(file)]
    played = [rollout for rollout in rollouts if rollout.calls]
    assert played
    for rollout in played:
        number = rollout.example["number"]
        own = [image_digest(picture(number + index, 56 + 28 * index, 84)) for index in range(number % 3)]
        assert [part["digest"] for part in rollout.example["images"]] == own
        first, *others = rollout.calls
        assert [image.digest for image in first.images] == own
        for call in others:
            assert [image.digest for image in call.images[:-1]] == own, "turn 2 has the picture of the environment, too"
        assert {image.digest for call in rollout.calls for image in call.images} <= files
    assert AutoImageProcessor.from_pretrained(run / "model").merge_size == 2

    resumed = train(directory, "tower", resume="auto", updates=3, **{"model.images.train_tower": "true"})
    assert largest_difference(resumed) < 1e-4
    assert len(resumed) == 3


@pytest.mark.long
def test_two_ranks_with_their_own_engines_train_adapters_of_the_language_part_only(directory: Path) -> None:
    changes = {"rollout": "colocated", "model.lora.rank": 4, "algorithm.kl_coef": 0.05}
    steps = train(directory, "adapters", ranks=2, **changes)
    assert largest_difference(steps) < 1e-4
    assert tower_change(directory, "adapters") == 0


@pytest.mark.long
def test_a_critic_of_its_own_sees_the_images(directory: Path) -> None:
    steps = train(directory, "critic", ranks=2, algorithm="ppo", **{"model.dtype": "bfloat16"})
    assert largest_difference(steps) < 0.2
    assert steps[-1]["ppo/value/loss"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_servers_are_sent_images_and_a_trained_tower(directory: Path) -> None:
    settings = {"model.images.max_per_prompt": 3, "rollout.max_model_len": 256}
    with running(directory / "model", directory, **settings) as (server,):
        changes = {"rollout": "server", "rollout.urls": f"[{server.url}]", "model.images.train_tower": "true"}
        steps = train(directory, "served", **changes)
    assert largest_difference(steps) < 1e-4
    assert tower_change(directory, "served") > 1e-4
