"""Publication of a run: folder, card and upload, with a stand-in for the hub's server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from omegaconf import OmegaConf
from safetensors.torch import save_file

from lockstep.rollout.errors import ConfigError, HubError
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.run import model_card
from lockstep.trainer.run.hub import publish
from tests.fixtures.hub_server import HubServer, running_hub
from tests.fixtures.paths import ROOT

REPO = "me/better"
SECRET = "hf_" + "S3cret" * 4
WHOLE = ["README.md", "config.json", "curve.png", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home-of-ann"))
    return tmp_path / "home-of-ann"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with running_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def settings(home: Path) -> Config:
    config = Config(updates=40)
    config.model.path = "Qwen/Qwen3-0.6B"
    config.data.path = "openai/gsm8k"
    config.data.heldout_path = f"{home}/secret data/test.jsonl"
    config.data.system_prompt = "Think. Then answer and/or ask."
    config.reward.functions = ["numeric", f"{home}/secret/mine.py:brevity"]
    config.reward.weights = [1.0, 0.25]
    config.reward.settings = {"judge": {"url": f"http://{socket.gethostname()}:8000/v1", "api_key": SECRET}}
    config.rollout.urls = ["http://gpu-7:8000"]
    config.run_root = f"{home}/runs"
    return config


def evaluation(reward: float) -> dict[str, float]:
    return {
        "eval/reward_mean": reward, "eval/reward_stderr": 0.1, "eval/prompts": 8.0, "eval/rollouts": 32.0,
        "eval/pass@1": reward, "eval/pass@1_low": reward - 0.2, "eval/pass@1_high": reward + 0.2,
        "eval/easy/reward_mean": 0.9, "eval/easy/pass@1": 0.9,
    }  # fmt: skip


def write_model(directory: Path, home: Path) -> None:
    directory.mkdir(parents=True)
    save_file({"weight": torch.arange(4.0)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "_name_or_path": f"{home}/base"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "optimizer.bin", "notes.txt", "credentials.json"):
        (directory / name).write_text("{}")


def write_adapter(directory: Path, home: Path) -> None:
    directory.mkdir(parents=True)
    save_file({"lora_A": torch.ones(2)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": f"{home}/base"}))
    (directory / "README.md").write_text(f"written by peft for {home}/base")


def write_run(home: Path, config: Config | None = None) -> Path:
    run = home / "runs" / "mine"
    write_model(run / "model", home)
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step-000040.jsonl").write_text("{}")
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(config or settings(home)))))
    lines = [{"step": step, "reward/mean": step / 50} for step in range(1, 41)]
    lines = [{"step": 0, **evaluation(0.25)}, *lines[:-1], {**lines[-1], **evaluation(0.5)}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    packages = {"lockstep-rl": "0.6.0", "torch": "2.9.0", "vllm": "0.32.0", "wandb": "0.1"}
    provenance = {"command": f"{home}/train.py", "code": {"commit": "c0ffee"}, "packages": packages}
    (run / "provenance.json").write_text(json.dumps(provenance))
    return run


@pytest.fixture
def run(home: Path) -> Path:
    return write_run(home)


def test_a_run_becomes_a_private_repository_with_a_card(run: Path, hub: HubServer) -> None:
    said: list[str] = []
    publish(run, REPO, say=said.append)
    assert sorted(hub.repos[REPO]) == [".gitattributes", *WHOLE]
    assert hub.repos[REPO]["model.safetensors"] == (run / "model/model.safetensors").read_bytes()
    assert hub.repos[REPO]["curve.png"].startswith(b"\x89PNG")
    assert (hub.visibility, hub.messages) == ({REPO: "private"}, ["40 updates"])
    assert hub.calls.index("validate") < hub.calls.index("create") < hub.calls.index("put") < hub.calls.index("commit")
    assert [line.split()[-1] for line in said[1:7]] == WHOLE
    assert said[-1] == f"uploaded       {hub.url}/{REPO}"

    card = ModelCard.load(REPO)
    data = card.data.to_dict()
    assert data["base_model"] == "Qwen/Qwen3-0.6B"
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert data["datasets"] == ["openai/gsm8k"]
    assert data["tags"] == ["lockstep", "reinforcement-learning", "grpo"]
    assert card.data.eval_results is not None
    results = {result.metric_type: result for result in card.data.eval_results}
    assert sorted(results) == ["mean reward", "pass@1"]
    assert results["pass@1"].dataset_name == "test.jsonl"
    assert results["pass@1"].metric_value == 0.5
    assert results["pass@1"].metric_args == {"low": 0.3, "high": 0.7, "level": 0.95}
    for text in (
        "# better\n",
        "| rewards | numeric + 0.25 × mine.py:brevity |",
        "| updates | 40 of 40 |",
        "mean reward 0.060 in the first 5 steps and 0.760 in the last 5",
        "| data | value | before training | update 40 |",
        "| test.jsonl | mean reward | 0.250 [0.054, 0.446] | 0.500 [0.304, 0.696] |",
        "| test.jsonl | pass@1 | 0.250 [0.050, 0.450] | 0.500 [0.300, 0.700] |",
        "![Mean reward over updates](curve.png)",
        "| torch | 2.9.0 |",
        "| commit of lockstep | c0ffee |",
        "lockstep train updates=40 model.path=Qwen/Qwen3-0.6B data.path=openai/gsm8k",
        'AutoModelForCausalLM.from_pretrained("me/better")',
        "vllm serve me/better",
    ):
        assert text in card.text, card.text


def test_nothing_private_reaches_the_repository(run: Path, home: Path, hub: HubServer) -> None:
    publish(run, REPO, say=lambda line: None)
    for name, content in hub.repos[REPO].items():
        for private in (str(home), "home-of-ann", "secret", SECRET, "gpu-7", socket.gethostname()):
            assert private.encode() not in content, (name, private)
    assert json.loads(hub.repos[REPO]["config.json"])["_name_or_path"] == "base"
    assert b"Think. Then answer and/or ask." in hub.repos[REPO]["README.md"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("README.md", "---\ntags: [a]\n---\nmy key is {secret}", "a secret"),
        ("README.md", "---\ntags: [a]\n---\nfrom {home}/data", "the local path"),
        ("config.json", '{{"kernel": "{home}/kernels"}}', "the local path"),
        ("README.md", "---\n- a list\n---\n", "front matter"),
    ],
)
def test_files_with_something_private_are_not_uploaded(
    run: Path, home: Path, hub: HubServer, name: str, text: str, problem: str
) -> None:
    (run / "model" / name).write_text(text.format(secret=SECRET, home=home))
    with pytest.raises(HubError, match=problem):
        publish(run, REPO, say=lambda line: None)
    assert hub.calls == []


def test_a_local_base_model_and_local_data_are_no_ids_of_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(home)
    config.model.path = "models/calculator"
    config.data.sources = {"a": DataSetConfig(path=f"{home}/rows.jsonl"), "b": DataSetConfig(path="org/set")}
    run = write_run(home, config)
    monkeypatch.chdir(home)  # where models/calculator is not
    publish(run, REPO, say=lambda line: None)
    card = ModelCard.load(run / "hub/README.md")
    assert card.data.to_dict().get("base_model") is None
    assert card.data.to_dict()["datasets"] == ["org/set"]
    assert "| base model | calculator |" in card.text
    assert "| data | rows.jsonl, org/set |" in card.text


@pytest.mark.parametrize("is_quantized", [False, True])
def test_an_adapter_is_published_alone(run: Path, home: Path, hub: HubServer, is_quantized: bool) -> None:
    write_adapter(run / "model/adapter", home)
    if is_quantized:  # then no merged model is saved
        (run / "model/model.safetensors").unlink()
    publish(run, REPO, adapter=not is_quantized, say=lambda line: None)
    expected = ["adapter_config.json", "adapter_model.safetensors", "curve.png", "tokenizer.json"]
    assert sorted(hub.repos[REPO]) == [".gitattributes", "README.md", *expected, "tokenizer_config.json"]
    assert json.loads(hub.repos[REPO]["adapter_config.json"]) == {"r": 8, "base_model_name_or_path": "base"}
    card = ModelCard.load(REPO)
    assert (card.data.to_dict()["library_name"], card.data.to_dict()["base_model"]) == ("peft", "Qwen/Qwen3-0.6B")
    assert "AutoPeftModelForCausalLM" in card.text
    assert "vllm serve Qwen/Qwen3-0.6B --enable-lora" in card.text


def test_a_merged_model_has_its_adapter_beside_it(run: Path, home: Path, hub: HubServer) -> None:
    write_adapter(run / "model/adapter", home)
    publish(run, REPO, private=False, say=lambda line: None)
    beside = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    assert sorted(hub.repos[REPO]) == sorted([".gitattributes", *WHOLE, *beside])
    assert hub.visibility == {REPO: "public"}


@pytest.mark.parametrize(
    ("addresses", "name"),
    [([], "trained by Lockstep (grpo)"), (["Homepage, https://x.y/z"], "trained by [Lockstep](https://x.y/z) (grpo)")],
)
def test_a_declared_address_of_the_project_is_linked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: list[str], name: str
) -> None:
    declared = Message()
    for address in addresses:
        declared["Project-URL"] = address
    monkeypatch.setattr(model_card, "metadata", lambda package: declared)
    publish(run, REPO, out=tmp_path / "folder", say=lambda line: None)
    assert name in (tmp_path / "folder/README.md").read_text()


@pytest.mark.parametrize(
    ("request_name", "status", "advice"),
    [
        ("create", 401, "hf auth login"),
        ("create", 403, "a token that may write there"),
        ("create", 404, "check the user or organization"),
        ("validate", 400, "nothing"),
        ("put", 0, "when the hub can be reached"),
        ("commit", 0, "when the hub can be reached"),
    ],
)
def test_a_failed_upload_leaves_the_folder_and_can_be_repeated(
    run: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, request_name: str, status: int, advice: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own attempts
    hub.faults = {request_name: status}
    with pytest.raises(HubError, match=f"hf upload {REPO} .*/hub . --private") as caught:
        publish(run, REPO, say=lambda line: None)
    assert advice in str(caught.value) or status == 400
    assert sorted(file.name for file in (run / "hub").iterdir()) == WHOLE
    assert set(hub.repos.get(REPO, ())) <= {".gitattributes"}
    hub.faults = {}
    publish(run, REPO, say=lambda line: None)
    assert sorted(hub.repos[REPO]) == [".gitattributes", *WHOLE]


def test_a_token_that_the_hub_does_not_know_is_named(
    run: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(HubError, match="HF_TOKEN to a token that may write"):
        publish(run, REPO, say=lambda line: None)
    assert hub.repos == {}


def test_a_repository_with_another_model_gets_one_more_commit(run: Path, hub: HubServer) -> None:
    hub.repos[REPO] = {".gitattributes": b"", "config.json": b"{}", "model-00001-of-00002.safetensors": b""}
    hub.visibility[REPO] = "public"
    said: list[str] = []
    publish(run, REPO, say=said.append)
    (line,) = (line for line in said if "exists" in line)
    assert line == (
        f"{REPO} exists (public) with 2 files; this is one more commit on top of them, and "
        "model-00001-of-00002.safetensors of it stays"
    )
    assert "model.safetensors" in hub.repos[REPO]


def test_a_card_edited_by_hand_is_kept(run: Path, hub: HubServer) -> None:
    said: list[str] = []
    publish(run, REPO, say=said.append)
    publish(run, REPO, say=said.append)  # an unchanged one is made again
    assert not any("by hand" in line for line in said)
    card = run / "hub/README.md"
    card.write_text(card.read_text().replace("# better", "# My model"))
    publish(run, REPO, say=said.append)
    assert any("hub/README.md is edited by hand, so it is the card" in line for line in said)
    assert b"# My model" in hub.repos[REPO]["README.md"]
    (run / "model/README.md").write_text("---\nlicense: mit\n---\nMine")
    publish(run, REPO, say=said.append)
    assert b"# My model" in hub.repos[REPO]["README.md"]  # the edited one in hub/ counts first
    (run / "hub/README.md").unlink()
    for text in ("Mine", "Mine, again"):
        (run / "model/README.md").write_text(f"---\nlicense: mit\n---\n{text}")
        publish(run, REPO, say=said.append)
        assert hub.repos[REPO]["README.md"].startswith(f"---\nlicense: mit\n---\n{text}\n<!--".encode())


def test_files_of_an_earlier_publication_do_not_stay(run: Path, home: Path, hub: HubServer) -> None:
    write_adapter(run / "model/adapter", home)
    publish(run, REPO, say=lambda line: None)
    publish(run, "me/adapter", adapter=True, say=lambda line: None)
    assert "model.safetensors" not in hub.repos["me/adapter"]
    assert "adapter/adapter_config.json" not in hub.repos["me/adapter"]


def test_offline_the_folder_is_written(run: Path, home: Path) -> None:
    said: list[str] = []
    publish(run, REPO, say=said.append)  # tests are offline
    assert sorted(file.name for file in (run / "hub").iterdir()) == WHOLE
    assert said[-1].startswith(f"nothing was uploaded (HF_HUB_OFFLINE); upload it with: hf upload {REPO} ")
    assert not list(run.glob(".hub-*"))


def test_a_named_folder_is_written_and_never_overwritten(run: Path, hub: HubServer, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    publish(run, REPO, out=out, say=lambda line: None)
    assert sorted(file.name for file in out.iterdir()) == WHOLE
    assert (out / "model.safetensors").stat().st_nlink == 1  # a resumed run must not change it
    assert hub.calls == []
    with pytest.raises(HubError, match="is in use; name a new folder"):
        publish(run, REPO, out=out, say=lambda line: None)


def test_what_cannot_be_published_is_named(run: Path, home: Path) -> None:
    with pytest.raises(HubError, match=r"mine is not the id of a repository; expected <user or organization>/<name>"):
        publish(run, "mine")
    with pytest.raises(ConfigError, match="not the directory of a run"):
        publish(home, REPO)
    with pytest.raises(HubError, match="holds no adapter"):
        publish(run, REPO, adapter=True)
    with pytest.raises(HubError, match="step-5 is not there; set --checkpoint to one of: none"):
        publish(run, REPO, checkpoint=5)
    (run / "model/model.safetensors").unlink()
    with pytest.raises(HubError, match=r"holds no model: found config.json, .*expected config.json and \*.safetensors"):
        publish(run, REPO)
    assert not (run / "hub").exists()


def test_settings_of_another_version_are_left_out(run: Path) -> None:
    with (run / "config.yaml").open("a") as file:
        file.write("old: 1\nolder:\n  than: {this: 2}\n")
    publish(run, REPO, say=lambda line: None)
    assert "old" not in (run / "hub/README.md").read_text().split("## Reproduce")[1]


def test_a_run_of_a_program_is_reproduced_by_its_call(home: Path) -> None:
    config = settings(home)
    config.data.path, config.reward.functions = "object:data-b6a24cad", ["object:right", "numeric"]
    run = write_run(home, config)
    publish(run, REPO, say=lambda line: None)
    front, _, card = (run / "hub/README.md").read_text().partition("## Reproduce")
    assert "'data.path': <data-b6a24cad>," in card
    assert "'reward.functions': [<right>, 'numeric']," in card
    assert "lockstep train " not in card
    assert "object:" not in front.split("---")[1]


def test_a_link_among_the_model_files_is_not_followed(run: Path, home: Path) -> None:
    (home / "other.json").write_text("{}")
    (run / "model/vocab.json").symlink_to(home / "other.json")
    publish(run, REPO, say=lambda line: None)
    assert not (run / "hub/vocab.json").exists()


def test_the_command_publishes_and_names_problems(run: Path, home: Path) -> None:
    def command(*words: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
        script = [sys.executable, "scripts/publish.py", *map(str, words)]
        return subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)

    done = command(run, "--repo", REPO, "--no-private")
    assert done.returncode == 0, done.stderr
    assert "--no-private" in done.stdout.splitlines()[-1]
    done = command(run, "--repo", "mine")
    assert done.returncode == 1
    assert "mine is not the id of a repository" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_uploaded_by_default() -> None:
    assert Config().hub.repo is None
