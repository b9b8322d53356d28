"""Advantage estimators: pure functions, one file each, declared as in `trainer/objective/declare.py`.

Estimators without a critic take `AdvantageInputs` and return one advantage per rollout, in the dtype of the rewards and
computed in float64. Statistics are per rollout, never per row or token: a rollout that was split into branches, or is
long, counts once. A group whose rewards are all equal gets exactly 0 from every estimator with a group baseline;
otherwise rounding divided by eps would act as a signal. Such groups are counted in `reward/zero_std_fraction`.
"""

from trainer.objective.declare import ADVANTAGES, import_all

import_all(__name__, __path__)

__all__ = ["ADVANTAGES"]
