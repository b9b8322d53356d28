"""Environments in an interpreter of their own: packages that need other versions, or share one state per process."""
