"""Log-probabilities of a step under the policy and the reference."""
