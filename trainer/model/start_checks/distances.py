"""Lengths at which a model begins to compute in another way, and the row that the checks of a run score."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

NAME = re.compile(r"(window|window_size|chunk_size|original_max_position_embeddings|floor_scale)$")
"""Names of such lengths in configs: of attention's windows and chunks, recurrent layers' chunks, rotary positions, and
the positions at which Llama 4 and Ministral 3 begin to scale queries."""
USUAL = {"cuda": 1500, "cpu": 500}
"""Tokens of the row by type of device, where no length asks for more."""
MOST = {"cuda": 8448, "cpu": 2048}
"""Limit of the row: 118 TFLOP for a 7B model, less than a second of an H100, and 0.6 for 135M on a CPU."""
BEYOND = 128
"""Tokens of the row after the last length."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The row of a run's checks."""

    tokens: int
    passed: tuple[int, ...]
    """Lengths that the row passes [tokens]."""
    missed: Mapping[str, int]
    """Lengths that rows of the run can pass and this one does not, by their names in the config."""


def reach(config: PreTrainedConfig, *, longest: int, device_type: str, budget: int) -> Reach:
    """Return the row for a model. longest: row of the run [tokens]. budget: tokens that fit into memory together."""
    lengths = {name: length for name, length in distances(config).items() if length + 1 < longest}
    most = min(MOST.get(device_type, MOST["cpu"]), budget)
    within = [length for length in lengths.values() if length + BEYOND <= most]
    usual = USUAL.get(device_type, USUAL["cpu"])
    tokens = max(2, min(longest, most, max([usual, *(length + BEYOND for length in within)])))
    return Reach(
        tokens=tokens,
        passed=tuple(sorted({length for length in lengths.values() if length < tokens})),
        missed={name: length for name, length in lengths.items() if length >= tokens},
    )


def distances(config: PreTrainedConfig) -> dict[str, int]:
    """Return the lengths at which a model begins to compute in another way [tokens], by their names in its config."""
    text = config.get_text_config()
    lengths = dict(_numbers_by_name(text.to_dict()))
    if any(one.get("rope_type") == "dynamic" for one in _rope_parameters(text)):
        lengths["max_position_embeddings"] = text.max_position_embeddings
    return lengths


def _rope_parameters(text: PreTrainedConfig) -> list[Mapping[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    return [one for one in (parameters, *parameters.values()) if isinstance(one, Mapping)]


def _numbers_by_name(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", length) for inner, length in _numbers_by_name(value))
        elif type(value) is int and value > 0 and NAME.search(name):
            yield name, value
