"""Train a policy with rollouts from vLLM.

    python scripts/train.py                                                          the demo, one process
    accelerate launch --config_file configs/accelerate/zero3.yaml scripts/train.py   DeepSpeed ZeRO-3, several ranks
    python scripts/train.py algorithm=dr_grpo optimizer.lr=1e-4 model.path=...       override any setting
    python scripts/train.py --cfg job                                                print the resolved config
    python scripts/train.py dry_run=true                                             check and preview the run

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
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback; `launch` handles it

    from lockstep.trainer.cli import launch  # here, because engine processes import this file too

    launch(main)
