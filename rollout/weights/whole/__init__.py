"""Distributions over the whole vocabulary of engine and trainer: heard in vLLM, compared, and bounded after a sync."""
