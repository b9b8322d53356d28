"""Sandboxes of an episode: settings, containers, remote services; local walls are those of `rollout/sandbox/`."""
