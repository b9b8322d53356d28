"""Tables of docs/recipes.md, from the declarations and plans of the recipes.

`make docs` runs it; `--check` only says if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from lockstep.scripts.recipes import plan as planning
from lockstep.scripts.recipes.declared import RECIPES, Recipe
from lockstep.scripts.recipes.plan import Plan, make_plan
from lockstep.trainer.model.memory_plan import GIB
from scripts.project.generated import ROOT, filled, main

PAGE = "docs/recipes.md"


def recipes_page() -> str:
    """Return docs/recipes.md with its generated tables."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    plans = [make_plan(recipe) for recipe in RECIPES.values()]
    for name, lines in (("overview", overview()), ("plans", plan_table(plans)), ("recipes", sections(plans))):
        page = filled(page, name, lines)
    return page


def overview() -> Iterator[str]:
    yield "| `RECIPE=` | result | metric | published | machine |"
    yield "|---|---|---|---|---|"
    for recipe in RECIPES.values():
        machine = f"{recipe.gpus} x {recipe.gpu_gib} GB" if recipe.gpus else "CPU"
        metric = f"{recipe.measure} of {len(recipe.parts)} test sets" if recipe.parts else f"`{recipe.metric}`"
        yield f"| `{recipe.name}` | {recipe.title} | {metric} | {band(recipe)} | {machine} |"


def plan_table(plans: list[Plan]) -> Iterator[str]:
    yield (
        "| recipe | memory per GPU | sampled tokens per rollout | tokens/s per GPU | sampling | training | evaluation "
        "| rest | hours | GPU hours | USD |"
    )
    yield "|---" * 11 + "|"
    for plan in plans:
        hours, assumptions = plan.hours, plan.recipe.assumed
        if hours is None or assumptions is None or plan.gpu_hours is None:
            continue
        cells = [
            f"`{plan.recipe.name}`",
            f"{plan.memory.total / GIB:.1f} GiB",
            f"{assumptions.sampled_tokens:,}",
            f"{assumptions.tokens_per_s:,}",
            *(f"{part:.1f}" for part in (hours.sampling, hours.training, hours.evaluation, hours.fixed, hours.total)),
            f"{plan.gpu_hours:.0f}",
            f"{plan.gpu_hours * planning.USD_PER_GPU_HOUR:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield (
        f"Assumed for all: {planning.GPU}, {planning.PEAK_TFLOPS:g} TFLOP/s in bfloat16, of which an update reaches "
        f"{planning.MFU:.0%}; {planning.FIXED_S:g} s per rollout batch for everything else; "
        f"{planning.USD_PER_GPU_HOUR:g} USD per GPU hour."
    )


def sections(plans: list[Plan]) -> Iterator[str]:
    for plan in plans:
        recipe = plan.recipe
        yield f"### {recipe.name}"
        yield ""
        yield f"{recipe.title}. Published: {band(recipe)}, the {recipe.at} evaluation of the run."
        yield ""
        yield f"* Source: {recipe.source}."
        yield from (f"  {linked(link)}" for link in recipe.links)
        yield f"* Tolerance: {recipe.why_tolerance}."
        yield f"* Model: {linked(recipe.model)}"
        yield f"* Data: {linked(recipe.data)}"
        if recipe.install:
            yield f"* Needs `{recipe.install}`."
        yield f"* Curve: {'; '.join(curve(recipe)) or 'no published curve found'}."
        yield ""
        yield "```bash"
        yield "# needs a GPU" if recipe.gpus else f"make reproduce RECIPE={recipe.name}"
        if recipe.gpus:
            yield f"make reproduce RECIPE={recipe.name}"
            yield command(plan)
        yield "```"
        yield ""


def command(plan: Plan) -> str:
    """Return the command for the GPUs of the recipe."""
    recipe = plan.recipe
    words = [f"experiment={recipe.experiment}", *recipe.overrides]
    return (
        f"accelerate launch --config_file configs/accelerate/{recipe.launch}.yaml --num_processes {plan.processes} "
        f"-m lockstep train {' '.join(words)}"
    )


def band(recipe: Recipe) -> str:
    return f"{recipe.published:g} ± {recipe.tolerance:g}"


def curve(recipe: Recipe) -> Iterator[str]:
    for bound in recipe.curve:
        yield f"`{bound.metric}` at update {bound.update} from {bound.low:g} to {bound.high:g} ({bound.found})"


def linked(text: str) -> str:
    """Return a text with its addresses between angle brackets."""
    return " ".join(
        f"<{word.rstrip(';,')}>{word[len(word.rstrip(';,')) :]}" if word.startswith("https://") else word
        for word in text.split(" ")
    )


PAGES = {PAGE: recipes_page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "Write the tables of docs/recipes.md."))
