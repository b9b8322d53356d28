"""Checksums after a failed canary: differing groups are named, and incomparable parameters are left out."""

from __future__ import annotations

import hashlib

import torch

from lockstep.rollout.weights.checksums import EMPTY_HASH, describe_differences


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(torch.cat(tensors).contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def layer(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "input_norm")
    return {f"model.layers.{index}.{name}.weight": torch.randn(4, 8, generator=generator) for name in names}


WEIGHTS = {"model.embed_tokens.weight": torch.randn(64, 8), **layer(0), **layer(1)}


def held(weights: dict[str, torch.Tensor], *, prefix: str = "dp0:pp0:pcp0:tp0:") -> dict[str, str]:
    """Return the checksums of an engine with these weights, fused as in vLLM."""
    found = {f"{prefix}model.embed_tokens.weight": digest(weights["model.embed_tokens.weight"])}
    for index in (0, 1):
        start = f"model.layers.{index}."
        qkv = [weights[f"{start}self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [weights[f"{start}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found[f"{prefix}{start}self_attn.qkv_proj.weight"] = digest(*qkv)
        found[f"{prefix}{start}mlp.gate_up_proj.weight"] = digest(*gate_up)
        found[f"{prefix}{start}input_norm.weight"] = digest(weights[f"{start}input_norm.weight"])
    return found


def test_equal_weights_point_to_the_engines_computation():
    said = describe_differences(WEIGHTS.items(), held(WEIGHTS))
    assert said.startswith("7 of the engine's 7 parameters can be compared, and they equal the sent ones")


def test_the_worst_group_comes_first():
    other = dict(WEIGHTS)
    other["model.embed_tokens.weight"] = WEIGHTS["model.embed_tokens.weight"] + 1
    for name in ("self_attn.k_proj", "mlp.up_proj"):  # one part of each fused parameter
        other[f"model.layers.1.{name}.weight"] = torch.zeros(4, 8)
    said = describe_differences(WEIGHTS.items(), held(other))
    assert said.startswith("different from the sent weights: model.layers.1 (2 of 3), model.embed_tokens (1 of 1);")


def test_packed_padded_and_unknown_parameters_are_left_out():
    known = held(WEIGHTS)
    known = {name: EMPTY_HASH if "proj" in name else digest for name, digest in known.items()}
    odd = {**WEIGHTS, "model.embed_tokens.weight": torch.randn(63, 8), "unknown.weight": torch.zeros(2)}
    said = describe_differences(odd.items(), known)
    assert said.startswith(
        "2 of the engine's 7 parameters can be compared, 5 are packed, padded or fused, and they equal"
    )


def test_parts_in_another_order_are_left_out():
    backwards = dict(reversed(WEIGHTS.items()))
    said = describe_differences(backwards.items(), held(WEIGHTS))
    assert "3 of the engine's 7" in said
    assert "and they equal the sent ones" in said
