"""Security: no code from files or models is run, servers listen on loopback, and parsers refuse bad input."""

from __future__ import annotations

import ast
import inspect
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.errors import DataError, LockstepError
from lockstep.rollout.saved_rollouts import from_json, read_rollouts, to_json
from lockstep.trainer.config.groups.outputs_settings import GatewayConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.datasets import load_rows
from lockstep.trainer.model.policy import Policy
from tests.fixtures.gateway import running
from tests.fixtures.models import save_tiny_model
from tests.fixtures.paths import ROOT
from tests.fixtures.sockets import is_loopback, listening
from tests.fixtures.tokenizers import chat_tokenizer
from tests.unit.rewards.workers.test_pool import rollout

PACKAGES = ("lab", "integrations", "trainer", "rollout", "rewards", "scripts")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


def problems(source: str) -> list[str]:
    """Forbidden calls and constants of a module, beside those that ruff refuses (S rules in pyproject.toml)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in ("_target_", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
            found.append(node.value)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords}
            found += keywords & {"trust_remote_code=True", "allow_pickle=True"}
            if name.endswith("utils.instantiate") or (name == "torch.load" and "weights_only=True" not in keywords):
                found.append(name)
    return found


def test_no_module_runs_code_from_files() -> None:
    assert {str(path): found for path in SOURCES if (found := problems(path.read_text()))} == {}
    assert not any("_target_" in path.read_text() for path in (ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize(
    "bad",
    ["torch.load(f)", "torch.load(f, weights_only=False)", "f(trust_remote_code=True)", "d['_target_']",
     "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_a_forbidden_call_is_found(bad: str) -> None:
    assert problems(bad)


def test_ruff_refuses_unpickling_evaluation_and_shells() -> None:
    calls = ["pickle.loads(b)", "dill.load(f)", "marshal.load(f)", "shelve.open(f)", "eval(x)", "exec(x)",
             "yaml.load(f)", "subprocess.run(c, shell=True)", "os.system(c)"]  # fmt: skip
    source = "import dill, marshal, os, pickle, shelve, subprocess, yaml\n" + "\n".join(calls)
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename=trainer/x.py", "-"]
    done = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=False)
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": S" in line}
    assert refused == set(range(2, 2 + len(calls)))


@pytest.fixture
def evil_model(tmp_path) -> Path:
    """A model directory whose code writes a file when it is imported."""
    directory = save_tiny_model(tmp_path / "model", tied=True)
    chat_tokenizer("qwen3").save_pretrained(directory)
    (directory / "evil.py").write_text(
        f"open({str(tmp_path / 'fired')!r}, 'w').write('x')\n"
        "from transformers import Qwen3Config as Config, Qwen3ForCausalLM as Model\n"
        "from transformers import PreTrainedTokenizerFast as Tokenizer\n"
    )
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "evil.Tokenizer"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize("model_type", ["qwen3", "evil"])
def test_code_that_ships_with_a_model_is_not_run(evil_model, tmp_path, model_type):
    config = json.loads((evil_model / "config.json").read_text())
    (evil_model / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    loads = [
        lambda: Policy.from_pretrained(str(evil_model), dtype="float32", attn_implementation="sdpa"),
        lambda: Chat.from_pretrained(str(evil_model)),
    ]
    for load in loads:
        try:
            load()
        except (LockstepError, ValueError, OSError) as error:  # an unknown model type cannot be loaded
            assert model_type == "evil" or "trust" in str(error)  # noqa: PT017
    assert not (tmp_path / "fired").exists()


def test_no_entrance_trusts_remote_code_by_default():
    for function in (EngineSettings, Policy.from_pretrained, Chat.from_pretrained):
        assert inspect.signature(function).parameters["trust_remote_code"].default is False
    assert Config().model.trust_remote_code is False


async def test_the_gateway_listens_on_loopback_only_and_has_a_key():
    before = listening()
    async with running(chat_tokenizer("qwen3"), "hello") as server:
        opened = listening() - before
        assert opened, "the gateway listens somewhere"
        assert all(is_loopback(address) for address, _ in opened)
        assert len(server.gateway.api_key) >= 20
    assert GatewayConfig().host == "127.0.0.1"


def test_a_socket_beyond_loopback_is_found():
    with socket.create_server(("0.0.0.0", 0)) as server:  # all addresses
        port = server.getsockname()[1]
        assert ("0.0.0.0", port) in listening()
    assert not is_loopback("0.0.0.0")
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("::ffff:127.0.0.1")


# Parsers of input from outside

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


DEEP = "[" * 20_000  # deeper than Python's stack


def _mutations() -> st.SearchStrategy[object]:
    """A saved rollout with one value replaced at any depth."""
    whole = json.loads(json.dumps(to_json(rollout())))
    keys = st.sampled_from(sorted(whole))
    calls = st.sampled_from(sorted(whole["calls"][0]))
    change = st.builds(lambda key, value: {**whole, key: value}, keys, JSON)
    inside = st.builds(lambda key, value: {**whole, "calls": [{**whole["calls"][0], key: value}]}, calls, JSON)
    return change | inside | JSON


@settings(max_examples=300, deadline=None)
@given(line=_mutations().map(json.dumps) | st.text())
@example(line=DEEP)
def test_a_saved_rollout_is_read_or_refused_by_line(tmp_path_factory, line):
    file = tmp_path_factory.mktemp("fuzz") / "step.jsonl"
    file.write_text(line.replace("\n", " "), errors="replace")
    try:
        found = list(read_rollouts(file))
    except DataError as error:
        assert f"{file}:" in str(error)  # noqa: PT017
    else:
        for one in found:
            assert from_json(json.loads(json.dumps(to_json(one), allow_nan=False))) == one


@settings(max_examples=40, deadline=None)
@given(lines=st.lists(JSON.map(json.dumps) | st.text(max_size=10), max_size=4))
def test_data_rows_are_read_or_refused(tmp_path_factory, lines):
    file = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    file.write_text("\n".join(lines), errors="replace")
    try:
        rows = load_rows(str(file), "train")
    except LockstepError as error:
        assert str(file) in str(error)  # noqa: PT017
    else:
        assert len(rows) == sum(bool(line.strip()) for line in lines) > 0
