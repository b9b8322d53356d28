"""Commands to continue, evaluate and inspect a finished run, with the settings of its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainer.config.redaction import redact_words

NOT_REPEATED = ("run_name=", "resume=", "updates=")
SAMPLED_AND_SCORED = re.compile(r"(experiment|model|data|environment|reward|rollout|eval)[=.]")
"""Settings on which an evaluation depends."""
TRAINING_ONLY = ("model.path=", "model.lora.", "model.critic", "model.reference_path=", "eval.every=")


def next_steps(
    words: Sequence[str],
    *,
    run: Path,
    model: Path,
    update: int,
    updates: int,
    launcher: str,
    critic: Path | None,
    has_heldout: bool,
) -> str:
    """Return lines of a name and a path or command each.

    words: command line of the run without the script, of which secrets are redacted. launcher: command in front of
    scripts/train.py. has_heldout: True if the run has held-out data, which an evaluation needs.
    """
    goal = updates if update < updates else 2 * updates
    own = [word for word in redact_words(words) if not word.startswith(NOT_REPEATED)]
    resumed = [*own, f"run_name={run.name}", "resume=auto", f"updates={goal}"]
    evaluated = [word for word in own if SAMPLED_AND_SCORED.match(word) and not word.startswith(TRAINING_ONLY)]
    evaluate = f"python scripts/evaluate.py {shlex.join([f'model.path={model}', *evaluated])}"
    lines = {
        "model": str(model),
        **({"critic": str(critic)} if critic else {}),
        "resume": f"{launcher} scripts/train.py {shlex.join(resumed)}",
        **({"evaluate": evaluate} if has_heldout else {}),
        "inspect": f"python scripts/inspect_run.py {shlex.quote(str(run))}",
        "report": f"python scripts/report.py {shlex.quote(str(run))}",
    }
    return "\n".join(f"{name:<14} {text}" for name, text in lines.items())
