"""Reward models as reward functions."""
