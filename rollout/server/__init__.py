"""Engines over HTTP: vLLM servers and the engines of other ranks."""
