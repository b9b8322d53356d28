"""Settings with which a run cannot be followed bit for bit are refused before an engine starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.lab.run_replay.replay_run import _refuse_inexact
from lockstep.rollout.errors import ConfigError
from tests.fixtures.composed import composed


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("rollout.num_threads=null", "rollout.num_threads=null: .* record with rollout.num_threads=1"),
        ("rollout.num_threads=2", "rollout.num_threads=2: with several threads"),
        ("model.dtype=bfloat16", "model.dtype=bfloat16: .* record with model.dtype=float32"),
        ("rollout.engine=server", "rollout.engine=server: .* record with rollout=embedded"),
        ("rollout.num_engines=2", "record with rollout.num_engines=1"),
        ("algorithm=remax", "greedy answers are not saved"),
        ("teacher.path=t", "a replay starts no teacher"),
        ("correction.routing_replay=engine", "record with correction.routing_replay=off"),
        ("environment=agent", "calls of an agent"),
    ],
)
def test_what_is_not_exact_is_refused(word: str, sentence: str, tmp_path: Path) -> None:
    refused(tmp_path, sentence, word)


def test_recurrent_models_ranks_and_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path, "a model of type falcon_h1 carries a state", model_type="falcon_h1")
    refused(tmp_path, "the run had several ranks", is_alone=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused(tmp_path, "this machine has a GPU")


def read(*words: str) -> Callable[[str], Any]:
    config = composed(*words)
    return lambda name: attrgetter(name)(config)


def refused(path: Path, sentence: str, *words: str, model_type: str = "qwen3", is_alone: bool = True) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    base = [f"model.path={path}", "rollout.num_threads=1", "rollout.max_staleness=1"]
    recorded = SimpleNamespace(
        collections=[SimpleNamespace(is_alone=is_alone)], directory=SimpleNamespace(path=Path("runs/a"))
    )
    if words:
        _refuse_inexact(read(*base), recorded)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"runs/a cannot be followed bit for bit: .*{sentence}"):
        _refuse_inexact(read(*base, *words), recorded)  # type: ignore[arg-type]
