"""Rewards of rollouts: reward functions, their weighted sum, shaping, and the action on failures."""
