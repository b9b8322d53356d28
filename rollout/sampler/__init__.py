"""Groups of episodes, run concurrently."""
