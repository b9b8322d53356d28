"""Runs of a tiny mixture of experts with routing replay, on one process and on two ZeRO-3 ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.families import EXPERTS
from tests.fixtures.forked_python import forked_python
from tests.integration.test_run import ROOT, command, demo, metrics, train

__all__ = ["demo"]  # the fixture: the demo's model and data

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def sparse(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides of a run of an untrained Qwen3 MoE with the demo's tokenizer, whose rewards differ by length."""
    directory = tmp_path_factory.mktemp("sparse")
    dense = demo[0].removeprefix("model.path=")
    tokenizer, config = AutoTokenizer.from_pretrained(dense), AutoConfig.from_pretrained(dense)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {name: getattr(config, name) for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")}
    shape = Qwen3MoeConfig(
        **sizes, **ids, **EXPERTS, num_key_value_heads=1, head_dim=32, initializer_range=0.12, tie_word_embeddings=False
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "reward.py").write_text("def tokens(rollout): return float(rollout.num_sampled % 7)\n")
    return (
        *(f"model.path={directory}/model", *demo[1:], f"reward.functions=[{directory}/reward.py:tokens]"),
        *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_tokens_per_turn=24"),
        *("updates=4", "algorithm.minibatches=2", "correction.noise_floor_every=1", f"run_root={directory}"),
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("replay", "ranks"), [("engine", None), ("engine", 2), pytest.param("old", 2, marks=pytest.mark.slow)]
)
def test_a_run_replays_routes(replay: str, ranks: int | None, sparse: tuple[str, ...]) -> None:
    name = f"{replay}-{ranks}"
    train(*sparse, f"correction.routing_replay={replay}", f"run_name={name}", ranks=ranks)
    run = Path(sparse[-1].removeprefix("run_root=")) / name
    lines = [line for line in metrics(run) if "reward/mean" in line]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout_correction/logp_diff_abs_max"] < 1e-3
        assert line["sync/canary_abs_diff"] < 1e-3
    calls = [call for path in run.glob("rollouts/*.jsonl") for one in read_rollouts(path) for call in one.calls]
    assert calls
    for call in calls:
        assert (call.routes is None) == (replay == "old")
        assert call.routes is None or call.routes.whole.max() > 0


def test_a_dense_model_is_refused_before_an_engine_starts(demo: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*demo, "correction.routing_replay=engine", f"run_root={tmp_path}", "run_name=dense")
    done = subprocess.run(
        command(*overrides, python=forked_python()), cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert "is a dense model; set correction.routing_replay=off" in (done.stdout + done.stderr).replace("\n", " ")
