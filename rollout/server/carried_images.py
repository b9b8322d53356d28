"""Images on the way to a server: tensors travel once per server, and later requests name them by digest.

    client   images: [{start, end, digest}, ...] ─► server has all of them ─► samples
                                                 └► {"missing": [digests]} ─► the request again, with their tensors

The server computes on exactly the tensors that the trainer has. It processes no image and expands no prompt.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.rollout.media.bounded_cache import bytes_of
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.rollout.records import IMAGE_DIGEST, ImageSpan

if TYPE_CHECKING:
    from lockstep.rollout.media.image_prompts import ImagePrompts
    from lockstep.rollout.media.processing import ImageProcessing

MISSING = "missing"
KEPT_IMAGES, KEPT_BYTES = 64, 2 * 2**30
"""Images that a server keeps at most, the most recently used: about 12 MB of bfloat16 for a megapixel."""


def image_fields(
    spans: Sequence[ImageSpan], images: ImageProcessing, *, dtype: torch.dtype, missing: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the images of a request as JSON. dtype: of the engine. missing: digests whose tensors go with it."""
    return [
        {**asdict(span), "tensors": _encoded(images.prepared(span.digest), dtype)}
        if span.digest in missing
        else asdict(span)
        for span in spans
    ]


def _encoded(image: PreparedImage, dtype: torch.dtype) -> dict[str, Any]:
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in image.tensors.items()
    }
    return {
        name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": base64.b64encode(tensor.view(torch.uint8).numpy().tobytes()).decode(),
        }
        for name, tensor in tensors.items()
    }


class CarriedImages:
    """Images that a server was sent, and prompts with them as vLLM's input."""

    def __init__(self, engine: Any) -> None:
        """engine: vLLM's client in the server."""
        self._engine = engine
        self._kept: OrderedDict[str, PreparedImage] = OrderedDict()

    def input(self, ids: Sequence[int], fields: Sequence[Mapping[str, Any]]) -> Any | list[str]:
        """Return vLLM's input, or the digests of images that the server lacks. Raises on other input."""
        for one in fields:
            if one.get("tensors") is not None:
                self._keep(str(one["digest"]), one["tensors"])
        spans = [ImageSpan(start=int(one["start"]), end=int(one["end"]), digest=str(one["digest"])) for one in fields]
        if missing := sorted({span.digest for span in spans} - self._kept.keys()):
            return missing
        prompt = self._prompts.input(ids, spans)
        while len(self._kept) > 1 and (len(self._kept) > KEPT_IMAGES or self._bytes > KEPT_BYTES):
            self._kept.popitem(last=False)
        return prompt

    @property
    def _bytes(self) -> int:
        return sum(bytes_of(image.tensors) for image in self._kept.values())

    @cached_property
    def _prompts(self) -> ImagePrompts:
        from lockstep.rollout.media.image_prompts import ImagePrompts

        model, renderer = self._engine.model_config, self._engine.renderer
        limit = model.multimodal_config.get_limit_per_prompt("image")
        return ImagePrompts(self, max_images=limit, dtype=model.dtype, processor=renderer.get_mm_processor())

    @cached_property
    def family(self) -> Any:
        from lockstep.rollout.media.processing import FAMILIES

        return FAMILIES[self._engine.model_config.hf_config.model_type]

    @property
    def image_token_id(self) -> int:
        token: int = self._engine.model_config.hf_config.image_token_id
        return token

    def prepared(self, digest: str) -> PreparedImage:
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _keep(self, digest: str, tensors: Mapping[str, Any]) -> None:
        if not IMAGE_DIGEST.fullmatch(digest):
            raise ValueError(f"an image has no SHA-256, but {digest!r:.80}")
        decoded = {name: _decoded(value) for name, value in tensors.items()}
        num_tokens = self.family.num_tokens(self._engine.model_config.hf_config, decoded)
        self._kept[digest] = PreparedImage(digest=digest, tensors=decoded, num_tokens=num_tokens)


def _decoded(value: Mapping[str, Any]) -> torch.Tensor:
    data = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype=np.uint8).copy()
    return torch.from_numpy(data).view(getattr(torch, value["dtype"])).reshape(value["shape"])
