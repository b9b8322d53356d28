"""Repairs of vLLM, installed by the plugin in every process of an engine: what it computes wrongly or refuses."""
