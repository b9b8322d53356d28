"""What each token is trained with: advantages, returns, old log-probabilities, weights."""
