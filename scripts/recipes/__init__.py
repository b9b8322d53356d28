"""Recipes: published results as experiments, with their plan, their judgment and their page in docs/."""
