"""Errors of `lockstep.train`: names that are not settings, and instructions in Python."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import lockstep
from lockstep.arguments import Arguments
from lockstep.python_words import NAMES, python_words
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.compose import all_keys, schema
from lockstep.trainer.config.groups.other_names import RENAMED, REPLACED, closest_name
from tests.fixtures.paths import ROOT

ROWS = [{"question": f"compute {number}", "answer": str(number)} for number in range(60)]
KEYS = all_keys(schema())


VALUES = {"False", "rloo", "remax", "reinforce_plus_plus", "gae", "gspo", "dppo_kl", "kl_cov", "tools", "enable"}
"""Words in the left column of docs/migrating.md that are values, or too general to stand for one setting."""


class Factory: ...


def right(rollout: Any) -> float:
    return 1.0


def refusal(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        Arguments().content(arguments, {})
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"temperature": 0.7}, 'write rollout={"temperature": 0.7}'),
        ({"top_p": 0.9}, 'write rollout={"top_p": 0.9}'),
        ({"max_tokens": 32}, 'write rollout={"max_tokens_per_turn": 32}'),
        ({"save_steps": 10}, 'write checkpoint={"every": 10}'),
        ({"logging_steps": 1}, "write logger=... (docs/migrating.md)"),
        ({"on_steps": right}, "write on_step=right"),
        ({"eval_dataset": ROWS}, "write heldout=..."),
        ({"heldout_data": ROWS}, "write heldout=..."),
        ({"dataset": ROWS}, "write data=..."),
        ({"environment_factory": Factory}, "write environment=... (docs/migrating.md)"),
        ({"scale_rewards": False}, 'write algorithm={"advantage": ...} (docs/migrating.md)'),
        ({"reward_funcs": right}, "write rewards=[right]"),
        ({"processing_class": Factory()}, "write tokenizer=..."),
        ({"processor": Factory()}, "write tokenizer=..."),
        ({"agent": right}, "write environment=right"),
        ({"per_device_train_batch_size": 8}, "write token_budget=... (docs/migrating.md)"),
        ({"peft_config": Factory()}, 'write model={"lora": ...} (docs/migrating.md)'),
        ({"optimizer": {"lrr": 1}}, 'write optimizer={"lr": 1}'),
        ({"seeed": "many"}, "write seed=..."),
        ({"loss": right}, 'write algorithm={"loss": ...}'),
        ({"args": Factory()}, "args is not a setting; docs/settings.md has all of them, and docs/migrating.md has"),
        ({"profile_step": Factory()}, "profile_step is not a setting; docs/settings.md has"),
        ({"on_step": right}, "on_step is an argument of lockstep.train and of resume alone"),
        ({"data": {"rows": ROWS}}, "data.rows is not a setting"),
    ],
)
def test_an_unknown_name_gets_what_to_write(arguments: dict[str, Any], written: str) -> None:
    assert written in refusal(**arguments)
    assert len(refusal(**arguments)) < 250


def test_all_names_are_in_one_error() -> None:
    lines = refusal(learning_rate=1e-5, num_generations=4, max_steps=3).splitlines()
    assert [line.split("; write ")[1] for line in lines] == [
        'optimizer={"lr": 1e-05}', 'rollout={"samples_per_prompt": 4}', "updates=3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("updates=-1 is bad; set updates=80", "updates=-1 is bad; set updates=80"),
        ("set optimizer.lr=1e-6", 'set optimizer={"lr": 1e-6}'),
        ("set model.lora.rank=16.", 'set model={"lora": {"rank": 16}}.'),
        ("set correction.low=0.5 correction.high=2.0", 'set correction={"low": 0.5, "high": 2.0}'),
        (
            "set environment=single_turn reward=numeric, or others",
            'set environment="single_turn", reward="numeric", or others',
        ),
        ("set run_name=<another name>, or resume=auto to", 'set run_name=<another name>, or resume="auto" to'),
        (
            "set 'data.columns={prompt: <column>}' with",
            'set columns={"prompt": <column>} with',
        ),
        ("set reward.functions=[object:right] if", "set rewards=[right] if"),
        ("write reward: {functions: [my.py:f]}", 'write rewards=["my.py:f"]'),
        ("write optimizer: {lr: 0.1}", 'write optimizer={"lr": 0.1}'),
        ("write defaults: [{algorithm: ppo}], if it", 'write algorithm="ppo", if it'),
        ("set sync.address=null, or model.compile=false", 'set sync={"address": None}, or model={"compile": False}'),
        ("set LANG=C; a=b", "set LANG=C; a=b"),
    ],
)
def test_instructions_are_in_python(text: str, expected: str) -> None:
    assert python_words(text) == expected
    assert python_words(expected) == expected


def test_errors_of_the_checks_are_in_python(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r'set algorithm=\{"clip_low": 0.2\}'):
        lockstep.configure(model=tmp_path, data=ROWS, rewards=[right], algorithm={"clip_low": 7})
    with pytest.raises(ConfigError, match=r"updates: found \[.{70,90}\.\.\., expected integer$"):
        lockstep.configure(model=tmp_path, data=ROWS, rewards=[right], updates=ROWS)
    with pytest.raises(ConfigError, match=r"wandb: found true, expected a text$"):
        lockstep.configure(model=tmp_path, data=ROWS, rewards=[right], logger={"wandb": True})


def test_the_arguments_are_those_of_train() -> None:
    named = {
        name for name, one in inspect.signature(lockstep.train).parameters.items() if one.kind is not one.VAR_KEYWORD
    }
    assert {*NAMES} == {*named, "environment"}


def test_names_of_other_trainers_are_settings_here() -> None:
    assert {*RENAMED.values(), *REPLACED.values()} <= {*KEYS}
    assert not RENAMED.keys() & REPLACED.keys()
    for name, meant in {**RENAMED, **REPLACED}.items():
        assert str(closest_name(name, KEYS)).endswith((meant, f".{name}")), name


def test_the_page_and_the_suggestions_agree() -> None:
    """Each name of TRL and verl on docs/migrating.md has, unless a setting has it, its setting in the same row."""
    page = (ROOT / "docs/migrating.md").read_text().partition("## Reward functions")[0]
    page = re.sub(r"### Metrics.*?(?=## From verl)", "", page, flags=re.DOTALL)
    tables, ends = {**RENAMED, **REPLACED}, {key.rpartition(".")[2] for key in KEYS}
    checked = set()
    for row in re.findall(r"^\| (`.+)$", page, re.MULTILINE):
        theirs, ours = (cell.strip() for cell in row.split("|")[:2])
        theirs = theirs.partition(" over ")[0]  # of a quotient, the first number
        if not ours or ours == "the same" or "accelerate launch" in ours:
            continue
        for name in re.findall(r"`(?:[\w.]*\.)?(\w+)(?:=|`|,)", theirs):
            if name in VALUES or (name in ends and name not in tables):
                continue
            section, _, last = tables[name].rpartition(".")
            assert tables[name] in ours or f"`{last}`" in ours or f"{section}=" in ours, (name, tables[name], ours)
            checked.add(name)
    assert len(checked) > 50


def test_the_module_lists_its_names_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, lockstep; assert {'train', 'configure', 'stop', 'Run', 'ConfigError', 'Step', '__version__'} <= "
        "{*dir(lockstep)}; assert 'omegaconf' not in sys.modules and 'numpy' not in sys.modules; "
        "lockstep.ConfigError, lockstep.Step, lockstep.train; assert 'torch' not in sys.modules; "
        "print(lockstep.__version__, 'lockstep.train(' in lockstep.__doc__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+\S* True\n", done.stdout)
