"""Comparison of an engine's weights with the sent ones by checksum, to locate the fault after a failed canary.

vLLM returns a SHA-256 of every parameter as it holds it. A fused parameter is the concatenated rows of several layers
of the trainer, so its hash is taken over them in that order.

Covered: one unquantized worker per engine. Not compared: parameters packed by a CPU engine (their hash is that of an
empty tensor), padded embeddings, layers that vLLM fuses otherwise, and shards of several workers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

EMPTY_HASH = hashlib.sha256().hexdigest()
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The trainer's layers in each of vLLM's, in order."""
VOCABULARY_PADDING = 64
"""vLLM pads the rows of embedding and head to a multiple of this."""
SHOWN_GROUPS = 5


def describe_differences(weights: Iterable[tuple[str, torch.Tensor]], engine_checksums: Mapping[str, str]) -> str:
    """Return a sentence on where the engine's weights differ from these, which are named and cast as sent."""
    engine_digests = {name.rpartition(":")[2]: digest for name, digest in engine_checksums.items()}
    counts: Counter[str] = Counter()
    different: Counter[str] = Counter()
    for name, digest in _digests(weights, engine_digests):
        if engine_digests[name] != EMPTY_HASH:
            counts[_group(name)] += 1
            different[_group(name)] += digest != engine_digests[name]
    left_out = len(engine_digests) - counts.total()
    scope = f"{counts.total()} of the engine's {len(engine_digests)} parameters can be compared"
    if left_out:
        scope += f", {left_out} are packed, padded or fused"
    wrong = [(group, count) for group, count in different.most_common() if count]
    if not wrong:
        return f"{scope}, and they equal the sent ones: the fault is in the engine's computation"
    summary = ", ".join(f"{group} ({count} of {counts[group]})" for group, count in wrong[:SHOWN_GROUPS])
    more = f" and {len(wrong) - SHOWN_GROUPS} more groups" if len(wrong) > SHOWN_GROUPS else ""
    return f"different from the sent weights: {summary}{more}; {scope}"


def _digests(weights: Iterable[tuple[str, torch.Tensor]], held: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yield name and SHA-256 of each engine parameter that these weights make up, in order of arrival."""
    open_hashes: dict[str, tuple[int, hashlib._Hash]] = {}
    for name, tensor in weights:
        target, part, parts = _target(name, held)
        is_padded = ("embed" in name or "lm_head" in name) and len(tensor) % VOCABULARY_PADDING != 0
        if target not in held or is_padded:
            continue
        next_part, digest = open_hashes.pop(target, (0, hashlib.sha256()))
        if next_part != part:
            continue  # not in the engine's order, so the hash cannot be compared
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if part + 1 == parts:
            yield target, digest.hexdigest()
        else:
            open_hashes[target] = (part + 1, digest)


def _target(name: str, held: Mapping[str, str]) -> tuple[str, int, int]:
    """Return (parameter of the engine, index of this part in it, number of parts)."""
    if name not in held:
        for fused_name, parts in FUSED.items():
            for index, part in enumerate(parts):
                if f".{part}." in name:
                    return name.replace(f".{part}.", f".{fused_name}."), index, len(parts)
    return name, 0, 1


def _group(name: str) -> str:
    """Return `model.layers.3` for a parameter of layer 3, and the module's name elsewhere."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[: number + 1] if number is not None else words[:-1])
