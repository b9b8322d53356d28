"""Weight transfer from the trainer to the engines."""
