"""Attention of images on a CPU; tests/integration/test_images.py compares whole models with transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.rollout.engine.architectures.cpu_image_attention import attend, images_of


@pytest.mark.parametrize("window", [-1, 3, 100])
def test_tokens_of_an_image_attend_to_all_of_it_within_the_window(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, image = 9, range(4, 9)
    query = torch.randn(len(image), 4, 8, generator=generator)
    key, value = (torch.randn(tokens, 2, 8, generator=generator) for _ in range(2))
    found = attend(query, key, value, scale=0.3, window=window)
    for number, place in enumerate(image):
        seen = [at for at in range(tokens) if window < 0 or at > place - window]
        for head in range(4):
            weights = torch.softmax(0.3 * key[seen, head // 2] @ query[number, head], 0)
            torch.testing.assert_close(found[number, head], weights @ value[seen, head // 2])


def test_places_of_images_in_a_batch() -> None:
    def metadata(**ranges: Any) -> Any:
        return SimpleNamespace(
            query_start_loc=torch.tensor([0, 10, 11, 31]), seq_lens=torch.tensor([10, 50, 20]), **ranges
        )

    assert images_of(metadata(mm_req_doc_ranges=None)) == []
    ranges = {0: [(2, 5)], 1: [(3, 40)], 2: [(0, 3), (8, 11)]}
    assert images_of(metadata(mm_req_doc_ranges=ranges)) == [(0, 2, 6), (11, 11, 15), (11, 19, 23)]
    with pytest.raises(RuntimeError, match="first 49 tokens were computed before"):
        images_of(metadata(mm_req_doc_ranges={1: [(45, 49)]}))
