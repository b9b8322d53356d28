"""Ledger of evidence: what a run replays, corrects and measures, and the worst numbers about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.lab.pages.ledger import BADGES, SUMMARY, Line, Treatment, ledger, wandb_summary
from lockstep.lab.pages.saved_run import nested
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain


def lines_of(steps: list[dict[str, float | None]] | None = None, **settings: Any) -> dict[str, Line]:
    """Return the ledger by subject. settings: by name, with `__` for the dot."""
    config = plain(Config())
    for name, value in settings.items():
        group, *path, last = name.split("__")
        for part in path:
            group = f"{group}.{part}"
        nested(config, group)[last] = value
    rows = steps or []
    found = ledger(lambda name: nested(config, name), lambda metric: [row[metric] for row in rows if metric in row])
    return {line.entry.subject: line for line in found}


def test_a_plain_run_has_an_entry_for_each_way_to_part():
    lines = lines_of()
    assert {subject: line.entry.treatment for subject, line in lines.items()} == {
        "token ids and logprobs": Treatment.EXACT,
        "weights": Treatment.EXACT,
        "weight versions": Treatment.EXACT,
        "engine against trainer": Treatment.CORRECTED,
        "rollouts left out": Treatment.MEASURED,
    }
    assert all(line.holds for line in lines.values())


def test_the_worst_value_of_the_run_is_the_evidence():
    steps: list[dict[str, float | None]] = [
        {"rollout_correction/kl": 0.01, "rollout_correction/ess": 0.9},
        {"rollout_correction/kl": -0.02, "rollout_correction/ess": 0.4},
        {"rollout_correction/kl": None, "rollout_correction/ess": 0.8},
    ]
    evidence = lines_of(steps)["engine against trainer"].evidence
    assert "rollout_correction/kl: -0.02 at worst in 3 steps, 1 not finite" in evidence
    assert "rollout_correction/ess: 0.4 at worst in 3 steps" in evidence
    assert "rollout_correction/k3_kl: no value" in evidence


@pytest.mark.parametrize(
    ("metric", "value", "subject"),
    [
        ("rollout/token_match_rate", 0.999, "token ids and logprobs"),
        ("rollout_correction/version_lag_max", 1.0, "weight versions"),
    ],
)
def test_one_step_contradicts_a_replay(metric: str, value: float, subject: str):
    exact = 1.0 if metric == "rollout/token_match_rate" else 0.0
    line = lines_of([{metric: exact}, {metric: value}, {metric: None}])[subject]
    assert not line.holds
    assert line.badge == "critical"
    assert line.text.startswith("CONTRADICTED")
    line = lines_of([{metric: exact}, {metric: None}])[subject]
    assert line.holds, "a step without trained tokens has no finite value"
    assert line.badge == BADGES[Treatment.EXACT]


@pytest.mark.parametrize(
    ("settings", "subject", "treatment"),
    [
        ({"rollout__top_k": 20, "rollout__replay_support": True}, "sampling support", Treatment.EXACT),
        ({"rollout__min_p": 0.1}, "sampling support", Treatment.UNACCOUNTED),
        ({"correction__routing_replay": "engine"}, "experts", Treatment.EXACT),
        ({"correction__routing_replay": "old"}, "experts", Treatment.CORRECTED),
        ({"correction__routing_replay": "old", "correction__mode": "off"}, "experts", Treatment.MEASURED),
        ({"model__images__max_per_prompt": 2}, "images", Treatment.EXACT),
        ({"rollout__quantization": "fp8_per_channel"}, "weights", Treatment.CORRECTED),
        ({"rollout__max_staleness": 2}, "weight versions", Treatment.CORRECTED),
        ({"rollout__max_staleness": 2, "correction__mode": "none"}, "weight versions", Treatment.UNACCOUNTED),
        ({"correction__mode": "off"}, "engine against trainer", Treatment.MEASURED),
        ({"correction__mode": "none"}, "engine against trainer", Treatment.UNACCOUNTED),
        ({"correction__logp_old": "bypass"}, "engine against trainer", Treatment.CORRECTED),
        ({"correction__mode": "off", "algorithm__loss": "dppo"}, "engine against trainer", Treatment.CORRECTED),
        ({"algorithm__minibatches": 2}, "later updates of a batch", Treatment.CORRECTED),
        ({"algorithm__epochs": 3, "algorithm__loss": "reinforce"}, "later updates of a batch", Treatment.UNACCOUNTED),
        (
            {"algorithm__epochs": 3, "algorithm__loss": "mine.py:loss"},
            "later updates of a batch",
            Treatment.UNACCOUNTED,
        ),
    ],
)
def test_settings_choose_the_treatment(settings: dict[str, Any], subject: str, treatment: Treatment):
    assert lines_of(**settings)[subject].entry.treatment is treatment


def test_experts_that_nothing_replays_are_named_once_a_router_was_logged():
    assert "experts" not in lines_of()
    assert lines_of([{"router/load_max": 2.0}])["experts"].entry.treatment is Treatment.CORRECTED


def test_the_weights_have_every_canary_that_was_scored():
    assert "distribution" not in lines_of()["weights"].evidence
    evidence = lines_of([{"sync/canary_abs_diff": 1e-6, "sync/distribution_kl": 2e-14}])["weights"].evidence
    assert "sync/canary_abs_diff: 1.0e-6 at worst in 1 step; sync/distribution_kl: 2.0e-14" in evidence


def test_the_treatment_names_what_was_chosen():
    weights = lines_of(model__lora__rank=8)["weights"]
    assert "adapters of rank 8 (model.lora.send=auto)" in weights.entry.how
    assert "all weights, rounded to bfloat16" in lines_of(model__dtype="bfloat16")["weights"].entry.how
    correction = lines_of(correction__rejection={"token_k1": 2.0})["engine against trainer"]
    assert "token_truncate" in correction.entry.how
    assert "rejection token_k1=2.0" in correction.entry.how
    assert "top_k=20" in lines_of(rollout__top_k=20, rollout__top_p=1.0)["sampling support"].entry.how


def test_training_on_demonstrations_alone_has_no_ledger():
    assert not lines_of(algorithm__trains_on="demonstrations")


def test_wandb_gets_the_lines_of_a_run_with_and_without_metrics(tmp_path: Path):
    config = plain(Config())
    before = wandb_summary(tmp_path, config)
    assert "no value" in before[SUMMARY + "token ids and logprobs"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/token_match_rate": 1.0}) + "\n")
    text = wandb_summary(tmp_path, config)[SUMMARY + "token ids and logprobs"]
    assert text.startswith("exact: ")
    assert text.endswith("(rollout/token_match_rate: 1 at worst in 1 step)")
    assert wandb_summary(tmp_path, config).keys() == before.keys()


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, None, float("nan"), True])
def test_settings_of_any_type_make_a_ledger(value: Any):
    names = ["model.lora.rank", "model.images.max_per_prompt", "model.dtype", "rollout.top_k", "rollout.max_staleness",
             "rollout.quantization", "algorithm.epochs", "algorithm.loss", "correction.mode", "correction.rejection",
             "correction.routing_replay", "correction.logp_old"]  # fmt: skip
    lines = lines_of(**{name.replace(".", "__"): value for name in names})
    assert "token ids and logprobs" in lines
