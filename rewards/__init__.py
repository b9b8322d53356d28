"""Rewards of rollouts: reward functions, their weighted sum, shaping, and the action on failures."""

if __name__ == "rewards":  # it would be a second copy of every module
    raise ImportError(
        "found `import rewards`, expected `import lockstep.rewards`: Lockstep's packages moved into `lockstep`"
    )
