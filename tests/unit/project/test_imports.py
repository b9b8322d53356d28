"""What the trainer imports before it needs it costs seconds of every start, on every rank."""

import subprocess
import sys

HEAVY = ("vllm", "peft", "deepspeed", "wandb", "openai", "matplotlib")


def test_the_trainer_imports_what_every_run_needs_and_no_more():
    code = f"import sys, trainer.run.run; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
