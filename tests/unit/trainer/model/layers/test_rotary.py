"""Rotary frequencies by the length of a row: packs against plain transformers with each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedConfig

from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.model.layers.rotary import longest_shared, original_lengths
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import SIZES

ORIGINAL = 16
LENGTHS = (30, 9, ORIGINAL, ORIGINAL + 1, 24)
HALF = [1.0, 1.0, 1.05, 1.16, 1.34, 1.85, 2.02, 2.59]
LONG = [1.08, 1.59, 3.23, 7.7, 24.5, 32.6, 50.3, 64.5]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": HALF, "long_factor": LONG}
"""Factors of Phi-3.5-mini (config.json of microsoft/Phi-3.5-mini-instruct), some of them."""


def phi3(**changes: Any) -> PreTrainedConfig:
    return Phi3Config(**SIZES | {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE} | changes)


CONFIGS = {
    "phi3": lambda: phi3(num_attention_heads=4, num_key_value_heads=4),
    "phi4_mini": lambda: phi3(
        hidden_size=88, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
    ),
    "dynamic": lambda: LlamaConfig(
        **SIZES | {"max_position_embeddings": ORIGINAL},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
}  # fmt: skip


def conversations() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 500, (length,), generator=generator).tolist() for length in LENGTHS]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()


def scored(policy: Policy, packs: list[list[list[int]]]) -> torch.Tensor:
    outputs = []
    for rows in packs:
        packed = collate([whole_row(row) for row in rows], range(len(rows)))
        outputs.append(policy(packed, with_entropy=False)[0])
    return torch.cat(outputs)


def alone(model: Any, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row])
    return torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_have_the_frequencies_of_their_own_length_in_every_division_into_microbatches(name: str) -> None:
    rows, policy = conversations(), Policy(model_of(name))
    expected, gradient = [], dict[str, torch.Tensor]()
    for row in rows:
        plain = model_of(name)  # a new one: transformers keeps the frequencies of the longest row that it has seen
        expected.append(alone(plain, row))
        expected[-1].sum().backward()
        for parameter, tensor in plain.named_parameters():
            gradient[parameter] = gradient.get(parameter, 0) + tensor.grad
    for packs in ([rows], [rows[:2], *([row] for row in rows[2:])], [[row] for row in rows]):
        found = scored(policy, packs)
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=2e-5)
        policy.zero_grad()
        found.sum().backward()
        for parameter, tensor in policy.model.named_parameters():
            own = gradient[parameter]
            assert tensor.grad is not None
            assert (tensor.grad - own).norm() <= 1e-4 * own.norm(), parameter


def test_rows_of_an_engine_with_a_long_context_all_have_the_long_factors() -> None:
    rows = conversations()
    policy = Policy(model_of("phi3"), engine_context=ORIGINAL + 1)
    plain = model_of("phi3")
    plain.config.rope_parameters["short_factor"] = LONG
    plain = AutoModelForCausalLM.from_config(plain.config, attn_implementation="eager").eval()
    plain.load_state_dict(policy.model.state_dict(), strict=False)
    expected = torch.cat([alone(plain, row) for row in rows])
    with torch.no_grad():
        torch.testing.assert_close(scored(policy, [rows]), expected, rtol=1e-4, atol=2e-5)
        ids = torch.tensor([rows[1]])  # as the canary is scored
        torch.testing.assert_close(policy.causal_lm(ids).logits, plain(ids).logits, rtol=1e-4, atol=2e-5)
    assert longest_shared(policy) == float("inf")


def test_prefixes_are_shared_up_to_the_original_length() -> None:
    assert longest_shared(Policy(model_of("phi3"))) == ORIGINAL
    assert longest_shared(Policy(model_of("phi3"), engine_context=ORIGINAL)) == ORIGINAL
    assert longest_shared(Policy(model_of("dynamic"), engine_context=64)) == ORIGINAL
    assert original_lengths(CONFIGS["dynamic"]()) == {"dynamic": ORIGINAL}
    assert not original_lengths(LlamaConfig(**SIZES))


def test_generation_with_a_cache_takes_the_length_so_far() -> None:
    ids = torch.tensor([conversations()[1]])
    expected = model_of("phi3").generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(
        Policy(model_of("phi3")).causal_lm.eval().generate(ids, max_new_tokens=5, do_sample=False), expected
    )
