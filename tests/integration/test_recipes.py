"""The recipes of published results, end to end with the real engine: a tiny model, small files, one or two updates.

Only sizes and paths differ from the recipes. The model is random, and its head prefers the tags of the search
environment, so that it searches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.demo.tokenizer import TURN_END, train_tokenizer
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.scripts.recipes.declared import RECIPES
from lockstep.scripts.recipes.judge import Status, judge
from lockstep.scripts.recipes.plan import overrides_of
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.paths import FIXTURES, ROOT
from tests.integration.test_run import demo, metrics, train

__all__ = ["demo"]  # the fixture: the demo's model and data

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
TAGS = ("<search>", "</search>", "<answer>", "</answer>")
DATA = FIXTURES / "data"
SMALL = (
    *("model.dtype=float32", "rollout.engine=embedded", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
    *(
        "rollout.max_tokens_per_turn=12",
        "rollout.max_model_len=1024",
        "token_budget=2048",
        "optimizer.warmup_updates=0",
    ),
    *(
        "eval.every=1",
        "eval.prompts=2",
        "eval.samples_per_prompt=2",
        "eval.max_tokens_per_turn=12",
        "eval.temperature=1",
    ),
)
OWN: dict[str, tuple[str, ...]] = {
    "gsm8k_lora_0.5b": ("updates=1", "model.lora.rank=4"),
    "gsm8k_ppo": ("updates=2", "rollout.samples_per_prompt=1", "algorithm.minibatches=2"),
    "dapo_math": ("updates=2", "algorithm.minibatches=2", f"eval.sets.aime.path={DATA}/math.jsonl",
                  "eval.sets.aime.columns={prompt: problem, answer: solution}"),
    "reverse_text": ("updates=1",),
    "search_r1": ("updates=2", "algorithm.minibatches=2", "environment.max_turns=3"),
}  # fmt: skip
"""Overrides by recipe; the LoRA recipes of other sizes differ by the model only."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["the capital of France is Paris", "compute 1+2"] * 4)
    tokenizer.add_tokens(list(TAGS))
    tokenizer.save_pretrained(directory)
    policy = tiny_qwen3(tied=False)
    policy.resize_token_embeddings(len(tokenizer.get_vocab()))
    policy.config.eos_token_id = policy.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(TURN_END)
    policy.config.max_position_embeddings = 2048
    with torch.no_grad():
        preferred = tokenizer.convert_tokens_to_ids([*TAGS, TURN_END])
        rows = torch.randn(len(preferred), policy.config.hidden_size, generator=torch.Generator().manual_seed(0))
        policy.lm_head.weight.zero_()
        policy.lm_head.weight[preferred] = rows
    policy.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def searching_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chain of tokens that it almost always samples: a search for "Paris"."""
    directory = tmp_path_factory.mktemp("searching")
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True)["input_ids"]
    tags = [tokenizer.convert_tokens_to_ids(name) for name in ("<search>", "</search>", TURN_END)]
    chain = [prompt[-1], tags[0], *tokenizer.encode(" Paris", add_special_tokens=False), *tags[1:]]
    with torch.no_grad():
        embedding, head = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
        directions = torch.eye(embedding.shape[1])[: len(chain)]
        embedding[chain] = 10 * directions  # far above what the layers add
        head.zero_()
        head[chain[1:]] = 2 * directions[:-1]
    tokenizer.save_pretrained(directory)
    policy.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def search_server() -> Iterator[tuple[str, list[str]]]:
    """Serve Search-R1's protocol; yield the URL and the queries it gets."""
    queries: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            queries.extend(body["queries"])
            found = [[{"document": {"contents": "Paris\nThe capital."}, "score": 1.0}] for _ in body["queries"]]
            answer = json.dumps({"result": found}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve", queries
    server.shutdown()
    server.server_close()


def words(name: str, model: Path, root: Path, *more: str) -> list[str]:
    data = {"gsm8k_lora_0.5b": "gsm8k", "gsm8k_ppo": "gsm8k", "search_r1": "nq_hotpotqa"}.get(name, name)
    heldout = () if name == "dapo_math" else (f"data.heldout_path={DATA}/{data}.jsonl",)
    own = (f"model.path={model}", f"data.path={DATA}/{data}.jsonl", *heldout, f"run_root={root}")
    return overrides_of(RECIPES[name], (*own, *SMALL, *OWN[name], *more))


def check_run(name: str, root: Path) -> list[dict[str, float]]:
    """Assert that every sampled token was trained exactly as it was sampled, and that the last update is evaluated."""
    run = root / f"recipe-{name}"
    lines = [line for line in metrics(run) if "reward/mean" in line]
    updates = next(int(word.partition("=")[2]) for word in OWN[name] if word.startswith("updates="))
    assert lines[-1]["step"] == updates
    assert all(line["rollout/token_match_rate"] == 1.0 for line in lines)
    verdict = judge(RECIPES[name], run, updates=updates) if not RECIPES[name].parts else None
    assert verdict is None or verdict.status in (Status.BELOW, Status.ABOVE, Status.OFF_CURVE, Status.REPRODUCED)
    return lines


def test_reverse_text_runs_and_is_judged(model: Path, tmp_path: Path) -> None:
    train(*words("reverse_text", model, tmp_path))
    check_run("reverse_text", tmp_path)


def test_search_r1_searches_and_trains_no_token_of_the_results(
    searching_model: Path, search_server: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, queries = search_server
    train(
        *words("search_r1", searching_model, tmp_path, f"environment.settings.url={url}", "rollout.prompts_per_step=4")
    )
    check_run("search_r1", tmp_path)
    assert queries, "the model must search, or nothing is tested"
    path = tmp_path / "recipe-search_r1" / "rollouts" / "step-000002.jsonl"
    if not path.is_file():
        (path,) = path.parent.glob("step-*.jsonl")
    rollouts = list(read_rollouts(path))
    searched = [rollout for rollout in rollouts if rollout.outcome.get("searches")]
    assert searched
    for rollout in rollouts:
        assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled
    told = [turn["content"] for turn in searched[0].messages if turn["role"] == "user"]
    assert any("<information>Doc 1(Title: Paris) The capital.</information>" in text for text in told)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k_lora_0.5b", "gsm8k_ppo", "dapo_math"])
def test_a_recipe_of_mathematics_runs_and_is_judged(name: str, model: Path, tmp_path: Path) -> None:
    if name == "dapo_math":
        pytest.importorskip("math_verify")
    train(*words(name, model, tmp_path))
    check_run(name, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupted_recipe_continues_and_a_missing_evaluation_is_made(
    demo: tuple[str, ...], tmp_path: Path
) -> None:
    def reproduce(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lockstep.scripts.reproduce", "demo_calculator", *demo[:3], f"run_root={tmp_path}",
             "eval.prompts=8", "rollout.prompts_per_step=4", "logger.print_rollouts=0", "optimizer.lr=1e-9", *more],
            cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    run = tmp_path / "recipe-demo_calculator"
    first = reproduce("updates=4", "max_hours=0.0001", "checkpoint.every=1")
    # None if the evaluation before training took the time.
    assert re.search("interrupted: found [01] of 4 updates", first.stdout), first.stdout[-3000:] + first.stderr[-3000:]
    assert first.returncode == 1
    second = reproduce("updates=4")
    assert "at update 4, expected" in second.stdout, second.stdout[-3000:] + second.stderr[-3000:]
    assert second.returncode == 1, "nothing was learned"
    assert [line["step"] for line in metrics(run) if "reward/mean" in line] == [1, 2, 3, 4]
    assert json.loads((run / "verdict.json").read_text())["status"] == "below"
    shutil.rmtree(run / "evaluations")
    third = reproduce("updates=4")
    assert "at update 4, expected" in third.stdout, third.stdout[-3000:] + third.stderr[-3000:]
