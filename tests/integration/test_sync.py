"""Weight sync with real engines: afterwards the engine computes with the trained weights, or the run stops."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from transformers import Qwen3ForCausalLM

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError, SyncError
from tests.fixtures.in_flight import sampled_across_a_sync
from tests.fixtures.models import perturb, sampled_logprobs
from tests.fixtures.sent import leave_out, on_bucket, send_instead
from tests.integration.conftest import Served

pytestmark = [pytest.mark.engine, pytest.mark.v2]

LONG_PROMPT = tuple(range(10, 180))  # longer than one cache block (128 tokens on CPU), so that it can be stale


@pytest.fixture(params=["tied", "untied"])
def either(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue("served" if request.param == "tied" else "served_untied")


def test_after_a_sync_the_engine_samples_from_the_new_weights(either: Served) -> None:
    before = either.generate(LONG_PROMPT)
    for seed in (1, 2, 3):
        perturb(either.model, seed=seed)
        report = either.push()
        call = either.generate(LONG_PROMPT)

        assert either.mismatch(call) < 1e-4
        assert call.version_spans[0].version == either.version == report.version
        assert report.canary_abs_diff < 1e-4
    assert either.mismatch(before) > 0.1, "the perturbation is too small for this test to mean anything"


def test_the_report_measures_the_sync(either: Served) -> None:
    metrics = either.push().metrics()

    assert set(metrics) == {
        f"sync/{name}"
        for name in ("gather_s", "transfer_s", "pause_s", "bytes", "gb_per_s", "canary_abs_diff", "version")
    }
    assert metrics["sync/bytes"] == 4 * sum(param.numel() for param in either.model.parameters())
    assert 0 < metrics["sync/pause_s"] < 30
    assert metrics["sync/gb_per_s"] > 0


def test_canaries_take_at_most_their_share_of_the_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_scored() -> bool:
        return "sync/canary_abs_diff" in served.push().metrics()

    assert [is_scored(), is_scored()] == [True, True], "one in every push, unless a share is set"
    monkeypatch.setattr(served.sync, "_canary_share", 0.01)
    assert not is_scored()
    pace = served.sync._pace
    monkeypatch.setattr(pace, "_ended_at", pace._ended_at - 101 * pace._cost_s)
    assert [is_scored(), is_scored()] == [True, False]
    served.sync.reconnect()
    assert is_scored(), "an engine that was started again"


def test_a_scaled_head_answers_the_first_request_for_a_cached_prompt(either: Served) -> None:
    before = either.generate(LONG_PROMPT)
    either.generate(LONG_PROMPT)  # the prompt's blocks are in the cache now
    with torch.no_grad():
        either.model.lm_head.weight.mul_(1.5)  # and the embedding of the tied model
    either.push()
    call = either.generate(LONG_PROMPT)

    assert either.mismatch(call) < 1e-4
    assert {span.version for span in call.version_spans} == {either.version}
    assert either.mismatch(before) > 0.1, "the scale is too small for this test to mean anything"


def test_a_request_in_flight_carries_both_versions_and_each_part_matches_its_weights(served: Served) -> None:
    old: list[Qwen3ForCausalLM] = []

    def update() -> None:
        old.append(copy.deepcopy(served.model))
        perturb(served.model, seed=11)
        served.push()

    call = sampled_across_a_sync(served, update, (5, 6, 7), Sampling(max_tokens=250, ignore_eos=True))

    cut = call.version_spans[0].end
    by_old = sampled_logprobs(old[-1], call.prompt_ids, call.sampled_ids)
    by_new = sampled_logprobs(served.model, call.prompt_ids, call.sampled_ids)
    assert call.sampled_logprobs == pytest.approx(by_old[:cut] + by_new[cut:], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(by_old, by_new, strict=True)) > 0.1


@pytest.mark.parametrize("wrong", [-1.0, float("nan")])
def test_a_canary_that_differs_stops_the_run(served: Served, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    monkeypatch.setattr(served.sync._canary, "_score", lambda ids: [wrong] * (len(ids) - 1))
    with pytest.raises(SyncError, match="does not compute what the trainer computes"):
        served.push()
    monkeypatch.undo()
    _recover(served)


def test_a_stale_head_is_caught(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine once kept the packed old head beside a new embedding; here the trainer sends such weights."""
    send_instead(monkeypatch, lambda name, sent: sent if "embed_tokens" in name else torch.zeros_like(sent))
    with pytest.raises(SyncError, match="canary"):
        served.push()
    monkeypatch.undo()
    _recover(served)


def test_a_layer_with_other_weights_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    send_instead(
        monkeypatch,
        lambda name, sent: 3 * sent if name.startswith("model.layers.2.") and "norm" in name else sent,
    )
    with pytest.raises(SyncError, match=r"canary .* different from the sent weights: model\.layers\.2 \(4 of 4\)"):
        served.push()
    monkeypatch.undo()
    _recover(served)


def test_a_parameter_that_is_not_sent_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, served.sync, "model.layers.1.")
    with pytest.raises(SyncError, match=r"were not among the weights that arrived, first \['model\.layers\.1\."):
        served.push()
    monkeypatch.undo()
    _recover(served)


def test_a_sender_that_fails_half_way_leaves_the_old_weights_serving(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.generate(LONG_PROMPT)

    def fails() -> None:
        raise RuntimeError("the disk of the third rank is full")

    on_bucket(monkeypatch, 2, fails)
    started = time.monotonic()
    with pytest.raises(SyncError, match="disk of the third rank"):
        served.sync.push(served.version + 1)
    assert time.monotonic() - started < 10
    monkeypatch.undo()

    served.loop.run(served.engine.resume())
    after = served.generate(LONG_PROMPT)
    assert after.sampled_ids == before.sampled_ids
    assert after.version_spans == before.version_spans
    served.push()
    assert served.mismatch(served.generate(LONG_PROMPT)) < 1e-4


def test_a_sync_that_misses_its_deadline_is_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    on_bucket(monkeypatch, 0, lambda: time.sleep(4))
    monkeypatch.setattr(served.sync._ranks, "_deadline_s", 2.0)
    with pytest.raises(SyncError, match="no answer within 2 s"):
        served.push()
    monkeypatch.undo()
    time.sleep(3)  # the abandoned thread ends by itself
    _recover(served)


def test_a_closed_engine_is_named(served: Served) -> None:
    closed = object.__new__(type(served.engine))
    closed._llm = None
    with pytest.raises(EngineError, match="closed"):
        _ = closed.llm


def _recover(served: Served) -> None:
    """A failed sync leaves the engine paused; the next good one must restore it exactly."""
    served.loop.run(served.engine.resume())
    served.push()
    assert served.mismatch(served.generate(LONG_PROMPT)) < 1e-4
