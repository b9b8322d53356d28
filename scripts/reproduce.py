"""Reproduce a published result: plan, check the machine, train, evaluate, and judge against the published value.

    make reproduce                                      list the recipes
    make reproduce RECIPE=demo_calculator               the demo, on a CPU
    make reproduce RECIPE=gsm8k_lora_0.5b               again after an interruption: continue
    lockstep reproduce gsm8k_ppo --dry-run              recipe, plan and machine only
    lockstep reproduce gsm8k_ppo seed=1 run_name=second without make, in any directory

Settings behind the name are those of scripts/train.py. The verdict is in verdict.md and verdict.json of the run
directory. Exit status: 0 reproduced, 1 not, 2 a mistake in the settings or a machine that does not fit.
Experimental: only the recipes for a CPU have run.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", nargs="?", help="name of a recipe; none: list them")
    parser.add_argument("overrides", nargs="*", help="settings of scripts/train.py")
    parser.add_argument("--dry-run", action="store_true", help="show recipe, plan and machine, and start nothing")
    parser.add_argument("--judge", action="store_true", help="only judge the run that is there")
    parser.add_argument("--processes", type=int, help="number of processes (default: one per GPU of the recipe)")
    options = parser.parse_intermixed_args(arguments)

    from lockstep.rollout.errors import ConfigError, LockstepError
    from lockstep.rollout.safe_text import print_error
    from lockstep.scripts.recipes.declared import RECIPES

    if options.recipe is None:
        print(listing())
        return 0
    try:
        if options.recipe not in RECIPES:
            raise ConfigError(
                f"found no recipe {options.recipe}, expected one of {', '.join(RECIPES)}; type make reproduce"
            )
        return reproduce(
            RECIPES[options.recipe],
            tuple(options.overrides),
            processes=options.processes,
            is_dry=options.dry_run,
            only_judges=options.judge,
        )
    except LockstepError as error:
        print_error(error)
        return 2 if isinstance(error, ConfigError) else 1


def listing() -> str:
    from lockstep.scripts.recipes.declared import RECIPES

    width = max(map(len, RECIPES))
    lines = ["Recipes: make reproduce RECIPE=<name>", ""]
    for recipe in RECIPES.values():
        machine = f"{recipe.gpus} GPU{'s' * (recipe.gpus > 1)}" if recipe.gpus else "a CPU"
        value = f"{recipe.metric.partition('{')[0]}... " if recipe.parts else f"{recipe.metric} "
        lines.append(
            f"{recipe.name:{width}}  {recipe.title}; {machine}; {value}{recipe.published:g} ± {recipe.tolerance:g}"
        )
    return "\n".join(lines)


def reproduce(recipe, overrides: tuple[str, ...], *, processes: int | None, is_dry: bool, only_judges: bool) -> int:
    """Run all stages of a recipe; return the exit status. Raises `LockstepError`."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from lockstep.rollout.errors import ConfigError
    from lockstep.rollout.safe_text import print_error
    from lockstep.scripts.recipes.judge import Status, judge, write_verdict
    from lockstep.scripts.recipes.plan import make_plan, overrides_of, refusals, this_machine
    from lockstep.trainer.cli import explain
    from lockstep.trainer.config.schema import Config

    try:
        plan = make_plan(recipe, processes=processes, extra=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, Config)) from error
    config = plan.config
    run = Path(config.run_root) / str(config.run_name)
    words = overrides_of(recipe, overrides)
    train = launch_command(recipe.launch, plan.processes, words)
    print(described(plan, run, train))
    if not only_judges:
        problems = list(refusals(plan, this_machine()))
        for problem in problems:
            print_error(problem)
        if problems or is_dry:
            return 2 if problems else 0
        status = run_to_the_end(train)
        if status:
            print_error(f"training ended with status {status}; the messages above say why")
    verdict = judge(recipe, run, updates=config.updates)
    if verdict.status is Status.MISSING and not only_judges:
        run_to_the_end(evaluate_command(words, run, config.updates))
        verdict = judge(recipe, run, updates=config.updates)
    if run.is_dir():
        print(f"verdict        {write_verdict(recipe, verdict, run)}")
    print(f"{recipe.name}: {verdict.status}: {verdict.sentence}")
    return 0 if verdict.passes else 1


def run_to_the_end(command: list[str]) -> int:
    """Run a command and return its status. Ctrl-C reaches it and not this process, which judges what it leaves."""
    process = subprocess.Popen(command)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def launch_command(launch: str, processes: int, words: list[str]) -> list[str]:
    """Return the command that trains."""
    from lockstep.trainer.compose import CONFIG_DIR

    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(CONFIG_DIR / "accelerate" / f"{launch}.yaml"), "--num_processes", str(processes)),
        *("-m", "lockstep", "train", *words),
    ]


def evaluate_command(words: list[str], run: Path, updates: int) -> list[str]:
    """Return the command that evaluates the trained model where the run would have written its last evaluation."""
    output = run / "evaluations" / f"update-{updates:06d}.json"
    own = [word for word in words if not word.startswith(("model.path=", "resume=", "run_name="))]
    return [sys.executable, "-m", "lockstep", "evaluate", *own, f"model.path={run / 'model'}", f"eval.output={output}"]


def described(plan, run: Path, train: list[str]) -> str:
    """Return recipe and plan for the console."""
    from lockstep.scripts.recipes import plan as planning

    recipe, hours = plan.recipe, plan.hours
    machine = f"{plan.processes} GPUs of {recipe.gpu_gib} GB" if recipe.gpus else "a CPU"
    lines = [
        f"recipe         {recipe.title}",
        f"published      {recipe.metric} {recipe.published:g} ± {recipe.tolerance:g} ({recipe.at} evaluation)",
        f"source         {recipe.source}",
        *(f"               {link}" for link in recipe.links),
        f"model          {recipe.model}",
        f"data           {recipe.data}",
        f"machine        {machine}",
        plan.memory.table(),
    ]
    if hours is not None:
        lines.append(
            f"estimate       {hours.total:.1f} h on {plan.processes} {planning.GPU}, {plan.gpu_hours:.0f} GPU hours, "
            f"{plan.gpu_hours * planning.USD_PER_GPU_HOUR:.0f} USD; from assumed rates, not measured (docs/recipes.md)"
        )
    lines += [f"run directory  {run}", f"command        {shlex.join(train)}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
