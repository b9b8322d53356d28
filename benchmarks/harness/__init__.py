"""Shared parts of the benchmarks: results, workloads, and the compared processes."""
