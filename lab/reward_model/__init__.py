"""Reward models: comparisons, loss, normalization, training and saving."""
