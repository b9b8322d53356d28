"""An engine that quantizes the weights that arrive, which on a CPU is fp8_per_channel in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.canary import CANARY_THRESHOLD, FLOOR_FACTOR
from tests.fixtures.models import perturb, sampled_logprobs
from tests.fixtures.sent import send_instead
from tests.integration.conftest import Served, serve

pytestmark = [pytest.mark.engine, pytest.mark.v2]

PROMPT = tuple(range(10, 100))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("quantized")
    yield from serve(directory, tied=True, dtype="bfloat16", quantization="fp8_per_channel")


def mean_difference(served: Served) -> float:
    call = served.generate(PROMPT)
    expected = torch.tensor(sampled_logprobs(served.model, call.prompt_ids, call.sampled_ids))
    return (torch.tensor(call.sampled_logprobs) - expected).abs().mean().item()


def test_weights_are_quantized_at_every_sync_and_the_first_canary_sets_the_threshold(
    quantized: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = quantized.push()
    threshold = max(CANARY_THRESHOLD[torch.bfloat16], FLOOR_FACTOR * first.canary_abs_diff)
    assert quantized.sync._canary._threshold == pytest.approx(threshold)
    assert 0.02 < mean_difference(quantized) < 0.6, "the engine computes in fp8, and with the right weights"
    before = quantized.generate(PROMPT)
    perturb(quantized.model, seed=1)
    quantized.push()
    assert quantized.mismatch(before) > 1, "the perturbation is too small for this test to mean anything"
    assert mean_difference(quantized) < 0.6

    for factor in (float("nan"), 3.0):
        send_instead(monkeypatch, lambda name, sent, by=factor: by * sent if "embed" in name else sent)
        with pytest.raises(SyncError, match="canary"):
            quantized.push()
        monkeypatch.undo()
    quantized.push()
    assert mean_difference(quantized) < 0.6
