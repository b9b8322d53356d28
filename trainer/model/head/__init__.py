"""The head of a language model, fused with log-probability and entropy."""
