"""Shipped configs: hub data sets, on small files with the same columns, and experiments, by their own commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lockstep.lab.reward_model.config import RewardModelConfig
from lockstep.lab.reward_model.config import check as check_reward_model
from lockstep.lab.reward_model.data import Lengths, read_comparisons
from lockstep.rewards.composition import make_reward_set
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.environments import make_environment
from lockstep.rollout.records import Rollout
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.compose import CONFIG_DIR
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import load_data_set, training_data
from tests.fixtures.composed import composed
from tests.fixtures.paths import FIXTURES
from tests.fixtures.tokenizers import chat_tokenizer

FILES = FIXTURES / "data"
EXPERIMENTS = sorted((CONFIG_DIR / "experiment").glob("*.yaml"))
READY = {
    **{"gsm8k": "numeric", "math": "math", "dapo_math": "math", "xlam": "tool_calls"},
    **{"reverse_text": "reverse_text", "nq_hotpotqa": "question_answer"},
}
"""Reward group by data group, as in the data group's file."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return f"model.path={tmp_path}"


def ready(name: str, model: str, *overrides: str) -> Config:
    config = composed(
        f"data={name}", "environment=single_turn", f"data.path={FILES}/{name}.jsonl", "data.heldout_path=null", model,
        *overrides,
    )  # fmt: skip
    validate(config)
    return config


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ANSWERS: dict[str, list[tuple[dict[str, Any], float]]] = {
    "gsm8k": [
        ({"content": "6 * 12 is 72, less 8 is \\boxed{64}."}, 1.0),
        ({"content": "72 - 8 = 64"}, 1.0),
        ({"content": "\\boxed{72}, which leaves 64"}, 0.0),
    ],
    "math": [
        ({"content": "It is $\\boxed{0.5}$."}, 1.0),
        ({"content": "\\boxed{\\frac{3}{6}}"}, 1.0),
        ({"content": "\\boxed{\\frac{1}{3}}"}, 0.0),
    ],
    "dapo_math": [
        ({"content": "2 to the 5th.\nAnswer: 32"}, 1.0),
        ({"content": "Answer: $32$"}, 1.0),
        ({"content": "32 is too small.\nAnswer: 64"}, 0.0),
    ],
    "reverse_text": [
        ({"content": "<reversed_text>\nti otni degrem saw revir ehT\n</reversed_text>"}, 1.0),
        ({"content": "ti otni degrem saw revir ehT"}, 0.0),
        ({"content": "<reversed_text>saw revir ehT</reversed_text>"}, 2 * 13 / (13 + 28)),
    ],
    "nq_hotpotqa": [
        ({"content": "<think>France.</think> <answer>paris</answer>"}, 1.0),
        ({"content": "<answer> City of Light. </answer>"}, 1.0),
        ({"content": "<answer>Lyon</answer>"}, 0.0),
        ({"content": "Paris"}, 0.0),
    ],
    "xlam": [
        ({"content": "", "tool_calls": [call("weather", city="Rome", days=3), call("weather", city="Oslo")]}, 1.0),
        ({"content": "", "tool_calls": [call("weather", city="Rome", days=3)]}, 0.0),
        ({"content": "", "tool_calls": [call("weather", city="Rome", days="3"), call("weather", city="Oslo")]}, 0.0),
        ({"content": "It is sunny."}, 0.0),
    ],
}


@pytest.mark.parametrize("name", READY)
async def test_rows_of_a_hub_data_set_become_prompts_that_are_scored(name: str, model: str) -> None:
    config = ready(name, model, f"reward={READY[name]}")
    (data,) = training_data(config.data, config.environment, config.reward)
    environment = make_environment(config.environment.name)
    messages = list(await environment.reset(data[0]))
    chat = Chat(chat_tokenizer("qwen3"))
    assert chat.prompt(messages, environment.tools)
    assert messages[-1]["role"] == "user"
    assert (messages[0]["role"] == "system") == (config.data.system_prompt is not None)
    rewards = make_reward_set(config.reward.functions, config.reward.weights, config.reward.settings)
    try:
        turns, expected = zip(*ANSWERS[name], strict=True)
        rollouts = [
            Rollout(
                rollout_id=index, group_id=0, calls=(), example=data[0],
                messages=(*messages, {"role": "assistant", **turn}),
            )
            for index, turn in enumerate(turns)
        ]  # fmt: skip
        scored = await rewards.score(rollouts)
    finally:
        rewards.close()
    assert [rollout.error for rollout in scored] == [None] * len(scored)
    assert [rollout.reward for rollout in scored] == pytest.approx(list(expected))


async def test_tools_of_a_row_are_shown_in_openai_form(model: str) -> None:
    config = ready("xlam", model, "reward=tool_calls")
    (data,) = training_data(config.data, config.environment, config.reward)
    environment = make_environment("single_turn")
    await environment.reset(data[0])
    (tool,) = environment.tools
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city"},
            "days": {"type": "integer", "description": "Days ahead"},
            "fields": {"type": "array", "description": "What to report"},
        },
        "required": ["city"],
    }


def test_preferences_give_prompts_to_ppo_and_comparisons_to_a_reward_model(model: str) -> None:
    config = ready("hh_helpful", model, "reward.functions=[repetition]")
    (data,) = training_data(config.data, config.environment, config.reward)
    assert [message["role"] for message in data[1]["prompt"]] == ["user", "assistant", "user"]
    rows = [json.loads(line) for line in (FILES / "hh_helpful.jsonl").read_text().splitlines()]
    comparisons = read_comparisons(rows, chat_tokenizer("qwen3"), Lengths())
    assert [comparison.best for comparison in comparisons] == [0, 0]
    assert comparisons[1].sequences[0] != comparisons[1].sequences[1]


def test_held_out_rows_have_the_columns_of_the_training_rows(model: str) -> None:
    """MATH-500 has an additional answer column; problem and solution are as in MATH."""
    row = {"problem": "1+1", "solution": "\\boxed{2}", "answer": "2", "subject": "x", "level": 1, "unique_id": "y"}
    config = composed("data=math", "environment=single_turn", "reward=math", model)
    (heldout,) = config.heldout_sets().values()
    assert (heldout.path, heldout.split) == ("HuggingFaceH4/MATH-500", "test")
    path = Path(model.partition("=")[2]) / "heldout.jsonl"
    path.write_text(json.dumps(row) + "\n")
    heldout.path = str(path)
    assert load_data_set(heldout)[0]["answer"] == "\\boxed{2}"


def commands(file: Path) -> list[list[str]]:
    """Return the commands in the comment at the top of an experiment, each as script and overrides."""
    head = file.read_text().partition("\ndefaults:")[0]
    found = []
    for line in re.findall(r"^#\s+((?:python|accelerate launch) .*?)(?:\s+\(.*)?$", head, re.M):
        words = shlex.split(line)
        start = next(index for index, word in enumerate(words) if word.startswith("scripts/"))
        if words[0] == "accelerate":
            assert Path(CONFIG_DIR.parent, words[words.index("--config_file") + 1]).is_file()
        found.append(words[start:])
    return found


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_the_commands_at_the_top_of_an_experiment_are_accepted(file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = tmp_path / "rows.jsonl"
    columns = ("prompt", "question", "answer", "problem", "solution", "query", "answers")
    row: dict[str, object] = dict.fromkeys(columns, "1") | {"reward_model": {"ground_truth": {"target": "1"}}}
    row |= {
        "chain": {"links": [{"key": "a", "value": "b"}]},
        "squares": {"square": [40, 40, 32, "red", "rows"]},
        "tool_calls": {"answers": "[]"},
    }.get(file.stem, {})
    if file.stem == "sft":
        row["messages"] = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
    rows.write_text(json.dumps(row) + "\n")
    checked = 0
    for script, *overrides in commands(file):
        if script == "scripts/train_reward_model.py":
            own = [f"model.path={tmp_path}", f"data.path={rows}", "data.heldout_path=null"]
            check_reward_model(
                composed(*overrides, *own, config_name="train_reward_model", config_class=RewardModelConfig)
            )
        elif script in ("scripts/train.py", "scripts/evaluate.py", "scripts/serve_engine.py"):
            if overrides == ["experiment=demo", "model.path=runs/sft/model"]:
                continue  # the training after experiment=sft
            assert f"experiment={file.stem}" in overrides
            own = [f"model.path={tmp_path}", f"data.path={rows}"]
            config = composed(*overrides, *own, f"data.heldout_path={rows}")
            if "model" in config.reward.settings:
                config.reward.settings["model"]["path"] = str(tmp_path)
            validate(config)
            checked += 1
        else:
            assert script.startswith("scripts/make_"), script
    assert checked, f"{file.name} does not say how it is run"
