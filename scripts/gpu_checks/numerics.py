"""Checks of the trainer's attention and head against plain computations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from lockstep.demo.architectures import ARCHITECTURES
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall, FinishReason, TrainingRow
from lockstep.scripts.gpu_checks.measured import MEAN, Measured, above, below, equal, within_floor
from lockstep.scripts.gpu_checks.subject import Subject
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.model.head.fused_head import fused_candidates, fused_logprobs
from lockstep.trainer.model.head.logit_tiles import LogitTiles, LogitTransform
from lockstep.trainer.model.layers import varlen_attention
from lockstep.trainer.model.layers.compiled import compile_layers, num_graphs
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks import isolation

HALF = "weights in half"
"""Weights of the case without autocast, as under ZeRO."""


def attention(subject: Subject) -> list[Measured]:
    measurements = []
    rows, narrow = _rows(subject), subject.pick(64, 16)
    layers = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}
    cases = {
        "full": {},
        "a short window": {**layers, "sliding_window": subject.pick(256, 24)},
        "a window longer than the rows": {**layers, "sliding_window": 2 * max(map(len, rows))},
        "narrow heads": {"head_dim": narrow},
        "wide heads": {"head_dim": 4 * narrow},
        HALF: {},
    }
    for name, changes in cases.items():
        policy = subject.new_policy(**changes)
        true = _scored(policy, lambda policy=policy: torch.cat([_plain(policy, row) for row in rows]))
        autocast = subject.autocast
        if name == HALF:
            policy = Policy(policy.model.to(getattr(torch, subject.dtype)), compute_dtype=subject.dtype)
            autocast = contextlib.nullcontext
        with autocast():
            alone = _scored(policy, lambda policy=policy: torch.cat([_plain(policy, row) for row in rows]))
        for share in (False, True):
            packed = collate(rows, range(len(rows)), share_prefixes=share, device=subject.device)
            with (
                autocast(),
                contextlib.nullcontext() if subject.rehearses else _without_math(),
                _counted_kernels() as calls,
            ):
                logp, gradient = _scored(
                    policy, lambda policy=policy, packed=packed: policy(packed, with_entropy=False)[0]
                )
            which = f"{name}, {'shared prefixes' if share else 'whole rows'}"
            angle, floor = (1 - _cosine(gradients, true[1]) for gradients in (gradient, alone[1]))
            measurements += [
                equal(f"{which}: prefixes are shared", packed.prefixes is not None, share),
                equal(f"{which}: calls of the kernel, one per layer", len(calls), subject.pick(4, 0)),
                *within_floor(which, (logp - true[0]).abs(), (alone[0] - true[0]).abs(), least=1e-5),
                below(f"{which}: 1 - cosine of gradients", angle, max(2 * floor, 1e-5)),
            ]
    return measurements


def compiled(subject: Subject) -> list[Measured]:
    rows, policy = _rows(subject), subject.new_policy()
    packs = [
        collate(rows, range(number), share_prefixes=False, device=subject.device) for number in (len(rows), 2, 3, 4)
    ]

    def scored(packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return _scored(policy, lambda: policy(packed, with_entropy=False)[0])

    true = scored(packs[0])
    with subject.autocast():
        eager, eager_s = scored(packs[0]), _seconds(subject, lambda: scored(packs[0]))
        compile_layers(policy)
        before = num_graphs()
        fused, first = scored(packs[0]), num_graphs()
        for packed in packs[1:]:
            scored(packed)
        others = num_graphs()
        compiled_s = _seconds(subject, lambda: scored(packs[0]))
    angle, floor = (1 - _cosine(gradient, true[1]) for gradient in (fused[1], eager[1]))
    measurements = [
        *within_floor("compiled layers", (fused[0] - true[0]).abs(), (eager[0] - true[0]).abs(), least=1e-5),
        below("1 - cosine of gradients", angle, max(2 * floor, 1e-5)),
        above("graphs of the first pack", first - before, 0),
        equal("graphs of packs of other lengths", others - first, 0),
    ]
    if not subject.rehearses:
        measurements.append(below("time of plain layers", compiled_s / eager_s, 1.0))
    return measurements


def _seconds(subject: Subject, compute: Callable[[], object]) -> float:
    """Return the shortest of five times."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        compute()
        if not subject.rehearses:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


@contextlib.contextmanager
def _counted_kernels() -> Iterator[list[torch.dtype]]:
    """Collect the dtype of every call of the kernel for rows of any length."""
    calls, kernel = [], varlen_attention.varlen_attn

    def counted(query: torch.Tensor, *others: Any, **settings: Any) -> Any:
        calls.append(query.dtype)
        return kernel(query, *others, **settings)

    with patch.object(varlen_attention, "varlen_attn", counted):
        yield calls


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0).item()


def recurrent(subject: Subject) -> list[Measured]:
    measurements = []
    for name in ("falcon_h1", "qwen3_next"):
        torch.manual_seed(0)
        config = ARCHITECTURES[name](vocab_size=512, eos_token_id=0, pad_token_id=0)
        policy = Policy(AutoModelForCausalLM.from_config(config).to(subject.device), compute_dtype=subject.dtype)

        def score(packed: PackedBatch, policy: Policy = policy) -> torch.Tensor:
            with subject.autocast():
                return policy(packed, with_entropy=False)[0][None]

        leak = isolation.leak(score, vocab_size=512, length=subject.pick(600, 100), device=subject.device)
        measurements.append(below(f"{name}: mean |Δ log π| by other rows", leak, subject.pick(0.03, 1e-5)))
    return measurements


def _without_math() -> Any:
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])


def _rows(subject: Subject) -> list[TrainingRow]:
    """Make rows of unequal lengths, three behind one prompt and one behind a longer part of it."""
    unit = subject.pick(128, 12)
    prompt, *others = subject.prompts(6, 4 * unit)
    parts = [(prompt, unit), (prompt, 2 * unit), (prompt, 3), ((*prompt, *others[0]), unit), (others[1], 2 * unit)]
    rows: list[TrainingRow] = []
    for index, (before, length) in enumerate(parts):
        sampled_ids = others[index][:length] if index else others[4][:length]
        call = EngineCall(
            prompt_ids=before,
            sampled_ids=sampled_ids,
            sampled_logprobs=(-1.0,) * length,
            finish_reason=FinishReason.STOP,
        )
        rows += rows_from_calls([call], rollout_id=index)
    return rows


def _plain(policy: Policy, row: TrainingRow) -> torch.Tensor:
    """Return the logprobs of the trained tokens from transformers' own forward pass over the row."""
    device = next(policy.parameters()).device
    ids = torch.from_numpy(row.ids).to(device)
    logits = policy.causal_lm(ids[None], use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(row.loss_mask[1:]).to(device)]


def _scored(policy: Policy, forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and the gradient of their mean."""
    policy.zero_grad()
    logp = forward()
    logp.mean().backward()
    gradients = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
    return logp.detach().float(), torch.cat(gradients).clone()


def head(subject: Subject) -> list[Measured]:
    measurements = []
    for dtype in (torch.float32, torch.bfloat16):
        full, fused = (_head_cost(subject, dtype, compute) for compute in (_full_head, _fused_head))
        difference = (full["logp"] - fused["logp"]).abs()
        gradients = [torch.nn.functional.cosine_similarity(full[name], fused[name], dim=0) for name in ("dh", "dw")]
        name = str(dtype).removeprefix("torch.")
        is_exact = dtype == torch.float32
        measurements += [
            below(f"{name}: largest |Δ log π|", difference.max().item(), 1e-5)
            if is_exact
            else below(f"{name}: mean |Δ log π|", difference.mean().item(), 2e-3),
            above(f"{name}: cosine of gradients, least", min(gradients).item(), 0.99999 if is_exact else 0.999),
        ]
        if not subject.rehearses:
            measurements += [
                below(f"{name}: memory of the full head", fused["bytes"] / full["bytes"], 0.35),
                below(f"{name}: time of the full head", fused["seconds"] / full["seconds"], 1.3),
            ]
    return measurements


def head_kernels(subject: Subject) -> list[Measured]:
    """Hold the kernels against float64 and against torch's operations, which round the same products."""
    measurements = []
    tokens, vocabulary, hidden = subject.pick((256, 20_000, 1024), (64, 5000, 64))
    for dtype in (torch.float32, torch.bfloat16):
        for case, transform in (("plain", LogitTransform()), ("softcap", LogitTransform(temperature=0.7, softcap=5.0))):
            torch.manual_seed(0)
            states = torch.randn(tokens, hidden).to(subject.device, dtype)
            weight = (torch.randn(vocabulary, hidden) * 2 * hidden**-0.5).to(subject.device, dtype)
            bias = torch.randn(vocabulary).to(subject.device, dtype)
            targets = torch.randint(vocabulary, (tokens,)).to(subject.device)
            candidates = targets[:, None] + torch.arange(20, device=subject.device) * 7
            inputs = (states, weight, targets, candidates % vocabulary, bias, transform)
            exact = _head_values(torch.float64, *inputs)
            with patch.object(LogitTiles, "uses_kernels", False):
                chain = _head_values(dtype, *inputs)
            kernels = _head_values(dtype, *inputs)
            for index, name in enumerate(("log π", "entropy", "candidates", "dh", "dW", "db")):
                error, floor = ((one[index] - exact[index]).norm() for one in (kernels, chain))
                least = 1e-6 * exact[index].norm().item()
                bound = max(MEAN * floor.item(), least)
                which = f"{str(dtype).removeprefix('torch.')}, {case}: error of {name}"
                measurements.append(below(which, error.item(), bound))
    if not subject.rehearses:
        for dtype in (torch.float32, torch.bfloat16):
            with patch.object(LogitTiles, "uses_kernels", False):
                chain = _head_cost(subject, dtype, _fused_head)
            kernels, name = _head_cost(subject, dtype, _fused_head), str(dtype).removeprefix("torch.")
            measurements += [
                below(f"{name}: time of torch's operations", kernels["seconds"] / chain["seconds"], 1.0),
                below(f"{name}: memory of torch's operations", kernels["bytes"] / chain["bytes"], 1.05),
            ]
    return measurements


def _head_values(
    dtype: torch.dtype,
    states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    candidates: torch.Tensor,
    bias: torch.Tensor,
    transform: LogitTransform,
) -> list[torch.Tensor]:
    """Return logprobs, entropy, candidates, and gradients of their weighted sum, in float64."""
    leaves = [one.detach().to(dtype).requires_grad_() for one in (states, weight, bias)]
    values = fused_candidates(leaves[0], leaves[1], targets, candidates, bias_V=leaves[2], transform=transform)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(one.shape, generator=generator).to(one) for one in values]
    gradients = torch.autograd.grad(values, leaves, upstream)
    return [one.detach().double() for one in (*values, *gradients)]


def _head_cost(subject: Subject, dtype: torch.dtype, compute: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Return logprobs, gradients, seconds and extra bytes of forward and backward."""
    tokens, vocabulary, hidden = subject.pick((8192, 151_936, 1024), (256, 8192, 64))
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, hidden) * hidden**-0.5).to(subject.device, dtype).requires_grad_()
    states = torch.randn(tokens, hidden).to(subject.device, dtype).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,)).to(subject.device)
    seconds, peak = 0.0, 0
    logp = torch.empty(0)
    for _ in range(2):  # the first time, kernels are loaded
        weight.grad = states.grad = None
        if not subject.rehearses:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            peak = torch.cuda.memory_allocated()
        start = time.perf_counter()
        logp = compute(states, weight, targets)
        logp.mean().backward()
        if not subject.rehearses:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - peak
        seconds = time.perf_counter() - start
    assert states.grad is not None
    assert weight.grad is not None
    gradients = {"dh": states.grad.float().flatten(), "dw": weight.grad.float().flatten()}
    return {"logp": logp.detach(), "seconds": seconds, "bytes": peak, **gradients}


def _full_head(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute logprobs from logits accumulated in float32."""
    logits = states.float() @ weight.float().T
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def _fused_head(states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return fused_logprobs(states, weight, targets, with_entropy=False)[0]
