"""The trainer imports heavy packages only when it needs them, which saves seconds of every start on every rank."""

import subprocess
import sys

HEAVY = ("vllm", "peft", "deepspeed", "wandb", "openai", "matplotlib")


def test_the_trainer_imports_no_optional_package():
    code = f"import sys, lockstep.trainer.run.run; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
