"""Rollout correction: importance weights, rejection, and the measured mismatch of sampler and trainer."""
