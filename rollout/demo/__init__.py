"""Small tasks that a model made from nothing learns in a minute: data, tokenizer and warm-started model."""

from rollout.demo.make import DemoInfo, make_demo
from rollout.demo.tasks import TASKS

__all__ = ["TASKS", "DemoInfo", "make_demo"]
