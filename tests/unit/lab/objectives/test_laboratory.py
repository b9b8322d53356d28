"""A whole comparison on a small saved run: numbers, held-out rollouts, later optimizer steps, the page, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.lab.objectives.gradients import TrialSteps
from lockstep.lab.objectives.laboratory import Request, compare_objectives
from lockstep.lab.objectives.objective_numbers import Comparison, tables
from lockstep.lab.objectives.page import objectives_page
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.observe.metrics_log import BATCH
from tests.fixtures.distributed import _Accelerator
from tests.fixtures.models import byte_tokenizer, sampled_logprobs, tiny_qwen3
from tests.unit.lab.test_replay import write

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GROUPS, SAMPLES = 4, 3


class AloneTrial(TrialSteps):
    def close(self) -> None:
        """There is no process group."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of unequal lengths, some of two turns, by the model itself and by a policy a little off it."""
    root = tmp_path_factory.mktemp("run")
    model = tiny_qwen3(tied=True)
    model.save_pretrained(root / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(root / "model")
    write(root, "updates=5", "correction.low=0.9", "correction.high=1.1", "optimizer.lr=1e-3")
    (root / "rollouts").mkdir()
    rng = np.random.default_rng(0)
    for update, noise in ((1, 0.0), (2, 0.1)):
        rollouts = [made(model, number, rng, noise) for number in range(GROUPS * SAMPLES)]
        write_rollouts(root / "rollouts" / f"step-{update:06d}.jsonl", rollouts)
    lines = [{"step": update, BATCH: update} for update in (1, 2)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def made(model: torch.nn.Module, number: int, rng: np.random.Generator, noise: float) -> Rollout:
    calls: list[EngineCall] = []
    for _ in range(1 + number % 2):
        prompt = (*(calls[-1].all_ids if calls else (7, 9, number // SAMPLES + 1)), 11)
        sampled = tuple(rng.integers(1, 250, 2 + number).tolist())
        own = np.array(sampled_logprobs(model, prompt, sampled))
        logprobs = np.minimum(own + noise * rng.normal(size=len(sampled)), 0)
        calls.append(
            EngineCall(
                prompt_ids=prompt,
                sampled_ids=sampled,
                sampled_logprobs=tuple(logprobs.tolist()),
                finish_reason=FinishReason.STOP,
                version_spans=(VersionSpan(version=0, start=0, end=len(sampled)),),
            )
        )
    reward = float(rng.integers(0, 2)) if number % SAMPLES else 1.0 - number % 2 / 2
    return Rollout(
        rollout_id=number, group_id=number // SAMPLES, calls=tuple(calls), reward=reward, rewards={"a": reward}
    )  # fmt: skip


@pytest.fixture
def compare(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TrialSteps, "start", lambda **_: AloneTrial(_Accelerator(0), max_grad_norm=1.0))  # type: ignore[arg-type]

    def compare(*overrides: str, names: str = "", corrections: str = "", **more: Any) -> Comparison:
        request = Request(
            run=run, step=1, names=names.split(), corrections=corrections.split(), after=0, heldout=None,
            overrides=overrides, trusts_run=False,
        )  # fmt: skip
        return compare_objectives(request._replace(**more))

    return compare


def test_identities_and_shares_on_a_saved_step(compare) -> None:
    found = compare(names="grpo gspo cispo grpo_sequence_mean bnpo")
    rows = {row.name: row for row in found.rows}
    cosine = dict(zip(rows, found.cosines[0], strict=True))
    assert cosine["grpo"] == pytest.approx(1, abs=1e-9)
    assert cosine["cispo"] == cosine["bnpo"] == pytest.approx(1, abs=1e-6)  # ratio 1, mean over tokens
    assert cosine["gspo"] < 0.999
    assert found.cosines[2][4] == pytest.approx(1, abs=1e-6)  # gspo, grpo_sequence_mean
    for row in found.rows:
        assert row.clipped == 0
        for kind, shares in row.shares.items():
            assert sum(shares.values()) == pytest.approx(1), kind
            assert sum(found.tokens[kind].values()) == pytest.approx(1)
        assert math.isfinite(row.predicted.mean + row.predicted.error + row.signal_to_noise)
    assert rows["run"].against_run.mean == 0
    assert rows["gspo"].against_run.mean != 0
    assert "halves" in found.about["heldout"]
    assert found.about["effective"] == pytest.approx(1, abs=1e-3)
    # a mean over rollouts gives short ones as much weight as long ones
    shortest = next(iter(rows["run"].shares["length"]))
    assert rows["gspo"].shares["length"][shortest] > rows["run"].shares["length"][shortest]


def test_corrections_take_the_weight_of_tokens_that_another_policy_sampled(compare, run: Path) -> None:
    # its weights are those before the first step, which the run would have changed
    (run / "metrics.jsonl").write_text(json.dumps({"step": 2, BATCH: 1}) + "\n")
    found = compare(
        step=2, corrections="off token_truncate token_mask", names="ppo_clip", overrides=("rollout.max_staleness=2",)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, BATCH: n}) + "\n" for n in (1, 2)))
    untrained = {row.name: row.untrained for row in found.rows}
    assert untrained["ppo_clip off"] == untrained["run"] == 0
    assert 0.1 < untrained["ppo_clip token_mask"] < 0.9
    assert found.cosines[0][2] == pytest.approx(1)


def test_held_out_rollouts_and_a_later_optimizer_step_can_be_named(compare, run: Path) -> None:
    more = "algorithm.minibatches=2"
    first = compare(more, names="gspo", heldout=run / "rollouts" / "step-000002.jsonl")
    second = compare(more, names="gspo", after=1)
    assert "step-000002.jsonl" in first.about["heldout"]
    assert first.about["effective"] < 1
    assert (first.about["optimizer_step"], second.about["optimizer_step"]) == ("1 of 2", "2 of 2")
    assert first.rows[1].clipped == 0
    assert second.rows[1].clipped > 0  # ratios are no longer 1
    assert second.cosines[0][1] < 0.999


def test_a_step_along_the_gradient_of_the_reward_promises_its_norm_times_its_length(compare, run: Path) -> None:
    """REINFORCE with a leave-one-out baseline under SGD, judged on the rollouts that it trains and on others."""
    more = ("optimizer.name=sgd", "optimizer.momentum=0")
    itself = compare(*more, names="rloo", heldout=run / "rollouts" / "step-000001.jsonl").rows[1]
    assert itself.predicted.mean == pytest.approx(itself.norm * itself.step, rel=1e-3)
    halves = compare(*more, names="rloo").rows[1]
    assert abs(halves.predicted.mean) < 0.3 * itself.predicted.mean  # rewards are random: halves share nothing


def test_the_result_is_a_table_a_page_and_json(compare) -> None:
    found = compare(names="gspo dapo")
    text, page = tables(found), objectives_page(found)
    for said in ("signal/noise", "weight by class", "algorithm.loss=gspo", "left as in the run", "fresh moments"):
        assert said in text, said
    for said in ("gspo", "Weight by turn", "algorithm.loss=gspo"):
        assert said in page, said
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert values["rows"][1]["name"] == "gspo"
    assert replace(found, about={"effective": math.nan}).to_json()["about"]["effective"] is None


def test_the_model_after_each_update_is_written(run: Path, compare, tmp_path: Path) -> None:
    models = tmp_path / "models"
    found = compare(names="gspo", heldout=run / "rollouts/step-000001.jsonl", models=models)
    assert sorted(path.name for path in models.iterdir()) == ["0-run", "1-gspo"]
    before = list(AutoModelForCausalLM.from_pretrained(run / "model").parameters())
    for row, name in zip(found.rows, ("0-run", "1-gspo"), strict=True):
        after = AutoModelForCausalLM.from_pretrained(models / name).parameters()
        change = sum(float((b - a).detach().double().square().sum()) for a, b in zip(before, after, strict=True))
        assert row.step == pytest.approx(change**0.5, rel=1e-4)
    assert found.rows[0].step > 0
    with pytest.raises(ConfigError, match="is not empty; name a new directory"):
        compare(names="gspo", models=models)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"step": 2}, r"--step 2 was computed with the weights of update 1.*no whole checkpoint; name --step 1, or"),
        ({"step": 9}, "found step-000001 to step-000002"),
        ({"names": "ppo"}, "ppo needs a critic.*algorithm=ppo"),
        ({"names": "opd"}, "opd needs a teacher's scores"),
        ({"names": "remax"}, r"needs greedy answers, which are not saved; compare algorithm\.advantage=rloo"),
        ({"names": "sft"}, "needs demonstrations alone"),
        ({"names": "m2po"}, "m2po: correction.high=1.1 has no effect"),
        ({"after": 1}, r"--after 1: .* 1 optimizer steps.*algorithm\.minibatches=4"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(compare, more: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        compare(**{"names": "gspo", **more})
