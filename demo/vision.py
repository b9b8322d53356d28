"""Images in demos: the config of a small Qwen2.5-VL, its image processor, and its inputs.

All images of a demo have the same number of tokens, so a conversation stays one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from lockstep.demo.architectures import SIZES
from lockstep.demo.tokenizer import IMAGE
from lockstep.rollout.environments.demo.squares import VIEW

PATCH, MERGE = 14, 2
TOKENS_PER_IMAGE = (VIEW // PATCH // MERGE) ** 2
TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [0],
    "out_hidden_size": SIZES["hidden_size"],
    "initializer_range": SIZES["initializer_range"],
}


def vision_config(vocabulary: dict[str, int], **tokens: Any) -> Qwen2_5_VLConfig:
    """Return the config of a Qwen2.5-VL with the sizes of the other demos for a tokenizer."""
    names = {"vision_start": "vision_start", "image": "image_pad", "video": "video_pad", "vision_end": "vision_end"}
    text = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    ids: dict[str, Any] = {f"{name}_token_id": vocabulary[f"<|{token}|>"] for name, token in names.items()}
    ids["eos_token_id"] = tokens["eos_token_id"]
    return Qwen2_5_VLConfig(
        text_config=text | tokens | {"rope_parameters": rope},
        vision_config=TOWER,
        tie_word_embeddings=SIZES["tie_word_embeddings"],
        dtype=SIZES["dtype"],
        **ids,
    )


@cache
def image_processor() -> Qwen2VLImageProcessor:
    """Make the processor: it brings every image to `VIEW` x `VIEW` pixels or their number."""
    return Qwen2VLImageProcessor(patch_size=PATCH, merge_size=MERGE, min_pixels=VIEW**2, max_pixels=VIEW**2)


def save_processor(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Save the processor with the tokenizer as transformers and vLLM load them."""
    processor = Qwen2_5_VLProcessor(
        image_processor=image_processor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(directory)


def expanded(text: str) -> str:
    """Return a rendering with the image token of each image as often as the image has tokens."""
    return text.replace(IMAGE, IMAGE * TOKENS_PER_IMAGE)


def image_inputs(model: PreTrainedModel, ids_BT: Tensor, mask_BT: Tensor, images: Sequence[Image]) -> dict[str, Tensor]:
    """Return the inputs of a model beside ids and mask. images: of all rows, in the order of their tokens."""
    tensors = image_processor()(images=list(images), return_tensors="pt")
    grid = tensors["image_grid_thw"]
    is_image_BT = (ids_BT == model.config.image_token_id).int()
    positions_3BT, _ = model.model.get_rope_index(ids_BT, is_image_BT, grid, attention_mask=mask_BT)
    return {"pixel_values": tensors["pixel_values"], "image_grid_thw": grid, "position_ids": positions_3BT}
