"""The row that the checks of a run score, by the config of the model."""

from __future__ import annotations

import pytest
from transformers import Gemma3TextConfig, Llama4TextConfig, Phi3Config, PreTrainedConfig, Qwen3Config

from lockstep.trainer.model.start_checks.distances import Reach, distances, reach

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
PHI = Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=4096, max_position_embeddings=131072)
LLAMA = Llama4TextConfig(attention_chunk_size=8192, floor_scale=8192)


def on(device: str, config: PreTrainedConfig, *, longest: int = 100_000, budget: int = 100_000) -> Reach:
    return reach(config, longest=longest, device_type=device, budget=budget)


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (Qwen3Config(), set()),
        (Gemma3TextConfig(sliding_window=512), {512}),
        (PHI, {4096}),
        (LLAMA, {8192}),
        (
            Qwen3Config(
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=2048
            ),
            {2048},
        ),
    ],
)
def test_lengths_come_from_the_config(config: PreTrainedConfig, lengths: set[int]) -> None:
    assert set(distances(config).values()) == lengths


def test_the_row_passes_all_lengths_within_its_limits() -> None:
    assert on("cuda", PHI) == Reach(4096 + 128, (4096,), {})
    assert on("cuda", LLAMA).passed == (8192,)
    assert on("cpu", Qwen3Config()) == Reach(500, (), {})
    assert on("cpu", Gemma3TextConfig(sliding_window=512)) == Reach(640, (512,), {})


def test_lengths_that_rows_of_the_run_pass_and_the_check_does_not_are_named() -> None:
    missed = on("cpu", LLAMA)
    assert missed.tokens == 500
    assert missed.missed == {"attention_chunk_size": 8192, "floor_scale": 8192}
    assert on("cuda", PHI, budget=1000).tokens == 1000
    assert on("cuda", PHI, budget=1000).missed
    assert on("cpu", LLAMA, longest=4000).missed == {}, "no row of the run gets there"


def test_the_row_is_no_longer_than_rows_of_the_run() -> None:
    assert on("cuda", PHI, longest=63) == Reach(63, (), {})
    assert on("cuda", PHI, longest=4100) == Reach(4100, (4096,), {})
