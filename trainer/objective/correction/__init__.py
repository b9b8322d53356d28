"""Rollout correction: importance weights, rejection, and the measured mismatch of sampler and trainer."""

PREFIX = "rollout_correction/"
"""Prefix of its metrics. It stands here for readers of runs, which do not load torch."""
QUANTIZATION_K3 = PREFIX + "quantization_k3"
