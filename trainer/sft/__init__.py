"""Training on demonstrations: their component of the loss, and a step of a run that has nothing else."""
