"""Adapters sent to a real engine, which applies them to weights that it keeps."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import BASE, Sampling
from lockstep.rollout.errors import EngineError, SyncError
from lockstep.rollout.records import EngineCall
from lockstep.rollout.server.server_engine import GENERATE
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import SyncReport, WeightSync
from tests.fixtures.adapted import perturb_adapters, with_lora
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.in_flight import sampled_across_a_sync
from tests.fixtures.models import sampled_logprobs, save_tiny_model, tiny_qwen3
from tests.fixtures.remote import save_model, trained
from tests.fixtures.sent import on_bucket, send_instead

pytestmark = [pytest.mark.engine, pytest.mark.v2]

PROMPT = tuple(range(10, 180))  # of several blocks of the cache, so that it can be stale
TOLERANCE = 1e-4


@dataclass
class Adapted:
    """An engine, and the trained model with adapters on the same weights."""

    loop: BackgroundLoop
    engine: EmbeddedEngine
    model: PeftModel
    sync: WeightSync
    version: int = 0

    def generate(self, model: str = "policy", *, seed: int = 0) -> EngineCall:
        settings = Sampling(max_tokens=32, ignore_eos=True, seed=seed, model=model)
        return self.loop.run(self.engine.generate(PROMPT, settings), timeout=120)

    def mismatch(self, call: EngineCall) -> float:
        expected = sampled_logprobs(self.model, call.prompt_ids, call.sampled_ids)
        return max(abs(a - b) for a, b in zip(call.sampled_logprobs, expected, strict=True))

    def push(self) -> SyncReport:
        self.version += 1
        return self.sync.push(self.version)

    def update(self, seed: int) -> SyncReport:
        perturb_adapters(self.model, seed=seed)
        return self.push()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    directory = tmp_path_factory.mktemp("adapters")
    other = with_lora(tiny_qwen3(tied=True), rank=2, layers=["q_proj", "down_proj"])
    perturb_adapters(other, seed=99)
    other.save_pretrained(str(directory / "other"))
    with BackgroundLoop() as loop:
        with forks_for_spawns():
            engine = EmbeddedEngine(
                EngineSettings(
                    model=save_tiny_model(directory / "model", tied=True),
                    max_model_len=320,
                    kv_cache_gib=0.0625,
                    num_threads=1,
                    adapters=AdapterSettings(max_rank=3, others=(("other", str(directory / "other")),)),
                ),
                loop=loop,
                log_path=directory / "engine.log",
            )
        model = with_lora(tiny_qwen3(tied=True))
        sync = WeightSync(
            module=model,
            engines=[engine],
            score_canary=lambda ids: sampled_logprobs(model, tuple(ids[:1]), tuple(ids[1:])),
            deadline_s=60,
        )
        yield Adapted(loop, engine, model, sync)
        sync.close()
        loop.run(engine.close())


def test_after_a_sync_the_engine_samples_with_the_new_adapter(adapted: Adapted) -> None:
    with adapted.model.disable_adapter():
        assert adapted.mismatch(adapted.generate()) < TOLERANCE, "before the first sync the policy is the base"
    adapted.push()
    before = adapted.generate()
    with adapted.model.disable_adapter():
        assert adapted.mismatch(before) < TOLERANCE
    for seed in (1, 2, 3):
        report = adapted.update(seed)
        call = adapted.generate()

        assert adapted.mismatch(call) < TOLERANCE
        assert report.canary_abs_diff < TOLERANCE
        assert {span.version for span in call.version_spans} == {adapted.version}
        assert adapted.mismatch(before) > 0.1, "the perturbation is too small for this test to mean anything"
        before = call


def test_only_the_adapters_travel_and_the_base_stays(adapted: Adapted) -> None:
    base = adapted.generate(BASE)
    sums = adapted.loop.run(adapted.engine.weight_checksums())
    report = adapted.update(4)

    assert report.bytes == 4 * sum(p.numel() for p in adapted.model.parameters() if p.requires_grad)
    assert adapted.loop.run(adapted.engine.weight_checksums()) == sums
    assert adapted.generate(BASE).sampled_logprobs == pytest.approx(base.sampled_logprobs, abs=1e-5)
    with adapted.model.disable_adapter():
        assert adapted.mismatch(base) < TOLERANCE


def test_several_adapters_answer_at_once_each_with_its_own_logprobs(adapted: Adapted) -> None:
    adapted.update(5)
    names = [BASE, "policy", "other"] * 2
    settings = [Sampling(max_tokens=24, ignore_eos=True, seed=3, model=name) for name in names]

    async def together() -> list[EngineCall]:
        return await asyncio.gather(*(adapted.engine.generate(PROMPT, one) for one in settings))

    calls = adapted.loop.run(together(), timeout=120)
    other = with_lora(tiny_qwen3(tied=True), rank=2, layers=["q_proj", "down_proj"])
    perturb_adapters(other, seed=99)
    for name, call in zip(names, calls, strict=True):
        model = other if name == "other" else adapted.model
        if name == BASE:
            with adapted.model.disable_adapter():
                assert adapted.mismatch(call) < TOLERANCE
            continue
        expected = sampled_logprobs(model, call.prompt_ids, call.sampled_ids)
        assert call.sampled_logprobs == pytest.approx(expected, abs=TOLERANCE), name
    with pytest.raises(EngineError, match="no adapter unknown; it has base, policy, other"):
        adapted.generate("unknown")


def test_a_request_that_goes_on_during_a_sync_ends_with_the_new_adapter(adapted: Adapted) -> None:
    adapted.update(20)
    before: list[PeftModel] = []

    def update() -> None:
        before.append(copy.deepcopy(adapted.model))
        adapted.update(21)

    call = sampled_across_a_sync(adapted, update, PROMPT, Sampling(max_tokens=140, ignore_eos=True, seed=1))

    cut = call.version_spans[0].end
    expected = sampled_logprobs(before[-1], call.prompt_ids, call.sampled_ids)
    assert call.sampled_logprobs[:cut] == pytest.approx(expected[:cut], abs=TOLERANCE)
    later = zip(call.sampled_logprobs[cut:], expected[cut:], strict=True)
    assert max(abs(a - b) for a, b in later) > 0.1, "the last tokens are still the old adapter's"
    assert adapted.mismatch(adapted.generate()) < TOLERANCE, "a prefix of the old adapter is cached"


def test_a_sender_that_fails_half_way_leaves_the_old_adapter(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted.update(6)
    before = adapted.generate()

    def fails() -> None:
        raise RuntimeError("the disk of the third rank is full")

    on_bucket(monkeypatch, 2, fails)
    with pytest.raises(SyncError, match="the disk of the third rank is full"):
        adapted.update(7)
    monkeypatch.undo()
    adapted.loop.run(adapted.engine.resume())
    again = adapted.generate()
    assert again.sampled_logprobs == pytest.approx(before.sampled_logprobs, abs=1e-5)
    assert again.oldest_version == before.oldest_version
    adapted.push()
    assert adapted.mismatch(adapted.generate()) < TOLERANCE


def test_values_that_are_not_finite_and_a_wrong_scale_stop_the_run(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted.update(8)
    send_instead(monkeypatch, lambda name, sent: sent * float("nan") if "layers.2.mlp.up_proj.lora_A" in name else sent)
    with pytest.raises(SyncError, match=r"layers\.2\.mlp\.up_proj came with values that are not finite"):
        adapted.push()
    monkeypatch.undo()
    send_instead(monkeypatch, lambda name, sent: 3 * sent if "lora_B" in name else sent)
    with pytest.raises(SyncError, match="canary"):
        adapted.push()
    monkeypatch.undo()
    adapted.push()
    assert adapted.mismatch(adapted.generate()) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 128},
            r"adapter other: model\.layers\.0\.\S+ has 64 inputs, and its adapter came as \(2, 128\)",
        ),
        ({"num_hidden_layers": 6, "layer_types": None}, r"other: the model has no layer model\.layers\.[45]\."),
    ],
)
def test_an_adapter_of_another_model_stops_the_start(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = tiny_qwen3(tied=True).config
    other = with_lora(Qwen3ForCausalLM(Qwen3Config(**{**config.to_dict(), **changes})), rank=2)
    other.save_pretrained(str(tmp_path / "other"))
    with BackgroundLoop() as loop, forks_for_spawns(), pytest.raises(EngineError, match=message):
        EmbeddedEngine(
            EngineSettings(
                model=save_tiny_model(tmp_path / "model", tied=True),
                max_model_len=320,
                kv_cache_gib=0.0625,
                num_threads=1,
                adapters=AdapterSettings(max_rank=3, others=(("other", str(tmp_path / "other")),)),
            ),
            loop=loop,
            log_path=tmp_path / "engine.log",
        )


def test_a_server_takes_adapters_and_keeps_the_old_one_if_a_trainer_dies(tmp_path: Path) -> None:
    servers = ForkedServers(save_model(tmp_path / "model"), tmp_path, lora_rank=3)
    with servers.running() as (server,):
        with trained([server], lora_rank=3) as first:
            assert first.engine.takes_adapters
            for seed in (1, 2):
                perturb_adapters(first.model, seed=seed)
                assert first.push().canary_abs_diff < TOLERANCE
                before = first.generate(PROMPT)
                assert first.mismatch(before) < TOLERANCE
            first.engine._route = GENERATE
            assert first.generate(PROMPT).sampled_logprobs == pytest.approx(before.sampled_logprobs, abs=1e-5)
            base = first.generate(PROMPT, model=BASE)
            with first.model.disable_adapter():  # type: ignore[union-attr,operator]
                assert first.mismatch(base) < TOLERANCE
        servers.send_and_die(server.url)
        with trained([server], lora_rank=3) as second:
            second.loop.run(second.engine.resume())
            again = second.generate(PROMPT)
            assert again.sampled_logprobs == pytest.approx(before.sampled_logprobs, abs=1e-5)
            perturb_adapters(second.model, seed=5)
            second.push()
            assert second.mismatch(second.generate(PROMPT)) < TOLERANCE
