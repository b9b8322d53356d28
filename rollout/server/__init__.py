"""Engines over HTTP: vLLM servers."""
