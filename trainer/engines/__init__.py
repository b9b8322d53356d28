"""The engines of a run: start, share of memory, recovery."""
