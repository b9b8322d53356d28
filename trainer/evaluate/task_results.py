"""Results of lm-eval tasks: per document, per metric with an interval, and paired between two models.

lm-eval computes the values. Intervals and paired differences come from its per-document values, over documents. Every
value must be one of the forms below, which this module checks by computing it again; for others (corpus metrics such as
BLEU) the interval is that of lm-eval's standard error, and there is no paired comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.rollout.errors import DataError
from lockstep.trainer.evaluate import estimates
from lockstep.trainer.evaluate.estimates import Z_95, Estimate
from lockstep.trainer.evaluate.results import Comparison, Number, common, read_as

Form = Literal["mean", "perplexity", "bits"]
FORMS: tuple[Form, ...] = ("mean", "perplexity", "bits")
"""Values as functions of x = Σ values / Σ weights: x, exp(-x), -x / ln 2. The last two are of log-probabilities, with
words, bytes or 1 as weights."""
SAME = 1e-6
"""Relative difference up to which a value of lm-eval counts as this form's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentScore:
    """One document of a task under one metric."""

    document: str
    """Digest of the document, equal across evaluations."""
    value: Number
    weight: Number = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetric:
    """One metric of a task, or of a group of tasks, under one model."""

    task: str
    metric: str
    filter: str
    """lm-eval's name of the answer's extraction; `none` without one."""
    version: str
    """Version of the task."""
    value: Number
    """Value of lm-eval."""
    stderr: Number | None
    """Standard error of lm-eval."""
    form: Form | None
    """None if documents do not determine the value."""
    is_higher_better: bool
    documents: tuple[DocumentScore, ...]

    def __post_init__(self) -> None:
        if self.form is not None and not sum(document.weight for document in self.documents) > 0:
            raise DataError(f"{self.name:.80} has no documents")

    @property
    def name(self) -> str:
        """`task/metric`, with the filter behind it if there is one."""
        return "/".join((self.task, self.metric, *(() if self.filter == "none" else (self.filter,))))

    def estimate(self) -> Estimate:
        """Return the value with its 95 % interval: Wilson's if every document is 0 or 1, else normal."""
        values = [document.value for document in self.documents]
        if self.form is None:
            return _around(self.value, math.inf if self.stderr is None else self.stderr)
        if self.form == "mean" and set(values) <= {0.0, 1.0}:
            return estimates.proportion(values, trials_per_value=1)
        # Bounds of x, so that those of a perplexity are positive.
        total = math.fsum(document.weight for document in self.documents)
        x = math.fsum(values) / total
        half = Z_95 * estimates.standard_error(self.influences()) / abs(_slope(self.form, x))
        low, high = sorted(_value(self.form, bound) for bound in (x - half, x + half))
        return Estimate(value=self.value, low=low, high=high)

    def influences(self) -> list[float]:
        """Return the influence of each document on the value, with mean 0; their standard error is the value's.

        The linearization of a ratio (delta method): f'(x) (v - x w) n / Σw for the value f(x).
        """
        total = math.fsum(document.weight for document in self.documents)
        x = math.fsum(document.value for document in self.documents) / total
        slope = _slope(str(self.form), x) * len(self.documents) / total
        return [slope * (document.value - x * document.weight) for document in self.documents]

    def metrics(self) -> dict[str, float]:
        """Return `eval/<name>`, the bounds of its interval, and the number of documents."""
        estimate = self.estimate()
        values = {
            "": estimate.value,
            "_low": estimate.low,
            "_high": estimate.high,
            "/documents": float(len(self.documents)),
        }
        return {f"eval/{self.name}{end}": value for end, value in values.items() if math.isfinite(value)}


def task_metrics(results: Mapping[str, Any]) -> tuple[TaskMetric, ...]:
    """Convert what `lm_eval.evaluator.evaluate` returned, with samples: groups after their tasks."""
    metrics: list[TaskMetric] = []
    by_task: dict[str, dict[tuple[str, str], tuple[DocumentScore, ...]]] = {}
    for task, samples in results["samples"].items():
        kinds = dict.fromkeys((metric, sample["filter"]) for sample in samples for metric in sample["metrics"])
        by_task[task] = {kind: _documents(samples, *kind) for kind in kinds}
    children = results.get("group_subtasks", {})

    def below(name: str) -> list[str]:
        """Return the tasks of a group, at any depth."""
        parts = children.get(name, ())
        return [task for part in parts for task in ([part] if part in by_task else below(part))]

    for name, scores in {**results["results"], **results.get("groups", {})}.items():
        tasks = [name] if name in by_task else below(name)
        for key, value in scores.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            documents = tuple(one for task in tasks for one in by_task[task].get((metric, filter_name), ()))
            stderr = scores.get(f"{metric}_stderr,{filter_name}")
            metrics.append(
                TaskMetric(
                    task=name,
                    metric=metric,
                    filter=filter_name,
                    version=str(results.get("versions", {}).get(name)),
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
                    form=_form(float(value), documents),
                    is_higher_better=results.get("higher_is_better", {}).get(name, {}).get(metric) is not False,
                    documents=documents,
                )
            )
    return tuple(metrics)


def _documents(samples: Iterable[Mapping[str, Any]], metric: str, chosen: str) -> tuple[DocumentScore, ...]:
    """Return the values of a metric in order of documents; empty if they are neither numbers nor pairs of numbers."""
    scores = []
    for sample in samples:
        if sample["filter"] != chosen or metric not in sample:
            continue
        value = sample[metric]
        pair = value if isinstance(value, tuple | list) else (value, 1.0)
        if len(pair) != 2 or not all(isinstance(number, int | float) and math.isfinite(number) for number in pair):
            return ()
        scores.append(DocumentScore(document=str(sample["doc_hash"])[:16], value=float(pair[0]), weight=float(pair[1])))
    return tuple(scores)


def _form(value: float, documents: Sequence[DocumentScore]) -> Form | None:
    """Return the form in which these documents have this value."""
    total = math.fsum(document.weight for document in documents)
    if not total > 0:
        return None
    x = math.fsum(document.value for document in documents) / total
    return next((form for form in FORMS if math.isclose(_value(form, x), value, rel_tol=SAME, abs_tol=1e-12)), None)


def _value(form: str, x: float) -> float:
    if form == "mean":
        return x
    return -x / math.log(2) if form == "bits" else math.exp(min(-x, 700.0))


def _slope(form: str, x: float) -> float:
    if form == "mean":
        return 1.0
    return -1 / math.log(2) if form == "bits" else -_value(form, x)


def _around(value: float, stderr: float) -> Estimate:
    """Return the normal interval; an unbounded one if the documents show no spread."""
    stderr = stderr or math.inf
    return Estimate(value=value, low=value - Z_95 * stderr, high=value + Z_95 * stderr)


def compare_tasks(first: Sequence[TaskMetric], second: Sequence[TaskMetric]) -> list[Comparison]:
    """Compare paired by document every metric that both have, second minus first.

    Raises `DataError` without a common metric, or for a task of another version or with other documents.
    """
    return [_compare(one, other) for one, other in common(first, second)]


def _compare(first: TaskMetric, second: TaskMetric) -> Comparison:
    differs = [(one.document, one.weight) for one in first.documents] != [
        (one.document, one.weight) for one in second.documents
    ]
    if differs or first.version != second.version:
        raise DataError(
            f"{second.name}: {len(first.documents)} documents of version {first.version} cannot be compared with "
            f"{len(second.documents)} of version {second.version}{' (other documents)' if differs else ''}; evaluate "
            "both with the same task, eval.prompts and lm-eval"
        )
    # A log-probability is better if higher, also where the metric itself is not.
    sign = 1 if second.is_higher_better or second.form in ("perplexity", "bits") else -1
    gains = [sign * (b.value - a.value) for a, b in zip(first.documents, second.documents, strict=True)]
    differences = {}
    if first.form is not None and first.form == second.form:
        shifts = [b - a for a, b in zip(first.influences(), second.influences(), strict=True)]
        differences[""] = _around(second.value - first.value, estimates.standard_error(shifts))
        values = [[document.value for document in metric.documents] for metric in (first, second)]
        if (
            first.form == "mean"
            and {*values[0], *values[1]} <= {0.0, 1.0}
            and not any(gains[0] - gain for gain in gains)
        ):
            differences[""] = estimates.paired_difference(*values)
    return Comparison.of(second.name, "documents", differences, gains)


def task_lines(metrics: Sequence[TaskMetric]) -> Iterator[str]:
    """Yield a table with a line per metric."""
    width = max(len(metric.name) for metric in metrics)
    yield f"{'':{width}}  documents  value"
    for metric in metrics:
        how = "" if metric.form is not None else "  (interval of lm-eval's standard error)"
        yield f"{metric.name:{width}}  {len(metric.documents):>9}  {metric.estimate()}{how}"
    yield "value [95 % interval] over documents; 0 or 1 per document: Wilson, others: normal"


def tasks_to_json(metrics: Sequence[TaskMetric]) -> list[dict[str, Any]]:
    return [{"name": metric.name, "metrics": metric.metrics(), **asdict(metric)} for metric in metrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The part of a file that is read again."""

    tasks: list[TaskMetric] = field(default_factory=list)


def read_tasks(path: Path) -> list[TaskMetric]:
    """Read the task metrics in a file of `write_results`; none if it has none. Raises `DataError` for another file."""
    return read_as(_File, path).tasks
