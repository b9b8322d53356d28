"""Log-probabilities of vLLM's sampler on a CPU, with an error that does not grow with the vocabulary.

On a CPU, torch's `log_softmax` adds the exponentials of a row one after the other in each SIMD lane
(`_vec_log_softmax_lastdim` in aten/src/ATen/native/cpu/SoftMaxKernel.cpp of pytorch/pytorch): with AVX-512 and 49,152
tokens 3,072 additions in a row. Their float32 rounding has a common sign for a whole row, and mostly makes all of its
logprobs too high. `torch.sum` adds pairwise, as in the trainer's head, which keeps the error below 1e-6.
"""

from __future__ import annotations

import functools

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return log π in float32 of logits (N, V); -inf where a logit is -inf."""
    logits = logits.float()
    shifted_logits = logits - logits.amax(-1, keepdim=True)
    return shifted_logits.sub_(shifted_logits.exp().sum(-1, keepdim=True).log_())


def install() -> None:
    """Replace `log_softmax` in the sampler of this process's vLLM, for engines created later; may be called repeatedly.

    vLLM 0.33 computes logprobs in `Sampler.compute_logprobs` (greedy tokens, prompts) and inside
    `TopKTopPSampler.forward_cpu`, which therefore runs as if logits were asked for.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    if Sampler.compute_logprobs is log_softmax:
        return
    sample = TopKTopPSampler.forward_cpu

    @functools.wraps(sample)
    def forward_cpu(
        self: TopKTopPSampler,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.logprobs_mode != "processed_logprobs":
            return sample(self, logits, generators, k, p)
        self.logprobs_mode = "processed_logits"
        try:
            tokens, processed_logits = sample(self, logits, generators, k, p)
        finally:
            self.logprobs_mode = "processed_logprobs"
        return tokens, None if processed_logits is None else log_softmax(processed_logits)

    TopKTopPSampler.forward_cpu = forward_cpu
    Sampler.compute_logprobs = staticmethod(log_softmax)
