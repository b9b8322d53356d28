"""Repairs of vLLM, installed by the plugin in every process of an engine: what 0.32 computes wrongly or refuses."""
