"""Environments of the demo."""
