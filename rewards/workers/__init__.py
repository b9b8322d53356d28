"""Processes that run reward functions and can be killed."""
