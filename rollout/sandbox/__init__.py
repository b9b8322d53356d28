"""Sandbox for Python programs that a model wrote."""
