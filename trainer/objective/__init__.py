"""Mathematics of the objective: tensors in, tensors out, no `Config`."""
