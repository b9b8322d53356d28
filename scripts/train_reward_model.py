"""Train a reward model on comparisons.

    lockstep make-preference-data --task sentiment && lockstep train-reward-model
    accelerate launch --config_file configs/accelerate/zero3.yaml -m lockstep train-reward-model
    lockstep train-reward-model model.path=... data.path=pairs.jsonl optimizer.lr=1e-5
    lockstep train-reward-model --cfg job                     print the resolved config

Settings: lab/reward_model/config.py. The model is written to <run directory>/model; use it in a run with
`reward.functions=[model] reward.settings.model.path=<run directory>/model`.
"""

from lockstep.lab.reward_model.config import RewardModelConfig, check
from lockstep.trainer.cli import launch


def main(config) -> None:
    from lockstep.lab.reward_model.train import train  # after the settings are checked, because torch loads slowly

    train(config)


if __name__ == "__main__":
    launch(main, config_name="train_reward_model", config_class=RewardModelConfig, check=check, description=__doc__)
