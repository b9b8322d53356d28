"""Check that the engines of a teacher compute the model at `teacher.path`, by a canary that transformers scores, too.

An engine that serves another model with the same tokenizer would teach without an error. The model is loaded once, in
float32 on the CPU of rank 0, and released.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedModel

from lockstep.rollout.engine.protocol import PooledEngine
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import language_model
from lockstep.rollout.records import PromptIds
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import CANARY_THRESHOLD, canary_ids
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

MEMORY_SHARE = 0.25
"""Largest share of the machine's memory that float32 weights may take for `teacher.check=null` to check."""
FLOAT32_BYTES = 4


def is_checked(settings: TeacherConfig, *, trust_remote_code: bool, sees_images: bool = False) -> bool:
    """Return `teacher.check`, with null resolved by the size of the model, with its tower if it sees images."""
    if settings.check is not None:
        return settings.check
    assert settings.path is not None
    shapes = AutoConfig.from_pretrained(settings.path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        auto = language_model(sees_images=sees_images).auto
        model = auto.from_config(shapes, trust_remote_code=trust_remote_code)
    size = FLOAT32_BYTES * sum(parameter.numel() for parameter in model.parameters())
    return size <= MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def canary_diff(
    settings: TeacherConfig,
    members: Sequence[PooledEngine],
    loop: BackgroundLoop,
    *,
    trust_remote_code: bool,
    images: ImageProcessing | None = None,
) -> float:
    """Return the largest |Δ log π| between transformers and the engines, over the tokens of the canary.

    images: of the run; with them the canary has a row with an image, too. Raises `EvidenceError` with the name of an
    engine that differs by more than rounding explains.
    """
    assert settings.path is not None
    vocab_size = min(member.vocab_size for member in members)
    rows = [PromptIds(canary_ids(vocab_size))]
    if images is not None:
        from lockstep.rollout.weights.canary_prompt import canary_prompt

        rows = [PromptIds(0 if token in images.reserved_ids else token for token in rows[0])]
        rows.append(canary_prompt(images, vocab_size))
    expected = _by_transformers(settings.path, rows, images, trust_remote_code=trust_remote_code)
    limit = CANARY_THRESHOLD[getattr(torch, settings.dtype)]
    largest = 0.0
    for member, index in product(members, range(len(rows))):
        row = rows[index]
        logprobs = torch.tensor(loop.run(member.score(row, row.images)), dtype=torch.float64)
        is_text = torch.tensor([images is None or token != images.image_token_id for token in row[1:]])
        difference = float((logprobs - expected[index])[is_text].abs().max())
        if not difference <= limit:
            raise EvidenceError(
                f"{member.name}: its log π of a canary{' with an image' if row.images else ''} differ by "
                f"{difference:.3g} from those of transformers with "
                f"teacher.path={settings.path}, expected at most {limit:g}: it serves another model, or computes "
                "it in another way. Serve the model at teacher.path, or set teacher.check=false if it is quantized on "
                "purpose"
            )
        largest = max(largest, difference)
    return largest


def _by_transformers(
    path: str, rows: Sequence[PromptIds], images: ImageProcessing | None, *, trust_remote_code: bool
) -> list[torch.Tensor]:
    """Return log π(ids[i] | ids[:i]) for i >= 1 of each row, in float64."""
    model = load_model(
        language_model(sees_images=images is not None),
        path,
        setting="teacher.path",
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
    ).eval()
    scores = [_scores(model, row, images) for row in rows]
    del model
    gc.collect()
    return scores


@torch.no_grad()
def _scores(model: PreTrainedModel, row: PromptIds, images: ImageProcessing | None) -> torch.Tensor:
    ids = torch.tensor([row])
    inputs: dict[str, Any] = {}
    if images is not None and row.images:
        prepared = [images.prepared(image.digest).tensors for image in row.images]
        inputs = {name: torch.cat([tensors[name] for tensors in prepared]) for name in images.family.tensors}
        inputs[images.family.type_ids] = (ids == images.image_token_id).long()
    logits = model(ids, use_cache=False, **inputs).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
