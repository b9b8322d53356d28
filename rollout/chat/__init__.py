"""Messages to token ids, and sampled text back to messages."""
