"""The rows of a step: exchange between ranks, packing, assignment to ranks."""
