"""`dry_run=true`: it shows what the run would do, starts no engine, and says that nothing is sampled."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from lockstep.integrations.environments.trl_rollout import by_their_function
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.single_turn import SingleTurn
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import FinishReason, Rollout, RolloutStatus
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain, settings, settings_tree
from lockstep.trainer.data.prompts import DataSet
from lockstep.trainer.observe.token_texts import TokenTexts
from lockstep.trainer.tools.dry_run import (
    MAX_SHOWN_TOKENS,
    PLACEHOLDER,
    long_prompts,
    masked_text,
    preview,
    run_counts,
    sampled_answer,
    unknown_names,
)
from tests.fixtures.composed import DEMO, composed
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.paths import ROOT
from tests.fixtures.policies import CHAT, TOKENIZER

pytestmark = pytest.mark.long

DEMO_ROW = {"question": "compute 64*22-55", "answer": "1353"}


async def previewed(row: dict, environment: str = "single_turn", **rollout: Any) -> tuple[Rollout, str]:
    """Return the rollout of a row, unscored, and the notes."""
    settings: dict[str, Any] = {"max_tokens_per_turn": 256, "max_model_len": 4096} | rollout
    config = Config(rollout=RolloutConfig(**settings))
    config.environment.name, config.environment.settings = environment, {}
    config.reward.functions = ["llm_judge"]
    (found,), notes = await preview(config, CHAT, [row])
    return found, "\n".join(notes)


class TestPreview:
    async def test_a_row_is_answered_by_its_answer_column_and_the_notes_name_it(self):
        rollout, notes = await previewed({"prompt": "2+2?", "solution": "It is 4."})
        assert "Rollout 0: each turn of the assistant is the row's column 'solution'" in notes
        assert rollout.messages[-1]["content"] == "It is 4."
        assert rollout.calls[-1].finish_reason is FinishReason.STOP

    async def test_a_row_without_an_answer_gets_a_placeholder_and_the_notes_say_so(self):
        rollout, notes = await previewed({"prompt": "2+2?"})
        assert "a placeholder" in notes
        assert rollout.messages[-1]["content"] == PLACEHOLDER

    async def test_slow_rewards_are_left_out_and_named(self):
        rollout, notes = await previewed(DEMO_ROW)
        assert "Rewards are left out, because llm_judge" in notes
        assert not rollout.rewards

    async def test_rewards_that_need_several_rollouts_of_a_row_are_left_out_and_named(self):
        config = Config()
        config.environment.name, config.environment.settings = "single_turn", {}
        config.reward.functions = ["majority_vote"]
        (found,), notes = await preview(config, CHAT, [DEMO_ROW])
        assert "Rewards are left out, because majority_vote would compare rollouts of one row." in notes
        assert found.status is RolloutStatus.COMPLETED
        config.reward.functions = ["majority_vote", "contains"]
        (found,), notes = await preview(config, CHAT, [DEMO_ROW])
        assert any("Each rollout is a group of its own here" in note for note in notes)
        assert found.rewards == {"contains": 1.0}

    async def test_rows_of_an_environment_that_has_another_driver_are_left_out(self, monkeypatch):
        config = Config()
        config.environment.name, config.environment.settings = "agent", {"agent": print}
        config.reward.functions = ["exact_match"]
        rollouts, notes = await preview(config, CHAT, [DEMO_ROW, DEMO_ROW])
        assert list(rollouts) == []
        assert "Rollout 1 is left out, because its environment is not played turn by turn." in notes
        driven = replace(SingleTurn.declaration, driver=by_their_function)
        monkeypatch.setattr(SingleTurn, "declaration", driven)
        config.environment.name, config.environment.settings = "single_turn", {}
        rollouts, _ = await preview(config, CHAT, [DEMO_ROW])
        assert list(rollouts) == []

    async def test_a_prompt_that_is_too_long_ends_as_in_the_run(self):
        rollout, _ = await previewed({"prompt": "word " * 50, "answer": "4"}, max_model_len=20)
        assert rollout.status is RolloutStatus.CONTEXT_FULL

    async def test_a_long_answer_is_cut_like_a_sampled_one(self):
        call = await sampled_answer([5, 6, 7, 8], [1, 2], Sampling(max_tokens=3, stop_token_ids=CHAT.stop_token_ids))
        assert call.sampled_ids == (5, 6, 7)
        assert call.finish_reason is FinishReason.LENGTH


class TestMask:
    async def test_the_marked_text_is_the_trained_text(self):
        rollout, _ = await previewed(DEMO_ROW, "calculator")
        (row,) = rows_from_calls(rollout.calls)
        assert 0 < row.num_trained == rollout.num_sampled < len(row)
        shown = masked_text(row, TokenTexts(TOKENIZER), marks=("⟦", "⟧")).plain
        assert shown.count("⟦") == shown.count("⟧") == 1
        assert "⟦1353<|im_end|>⟧" in shown
        assert "compute 64*22-55<|im_end|>" in shown.split("⟦")[0]

    async def test_a_long_row_loses_its_middle(self):
        rollout, _ = await previewed({"prompt": "7" * (2 * MAX_SHOWN_TOKENS), "answer": "4"})
        (row,) = rows_from_calls(rollout.calls)
        shown = masked_text(row, TokenTexts(TOKENIZER), marks=("⟦", "⟧")).plain
        assert f"\n... {len(row) - MAX_SHOWN_TOKENS} tokens ...\n" in shown
        whole = "".join(map(TokenTexts(TOKENIZER).__getitem__, row.ids.tolist()))
        assert shown.count("7") == whole.count("7") - (len(row) - MAX_SHOWN_TOKENS)
        assert shown.endswith("⟦4<|im_end|>⟧")

    async def test_data_cannot_act_on_the_terminal(self):
        rollout, _ = await previewed({"prompt": "\x1b]0;owned\x07", "answer": "\x1b[31mred"})
        (row,) = rows_from_calls(rollout.calls)
        assert not set("\x1b\x07") & set(masked_text(row, TokenTexts(TOKENIZER), marks=("", "")).plain)


def test_prompts_that_fill_the_context_are_counted() -> None:
    rows = [{"prompt": "short"}, {"prompt": "long " * 300}, {"prompt": "long " * 200}]
    environment = Config().environment
    (sentence,) = long_prompts(DataSet(rows, DataSetConfig(path="rows.jsonl")), environment, CHAT, context=128)
    assert sentence.startswith("rows.jsonl: 2 of 3 prompts are too long for rollout.max_model_len=128")
    longest = len(CHAT.prompt([{"role": "user", "content": rows[1]["prompt"]}], ()))
    assert f"the longest has {longest:,} tokens" in sentence
    few = DataSet(rows[:1], DataSetConfig(path="rows.jsonl"))
    assert list(long_prompts(few, environment, CHAT, context=128)) == []


def test_a_name_of_the_teachers_context_that_rows_lack_is_named() -> None:
    rollout = Rollout(rollout_id=0, group_id=0, calls=(), example={"answer": "1"}, outcome={"feedback": "none"})
    assert unknown_names("", [rollout]) == []
    (sentence,) = unknown_names("{solution} {feedback} {answer} {anser} {0.x}", [rollout])
    assert "names {anser}, which these rows lack; expected names of answer, feedback, solution" in sentence


class TestCounts:
    def test_counts_of_the_demo(self):
        counts = run_counts(composed(DEMO), ranks=1, data_rows=640)
        assert counts["a step samples"] == "16 prompts x 8 samples = 128 rollouts, at most 18,432 sampled tokens"
        assert counts["a step trains"] == "1 optimizer updates on 128 rollouts each"
        # 128 rows of 512 tokens in packs of 16384
        assert counts["an update runs"].startswith("at most 4 packs of 16,384 tokens on each of 1 rank(s)")
        assert counts["the run makes"] == "80 updates in 80 steps, 10,240 rollouts"
        assert counts["the run reads"] == "1,280 prompts, 2.00 times the 640 rows of the data"

    def test_epochs_and_minibatches_make_fewer_steps(self):
        config = Config(updates=81, algorithm=AlgorithmConfig(epochs=2, minibatches=4))
        counts = run_counts(config, ranks=2, data_rows=10)
        assert counts["a step trains"] == "8 optimizer updates on 32 rollouts each"
        assert counts["the run makes"].startswith("81 updates in 11 steps")
        assert counts["an update runs"].startswith("at most 1 packs")  # 16 rows on each of two ranks, 32 in a pack

    def test_refills_and_greedy_answers_are_counted(self):
        dapo = Config(algorithm=AlgorithmConfig(dynamic_sampling=True, max_refills=2))
        remax = Config(algorithm=AlgorithmConfig(advantage="remax"))
        for config, extra in ((dapo, 256), (remax, 16)):
            counts = run_counts(config, ranks=1, data_rows=10)
            assert f"; up to {extra} more rollouts" in counts["a step samples"]

    def test_a_row_longer_than_the_budget_counts_as_a_pack(self):
        config = Config(token_budget=256, rollout=RolloutConfig(prompts_per_step=2, samples_per_prompt=2))
        assert run_counts(config, ranks=1, data_rows=10)["an update runs"].startswith("at most 4 packs")


class TestSettingsTree:
    def test_settings_that_differ_from_their_defaults_show_both_values_and_the_others_are_counted(self):
        stream = io.StringIO()
        config = Config(updates=7, rollout=RolloutConfig(temperature=0.7))
        Console(file=stream, width=100).print(settings_tree(plain(config)))
        shown = stream.getvalue()
        assert "updates 7  (default 80)" in shown
        assert "temperature 0.7  (default 1.0)" in shown
        assert "top_p" not in shown
        assert f"settings  {len(settings(plain(config))) - 2} others have the defaults" in shown

    def test_free_form_settings_are_one_value(self):
        config = Config()
        config.environment.settings = {"files": ["a.py:f"], "depth": 3}
        found = {setting.path: setting for setting in settings(plain(config))}
        assert found["environment", "settings"].text == "{files: ['a.py:f'], depth: 3}"
        assert found["environment", "settings"].is_changed


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """Write a model and a data file as a user has them; return the overrides that use them."""
    tiny_qwen3(tied=True).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", "data.heldout_path=null",
        "environment=single_turn", "reward.functions=[exact_match]", "rollout.prompts_per_step=2",
        f"run_root={tmp_path}/runs",
    )  # fmt: skip


def test_the_command_shows_the_run_starts_no_engine_and_writes_nothing(own: tuple[str, ...], tmp_path: Path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['scripts/train.py', 'dry_run=true', *{list(own)!r}]\n"
        "runpy.run_path('scripts/train.py', run_name='__main__')\n"
        "print('imported:', sorted({'vllm', 'deepspeed', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for words in (
        "prompts_per_step 2", "2 prompts x 8 samples = 16 rollouts", "times the 5 rows", "GiB", "Nothing is sampled",
        "the row's column 'answer'", "reward 1.00", "⟦", "leave dry_run out", "imported: []",
    ):  # fmt: skip
        assert words in " ".join(done.stdout.split()), words
    assert not (tmp_path / "runs").exists()
    assert done.stderr == ""


def test_a_plan_larger_than_the_device_is_a_problem_of_the_dry_run(own: tuple[str, ...], tmp_path: Path):
    command = [sys.executable, "scripts/train.py", "dry_run=true", *own, "rollout.kv_cache_gib=1000000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stdout
    assert "All checks passed" not in done.stdout
    assert "lockstep: the run does not fit into memory:" in done.stderr
    assert "rollout.kv_cache_gib=500000" in done.stderr


@pytest.fixture
def conversations(own: tuple[str, ...], tmp_path: Path) -> tuple[str, ...]:
    """Write conversations; return the overrides of a run on them."""
    for name, count in (("talks", 5), ("heldout", 2)):
        talks = [
            [{"role": "user", "content": f"{i}+{i}?"}, {"role": "assistant", "content": f"{2 * i}."}]
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return (
        "algorithm=sft", f"model.path={tmp_path}/model", f"data.path={tmp_path}/talks.jsonl", "updates=10",
        f"data.heldout_path={tmp_path}/heldout.jsonl", "eval.every=5", "demonstrations.rows_per_update=4",
        f"run_root={tmp_path}/runs",
    )  # fmt: skip


def dried(*overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/train.py", "dry_run=true", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_a_run_on_demonstrations_is_shown_with_its_rows_and_without_an_engine(
    conversations: tuple[str, ...], tmp_path: Path
) -> None:
    done = dried(*conversations)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for words in (
        "talks.jsonl: 5 demonstrations", "heldout.jsonl: 2 demonstrations", "4 demonstrations in 4 rows of at most",
        "in at most 1 packs", "40 demonstrations in 10 updates, 8.00 times the 5 of the data", "GiB planned per rank",
        "⟦", ".<|im_end|>⟧", "leave dry_run out",
    ):  # fmt: skip
        assert words in shown, words
    assert "engine weights" not in shown
    assert not (tmp_path / "runs").exists()
    assert done.stderr == ""


def test_demonstrations_beside_rollouts_are_shown_too(
    own: tuple[str, ...], conversations: tuple[str, ...], tmp_path: Path
) -> None:
    done = dried(*own, f"demonstrations.path={tmp_path}/talks.jsonl", "demonstrations.rows_per_update=2")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for words in ("2 prompts x 8 samples = 16 rollouts", "2 demonstrations in 2 rows", "the first demonstrations"):
        assert words in shown, words


def test_a_teacher_with_another_tokenizer_ends_the_dry_run(conversations: tuple[str, ...], tmp_path: Path) -> None:
    taught = (
        *conversations, f"teacher.path={tmp_path}/teacher", "demonstrations.teacher_divergence=forward",
        "rollout.max_model_len=64",
    )  # fmt: skip
    shutil.copytree(tmp_path / "model", tmp_path / "teacher")
    done = dried(*taught)
    assert done.returncode == 0, done.stderr
    other = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    other.add_tokens(["<one more>"])
    other.save_pretrained(tmp_path / "teacher")
    done = dried(*taught)
    assert done.returncode == 2
    assert "another tokenizer than" in done.stderr


def test_a_demonstration_that_cannot_be_trained_ends_the_dry_run(
    conversations: tuple[str, ...], tmp_path: Path
) -> None:
    with (tmp_path / "heldout.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "assistant", "content": "b", "weight": 0}]}) + "\n")
    done = dried(*conversations)
    assert done.returncode == 2
    assert "heldout.jsonl: 1 of 3 rows" in done.stderr
    assert "line 3: it cannot be trained" in done.stderr
    assert "All checks passed" not in done.stdout


FAULTS = """
def raises(rollout):
    return float(rollout.example["missing"])

def only_none(rollout):
    return None

def hopeless(rollout):
    return 0.0
"""


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("raises", "KeyError in line 3 of {path}/faults.py: 'missing' (line 5 of {path}/rows.jsonl)"),
        ("only_none", "no reward function applies to this rollout: each returned None (line 5 of {path}/rows.jsonl)"),
    ],
)
def test_rows_without_a_reward_end_the_dry_run_with_the_lines_of_code_and_data(
    own: tuple[str, ...], tmp_path: Path, reward: str, said: str
) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    done = dried(*own, f"reward.functions=[{tmp_path}/faults.py:{reward}]")
    assert done.returncode == 2, done.stdout
    assert "All checks passed" not in done.stdout
    assert "the first rows of the data" in done.stdout
    assert done.stderr.count("lockstep: a row shown above cannot be trained: ") == 2, done.stderr
    assert said.format(path=tmp_path) in done.stderr


def test_the_first_row_of_a_held_out_set_is_tried_too(own: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"prompt": "x", "answer": "y", "kind": "held out"}) + "\n")
    (tmp_path / "faults.py").write_text(
        "def fails(rollout):\n    return 1.0 if rollout.example.get('kind') is None else 1 / 0\n"
    )
    done = dried(
        *own, f"reward.functions=[{tmp_path}/faults.py:fails]", f"data.heldout_path={tmp_path}/heldout.jsonl",
        "eval.every=5",
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("lockstep: a row shown above cannot be trained: ") == 1, done.stderr
    assert f"ZeroDivisionError in line 2 of {tmp_path}/faults.py" in done.stderr
    assert f"(line 1 of {tmp_path}/heldout.jsonl)" in done.stderr


def test_a_row_whose_own_answer_earns_nothing_is_warned_of(own: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    done = dried(*own, f"reward.functions=[{tmp_path}/faults.py:hopeless]")
    assert done.returncode == 0, done.stderr
    said = "! the row's column 'answer' scores 0 as the model's answer: check the environment, the reward"
    assert done.stdout.count(said) == 2, done.stdout
    assert dried(*own).stdout.count("scores 0 as") == 0


def test_a_template_that_refuses_a_row_ends_the_dry_run(own: tuple[str, ...], tmp_path: Path) -> None:
    template = tmp_path / "refuses.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
        + str(TOKENIZER.chat_template)
    )
    done = dried(*own, f"model.chat_template={template}", "environment.settings.system_prompt=Be brief.")
    assert done.returncode == 2, done.stdout
    assert "no system prompt" in done.stderr


def test_a_context_beyond_the_model_ends_the_dry_run(own: tuple[str, ...]) -> None:
    done = dried(*own, "rollout.max_model_len=1000000")
    assert done.returncode == 2, done.stdout
    assert "rollout.max_model_len=1000000 is more than model.path" in done.stderr
