"""Tasks of lm-eval through a real engine have the results of lm-eval's Hugging Face backend on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="pip install 'lm-eval<0.5' for tasks of lm-eval")

from lm_eval import simple_evaluate  # type: ignore[import-not-found]
from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

from lockstep.rollout.engine.pool import EnginePool
from lockstep.trainer.config.schema import Config
from lockstep.trainer.evaluate.tasks import Tasks
from tests.fixtures.lm_eval_tasks import NAMES, task_files, values_by_metric
from tests.fixtures.models import byte_tokenizer
from tests.integration.conftest import Served

pytestmark = pytest.mark.engine


def test_tasks_of_every_output_type_have_the_results_of_the_hugging_face_backend(
    served: Served, tmp_path: Path
) -> None:
    served.push()
    config = Config()
    config.eval.lm_eval.tasks = list(NAMES)
    config.eval.lm_eval.include_path = str(task_files(tmp_path / "tasks"))
    config.rollout.max_model_len = served.engine.max_model_len
    byte_tokenizer().save_pretrained(tmp_path / "model")
    requests: list[tuple[str, int]] = []
    run = Tasks(config.eval, config.model, config.rollout, seed=config.seed).evaluate(
        EnginePool([served.engine]),
        model_path=str(tmp_path / "model"),
        on_stage=lambda name, total: requests.append((name, total)),
        on_answer=lambda tokens: None,
    )
    assert {name for name, total in requests if total} == {"scoring", "sampling"}
    expected: Any = simple_evaluate(
        model=HFLM(
            pretrained=served.model,
            tokenizer=byte_tokenizer(),
            batch_size=1,
            max_length=served.engine.max_model_len - 2,
        ),
        tasks=list(NAMES),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        fewshot_random_seed=0,
    )
    wanted = values_by_metric(expected)
    found = {(metric.task, f"{metric.metric},{metric.filter}"): metric.value for metric in run.metrics}
    assert found == {key: pytest.approx(value, rel=1e-4) for key, value in wanted.items()}
