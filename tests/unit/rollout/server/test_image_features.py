"""Images on the way to vLLM's own generate route."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, BatchFeature

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import EngineError, EvidenceError, RequestError
from lockstep.rollout.records import PromptIds
from lockstep.rollout.server.image_features import ImageFeatures, _Joins
from lockstep.rollout.server.server_engine import read_facts
from tests.fixtures.fake_server import SERVER_INFO
from tests.fixtures.vision import image_processing, picture, save_tiny

PROCESSORS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLMultiModalProcessor"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLMultiModalProcessor"),
    "gemma3": ("gemma3_mm", "Gemma3MultiModalProcessor"),
}
"""Module and class of vLLM by model type; Qwen3.5 takes that of Qwen3-VL."""


class Prompts:
    """Prompts of a tiny model, and requests with them to a server that a test plays."""

    def __init__(self, directory: Path) -> None:
        self.images = image_processing(save_tiny("qwen2_5_vl", directory))
        self.chat = Chat.from_pretrained(directory, images=self.images)
        self.posts: list[tuple[dict[str, Any], int]] = []
        """Fields and most attempts."""

    def prompt(self, *numbers: int) -> PromptIds:
        parts = [{"type": "image", "image": picture(number, 84, 56)} for number in numbers]
        return self.chat.prompt([{"role": "user", "content": [{"type": "text", "text": "see "}, *parts]}])

    def features(self, kept: set[str] | None) -> ImageFeatures:
        return ImageFeatures(self.images, max_images=2, dtype=torch.bfloat16, kept=kept, source="the server")

    def answer(self, features: ImageFeatures, prompt: PromptIds, *replies: Any) -> Any:
        """Return the answer, if the server gives these replies; without one it echoes the prompt."""
        self.posts.clear()
        left = list(replies)

        async def post(fields: dict[str, Any], attempts: int) -> Any:
            self.posts.append((fields, attempts))
            reply = left.pop(0) if left else echo(prompt, fields)
            if isinstance(reply, Exception):
                raise reply
            return reply

        return asyncio.run(features.answer(prompt, prompt.images, post))

    @property
    def sent(self) -> list[list[bool]]:
        """For each request, which images had tensors."""
        return [[item is not None for item in items(fields)] for fields, _ in self.posts]


def items(fields: dict[str, Any]) -> list[str | None]:
    found: list[str | None] = fields["features"]["kwargs_data"]["image"]
    return found


def echo(prompt: PromptIds, fields: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt), "mm_placeholders": fields["features"]["mm_placeholders"]}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(tmp_path_factory.mktemp("model"))


def test_a_request_holds_the_tensors_of_the_trainer(prompts: Prompts) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures

    prompt = prompts.prompt(1, 2)
    prompts.answer(prompts.features(None), prompt)
    ((fields, attempts),) = prompts.posts
    assert attempts > 1
    assert fields["return_token_ids"] is True
    features = MultiModalFeatures(**fields["features"])
    assert features.mm_hashes == {"image": [image.digest for image in prompt.images]}
    places = [range(one.offset, one.offset + one.length) for one in features.mm_placeholders["image"]]
    places_of_tokens = [place for place, token in enumerate(prompt) if token == prompts.images.image_token_id]
    assert [place for one in places for place in one] == places_of_tokens
    for image, item in zip(prompt.images, items(fields), strict=True):
        assert item is not None
        found = decode_mm_kwargs_item(item).get_data()
        expected = prompts.images.prepared(image.digest).tensors
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found["pixel_values"], expected["pixel_values"].bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(found["image_grid_thw"], expected["image_grid_thw"][0])


@pytest.mark.parametrize("family", PROCESSORS)
def test_tensors_are_joined_as_by_vllm(family: str, tmp_path: Path) -> None:
    module, name = PROCESSORS[family]
    processor = getattr(pytest.importorskip(f"vllm.model_executor.models.{module}"), name)
    images = image_processing(save_tiny(family, tmp_path))
    theirs = object.__new__(processor)
    config = AutoConfig.from_pretrained(tmp_path)
    theirs.info = SimpleNamespace(get_hf_config=lambda: config)
    prepared = images.prepared(images.store.add(picture(1)))
    tensors = {**prepared.tensors, **images.family.engine_tensors}
    ours = _Joins._get_mm_fields_config(tensors, {})
    expected = theirs._get_mm_fields_config(BatchFeature(tensors), {})
    assert ours.keys() == tensors.keys()
    assert {name: one.field for name, one in ours.items()} == {name: expected[name].field for name in tensors}


def test_a_server_that_keeps_images_is_sent_each_once(prompts: Prompts) -> None:
    kept: set[str] = set()
    features = prompts.features(kept)
    prompts.answer(features, prompts.prompt(1))
    assert prompts.sent == [[True]]
    prompts.answer(features, prompts.prompt(1, 2))
    assert prompts.sent == [[False, True]]
    assert prompts.posts[0][1] == 1, "a miss is found by one failure"
    kept.clear()
    prompts.answer(features, prompts.prompt(1, 2))
    assert prompts.sent == [[True, True]]


def test_a_server_that_keeps_none_is_sent_them_each_time(prompts: Prompts) -> None:
    features = prompts.features(None)
    for _ in range(2):
        prompts.answer(features, prompts.prompt(1))
        assert prompts.sent == [[True]]


def test_after_a_failure_without_tensors_all_are_sent(prompts: Prompts) -> None:
    features, prompt = prompts.features(set()), prompts.prompt(1, 2)
    prompts.answer(features, prompts.prompt(1))
    prompts.answer(features, prompt, RequestError("HTTP 500"))
    assert prompts.sent == [[False, True], [True, True]]
    with pytest.raises(RequestError, match="again"):
        prompts.answer(features, prompt, RequestError("HTTP 500"), RequestError("again"))
    with pytest.raises(RequestError, match="HTTP 500"):
        prompts.answer(prompts.features(set()), prompt, RequestError("HTTP 500"))
    assert prompts.sent == [[True, True]]


@pytest.mark.parametrize("change", [{"prompt_token_ids": [1]}, {"mm_placeholders": None}, {"mm_placeholders": {}}])
def test_an_answer_to_another_prompt_is_refused(prompts: Prompts, change: dict[str, Any]) -> None:
    prompt = prompts.prompt(1)
    features = prompts.features(set())
    good = prompts.answer(features, prompt)
    with pytest.raises(EvidenceError, match=r"another prompt than the \d+ tokens with 1 images"):
        prompts.answer(features, prompt, {**good, **change})
    with pytest.raises(EvidenceError, match="another prompt"):
        prompts.answer(features, prompt, [])


def test_ids_that_do_not_fit_their_images_are_not_sent(prompts: Prompts) -> None:
    prompt = prompts.prompt(1)
    with pytest.raises(EngineError, match="image tokens that are not those of its 1 images"):
        prompts.answer(
            prompts.features(set()), PromptIds([*prompt[:-12], prompts.images.image_token_id], prompt.images)
        )
    assert prompts.posts == []


@pytest.mark.parametrize(
    ("multimodal", "parallel", "keeps"),
    [
        ({}, {}, True),
        ({"mm_processor_cache_gb": 0}, {}, False),
        ({"mm_processor_cache_type": "shm"}, {}, False),
        ({}, {"data_parallel_size": 2}, False),
        ({}, {"_api_process_count": 2}, False),
        ({}, {"_api_process_count": None}, False),
    ],
)
def test_images_are_named_by_hash_only_where_the_engine_core_keeps_them(
    multimodal: dict[str, Any], parallel: dict[str, Any], keeps: bool
) -> None:
    """Elsewhere an engine that is asked for one without its tensors dies."""
    described = copy.deepcopy(SERVER_INFO)
    config = described["vllm_config"]
    config["model_config"]["multimodal_config"] = {
        "limit_per_prompt": {"image": {"count": 2}}, "mm_processor_cache_gb": 4.0, "mm_processor_cache_type": "lru",
        **multimodal,
    }  # fmt: skip
    config["parallel_config"] |= {"_api_process_count": 1, **parallel}
    facts = read_facts("http://server", described)
    assert (facts.keeps_images, facts.max_images) == (keeps, 2)
