"""Evaluation on held-out data, with intervals and paired comparisons."""
