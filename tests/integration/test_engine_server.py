"""A real vLLM server behind HTTP: exact tokens and logprobs, weights that follow the trainer, clear errors.

One server serves the whole file; the last test kills it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from lockstep.integrations.gateway.server import Gateway
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, EngineError, SyncError
from lockstep.rollout.records import FinishReason
from lockstep.rollout.server.generate_route import ROUTE
from lockstep.rollout.server.server_engine import GENERATE
from lockstep.rollout.weights.whole.distributions import distances
from lockstep.rollout.weights.whole.heard_logits import hear
from tests.fixtures.forked_python import forked_python
from tests.fixtures.in_flight import sampled_across_a_sync
from tests.fixtures.models import VOCAB_SIZE, perturb, sampled_logprobs
from tests.fixtures.remote import Trained, save_model, trained
from tests.fixtures.runs import check_run, launch_run, run_directory
from tests.fixtures.sent import leave_out, on_bucket
from tests.fixtures.servers import KEY, ROOT, EngineServer, running
from tests.fixtures.sockets import is_loopback, listening, watched
from tests.fixtures.tokenizers import chat_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = (5, 99, 300, 12)
LONG_PROMPT = tuple(range(10, 180))  # longer than one cache block (128 tokens on CPU), so that it can be stale
CHAT = Chat(chat_tokenizer("qwen3"))
DEADLINE_S = 6.0
SILENCE_S = 4.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with running(model_dir, tmp_path_factory.mktemp("logs")) as (server,):
        yield server


@pytest.fixture
def remote(server: EngineServer) -> Iterator[Trained]:
    with trained([server]) as connected:
        connected.push()
        yield connected


def test_a_server_by_the_name_of_this_machine_gets_weights(server: EngineServer):
    """The name resolves to loopback if /etc/hosts says so, as Debian's does."""
    name = socket.gethostname()
    try:
        resolved = socket.gethostbyname(name)
    except OSError:
        resolved = "nothing"
    if resolved != "127.0.0.1":
        pytest.skip(f"{name} resolves to {resolved}, where this server does not listen")
    with trained([dataclasses.replace(server, url=server.url.replace("127.0.0.1", name))]) as remote:
        perturb(remote.model, seed=1)
        remote.push()
        assert remote.mismatch(remote.generate(PROMPT)) < 1e-4


@pytest.mark.v2
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_the_trainer(remote: Trained, temperature: float):
    call = remote.generate(PROMPT, max_tokens=64, temperature=temperature)
    assert len(call.sampled_ids) == 64
    assert remote.mismatch(call, temperature=temperature) < 1e-4


def test_scores_are_those_of_the_trainer_for_every_token_but_the_first(remote: Trained):
    ids = list(range(40, 240))
    scores = remote.loop.run(remote.engine.score(ids))
    assert scores == pytest.approx(sampled_logprobs(remote.model, tuple(ids[:1]), tuple(ids[1:])), abs=1e-4)


def test_most_probable_tokens_are_those_of_the_trainer(remote: Trained) -> None:
    ids = [*PROMPT, 7, 8, 9, 400, 11]
    found = remote.loop.run(remote.engine.score_top(ids, 5))
    with torch.no_grad():
        expected = remote.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    top = expected.topk(5)
    assert found.logprobs.tolist() == pytest.approx(
        sampled_logprobs(remote.model, tuple(ids[:1]), tuple(ids[1:])), abs=1e-4
    )
    assert found.top_ids.tolist() == top.indices.tolist()
    assert found.top_logprobs == pytest.approx(top.values.numpy(), abs=1e-4)
    assert found.version == remote.version


@pytest.mark.v2
def test_a_server_sends_whole_distributions(remote: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*PROMPT, 7, 8, 9, 400, 11]
    logits, num_bytes = remote.loop.run(hear(remote.engine, ids, range(len(ids) - 1)))
    with torch.no_grad():
        expected = remote.model(torch.tensor([ids])).logits[0, :-1]
    assert distances(logits, expected).kl_N.max() < 1e-10
    assert num_bytes > logits.numel() * 4
    monkeypatch.setattr(remote.engine, "hears_logits", False)  # as one that was started by hand
    with pytest.raises(ConfigError, match=r"without --worker-extension-cls .*restart it with `lockstep serve-engine`"):
        remote.loop.run(hear(remote.engine, ids, [0]))


def test_a_seeded_request_is_the_same_alone_and_in_a_busy_batch(remote: Trained):
    alone = remote.generate(PROMPT, seed=7)

    async def busy() -> list[Any]:
        sampling = [Sampling(max_tokens=32, ignore_eos=True, seed=seed) for seed in range(64)]
        return await asyncio.gather(*(remote.engine.generate(PROMPT, one) for one in sampling))

    crowd = remote.loop.run(busy())
    assert crowd[7].sampled_ids == alone.sampled_ids
    assert len({call.sampled_ids for call in crowd}) == 64


def test_vllms_own_route_and_the_compact_one_give_equal_answers(remote: Trained, monkeypatch: pytest.MonkeyPatch):
    assert remote.engine._route == ROUTE
    settings: list[dict[str, Any]] = [{}, {"top_k": 8}, {"max_tokens": 1, "temperature": 0.5}]
    compact = [remote.generate(PROMPT, **one) for one in settings]
    monkeypatch.setattr(remote.engine, "_route", GENERATE)
    for one, expected in zip(settings, compact, strict=True):
        call = remote.generate(PROMPT, **one)
        assert (call.sampled_ids, call.finish_reason) == (expected.sampled_ids, expected.finish_reason)
        assert call.sampled_logprobs == pytest.approx(expected.sampled_logprobs, abs=1e-5)
        assert call.version_spans == expected.version_spans
        assert (call.support is None) == (expected.support is None)


@pytest.mark.v2
def test_truncated_sampling_brings_its_support(remote: Trained):
    call = remote.generate(PROMPT, top_k=8, temperature=0.7)
    assert call.support is not None
    assert call.support.offsets.tolist() == list(range(0, 8 * 32 + 1, 8))
    logits = remote.model(torch.tensor([call.all_ids])).logits[0, len(PROMPT) - 1 : -1].float() / 0.7
    allowed = torch.full_like(logits, -torch.inf)
    rows = torch.arange(32).repeat_interleave(8)
    allowed[rows, torch.from_numpy(call.support.token_ids).long()] = 0.0
    expected = (logits + allowed).log_softmax(-1)[torch.arange(32), torch.tensor(call.sampled_ids)]
    assert list(call.sampled_logprobs) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.v2
def test_after_a_sync_the_server_samples_from_the_new_weights(remote: Trained):
    before = remote.generate(LONG_PROMPT)
    for seed in (1, 2):
        perturb(remote.model, seed=seed)
        report = remote.push()
        call = remote.generate(LONG_PROMPT)
        assert remote.mismatch(call) < 1e-4
        assert call.version_spans[0].version == remote.version == report.version
        assert report.canary_abs_diff < 1e-4
    assert remote.mismatch(before) > 0.1, "the perturbation is too small for this test to mean anything"


@pytest.mark.v2
def test_a_request_in_flight_carries_both_versions_and_its_new_part_is_exact(remote: Trained):
    def update() -> None:
        perturb(remote.model, seed=11)
        remote.push()

    call = sampled_across_a_sync(remote, update, (5, 6, 7), Sampling(max_tokens=250, ignore_eos=True, seed=5))

    new = call.version_spans[-1].start
    expected = sampled_logprobs(remote.model, call.prompt_ids, call.sampled_ids)[new:]
    assert call.sampled_logprobs[new:] == pytest.approx(expected, abs=1e-4)


@pytest.mark.v2
def test_an_aborting_pause_returns_the_partial_completion(remote: Trained):
    long = Sampling(max_tokens=300, ignore_eos=True, seed=0)

    async def abort(head_start_s: float) -> Any:
        running = asyncio.ensure_future(remote.engine.generate(PROMPT, long))
        await asyncio.sleep(head_start_s)
        await remote.engine.pause("abort")
        call = await running
        await remote.engine.resume()
        return call

    for head_start_s in (0.1, 0.4, 1.6):  # on a busy machine it may not have begun
        call = remote.loop.run(abort(head_start_s))
        if len(call.sampled_ids) > 3:
            break
    assert call.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    whole = remote.loop.run(remote.engine.generate(PROMPT, long))
    assert call.sampled_ids == whole.sampled_ids[: len(call.sampled_ids)]
    assert len(call.sampled_ids) == len(call.sampled_logprobs) > 3


def test_the_error_of_a_refused_request_quotes_the_server(remote: Trained):
    remote.engine.vocab_size = 10**9  # past the check on this side
    with pytest.raises(EngineError, match=r"(?i)/v1/generate refused: HTTP 400: .*vocab"):
        remote.generate((5, VOCAB_SIZE + 1))
    assert remote.generate(PROMPT).sampled_ids


def test_a_stream_brings_tokens_as_they_are_sampled(remote: Trained, server: EngineServer):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    (model,) = client.models.list()
    stream = client.completions.create(
        model=model.id, prompt=list(PROMPT), max_tokens=250, stream=True, temperature=1.0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    parts = [chunk.choices[0].token_ids for chunk in stream if chunk.choices]
    parts = [ids for ids in parts if ids]
    assert sum(map(len, parts)) == 250
    assert len(parts) > 1  # more on an idle machine: a busy server sends several tokens at once


def test_without_the_key_nothing_but_health_answers(server: EngineServer):
    def status(path: str, *, method: str = "GET", key: str | None = None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(server.url + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    request = urllib.request.Request(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        routes = {
            (path, method.upper()) for path, methods in json.load(response)["paths"].items() for method in methods
        }
    assert {("/update_weights", "POST"), ("/collective_rpc", "POST"), ("/pause", "POST")} <= routes
    refused = {route: status(route[0], method=route[1]) for route in routes if route[0] != "/health"}
    assert {route: code for route, code in refused.items() if code != 401} == {}
    assert status("/is_paused", key="another") == 401
    assert status("/health") == status("/is_paused", key=KEY) == 200


def test_the_server_and_the_sync_listen_on_loopback_only(server: EngineServer):
    before = listening() - listening(server.process.pid)  # of other tests in this process
    with trained([server]) as remote:
        remote.push()
        opened = (listening() | listening(server.process.pid)) - before
    assert len(opened) > len(listening(server.process.pid)), "the sync listens as well"
    assert [entry for entry in opened if not is_loopback(entry[0])] == []


def test_openai_clients_reach_the_server_through_the_gateway(remote: Trained):
    sampling = Sampling(max_tokens=16, stop_token_ids=CHAT.stop_token_ids)
    gateway = Gateway(engine=EnginePool(remote.engines), chat=CHAT, offered=[sampling])
    remote.loop.run(gateway.start())
    try:
        base_url = gateway.base_url.replace("/v1", "/s/test/v1")
        messages: list[Any] = [{"role": "user", "content": "compute 12*34-56"}]
        with openai.OpenAI(base_url=base_url, api_key=gateway.api_key, max_retries=0) as client:
            for turn in range(3):
                answer = client.chat.completions.create(model="policy", messages=messages, seed=turn)
                message = answer.choices[0].message.model_dump(exclude_none=True)
                messages += [message, {"role": "user", "content": "go on"}]
        calls = gateway._named["test"].calls
    finally:
        remote.loop.run(gateway.close())
    assert len(calls) == 3
    assert all(remote.mismatch(call) < 1e-4 for call in calls)
    (row,) = rows_from_calls(calls)
    assert row.num_trained == sum(len(call.sampled_ids) for call in calls)
    assert messages[1]["generation_token_ids"] == list(calls[0].sampled_ids)


def test_two_ranks_under_zero3_train_two_updates_with_the_server(server: EngineServer, model_dir: Path, tmp_path: Path):
    """Meanwhile both listen on loopback only, except torch's own store (docs/reliability.md)."""
    run = launch_run([server.url], model_dir, tmp_path)
    with watched(run.pid) as trainer, watched(server.process.pid) as engine:
        output, errors = run.communicate(timeout=540)
    assert run.returncode == 0, output[-2000:] + errors[-5000:]
    check_run(run_directory(tmp_path), updates=2)
    assert trainer.listening
    assert engine.listening
    assert engine.reachable == []
    assert len(set(trainer.reachable)) <= 1, "the store where ranks meet: torch takes no address for it"


# Faults. A stopped server continues afterwards, so that one server serves all of these tests.


def test_weights_that_were_loaded_in_part_cannot_be_sampled_from(remote: Trained, monkeypatch: pytest.MonkeyPatch):
    leave_out(monkeypatch, remote.sync, "model.layers.1.")
    with pytest.raises(SyncError, match=r"were not among the weights that arrived|HTTP 500"):
        remote.push()
    monkeypatch.undo()
    remote.loop.run(remote.engine.resume())  # as a client that knows nothing of the sync might
    with pytest.raises(EngineError, match="half-loaded"):
        remote.generate(PROMPT)
    remote.push()
    assert remote.mismatch(remote.generate(LONG_PROMPT)) < 1e-4


def test_a_sender_that_is_killed_in_mid_bucket_leaves_the_old_weights(remote: Trained):
    before = remote.generate(LONG_PROMPT)
    worker = [forked_python(), "-m", "tests.integration.workers.killed_sender", remote.servers[0].url]
    done = subprocess.run(worker, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    remote.loop.run(remote.engine.resume())
    after = remote.generate(LONG_PROMPT)
    assert after.sampled_ids == before.sampled_ids
    assert after.version_spans == before.version_spans
    with trained(remote.servers) as next_trainer:
        perturb(next_trainer.model, seed=3)
        next_trainer.push()
        assert next_trainer.mismatch(next_trainer.generate(LONG_PROMPT)) < 1e-4


@pytest.fixture
def impatient(server: EngineServer) -> Iterator[Trained]:
    with trained([server], deadline_s=DEADLINE_S, silence_timeout_s=SILENCE_S) as connected:
        connected.push()
        yield connected
        server.signal(signal.SIGCONT)


def recovers(server: EngineServer) -> None:
    """Let a stopped server continue: it gets the rest of its requests, then a new trainer."""
    server.signal(signal.SIGCONT)
    time.sleep(1)
    with trained([server]) as again:
        again.loop.run(again.engine.resume())
        perturb(again.model, seed=4)
        again.push()
        assert again.mismatch(again.generate(PROMPT)) < 1e-4


def test_a_sync_with_a_stopped_server_ends_at_the_deadline(impatient: Trained):
    server = impatient.servers[0]
    server.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(SyncError, match=rf"pausing the engines: rank 0: .*{server.url} gave no answer within 5\.4 s"):
        impatient.push()
    assert time.monotonic() - started < 2 * DEADLINE_S
    recovers(server)


def test_a_server_that_stops_in_mid_transfer_ends_the_sync_at_the_deadline(
    impatient: Trained, monkeypatch: pytest.MonkeyPatch
):
    server = impatient.servers[0]
    on_bucket(monkeypatch, 2, lambda: server.signal(signal.SIGSTOP))
    started = time.monotonic()
    with pytest.raises(SyncError, match="sending the weights"):
        impatient.push()
    assert time.monotonic() - started < 4 * DEADLINE_S
    monkeypatch.undo()
    recovers(server)


def test_a_server_that_stops_in_mid_generation_is_noticed(impatient: Trained):
    server = impatient.servers[0]

    async def sample() -> None:
        requests = [
            impatient.engine.generate(PROMPT, Sampling(max_tokens=300, ignore_eos=True, seed=seed)) for seed in range(8)
        ]
        asyncio.get_running_loop().call_later(0.1, server.signal, signal.SIGSTOP)
        await asyncio.gather(*requests)

    started = time.monotonic()
    with pytest.raises(EngineError, match=f"{server.url} has answered nothing for 4 s"):
        impatient.loop.run(sample(), timeout=60)
    assert time.monotonic() - started < 4 * SILENCE_S + 2
    recovers(server)


def test_a_killed_server_ends_requests_and_syncs_at_once(remote: Trained):
    """The last test of this file, because it kills the server."""
    server = remote.servers[0]
    children = server.engine_pids
    assert children, "the engine runs in a process of its own"

    async def sample() -> None:
        long = [Sampling(max_tokens=300, ignore_eos=True, seed=seed) for seed in range(8)]
        asyncio.get_running_loop().call_later(0.1, os.kill, server.process.pid, signal.SIGKILL)
        await asyncio.gather(*(remote.engine.generate(PROMPT, one) for one in long))

    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"{server.url} failed \(tried 5 times\)"):
        remote.loop.run(sample(), timeout=60)
    with pytest.raises(SyncError, match=rf"pausing the engines: rank 0: {server.url} failed"):
        remote.push()
    assert time.monotonic() - started < 20
    deadline = time.monotonic() + 15
    while (alive := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive, "its engine ends with it"
