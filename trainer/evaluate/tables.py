"""Results of evaluations as lines of text that fit a terminal and a log file alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.evaluate.estimates import Estimate
from trainer.evaluate.results import Comparison, SetResult

NOTE = "value [95 % interval]; pass@k: Wilson over prompts, means and differences: normal over prompts"


def result_lines(results: Sequence[SetResult]) -> Iterator[str]:
    """A table with a line per data set, and below it one per value of the column that breaks it down."""
    width = max(len(title) for title, _ in _rows(results))
    for result in results:
        ks = tuple(result.pass_rates())
        names = [f"mean@{result.num_samples}", *(f"pass@{k}" for k in ks)]
        yield "  ".join([f"{'':{width}}", f"{'prompts':>7}", *(f"{name:<21}" for name in names)]).rstrip()
        for title, part in _rows([result]):
            cells = [str(part.rewards()), *map(str, part.pass_rates().values())]
            line = [f"{title:{width}}", f"{len(part.prompts):>7}", *(f"{cell:<21}" for cell in cells)]
            yield "  ".join(line).rstrip()
        cut = result.facts.get("truncated_fraction", 0) + result.facts.get("context_full_fraction", 0)
        yield (
            f"{'':{width}}  {result.facts['sampled_tokens_mean']:.0f} tokens and {result.facts['turns_mean']:.1f} "
            f"turns per rollout, {cut:.1%} cut off, {result.facts['failed_fraction']:.1%} failed"
        )
    yield NOTE


def comparison_lines(comparisons: Sequence[Comparison], first: str, second: str) -> Iterator[str]:
    """What changes from the first model to the second, paired by prompt."""
    yield f"{second} minus {first}, on the same prompts with the same seeds"
    for item in comparisons:
        cells = [f"reward {_signed(item.reward)}"]
        cells += [f"pass@{k} {_signed(rate)}" for k, rate in item.pass_rates.items()]
        yield f"{item.title}  {'  '.join(cells)}"
        same = item.prompts - item.better - item.worse
        yield f"{'':{len(item.title)}}  better on {item.better} prompts, worse on {item.worse}, equal on {same}"


def _rows(results: Sequence[SetResult]) -> Iterator[tuple[str, SetResult]]:
    for result in results:
        yield result.title, result
        parts = result.by_label()
        if len(parts) > 1:
            yield from ((f"  {label}", part) for label, part in parts.items())


def _signed(estimate: Estimate) -> str:
    verdict = "" if estimate.low <= 0 <= estimate.high else " *"
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]{verdict}"
