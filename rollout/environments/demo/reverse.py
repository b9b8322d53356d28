"""Environment `reverse`: a task of the demo with one turn, a list of numbers to be written backwards."""

from __future__ import annotations

from dataclasses import replace

from lockstep.rollout.environments.single_turn import SingleTurn


class ReverseEnvironment(SingleTurn):
    """`SingleTurn` for the demo's rows."""

    declaration = replace(SingleTurn.declaration, demo_task="reverse")
