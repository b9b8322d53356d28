"""Optimizers of the policy and the critic."""
