"""Optimizer steps on the rows of a step."""
