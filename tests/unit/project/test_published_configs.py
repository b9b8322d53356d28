"""Configs of public checkpoints in scripts/published: only sizes, lengths and ids of tokens are replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from scripts.published.models import Published, published_models

MODELS = published_models()
PATTERNS = ("hybrid_override_pattern", "layer_types", "layers_block_type", "mlp_layer_types")
"""Kinds of layers, of which some stay."""
FACTORS = ("long_factor", "short_factor", "activation_sparsity_pattern")
"""Values per dimension or layer, of which some stay."""


def replaced(published: Any, reduced: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, published and reduced value of each replaced setting of a text model."""
    for name, value in reduced.items():
        if isinstance(value, Mapping):
            if name != "vision_config":
                yield from replaced(published.get(name) or {}, value, f"{path}{name}.")
        else:
            yield name, published.get(name), value


@pytest.mark.parametrize("one", MODELS.values(), ids=list(MODELS))
def test_a_small_config_keeps_what_was_published(one: Published) -> None:
    assert one.source
    for name, published, value in replaced(one.published, one.reduced):
        if name in PATTERNS or name in FACTORS:
            assert published is None or {*value} <= {*published}, name
        elif isinstance(value, list):
            assert all(isinstance(part, int) for part in value), name
        elif isinstance(value, float):
            assert name == "initializer_range", name
        else:
            assert value is None or (isinstance(value, int) and not isinstance(value, bool)), name


def test_there_are_forty_families() -> None:
    assert len({one.config["model_type"] for one in MODELS.values()}) >= 40
