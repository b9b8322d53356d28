"""Which weights of an engine are not those that were sent: asked only when the canary already failed.

vLLM gives a SHA-256 of every parameter as it holds it. Some layers of the trainer are one parameter there, their rows
one after the other; the hash of those is taken over the parts in that order.

Covered: one worker per engine, unquantised. Not covered, and left out of the comparison: parameters that a CPU engine
has packed (their hash is that of nothing), padded embeddings, layers that vLLM fuses otherwise, and shards of several
workers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

NOTHING = hashlib.sha256().hexdigest()
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
VOCABULARY_PADDING = 64
"""vLLM pads embedding and head to a multiple of this many rows."""
SHOWN_GROUPS = 5


def worst_groups(weights: Iterable[tuple[str, torch.Tensor]], engine_checksums: Mapping[str, str]) -> str:
    """A sentence about where the engine's weights differ from these, which are named and cast as they are sent."""
    held = {name.rpartition(":")[2]: digest for name, digest in engine_checksums.items()}
    compared: Counter[str] = Counter()
    different: Counter[str] = Counter()
    for name, digest in _digests(weights, held):
        if held[name] != NOTHING:
            compared[_group(name)] += 1
            different[_group(name)] += digest != held[name]
    left_out = len(held) - compared.total()
    scope = f"{compared.total()} of the engine's {len(held)} parameters can be compared"
    if left_out:
        scope += f", {left_out} are packed, padded or fused"
    wrong = [(group, count) for group, count in different.most_common() if count]
    if not wrong:
        return f"{scope}, and they are what was sent: look for what the engine does with its weights"
    named = ", ".join(f"{group} ({count} of {compared[group]})" for group, count in wrong[:SHOWN_GROUPS])
    more = f" and {len(wrong) - SHOWN_GROUPS} more groups" if len(wrong) > SHOWN_GROUPS else ""
    return f"not what was sent: {named}{more}; {scope}"


def _digests(weights: Iterable[tuple[str, torch.Tensor]], held: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """SHA-256 of each of the engine's parameters that these weights make up, as they come by."""
    open_hashes: dict[str, tuple[int, hashlib._Hash]] = {}
    for name, tensor in weights:
        target, part, parts = _target(name, held)
        if target not in held or _is_padded(name, tensor):
            continue
        done, digest = open_hashes.pop(target, (0, hashlib.sha256()))
        if done != part:
            continue  # in another order than the engine's: nothing to compare with
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if part + 1 == parts:
            yield target, digest.hexdigest()
        else:
            open_hashes[target] = (part + 1, digest)


def _target(name: str, held: Mapping[str, str]) -> tuple[str, int, int]:
    """(parameter of the engine, index of this part in it, number of parts)."""
    if name not in held:
        for own, (fused, part) in FUSED.items():
            if f".{own}." in name:
                return name.replace(f".{own}.", f".{fused}."), part, PARTS[fused]
    return name, 0, 1


def _is_padded(name: str, tensor: torch.Tensor) -> bool:
    return ("embed" in name or "lm_head" in name) and len(tensor) % VOCABULARY_PADDING != 0


def _group(name: str) -> str:
    """`model.layers.3` for all of layer 3, the module's name elsewhere."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[: number + 1] if number is not None else words[:-1])
