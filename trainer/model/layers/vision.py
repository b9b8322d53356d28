"""The vision tower of a policy: images of a pack become embeddings in the place of their tokens.

    pixels ─► tower and projector ─► one feature per image token ─┐
    ids ─► embeddings ────────────────────────────────────────────┴─► decoder, as for text

Every pass runs the tower, so that all ranks make the same collectives (ZeRO-3 gathers its weights, DDP and ZeRO reduce
its gradients): a pack without images runs it on one small blank image, of which no feature is used. If the tower is
trained, its gradient there is exactly zero.

Covered: Qwen2.5-VL; Qwen3-VL, whose tower also adds features to the states of the first layers (DeepStack); Qwen3.5;
Gemma 3, in which the tokens of an image see all of it. Not covered: video.

Shape legend: _L tokens of the pack, _K tokens of images of the pack, _D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.trainer.batch.packed_images import GRID, ImageSource
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.model.layers.packed_attention import PACKED_ROWS

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3")
"""Model types whose images were tested."""
BIDIRECTIONAL = ("gemma3",)
"""Model types in which the tokens of an image attend to all of it."""


def refuse_tower(config: PreTrainedConfig) -> None:
    """Raise `ConfigError` unless the model has a vision tower that the trainer can run."""
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"model type {config.model_type}: training on images was tested with {', '.join(MODEL_TYPES)} only; set "
            "model.path to such a model, or train without images"
        )


def refuse_attention(requested: str, model: PreTrainedModel) -> None:
    """Raise `ConfigError` for an attention under which tokens of an image would see less of it than in the model."""
    if model.config.model_type in BIDIRECTIONAL:
        raise ConfigError(
            f"attn_implementation={requested}: it would not let the tokens of an image attend to all of it, as "
            f"{type(model).__name__} does; set model.attn_implementation={PACKED_ROWS}"
        )


def image_source(config: PreTrainedConfig, prepared: Callable[[str], PreparedImage]) -> ImageSource:
    """Return images as the packs of this model take them. prepared: returns one by its digest."""
    settings: Any = config
    return ImageSource(
        prepared=prepared,
        token_id=settings.image_token_id,
        merge_size=getattr(settings.vision_config, "spatial_merge_size", None),
        is_bidirectional=config.model_type in BIDIRECTIONAL,
    )


def tower_parts(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the tower and its projector, by their names in the base model; of a text model none."""
    base, decoder = model.base_model, model.get_decoder()
    return {} if base is decoder else {name: part for name, part in base.named_children() if part is not decoder}


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """Sizes of a vision tower that determine the memory of its activations."""

    layers: int
    hidden: int
    intermediate: int
    patches: float
    """Patches of an image per token of it."""
    is_trained: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> TowerShape:
        """Measure the tower of a model. Of an adapted one, its base."""
        config: Any = model.config
        vision = config.vision_config
        merged: int | None = getattr(vision, "spatial_merge_size", None)
        sides = vision.image_size / vision.patch_size if merged is None else merged
        return cls(
            layers=vision.num_hidden_layers if merged is None else vision.depth,
            hidden=vision.hidden_size,
            intermediate=vision.intermediate_size,
            patches=sides**2 / (config.mm_tokens_per_image if merged is None else 1),
            is_trained=any(part.requires_grad for tower in tower_parts(model).values() for part in tower.parameters()),
        )

    def activation_bytes(self, tokens: int, *, compute: int, is_checkpointed: bool) -> int:
        """Return the memory of a pack of which all tokens are of images: at most that.

        A layer holds its inputs, two norms, queries, keys, values, the output of attention, and three products of the
        MLP. A frozen tower keeps one layer; a trained one all, under checkpointing the inputs of all and one layer.
        """
        layer = 8 * self.hidden + 3 * self.intermediate
        width = layer
        if self.is_trained:
            width = layer + self.hidden * self.layers if is_checkpointed else layer * self.layers
        return int(compute * tokens * self.patches * width)


def freeze_tower(model: PreTrainedModel) -> None:
    """Freeze the tower and its projector, in place."""
    for part in tower_parts(model).values():
        part.requires_grad_(False)


class Vision:
    """Tower and projector of a model, which stay modules of the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: Any = model.base_model
        self._decoder: Any = model.get_decoder()
        self._parts = tuple(tower_parts(model).values())

    def inputs(self, packed: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the decoder that stand for the ids of a pack: embeddings, positions, DeepStack."""
        images = packed.images
        embeddings_LD = self._decoder.get_input_embeddings()(packed.ids)
        token_index_K = packed.ids.new_zeros(0) if images is None else images.token_index_K
        is_trained = any(parameter.requires_grad for part in self._parts for parameter in part.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            output = self._base.get_image_features(
                **(self._blank(packed.ids.device) if images is None else images.tensors), return_dict=True
            )

        def used(features: Iterable[Tensor]) -> Tensor:
            """Return the (K, D) features of image tokens. Without images K is 0, but backward reaches the tower."""
            return torch.cat(tuple(features))[: len(token_index_K)].to(embeddings_LD.dtype)

        inputs = {
            "inputs_embeds": embeddings_LD.index_copy(0, token_index_K, used(output.pooler_output))[None],
            "position_ids": packed.position_ids[None],
        }
        if hasattr(self._base.config.vision_config, "spatial_merge_size"):
            # transformers reads the rows of a pack from the first part, and rotates by the others.
            positions_3L = packed.position_ids.expand(3, -1)
            if images is not None and images.position_ids_3L is not None:
                positions_3L = images.position_ids_3L
            inputs["position_ids"] = torch.cat([inputs["position_ids"], positions_3L])[:, None]
        if (deepstack := getattr(output, "deepstack_features", None)) is not None:
            is_image_L = torch.zeros_like(packed.ids, dtype=torch.bool).index_fill(0, token_index_K, True)
            inputs |= {"visual_pos_masks": is_image_L[None], "deepstack_visual_embeds": [*map(used, deepstack)]}
        return inputs

    def _blank(self, device: torch.device) -> dict[str, Tensor]:
        """Return the smallest image of the model."""
        vision = self._base.config.vision_config
        side = getattr(vision, "spatial_merge_size", None)
        if side is None:
            return {"pixel_values": torch.zeros(1, vision.num_channels, *[vision.image_size] * 2, device=device)}
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.zeros(side**2, values, device=device),
            GRID: torch.tensor([[1, side, side]], device=device),
        }
