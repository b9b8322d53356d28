"""Environments of other packages that the demo model can learn, for the runs in docs/environments.md."""
