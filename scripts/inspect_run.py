"""Show metrics and rollouts of a run in the terminal.

    python scripts/inspect_run.py runs/latest                      last metrics, best and worst rollout
    python scripts/inspect_run.py runs/latest --step 5 --rollout 3 --tokens

`--tokens` prints every token with its id and the engine's logprob; trained tokens are bold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", type=Path, nargs="?", default=Path("runs/latest"), help="run directory (default: runs/latest)"
    )
    parser.add_argument("--step", type=int, help="update whose rollouts are shown (default: the newest saved)")
    parser.add_argument("--rollout", type=int, help="id of the rollout to show (default: the best and the worst)")
    parser.add_argument("--tokens", action="store_true", help="also print every token with its id and logprob")
    arguments = parser.parse_args()

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from lockstep.rollout.errors import LockstepError
    from lockstep.rollout.safe_text import print_error, terminal_safe
    from lockstep.rollout.saved_rollouts import read_newest_rollouts, read_rollouts
    from lockstep.rollout.system.plain_files import behind_link
    from lockstep.trainer.observe.console import RunConsole
    from lockstep.trainer.observe.metrics_log import read_metrics

    console = Console(highlight=False)
    run = behind_link(arguments.run)
    directory = run / "rollouts"
    try:
        if arguments.step is None:
            path, rollouts, passed_over = read_newest_rollouts(directory)
            for sentence in passed_over:
                print_error(sentence)
        else:
            path = directory / f"step-{arguments.step:06d}.jsonl"
            rollouts = list(read_rollouts(path)) if path.is_file() else []
        if path is None or not rollouts:
            print_error(f"no saved rollouts at {path or directory}")
            return 2
        lines = read_metrics(run / "metrics.jsonl")
    except LockstepError as error:
        print_error(error)
        return 1
    update = int(path.stem.split("-")[1])
    metrics = next((line for line in lines if line["step"] == update), {})
    title = Text(f"{terminal_safe(run.resolve().name)}, update {update}")
    table = Table(title=title, show_header=False)
    for name, value in metrics.items():
        if "/" in name and value is not None:
            table.add_row(Text(terminal_safe(name)), f"{value:.6g}")
    console.print(table)

    ordered = sorted(rollouts, key=lambda rollout: rollout.reward)
    chosen = [ordered[-1], ordered[0]] if len(ordered) > 1 else ordered
    if arguments.rollout is not None:
        chosen = [rollout for rollout in rollouts if rollout.rollout_id == arguments.rollout]
    for rollout in chosen:
        RunConsole(enabled=True, total_updates=0).sample(rollout)
        if arguments.tokens:
            try:
                _print_tokens(console, rollout, run)
            except LockstepError as error:
                print_error(error)
                return 1
    return 0


def _tokenizer(model: Path):
    """Load the tokenizer of a run that others may have written; None without a model."""
    from transformers import AutoTokenizer

    from lockstep.rollout.errors import ConfigError

    if not model.is_dir():
        return None
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare exceptions
        raise ConfigError(
            f"{model} has no tokenizer that loads without its own code ({type(error).__name__}: {error}); leave out "
            "--tokens, or load it yourself"
        ) from error


def _print_tokens(console, rollout, run: Path) -> None:
    from rich.text import Text

    from lockstep.rollout.episode.rows import rows_from_calls

    tokenizer = _tokenizer(run / "model")
    for number, row in enumerate(rows_from_calls(rollout.calls, rollout_id=rollout.rollout_id)):
        console.print(f"row {number}: {len(row)} tokens, {row.num_trained} trained")
        for i, token in enumerate(row.ids.tolist()):
            piece = repr(tokenizer.decode([token])) if tokenizer and token < len(tokenizer) else ""
            style = "bold" if row.loss_mask[i] else "dim"
            logprob = f"{row.sampling_logprobs[i]:9.4f}" if row.loss_mask[i] else " " * 9
            turn = f"turn {row.turns[i]:3d}" if row.loss_mask[i] else " " * 8
            console.print(Text(f"  {i:5d} {token:7d} {logprob} {turn}  {piece}", style=style))


if __name__ == "__main__":
    sys.exit(main())
