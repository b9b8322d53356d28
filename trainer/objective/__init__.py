"""The mathematics of the objective: tensors in, tensors out, no settings."""
