"""Policy losses: pure functions, one file each, declared as in `trainer/objective/declare.py`.

Those of `whole_step/` compare the tokens of an optimizer step before its first backward pass.

The inputs hold only tokens of the loss mask. Normalization (`trainer/objective/loss_normalization.py`), the KL term
(`trainer/objective/kl.py`) and the entropy bonus are separate. The loss of a microbatch is

    Σ_t coefficient_t · (loss_t + β kl_t − entropy_coef · entropy_t)

to which mixtures of experts may add losses about their routers (`trainer/objective/load_balance.py`).
"""

from lockstep.trainer.objective.declare import POLICY_LOSSES, import_all

import_all(__name__, __path__)

__all__ = ["POLICY_LOSSES"]
