"""Worker of test_failing_runs.py under `accelerate launch`: a run whose third batch of two minibatches fails.

failing_rank.py PLACE OVERRIDES...
PLACE: `alone`, on rank 1 only; `halfway`, on both ranks after the first minibatch.
"""

import sys
from datetime import timedelta
from typing import Any

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.cli import launch
from lockstep.trainer.config.schema import Config


def main(config: Config) -> None:
    from lockstep.trainer.distributed import distributed
    from lockstep.trainer.run.run import run
    from lockstep.trainer.update.updater import Updater

    distributed.MEETING_TIMEOUT = timedelta(seconds=3)
    update, make = Updater.update, Updater.optimizer_step

    def failing_update(self: Any, *arguments: Any) -> Any:
        if PLACE == "alone" and self.num_updates == 4 and self._distributed.rank == 1:
            raise TrainingError("injected")
        return update(self, *arguments)

    def failing_step(self: Any, *arguments: Any, **options: Any) -> Any:
        if PLACE == "halfway" and self.num_updates == 5:
            raise TrainingError("injected")
        return make(self, *arguments, **options)

    Updater.update, Updater.optimizer_step = failing_update, failing_step  # type: ignore[method-assign]
    run(config)


if __name__ == "__main__":
    PLACE = sys.argv.pop(1)
    launch(main)
