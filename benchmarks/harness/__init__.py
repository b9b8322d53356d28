"""What the benchmarks share: how results are shown, the workloads, and the processes that are compared."""
