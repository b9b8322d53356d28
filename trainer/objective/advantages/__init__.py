"""Advantage estimators: pure functions, one file each, declared as in `trainer/objective/declare.py`.

Estimators without a critic take `AdvantageInputs` and return one advantage per rollout, computed in float64, in the
dtype of the rewards. Statistics are per rollout: a rollout counts once, whatever its length and branches. A group of
equal rewards gets exactly 0 from every estimator with a group baseline; otherwise rounding divided by eps would act as
a signal. `reward/zero_std_fraction` is the share of such groups.
"""

from lockstep.trainer.objective.declare import ADVANTAGES, import_all

import_all(__name__, __path__)

__all__ = ["ADVANTAGES"]
