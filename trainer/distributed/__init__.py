"""Ranks and devices: everything that knows Accelerate and DeepSpeed."""
