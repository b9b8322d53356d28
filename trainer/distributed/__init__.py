"""Ranks and devices: everything that uses Accelerate and DeepSpeed."""
