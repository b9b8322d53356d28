"""The rollouts of a step, sampled and scored."""
