"""Reward models: comparisons, their loss, the head, its normalisation and the training of all of it."""
