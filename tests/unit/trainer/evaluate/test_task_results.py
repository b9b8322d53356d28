"""Values, intervals and paired comparisons of tasks of lm-eval, from per-document values."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.errors import DataError
from lockstep.trainer.evaluate import estimates
from lockstep.trainer.evaluate.results import SCHEMA, comparison_lines, write_results
from lockstep.trainer.evaluate.task_results import (
    TaskMetric,
    compare_tasks,
    read_tasks,
    task_lines,
    task_metrics,
    tasks_to_json,
)


def samples(metric: str, values: list[Any], *, of: str = "none", start: int = 0) -> list[dict[str, Any]]:
    """Return lm-eval's records of documents with these values."""
    return [
        {"doc_hash": f"{start + i:016x}".ljust(64, "0"), "filter": of, "metrics": [metric], metric: value}
        for i, value in enumerate(values)
    ]


def metric_of(metric: str, values: list[Any], value: float, *, higher: bool = True, stderr: Any = "N/A") -> TaskMetric:
    results = {
        "results": {"task": {"alias": "task", f"{metric},none": value, f"{metric}_stderr,none": stderr}},
        "samples": {"task": samples(metric, values)},
        "versions": {"task": 1.0},
        "higher_is_better": {"task": {metric: higher}},
    }
    (found,) = task_metrics(results)
    return found


WORDS = [(-20.0, 4), (-35.0, 9), (-12.0, 5), (-50.0, 11)]
"""Log-probability and number of words of four documents."""
RATE = sum(value for value, _ in WORDS) / sum(words for _, words in WORDS)


def test_zeros_and_ones_have_wilsons_interval() -> None:
    found = metric_of("acc", [1.0, 0.0, 1.0, 1.0], 0.75)
    assert (found.form, found.name) == ("mean", "task/acc")
    assert found.estimate() == estimates.proportion([1, 0, 1, 1], trials_per_value=1)


def test_other_values_have_the_normal_interval_of_their_mean() -> None:
    values = [0.5, 0.25, 1.0, 0.0]
    found = metric_of("f1", values, statistics.fmean(values)).estimate()
    expected = estimates.mean(values)
    assert (found.low, found.value, found.high) == pytest.approx((expected.low, expected.value, expected.high))


@pytest.mark.parametrize(
    ("form", "value"), [("perplexity", math.exp(-RATE)), ("bits", -RATE / math.log(2)), ("mean", RATE)]
)
def test_a_ratio_is_recognized_by_its_value(form: str, value: float) -> None:
    found = metric_of("measure", WORDS, value)
    assert found.form == form
    assert found.estimate().low < value < found.estimate().high


def test_the_interval_of_a_ratio_is_that_of_the_jackknife() -> None:
    words = [(-20.0 - 3 * (i % 5) - i % 7, 4 + i % 3) for i in range(60)]
    total, weights = sum(value for value, _ in words), sum(weight for _, weight in words)
    value = math.exp(-total / weights)
    found = metric_of("word_perplexity", words, value, higher=False)
    left_out = [math.exp(-(total - one) / (weights - weight)) for one, weight in words]
    stderr = math.sqrt((len(words) - 1) * statistics.pvariance(left_out))
    estimate = found.estimate()
    assert (estimate.high - estimate.low) / 2 == pytest.approx(estimates.Z_95 * stderr, rel=0.05)


def test_the_interval_of_a_perplexity_is_positive() -> None:
    words = [(-10.0, 1), (-1.0, 1), (-20.0, 1)]
    estimate = metric_of("perplexity", words, math.exp(31 / 3), higher=False).estimate()
    assert 0 < estimate.low < estimate.value < estimate.high


def test_a_corpus_metric_has_the_interval_of_lm_evals_standard_error_and_no_paired_difference() -> None:
    values = [("a reference", "an answer"), ("another", "one more")]
    found = metric_of("bleu", values, 12.0, stderr=2.0)
    assert (found.form, found.documents) == (None, ())
    assert found.estimate().high == pytest.approx(12.0 + estimates.Z_95 * 2)
    (compared,) = compare_tasks([found], [found])
    assert not compared.differences
    lines = "\n".join([*task_lines([found]), *comparison_lines([compared], "a", "b")])
    assert "standard error" in lines
    assert "no paired difference" in lines


def test_a_filter_is_part_of_the_name() -> None:
    results = {
        "results": {"gsm8k": {"exact_match,strict-match": 0.5, "exact_match,flexible-extract": 1.0}},
        "samples": {
            "gsm8k": samples("exact_match", [1.0, 0.0], of="strict-match")
            + samples("exact_match", [1.0, 1.0], of="flexible-extract")
        },
    }
    found = {metric.name: metric.value for metric in task_metrics(results)}
    assert found == {"gsm8k/exact_match/strict-match": 0.5, "gsm8k/exact_match/flexible-extract": 1.0}


def test_a_group_weighted_by_size_has_the_documents_of_its_tasks() -> None:
    results = {
        "results": {"one": {"acc,none": 1.0}, "two": {"acc,none": 0.25}},
        "groups": {"all": {"acc,none": 0.5}, "halves": {"acc,none": 0.625}},
        "group_subtasks": {"all": ["inner", "two"], "inner": ["one"], "halves": ["one", "two"]},
        "samples": {"one": samples("acc", [1.0, 1.0]), "two": samples("acc", [0.0, 1.0, 0.0, 0.0], start=9)},
    }
    results["groups"]["all"]["acc,none"] = 0.5  # 3 of 6 documents
    found = {metric.name: metric for metric in task_metrics(results)}
    assert found["all/acc"].form == "mean"
    assert len(found["all/acc"].documents) == 6
    assert found["halves/acc"].form is None, "a mean of means is another number"


def test_a_comparison_is_paired_by_document() -> None:
    before = metric_of("acc", [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], 1 / 3)
    after = metric_of("acc", [1.0, 1.0, 1.0, 1.0, 0.0, 0.0], 2 / 3)
    (found,) = compare_tasks([before], [after])
    expected = estimates.paired_difference([1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0])
    assert (found.differences[""].low, found.differences[""].high) == pytest.approx((expected.low, expected.high))
    assert (found.better, found.worse, found.count) == (2, 0, 6)
    assert found.metrics() == {"eval/task/acc/difference": pytest.approx(1 / 3)}


def test_a_lower_perplexity_is_better() -> None:
    better = [(value + 3, words) for value, words in WORDS]
    rate = sum(value for value, _ in better) / sum(words for _, words in better)
    before = metric_of("word_perplexity", WORDS, math.exp(-RATE), higher=False)
    after = metric_of("word_perplexity", better, math.exp(-rate), higher=False)
    (found,) = compare_tasks([before], [after])
    assert found.differences[""].value == pytest.approx(math.exp(-rate) - math.exp(-RATE))
    assert found.differences[""].high < 0, "the difficulty of documents cancels"
    assert (found.better, found.worse) == (4, 0)


def test_a_metric_of_errors_is_better_if_lower() -> None:
    before, after = (metric_of("error", [value] * 3, value, higher=False) for value in (0.75, 0.5))
    assert compare_tasks([before], [after])[0].better == 3


def test_other_documents_or_versions_are_refused() -> None:
    one = metric_of("acc", [1.0, 0.0], 0.5)
    other = replace(one, documents=tuple(reversed(one.documents)))
    for second, expected in ((other, "other documents"), (replace(one, version="2.0"), r"of version 2\.0")):
        with pytest.raises(DataError, match=expected):
            compare_tasks([one], [second])
    with pytest.raises(DataError, match="nothing to compare"):
        compare_tasks([one], [replace(one, task="another")])


def test_a_file_keeps_every_document(tmp_path: Path) -> None:
    metrics = [metric_of("acc", [1.0, 0.0], 0.5, stderr=0.5), metric_of("word_perplexity", WORDS, math.exp(-RATE))]
    path = tmp_path / "results.json"
    write_results(path, [], model="m", settings={}, others={"tasks": tasks_to_json(metrics)})
    assert read_tasks(path) == metrics


@pytest.mark.parametrize(
    "change",
    [{"form": "median"}, {"value": "0.5"}, {"documents": []}, {"documents": [{"document": "a", "value": None}]}],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "results.json"
    entries = tasks_to_json([metric_of("acc", [1.0, 0.0], 0.5)])
    path.write_text(json.dumps({"schema": SCHEMA, "tasks": [entries[0] | change]}))
    with pytest.raises(DataError, match="is not the result of an evaluation"):
        read_tasks(path)
