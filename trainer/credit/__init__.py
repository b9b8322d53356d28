"""Training targets per token: advantages, returns, old logprobs, correction weights."""
