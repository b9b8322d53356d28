"""Concurrent sampling of groups of episodes."""
