"""Observation of a run: metrics, console, W&B, pages."""
