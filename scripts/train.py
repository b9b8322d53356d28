"""Train a policy with rollouts from vLLM.

    lockstep train model.path=... data.path=my.jsonl reward=numeric        a task of yours, one process
    lockstep train experiment=demo                                         the demo
    lockstep train experiment=demo algorithm=dr_grpo optimizer.lr=1e-4     override any setting
    lockstep train experiment=demo dry_run=true                            check and preview the run
    lockstep train experiment=demo --cfg job                               print the resolved config
    accelerate launch --config_file configs/accelerate/zero3.yaml -m lockstep train experiment=demo
                                                                                    DeepSpeed ZeRO-3, several ranks

Settings: trainer/config/schema.py. One training step: `Trainer.step` in trainer/step.py.
"""


def main(config) -> None:
    # after the settings are checked, because torch, transformers and vLLM load slowly
    if config.dry_run:
        from lockstep.trainer.tools.dry_run import dry_run as run
    else:
        from lockstep.trainer.run.run import run

    run(config)


if __name__ == "__main__":
    import os
    import signal

    def end(*_: object) -> None:
        """End at Ctrl-C while the libraries load, without their traceback; then `launch` handles it."""
        os.write(2, b"lockstep: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, end)

    from lockstep.trainer.cli import launch  # here, because engine processes import this file too

    launch(
        main,
        description=__doc__,
        frequent=("model.path", "data.path", "reward.functions", "rollout.max_tokens_per_turn", "updates"),
    )
