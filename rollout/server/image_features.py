"""Images in requests to vLLM's own generate route, as its `features`: tensors, hashes and places in the expanded ids.

The engine then computes on exactly the tensors that the trainer has, as with Lockstep's route (`carried_images.py`).
A place has a beginning and a length, and no gaps: Lockstep's spans of all families hold image tokens only.

A server that keeps images by hash is sent the tensors once. If it has dropped them since, the request fails with status
500, which names no cause, and is sent again with all tensors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.rollout.errors import EngineError, EvidenceError
from lockstep.rollout.media.image_prompts import ImagePrompts
from lockstep.rollout.records import ImageSpan
from lockstep.rollout.server.client import ATTEMPTS
from lockstep.rollout.vllm_names import WINDOW, check_vllm

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

Post = Callable[[dict[str, Any], int], Awaitable[Any]]


class ImageFeatures:
    """Requests with images to one server."""

    def __init__(
        self, images: ImageProcessing, *, max_images: int, dtype: torch.dtype, kept: set[str] | None, source: str
    ) -> None:
        """max_images: of a prompt. dtype: of the engine. kept: digests of images that the server was sent, and may have
        kept; None for a server that keeps none."""
        check_vllm("images of vLLM's route")
        self._prompts = ImagePrompts(images, max_images=max_images, dtype=dtype, processor=_Joins())
        self._kept, self._source = kept, source

    async def answer(self, ids: Sequence[int], images: Sequence[ImageSpan], post: Post) -> Any:
        """Return the answer to a request. post: sends it with these fields, at most so often.

        Raises `EngineError` unless the image tokens of the ids are those of the images, `EvidenceError` if the server
        had another prompt.
        """
        omitted = {image.digest for image in images} & (self._kept or set())
        try:
            answer = await post(self._fields(ids, images, omitted), 1 if omitted else ATTEMPTS)
        except EngineError:
            if not omitted:
                raise
            answer = await post(self._fields(ids, images, set()), ATTEMPTS)
        self._check(answer, ids, images)
        if self._kept is not None:
            self._kept.update(image.digest for image in images)
        return answer

    def _fields(self, ids: Sequence[int], images: Sequence[ImageSpan], omitted: set[str]) -> dict[str, Any]:
        """Return the fields of a request. omitted: digests of images without tensors."""
        from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item

        prompt = self._prompts.input(ids, images)
        items = zip(images, prompt["mm_kwargs"]["image"], strict=True)
        return {
            "features": {
                "mm_hashes": prompt["mm_hashes"],
                "mm_placeholders": {"image": _places(images)},
                "kwargs_data": {
                    "image": [None if image.digest in omitted else encode_mm_kwargs_item(item) for image, item in items]
                },
            },
            "return_token_ids": True,
        }

    def _check(self, answer: Any, ids: Sequence[int], images: Sequence[ImageSpan]) -> None:
        fields = answer if isinstance(answer, Mapping) else {}
        places = {"image": _places(images)}
        if fields.get("prompt_token_ids") != list(ids) or fields.get("mm_placeholders") != places:
            raise EvidenceError(
                f"{self._source} answered to another prompt than the {len(ids)} tokens with {len(images)} images that "
                f"were sent; expected a server of vLLM {WINDOW}"
            )


def _places(images: Sequence[ImageSpan]) -> list[dict[str, int]]:
    return [{"offset": image.start, "length": image.end - image.start} for image in images]


class _Joins:
    """How vLLM's processors of all families join the tensors of several images; theirs need an engine's config.

    Values are concatenated, and sizes, which the CPU reads, are stacked.
    """

    @staticmethod
    def _get_mm_fields_config(tensors: Mapping[str, torch.Tensor], _: Mapping[str, Any]) -> dict[str, Any]:
        from vllm.multimodal.inputs import MultiModalFieldConfig

        return {
            name: MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(tensor)]))
            if tensor.is_floating_point()
            else MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            for name, tensor in tensors.items()
        }
