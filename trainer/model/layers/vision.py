"""The vision tower of a policy: images of a pack become embeddings in the place of their tokens.

    pixels ─► tower and projector ─► one feature per image token ─┐
    ids ─► embeddings ────────────────────────────────────────────┴─► decoder, as for text

Every pass runs the tower, so that all ranks make the same collectives (ZeRO-3 gathers its weights, DDP and ZeRO reduce
its gradients): a pack without images runs it on one small blank image, of which no feature is used. If the tower is
trained, its gradient there is exactly zero.

Covered: Qwen2.5-VL. Not covered: video.

Shape legend: _L tokens of the pack, _K tokens of images of the pack, _D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.trainer.batch.packed_images import GRID, ImageSource
from lockstep.trainer.batch.packing import PackedBatch

MODEL_TYPES = ("qwen2_5_vl",)
"""Model types whose images were tested."""


def refuse_tower(config: PreTrainedConfig) -> None:
    """Raise `ConfigError` unless the model has a vision tower that the trainer can run."""
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model type {config.model_type}: training on images was tested with {', '.join(MODEL_TYPES)} only; set "
            "model.path to such a model, or train without images"
        )


def image_source(config: PreTrainedConfig, images: Mapping[str, PreparedImage]) -> ImageSource:
    """Return images by digest as the packs of this model take them."""
    return ImageSource(
        images=images, token_id=config.image_token_id, merge_size=config.vision_config.spatial_merge_size
    )


class Vision:
    """Tower and projector of a model, which stay modules of the model."""

    def __init__(self, model: PreTrainedModel, *, is_trained: bool) -> None:
        """is_trained: False freezes them, in place."""
        self._base: Any = model.base_model
        self._decoder: Any = model.get_decoder()
        self._is_trained = is_trained
        for part in self._base.children():
            if part is not self._decoder:
                part.requires_grad_(is_trained)

    def inputs(self, packed: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the decoder that stand for the ids of a pack: embeddings and positions."""
        images = packed.images
        embeddings_LD = self._decoder.get_input_embeddings()(packed.ids)
        token_index_K = packed.ids.new_zeros(0) if images is None else images.token_index_K
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._is_trained):
            features_KD = self._features(self._blank(packed.ids.device) if images is None else images.tensors)
        # Without images K is 0: nothing is copied, but backward reaches the tower.
        used_KD = features_KD[: len(token_index_K)].to(embeddings_LD.dtype)
        positions = packed.position_ids[None]
        if images is not None and images.position_ids_3L is not None:
            # transformers reads the rows of a pack from the first part, and rotates by the others.
            positions = torch.cat([positions, images.position_ids_3L])[:, None]
        return {"inputs_embeds": embeddings_LD.index_copy(0, token_index_K, used_KD)[None], "position_ids": positions}

    def _features(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the (tokens, D) features of images."""
        output = self._base.get_image_features(**tensors, return_dict=True)
        return torch.cat(tuple(output.pooler_output))

    def _blank(self, device: torch.device) -> dict[str, Tensor]:
        """Return the smallest image, of one token."""
        vision = self._base.config.vision_config
        side = vision.spatial_merge_size
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(side**2, values, device=device),
            GRID: torch.tensor([[1, side, side]], device=device),
        }
