"""The run directory, checkpoints, and resuming from them."""
