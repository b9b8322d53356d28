"""Engine protocols, and vLLM in this process."""
