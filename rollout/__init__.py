"""Sampling: messages to tokens, environments, the engine, weight sync. Start with records.py."""

if __name__ == "rollout":  # it would be a second copy of every module
    raise ImportError(
        "found `import rollout`, expected `import lockstep.rollout`: Lockstep's packages moved into `lockstep`"
    )
