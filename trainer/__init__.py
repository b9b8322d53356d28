"""Training: a step, its objective, its runs. Start at `Trainer.step` in step.py."""

if __name__ == "trainer":  # it would be a second copy of every module
    raise ImportError(
        "found `import trainer`, expected `import lockstep.trainer`: Lockstep's packages moved into `lockstep`"
    )
