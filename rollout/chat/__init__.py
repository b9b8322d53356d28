"""Conversion of messages to token ids, and of sampled text to messages."""
