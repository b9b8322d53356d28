"""Prompts with images as vLLM's input, made of the ids and tensors that the trainer has.

vLLM neither expands such a prompt nor processes its images: it is given what its own renderer would have made
(`vllm.inputs.engine.mm_input`). From raw images it would expand ids that are expanded already a second time, without an
error, and put an image into the first placeholder that it finds, also into one that the model sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import BatchFeature

from lockstep.rollout.errors import EngineError
from lockstep.rollout.media.bounded_cache import BoundedCache, bytes_of
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.rollout.records import ImageSpan
from lockstep.rollout.vllm_names import check_vllm

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItem

KEPT_BYTES = 2**30
"""Images that are kept in the form of vLLM: the turns of an episode, and the rollouts of a group, send the same."""


class SeenImages(Protocol):
    """Images by digest, as `ImageProcessing` has them, or the side of a server that was sent them."""

    @property
    def family(self) -> Any: ...

    @property
    def image_token_id(self) -> int: ...

    def prepared(self, digest: str, /) -> PreparedImage: ...


class ImagePrompts:
    """Inputs of one engine."""

    def __init__(self, images: SeenImages, *, max_images: int, dtype: torch.dtype, processor: Any) -> None:
        """max_images: of one prompt. dtype: of the engine's model. processor: vLLM's own of the model, which knows how
        tensors of several images are joined."""
        check_vllm("images")
        self._images, self._max_images, self._dtype, self._processor = images, max_images, dtype, processor
        self._items = BoundedCache(self._item_of, size=lambda item: item[1], limit=KEPT_BYTES)
        """Items of vLLM, and their bytes, by digest."""

    def input(self, ids: Sequence[int], images: Sequence[ImageSpan]) -> Any:
        """Return vLLM's input. Raises `EngineError` unless the image tokens of the prompt are those of its images."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        self._check(ids, images)
        if not images:
            return tokens_input(list(ids))
        return mm_input(
            prompt_token_ids=list(ids),
            mm_kwargs=MultiModalKwargsItems({"image": [self._items(image.digest)[0] for image in images]}),
            mm_hashes={"image": [image.digest for image in images]},
            mm_placeholders={
                "image": [PlaceholderRange(offset=image.start, length=image.end - image.start) for image in images]
            },
        )

    def _check(self, ids: Sequence[int], images: Sequence[ImageSpan]) -> None:
        if len(images) > self._max_images:
            raise EngineError(
                f"a prompt has {len(images)} images, and the engine takes {self._max_images}; raise "
                "model.images.max_per_prompt"
            )
        token = self._images.image_token_id
        places = [place for place, one in enumerate(ids) if one == token]
        if places != [place for image in images for place in range(image.start, image.end)]:
            raise EngineError(
                f"a prompt has {len(places)} image tokens that are not those of its {len(images)} images; pass the "
                "images of a prompt together with its ids"
            )
        for image in images:
            expected = self._images.prepared(image.digest).num_tokens
            if image.end - image.start != expected:
                raise EngineError(
                    f"the image at token {image.start} of a prompt has {image.end - image.start} tokens, expected "
                    f"{expected}; make prompts with the model.path of the engine"
                )

    def _item_of(self, digest: str) -> tuple[MultiModalKwargsItem, int]:
        from vllm.multimodal.inputs import MultiModalKwargsItems

        tensors = {
            name: tensor.to(self._dtype) if tensor.is_floating_point() else tensor
            for name, tensor in self._images.prepared(digest).tensors.items()
        }
        tensors |= self._images.family.engine_tensors
        fields = self._processor._get_mm_fields_config(BatchFeature(tensors), {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields)["image"]
        return item, bytes_of(tensors)
