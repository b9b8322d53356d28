"""Policy losses: pure functions `LossInputs` → `LossOutputs`, one file each, declared as in
`trainer/objective/declare.py`.

A loss is not concerned with rejection and masks (tokens that are not trained are not in its inputs), normalization
(`trainer/objective/loss_normalization.py`), the KL term (`trainer/objective/kl.py`) or the entropy bonus. The loss of a
microbatch is

    Σ_t coefficient_t · (loss_t + β kl_t − entropy_coef · entropy_t)
"""

from trainer.objective.declare import POLICY_LOSSES, import_all

import_all(__name__, __path__)

__all__ = ["POLICY_LOSSES"]
