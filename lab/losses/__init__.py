"""Examination of losses and advantages on toy data: gradients, independence of ranks and microbatches, extremes."""
