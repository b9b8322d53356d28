"""Policy losses whose masks and weights need all tokens of the optimizer step: `PolicyLoss.step_values`.

A token whose mask is 0 keeps its place in the denominators, like a clipped one.
"""

from lockstep.trainer.objective.declare import import_all

import_all(__name__, __path__)
