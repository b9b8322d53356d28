"""Check that the engines of a teacher compute the model at `teacher.path`, by a canary that transformers scores, too.

An engine that serves another model with the same tokenizer would teach without an error. The model is loaded once, in
float32 on the CPU of rank 0, and released.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.rollout.engine.protocol import PooledEngine
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import LANGUAGE_MODEL
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import CANARY_THRESHOLD, canary_ids
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig

MEMORY_SHARE = 0.25
"""Largest share of the machine's memory that float32 weights may take for `teacher.check=null` to check."""
FLOAT32_BYTES = 4


def is_checked(settings: TeacherConfig, *, trust_remote_code: bool) -> bool:
    """Return `teacher.check`, with null resolved by the size of the model."""
    if settings.check is not None:
        return settings.check
    assert settings.path is not None
    shapes = AutoConfig.from_pretrained(settings.path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes, trust_remote_code=trust_remote_code)
    size = FLOAT32_BYTES * sum(parameter.numel() for parameter in model.parameters())
    return size <= MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def canary_diff(
    settings: TeacherConfig, members: Sequence[PooledEngine], loop: BackgroundLoop, *, trust_remote_code: bool
) -> float:
    """Return the largest |Δ log π| between transformers and the engines, over the tokens of the canary.

    Raises `EvidenceError` with the name of an engine that differs by more than rounding explains.
    """
    assert settings.path is not None
    ids = canary_ids(min(member.vocab_size for member in members))
    expected = _by_transformers(settings.path, ids, trust_remote_code=trust_remote_code)
    limit = CANARY_THRESHOLD[getattr(torch, settings.dtype)]
    largest = 0.0
    for member in members:
        logprobs = torch.tensor(loop.run(member.score(ids)), dtype=torch.float64)
        difference = float((logprobs - expected).abs().max())
        if not difference <= limit:
            raise EvidenceError(
                f"{member.name}: its log π of a canary differ by {difference:.3g} from those of transformers with "
                f"teacher.path={settings.path}, expected at most {limit:g}: it serves another model, or computes "
                "it in another way. Serve the model at teacher.path, or set teacher.check=false if it is quantized on "
                "purpose"
            )
        largest = max(largest, difference)
    return largest


@torch.no_grad()
def _by_transformers(path: str, ids: Sequence[int], *, trust_remote_code: bool) -> torch.Tensor:
    """Return log π(ids[i] | ids[:i]) for i >= 1, in float64."""
    model = load_model(
        LANGUAGE_MODEL,
        path,
        setting="teacher.path",
        dtype=torch.float32,
        trust_remote_code=trust_remote_code,
    ).eval()
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    del model
    gc.collect()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
