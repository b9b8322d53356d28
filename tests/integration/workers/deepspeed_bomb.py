"""Worker of test_safe_load.py: DeepSpeed's loader under `weights_only_loading`, with its checkpoint and with bombs.

Arguments: ZeRO stage, directory, port. Prints one line per attempt.
"""

import os
import sys
from pathlib import Path

import deepspeed
import torch

from lockstep.trainer.distributed.distributed import skip_deepspeed_builds
from lockstep.trainer.distributed.unsharded_state import weights_only_loading


class Bomb:
    def __init__(self, fired: Path) -> None:
        self.fired = fired

    def __reduce__(self):
        return os.mkdir, (str(self.fired),)


def main() -> None:
    stage, directory = int(sys.argv[1]), Path(sys.argv[2])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[3], RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    skip_deepspeed_builds()
    deepspeed.init_distributed("gloo")
    model = torch.nn.Linear(8, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.backward(engine(torch.randn(1, 8)).sum())
    engine.step()
    engine.save_checkpoint(str(directory), tag="state")
    with weights_only_loading():
        print("RESULT loaded", engine.load_checkpoint(str(directory), tag="state")[0] is not None)
    for file in sorted(directory.rglob("*.pt")):
        good = file.read_bytes()
        torch.save({"module": Bomb(directory / "fired")}, file)
        try:
            with weights_only_loading():
                engine.load_checkpoint(str(directory), tag="state")
            print("RESULT accepted", file.name)
        except Exception as error:
            print("RESULT refused", type(error).__name__)
        file.write_bytes(good)


if __name__ == "__main__":
    main()
