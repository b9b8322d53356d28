"""Programs written by a model, run behind walls."""
