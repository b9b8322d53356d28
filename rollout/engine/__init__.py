"""The engine: the protocol of a sampler, and vLLM in this process."""
