"""`dry_run=true`: what it says is what the run would do, it starts no engine, and it owns that it sampled nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rollout.engine.protocol import Sampling
from rollout.environments import make_environment
from rollout.episode.rows import rows_from_calls
from rollout.records import FinishReason, RolloutStatus
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.paths import ROOT
from tests.fixtures.policies import CHAT, TOKENIZER
from trainer.config.schema import AlgorithmConfig, Config, RolloutConfig
from trainer.config.tree import plain, settings, settings_tree
from trainer.diagnosis.token_classes import TokenTexts
from trainer.tools.dry_run import masked_text
from trainer.tools.rehearsal import PLACEHOLDER, Rehearsal, rehearse
from trainer.tools.run_counts import RunArithmetic
from trainer.tools.scripted import ScriptedEngine

DEMO_ROW = {"question": "compute 64*22-55", "answer": "1353"}


async def played(row: dict, environment: str = "single_turn", *, max_model_len: int = 4096) -> Rehearsal:
    return await rehearse(
        row,
        environment=make_environment(environment),
        chat=CHAT,
        sampling=Sampling(max_tokens=256, stop_token_ids=CHAT.stop_token_ids),
        max_turns=3,
        max_model_len=max_model_len,
        rollout_id=0,
    )


class TestRehearsal:
    async def test_other_data_is_answered_by_its_own_column_and_says_so(self):
        rehearsal = await played({"prompt": "2+2?", "solution": "It is 4."})
        assert rehearsal.player == "the row's column 'solution'"
        assert rehearsal.rollout.messages[-1]["content"] == "It is 4."
        assert rehearsal.rollout.calls[-1].finish_reason is FinishReason.STOP

    async def test_a_row_without_an_answer_gets_a_placeholder_and_says_so(self):
        rehearsal = await played({"prompt": "2+2?"})
        assert "placeholder" in rehearsal.player
        assert rehearsal.rollout.messages[-1]["content"] == PLACEHOLDER

    async def test_a_prompt_that_does_not_fit_shows_as_what_it_would_be(self):
        rehearsal = await played({"prompt": "word " * 50, "answer": "4"}, max_model_len=20)
        assert rehearsal.rollout.status is RolloutStatus.CONTEXT_FULL

    async def test_a_long_answer_is_cut_like_a_sampled_one(self):
        engine = ScriptedEngine(CHAT, lambda: "one two three four", max_model_len=100)
        call = await engine.generate([1, 2], Sampling(max_tokens=3, stop_token_ids=CHAT.stop_token_ids))
        assert len(call.sampled_ids) == 3
        assert call.finish_reason is FinishReason.LENGTH


class TestMask:
    async def test_the_marked_text_is_what_is_trained(self):
        rehearsal = await played(DEMO_ROW, "calculator")
        (row,) = rows_from_calls(rehearsal.rollout.calls)
        assert 0 < row.num_trained == rehearsal.rollout.num_sampled < len(row)
        shown = masked_text(row, TokenTexts(TOKENIZER), marks=("⟦", "⟧")).plain
        assert shown.count("⟦") == shown.count("⟧") == 1
        assert "⟦1353<|im_end|>⟧" in shown
        assert "compute 64*22-55<|im_end|>" in shown.split("⟦")[0]

    async def test_data_cannot_act_on_the_terminal(self):
        rehearsal = await played({"prompt": "\x1b]0;owned\x07", "answer": "\x1b[31mred"})
        (row,) = rows_from_calls(rehearsal.rollout.calls)
        assert not set("\x1b\x07") & set(masked_text(row, TokenTexts(TOKENIZER), marks=("", "")).plain)


class TestArithmetic:
    def test_counts_of_the_default_run(self):
        counts = RunArithmetic.of(Config(), ranks=1)
        assert (counts.rollouts, counts.updates_per_step, counts.steps) == (128, 1, 80)
        assert counts.sampled_tokens == 128 * 3 * 48
        assert counts.packs == 4  # 128 rows of 512 tokens in packs of 16384

    def test_epochs_and_minibatches_make_fewer_steps(self):
        config = Config(updates=81, algorithm=AlgorithmConfig(epochs=2, minibatches=4))
        counts = RunArithmetic.of(config, ranks=2)
        assert (counts.updates_per_step, counts.rollouts_per_update, counts.steps) == (8, 32, 11)
        assert counts.packs == 1  # 16 rows on each of two ranks, 32 in a pack

    def test_what_is_sampled_beside_the_batch_is_told(self):
        dapo = RunArithmetic.of(Config(algorithm=AlgorithmConfig(dynamic_sampling=True, max_refills=2)), ranks=1)
        remax = RunArithmetic.of(Config(algorithm=AlgorithmConfig(advantage="remax")), ranks=1)
        assert (dapo.extra_rollouts, remax.extra_rollouts) == (256, 16)
        assert any("256 more" in words for _, words in dapo.lines(data_rows=10))

    def test_a_row_longer_than_the_budget_still_counts_as_a_pack(self):
        config = Config(token_budget=256, rollout=RolloutConfig(prompts_per_step=2, samples_per_prompt=2))
        assert RunArithmetic.of(config, ranks=1).packs == 4


class TestSettingsTree:
    def test_what_differs_from_the_default_stands_out(self):
        stream = io.StringIO()
        config = Config(updates=7, rollout=RolloutConfig(temperature=0.7))
        Console(file=stream, width=100).print(settings_tree(plain(config)))
        shown = stream.getvalue()
        assert "updates 7  (default 80)" in shown
        assert "temperature 0.7  (default 1.0)" in shown
        assert "top_p 1.0\n" in shown.replace(" \n", "\n")

    def test_free_form_settings_are_one_value(self):
        config = Config()
        config.environment.settings = {"files": ["a.py:f"], "depth": 3}
        found = {setting.path: setting for setting in settings(plain(config))}
        assert found["environment", "settings"].shown == "{files: ['a.py:f'], depth: 3}"
        assert found["environment", "settings"].is_changed


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """A model and data as a user has them."""
    tiny_qwen3(tied=True).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", "data.heldout_path=null",
        "environment=single_turn", "reward.functions=[exact_match]", "rollout.prompts_per_step=2",
        f"run_root={tmp_path}/runs",
    )  # fmt: skip


def test_the_command_tells_everything_starts_no_engine_and_leaves_nothing(own: tuple[str, ...], tmp_path: Path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['scripts/train.py', 'dry_run=true', *{list(own)!r}]\n"
        "runpy.run_path('scripts/train.py', run_name='__main__')\n"
        "print('imported:', sorted({'vllm', 'deepspeed', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for words in (
        "samples_per_prompt 8", "2 prompts x 8 samples = 16 rollouts", "times the 5 rows", "GiB", "Nothing was sampled",
        "the row's column 'answer'", "reward 1.00", "⟦", "leave dry_run out", "imported: []",
    ):  # fmt: skip
        assert words in " ".join(done.stdout.split()), words
    assert not (tmp_path / "runs").exists()
    assert done.stderr == ""
