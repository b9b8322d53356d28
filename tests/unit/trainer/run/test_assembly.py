"""Parts of a run, made from the settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from lockstep.rollout.errors import DataError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.checkpoint.run_dir import RunDirectory
from lockstep.trainer.config.schema import Config
from lockstep.trainer.run import assembly
from tests.fixtures.tokenizers import chat_tokenizer


@pytest.mark.parametrize(
    ("device", "configured", "share"), [("cpu", None, 1.0), ("cuda", None, 0.01), ("cuda", 1.0, 1.0), ("cpu", 0.2, 0.2)]
)
def test_canaries_take_a_hundredth_of_the_time_on_gpus(
    device: str, configured: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "WeightSync", SimpleNamespace)
    causal_lm = SimpleNamespace(config=Qwen3Config())
    monkeypatch.setattr(assembly, "policy_of", lambda module: SimpleNamespace(model=None, causal_lm=causal_lm))
    layers: dict[str, None] = {}
    monkeypatch.setattr(assembly, "marked_layers", lambda policy: layers)
    config = Config()
    config.sync.canary_share = configured
    distributed: Any = SimpleNamespace(device=torch.device(device), unwrapped=None)
    sync: Any = assembly.make_sync(config, distributed, SimpleNamespace(logprobs=list), engines=[])  # type: ignore[arg-type]
    assert sync.canary.share == share
    assert sync.canary.long is None, "rounding cannot be measured in a model whose layers are not marked"
    layers["model.layers.0"] = None
    sync = assembly.make_sync(config, distributed, SimpleNamespace(logprobs=list), engines=[])  # type: ignore[arg-type]
    assert sync.canary.long.tokens > 24


@pytest.mark.parametrize("place", ["path", "heldout_path", "demonstrations"])
def test_a_row_that_cannot_be_used_ends_a_run_before_its_engine_starts(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [{"role": "user", "content": "1+1"}]
    row = {"messages": prompt, "answer": "2"}
    talk = {"messages": [*prompt, {"role": "assistant", "content": "2"}]}
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("path", "heldout_path", "demonstrations")}
    for name, path in paths.items():
        rows = [talk if name == "demonstrations" else row] * 2
        path.write_text(
            "".join(json.dumps(one) + "\n" for one in (*rows[:1], {"messages": []} if name == place else rows[1]))
        )
    config = Config()
    config.environment.name, config.environment.settings, config.reward.functions = "single_turn", {}, ["exact_match"]
    config.data.path, config.data.heldout_path = str(paths["path"]), str(paths["heldout_path"])
    config.demonstrations.path, config.eval.every = str(paths["demonstrations"]), 1
    chat_tokenizer("qwen3").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 1000}')
    config.model.path = str(tmp_path)
    monkeypatch.setattr(assembly, "start_engines", lambda *_, **__: pytest.fail("the engine starts"))
    distributed: Any = SimpleNamespace(is_main=True, world_size=1, together=lambda work: work(), broadcast=lambda x: x)
    console: Any = SimpleNamespace(say=lambda text: None)
    libraries: Any = None
    with BackgroundLoop() as loop, pytest.raises(DataError, match=rf"{place}\.jsonl: 1 of 2 rows .*\n  line 2: "):
        assembly.Assembly(config, distributed, RunDirectory(tmp_path / "run"), loop, console, libraries).parts()
