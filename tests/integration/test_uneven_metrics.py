"""Ranks whose losses report different metrics end together, with a sentence that names metric and ranks.

Without the comparison, sums of different lengths meet in one collective.
"""

import json
from pathlib import Path

import pytest

from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "uneven_metrics.py"


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["ddp", "zero3"])
def test_a_metric_that_is_missing_in_some_places_ends_all_ranks_with_one_sentence(
    launcher: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", tied=True)
    done = run_ranks(accelerate(launcher), WORKER, model, tmp_path, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    start = "a loss reports the metric 'policy/mine' in "
    assert first["last rank"].startswith(f"{start}every microbatch of rank 1, in no microbatch of rank 0; expected")
    assert first["first microbatch"].startswith(f"{start}some microbatches of rank 0 and 1; expected")
    assert first["first microbatch of the last rank"].startswith(
        f"{start}every microbatch of rank 0, in some microbatches of rank 1; expected"
    )
    assert first["even"]["policy/mine"] < 0
