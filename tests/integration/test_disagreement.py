"""Engines that compute another model than the trainer, with equal weights: found by the first sync, or by a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.errors import SyncError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import CanarySettings, LongRow
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.distances import reach
from lockstep.trainer.model.start_checks.rounding import rounding_errors, rounding_of
from tests.fixtures.families import save_family
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.policies import TOKENIZER
from tests.fixtures.ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
CONTEXT = 320
DISTANCE = 64
"""Beyond the short row of the canary."""
FAMILIES = {
    "gpt_oss": {"sliding_window": DISTANCE},
    "llama4": {"attention_chunk_size": DISTANCE, "floor_scale": DISTANCE},
}

Engines = dict[str, tuple[Path, EmbeddedEngine]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """An engine by family, with the directory of its model."""
    with BackgroundLoop() as loop:
        started = {}
        for family in FAMILIES:
            directory = tmp_path_factory.mktemp(family)
            path = changed(save_family(family, directory / "family"), directory / "model", **FAMILIES[family])
            with forks_for_spawns():
                engine = EmbeddedEngine(
                    EngineSettings(model=path, max_model_len=CONTEXT, kv_cache_gib=0.0625, num_threads=1),
                    loop=loop,
                    log_path=directory / "engine.log",
                )
            started[family] = path, engine
        yield started
        for _, engine in started.values():
            loop.run(engine.close())


def changed(path: Path, directory: Path, **values: Any) -> Path:
    """Copy a model, with other values in its config."""
    directory.mkdir()
    for file in path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    assert all(config[name] != value for name, value in values.items())
    (directory / "config.json").write_text(json.dumps(config | values))
    return directory


@contextmanager
def synced(policy: Policy, engine: EmbeddedEngine) -> Iterator[WeightSync]:
    def score(ids: list[int], error: float = 0.0) -> list[float]:
        with torch.no_grad(), rounding_errors(policy, error):
            return policy(collate([whole_row(ids)], [0]), with_entropy=False)[0].tolist()

    disturbed = partial(score, error=rounding_of(torch.float32, "cpu"))
    row = reach(policy.causal_lm.config, longest=CONTEXT - 1, device_type="cpu", budget=CONTEXT)
    long = LongRow(tokens=row.tokens, distances=row.passed, score_disturbed=disturbed)
    sync = WeightSync(
        module=policy.model, engines=[engine], score_canary=score, canary=CanarySettings(long=long), deadline_s=60
    )
    try:
        yield sync
    finally:
        sync.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_programs_agree(engines: Engines, family: str) -> None:
    path, engine = engines[family]
    with synced(Policy.from_pretrained(path), engine) as sync:
        report = sync.push(1)
        assert report.canary_long_diff < 1e-5 < report.canary_long_limit
        assert report.metrics()["sync/canary_long_diff"] == report.canary_long_diff
        assert "sync/canary_long_diff" not in sync.push(2).metrics(), "the long row takes a hundredth of the time"


@pytest.mark.parametrize(
    ("family", "values"),
    [
        pytest.param("gpt_oss", {"sliding_window": DISTANCE + 1}, id="window"),
        pytest.param("gpt_oss", {"rms_norm_eps": 1e-3}, id="norm"),
        pytest.param("gpt_oss", {"num_experts_per_tok": 1}, id="router"),
        pytest.param("llama4", {"floor_scale": 2 * DISTANCE}, id="scale by length"),
        pytest.param("llama4", {"attention_chunk_size": DISTANCE + 1}, id="chunk"),
    ],
)
def test_another_value_in_the_config_is_found_by_the_first_sync(
    engines: Engines, family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    path, engine = engines[family]
    policy = Policy.from_pretrained(changed(path, tmp_path / "changed", **values))
    with synced(policy, engine) as sync, pytest.raises(SyncError) as caught:
        sync.push(1)
    assert "the engine does not compute what the trainer computes" in str(caught.value)
    assert "the fault is in the engine's computation" in str(caught.value)
    is_distant = max(values.values()) > DISTANCE
    assert (", where the model begins to compute in another way" in str(caught.value)) is is_distant


def without_bias(linear: nn.Linear) -> None:
    linear.forward = lambda states: nn.functional.linear(states, linear.weight)  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", ["scale", "bias"])
def test_another_computation_is_found_by_the_first_sync(engines: Engines, fault: str) -> None:
    path, engine = engines["gpt_oss"]
    policy = Policy.from_pretrained(path)
    attention: Any = policy.causal_lm.model.layers[1].self_attn
    with torch.no_grad():
        attention.o_proj.bias.add_(0.1)  # the fixture's are 0
    with synced(policy, engine) as sync:
        sync.push(1)
    if fault == "scale":
        attention.scaling *= 1.01
    else:
        without_bias(attention.o_proj)
    with synced(policy, engine) as sync, pytest.raises(SyncError, match="does not compute what the trainer computes"):
        sync.push(2)


# Through the command


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    tiny_qwen3(tied=True).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {index}+{index}?", "answer": str(2 * index)} for index in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def many(rollout): return float(rollout.num_sampled % 7)\n")
    return (
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl",
        f"reward.functions=[{tmp_path}/reward.py:many]",
        "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_tokens_per_turn=16",
        "rollout.max_model_len=128", "rollout.kv_cache_gib=0.0625", "updates=3", "checkpoint.every=0",
        "logger.print_rollouts=0", "sync.canary_share=0", f"run_root={tmp_path}/runs", "run_name=own",
    )  # fmt: skip


def planted(when: str, *words: str) -> tuple[int, str]:
    ended = run_ranks((), "-m", "tests.integration.workers.planted", when, *words, timeout_s=200)
    return ended.returncode, ended.stderr


def test_a_difference_at_the_start_ends_a_run_before_it_samples(words: tuple[str, ...], tmp_path: Path) -> None:
    status, said = planted("loaded", *words)
    assert status == 1, said
    assert "the engine does not compute what the trainer computes" in said
    assert not list((tmp_path / "runs/own/rollouts").glob("*"))


def test_a_late_difference_ends_the_run_unless_it_is_allowed(words: tuple[str, ...], tmp_path: Path) -> None:
    status, said = planted("synced", *words)
    assert status == 1, said
    assert "update 1: k3_kl between engine and trainer is " in said
    assert "update 1 is saved; to go on: " in said
    allowed, _ = planted("synced", *words, "correction.on_disagreement=warn", "run_name=allowed")
    assert allowed == 0
    assert len((tmp_path / "runs/allowed/metrics.jsonl").read_text().splitlines()) == 3
