"""Model card and upload, with a stub of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from lockstep.rollout.errors import HubError
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.groups.outputs_settings import HubConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.run import hub

METRICS = {
    "eval/reward_mean": 0.5, "eval/prompts": 8.0, "eval/rollouts": 32.0,
    "eval/pass@1": 0.5, "eval/pass@1_low": 0.3, "eval/pass@1_high": 0.7,
    "eval/pass@4": 0.75, "eval/pass@4_low": 0.4, "eval/pass@4_high": 0.95,
}  # fmt: skip


def config(**changes: Any) -> Config:
    made = Config(hub=HubConfig(repo="me/better"))
    made.model.path = "Qwen/Qwen3-0.6B"
    made.data.path = "openai/gsm8k"
    made.data.heldout_path = "/home/user/secret/test.jsonl"
    made.reward.functions = ["numeric", "/home/user/secret/mine.py:brevity"]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_card_has_base_model_data_rewards_and_evaluation() -> None:
    card = hub.model_card(config(updates=7), METRICS)
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lockstep", "reinforcement-learning", "grpo"],
        "datasets": ["openai/gsm8k"],
    }
    assert text.strip().startswith("# better\n")
    for row in (
        "| rewards | numeric, mine.py:brevity |",
        "| updates | 7 |",
        "| adapters | none |",
        "| test.jsonl | mean@4 | 0.500 | |",
        "| test.jsonl | pass@4 | 0.750 | 0.400 to 0.950 |",
    ):
        assert row in text
    assert text.index("pass@1") < text.index("pass@4")


def test_a_card_contains_no_local_path(tmp_path: Path) -> None:
    made = config()
    made.model.path = str(tmp_path)
    made.data.sources = {"a": DataSetConfig(path=f"{tmp_path}/rows.jsonl"), "b": DataSetConfig(path="org/set")}
    card = hub.model_card(made, {})
    assert "home" not in card
    assert str(tmp_path.parent) not in card
    assert "| data | rows.jsonl, org/set |" in card
    assert "The run was not evaluated." in card


class StubApi:
    """The calls that `push` makes to the hub."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def create_repo(self, repo: str, **options: Any) -> str:
        self.calls.append((repo, options))
        return f"https://huggingface.co/{repo}"

    def upload_folder(self, *, folder_path: str, **options: Any) -> None:
        self.calls.append((options["repo_id"], sorted(path.name for path in Path(folder_path).iterdir())))


def test_the_directory_of_the_model_is_uploaded_with_its_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stub = StubApi()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stub)
    (tmp_path / "model.safetensors").write_bytes(b"")
    made = config()
    assert (
        hub.push(tmp_path, made.hub, card=hub.model_card(made, METRICS), updates=made.updates)
        == "https://huggingface.co/me/better"
    )
    assert stub.calls == [
        ("me/better", {"private": True, "exist_ok": True}),
        ("me/better", ["README.md", "model.safetensors"]),
    ]


def test_a_failed_upload_reports_where_the_model_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Offline(StubApi):
        def create_repo(self, repo: str, **options: Any) -> str:
            raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    with pytest.raises(HubError, match=rf"no route to host.*hf upload me/better {tmp_path}"):
        hub.push(tmp_path, config().hub, card="", updates=7)


def test_the_last_value_of_each_metric_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in ({"step": 1, "a": 1, "b": 2}, {"step": 2, "a": 3, "b": None}))
    )
    assert hub.last_metrics(path) == {"step": 2, "a": 3, "b": 2}
    assert hub.last_metrics(tmp_path / "nothing") == {}


def test_nothing_is_uploaded_by_default() -> None:
    assert Config().hub.repo is None
