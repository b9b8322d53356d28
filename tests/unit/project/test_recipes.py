"""Recipes of published results: declarations, plans, machines, judgment, and the command."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.rollout.errors import DataError
from lockstep.scripts import reproduce
from lockstep.scripts.recipes import judge as judging
from lockstep.scripts.recipes import plan as planning
from lockstep.scripts.recipes.declared import RECIPES, Bound, Recipe
from lockstep.scripts.recipes.judge import Status, judge, measure, page, write_verdict
from lockstep.scripts.recipes.plan import MODELS, Machine, make_plan, refusals, shape_of, sharding_of
from lockstep.trainer.evaluate.results import PromptResult, SetResult, write_results
from lockstep.trainer.model.memory_plan import GIB, MIN_CACHE_GIB, USABLE
from tests.fixtures.paths import ROOT

UPDATES = 10
RECIPE = Recipe(
    name="made_up",
    title="Made up",
    experiment=None,
    model="m",
    data="d",
    published=0.5,
    tolerance=0.1,
    why_tolerance="",
    source="nowhere",
    links=("https://example.org",),
    gpus=0,
    curve=(Bound(update=4, metric="reward/mean", low=0.2, high=0.4, found="a log"),),
)


def results(passed: int, count: int = 100, *, name: str = "", labels: tuple[str, ...] = ("",)) -> SetResult:
    """Return a set in which `passed` of `count` prompts of each label pass."""
    prompts = tuple(
        PromptResult(prompt=f"{label}{i}", label=label or None, rewards=(float(i < passed),), passed=(i < passed,))
        for label in labels
        for i in range(count)
    )
    return SetResult(name=name, prompts=prompts, facts={})


def make_run(root: Path, *, updates: int = UPDATES, passed: dict[int, int] | None = None, reward: float = 0.3) -> Path:
    """Write metrics of `updates` updates, and evaluations with that many of 100 prompts passed, by update."""
    (root / "evaluations").mkdir(parents=True)
    lines = [{"step": update, "reward/mean": reward} for update in range(1, updates + 1)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for update, count in (passed or {}).items():
        path = root / "evaluations" / f"update-{update:06d}.json"
        write_results(path, [results(count)], model="m", settings={})
    return root


# Judgment


@pytest.mark.parametrize(
    ("passed", "status"),
    [(50, Status.REPRODUCED), (40, Status.REPRODUCED), (60, Status.REPRODUCED), (39, Status.BELOW), (61, Status.ABOVE)],
)
def test_a_value_is_judged_by_its_distance_from_the_published_one(passed: int, status: Status, tmp_path: Path) -> None:
    verdict = judge(RECIPE, make_run(tmp_path / "run", passed={UPDATES: passed}), updates=UPDATES)
    assert verdict.status is status
    assert verdict.passes is (status is Status.REPRODUCED)
    assert verdict.value == passed / 100
    assert verdict.low is not None
    assert verdict.high is not None
    assert verdict.low < passed / 100 < verdict.high
    assert verdict.judged_update == UPDATES


def test_an_interrupted_run_fails_and_says_how_to_continue(tmp_path: Path) -> None:
    verdict = judge(RECIPE, make_run(tmp_path / "run", updates=7, passed={5: 50}), updates=UPDATES)
    assert verdict.status is Status.INTERRUPTED
    assert not verdict.passes
    assert "found 7 of 10 updates" in verdict.sentence
    assert "make reproduce RECIPE=made_up" in verdict.sentence


def test_a_missing_last_evaluation_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    verdict = judge(RECIPE, make_run(tmp_path / "run", passed={0: 10, 5: 50}), updates=UPDATES)
    assert verdict.status is Status.MISSING
    assert "found evaluations at updates 0, 5" in verdict.sentence


def test_the_best_evaluation_is_judged_where_the_source_reports_the_highest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", passed={0: 10, 5: 50, UPDATES: 20})
    assert judge(RECIPE, run, updates=UPDATES).status is Status.BELOW
    best = judge(replace(RECIPE, at="best"), run, updates=UPDATES)
    assert (best.status, best.value, best.judged_update) == (Status.REPRODUCED, 0.5, 5)


def test_a_point_off_the_curve_fails_and_one_that_was_not_measured_does_not(tmp_path: Path) -> None:
    off = judge(RECIPE, make_run(tmp_path / "off", passed={UPDATES: 50}, reward=0.5), updates=UPDATES)
    assert off.status is Status.OFF_CURVE
    assert "reward/mean is 0.500 at update 4, expected 0.2 to 0.4" in off.sentence
    other = replace(RECIPE, curve=(replace(RECIPE.curve[0], metric="eval/pass@1"),))
    verdict = judge(other, make_run(tmp_path / "other", passed={UPDATES: 50}), updates=UPDATES)
    assert verdict.passes
    assert verdict.points[0].value is None
    assert "not measured" in page(other, verdict)


def test_the_mean_of_parts_weighs_small_parts_as_large_ones() -> None:
    recipe = replace(RECIPE, measure="reward_mean", parts=("a", "b"))
    both = SetResult(
        name="",
        prompts=(*results(80, 100, labels=("a",)).prompts, *results(2, 10, labels=("b",)).prompts),
        facts={},
    )
    found = measure(recipe, [both], Path("f"))
    assert found.value == pytest.approx((0.8 + 0.2) / 2)
    deviations = [math.sqrt(0.16 * 100 / 99 / 100), math.sqrt(0.16 * 10 / 9 / 10)]
    assert found.high - found.value == pytest.approx(1.959964 * math.hypot(*deviations) / 2, rel=1e-5)
    with pytest.raises(DataError, match="no rows of c"):
        measure(replace(recipe, parts=("a", "c")), [both], Path("f"))


def test_an_evaluation_of_another_set_is_refused() -> None:
    with pytest.raises(DataError, match="found other, expected results of held-out data"):
        measure(RECIPE, [results(5, name="other")], Path("f"))


def test_page_and_json_hold_the_verdict(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", passed={UPDATES: 50})
    written = write_verdict(RECIPE, judge(RECIPE, run, updates=UPDATES), run).read_text()
    assert written.startswith("# Made up: reproduced")
    assert "https://example.org" in written
    found = json.loads((run / "verdict.json").read_text())
    assert (found["status"], found["value"], found["points"][0]["value"]) == ("reproduced", 0.5, 0.3)


# Declarations and plans


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_a_recipe_composes_evaluates_what_it_judges_and_names_its_sources(recipe: Recipe) -> None:
    plan = make_plan(recipe)
    config = plan.config
    assert config.run_name == f"recipe-{recipe.name}"
    assert config.resume == "auto"
    assert config.eval.before_training
    assert config.eval.every > 0, "so that the last update is evaluated"
    assert config.updates % (config.algorithm.epochs * config.algorithm.minibatches) == 0
    assert set(config.heldout_sets()) == {recipe.heldout}
    assert (ROOT / f"configs/accelerate/{recipe.launch}.yaml").is_file()
    assert recipe.source
    assert recipe.links or recipe.source.startswith("Lockstep itself")
    assert all(link.startswith("https://") for link in recipe.links)
    assert recipe.why_tolerance
    assert 0 < recipe.published < 1
    assert 0 < recipe.tolerance < recipe.published
    for bound in recipe.curve:
        assert bound.low < bound.high
        assert 0 < bound.update <= config.updates
        if bound.metric.startswith("eval/"):
            assert bound.update % config.eval.every == 0
        else:
            assert bound.update % (config.algorithm.epochs * config.algorithm.minibatches) == 0


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES.values() if recipe.gpus], ids=lambda r: r.name)
def test_the_plan_of_a_recipe_fits_its_gpus(recipe: Recipe) -> None:
    plan = make_plan(recipe)
    assert plan.config.model.path in MODELS
    assert plan.memory.total + MIN_CACHE_GIB * GIB < USABLE * recipe.gpu_gib * 1e9
    machine = Machine(gpus=plan.processes, name="made up", gpu_gib=recipe.gpu_gib * 1e9 / GIB)
    assert [text for text in refusals(plan, machine) if "planned" in text or "GPUs" in text] == []
    assert plan.hours is not None
    assert 0 < plan.hours.total < 100


@pytest.mark.parametrize(
    ("path", "billions"),
    [("Qwen/Qwen2.5-0.5B-Instruct", 0.494), ("Qwen/Qwen2.5-1.5B-Instruct", 1.54), ("Qwen/Qwen2.5-3B-Instruct", 3.09),
     ("Qwen/Qwen3-1.7B-Base", 1.72), ("PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT", 0.596)],
)  # fmt: skip
def test_the_declared_sizes_are_those_of_the_models(path: str, billions: float) -> None:
    config = planning.compose_config(["experiment=reverse_text", f"model.path={path}"])
    assert shape_of(config).parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_launch_files_divide_as_their_names_say() -> None:
    assert [sharding_of(name, 8).zero_stage for name in ("single", "ddp", "zero2", "zero3")] == [0, 0, 2, 3]
    for name in ("zero2", "zero3"):
        text = (ROOT / f"configs/accelerate/{name}.yaml").read_text()
        assert f"zero_stage: {sharding_of(name, 2).zero_stage}" in text


# Machines


def test_a_machine_without_gpus_is_told_what_it_can_run() -> None:
    (problem,) = refusals(make_plan(RECIPES["gsm8k_lora_0.5b"]), Machine(gpus=0))
    assert "found 0 GPUs, expected 2 of 24 GB" in problem
    assert "make reproduce RECIPE=demo_calculator" in problem


def test_fewer_and_smaller_gpus_are_told_apart() -> None:
    plan = make_plan(RECIPES["gsm8k_lora_3b"])
    (few,) = refusals(plan, Machine(gpus=1, name="H", gpu_gib=80))
    assert "--processes 1" in few
    (small,) = refusals(plan, Machine(gpus=2, name="H", gpu_gib=12))
    assert re.search(r"GiB are planned per rank and the device has .*ARGS=", small)
    assert list(refusals(plan, Machine(gpus=2, name="H", gpu_gib=40))) == []


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.importlib.util, "find_spec", lambda name: None)
    (problem,) = refusals(make_plan(RECIPES["dapo_math"]), Machine(gpus=8, name="H", gpu_gib=80))
    assert "pip install 'lockstep-rl[math]'" in problem


@pytest.fixture
def search_server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            body = json.dumps({"result": [[] for _ in queries]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


def test_the_search_server_is_asked_before_the_run(search_server: str) -> None:
    machine = Machine(gpus=8, name="H", gpu_gib=80)
    there = make_plan(RECIPES["search_r1"], extra=(f"environment.settings.url={search_server}",))
    assert list(refusals(there, machine)) == []
    gone = make_plan(RECIPES["search_r1"], extra=("environment.settings.url=http://127.0.0.1:9/retrieve",))
    (problem,) = refusals(gone, machine)
    assert "http://127.0.0.1:9/retrieve" in problem
    assert "docs/recipes.md" in problem


def test_nvidia_smi_and_the_visible_devices_say_which_gpus_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 81559\\nNVIDIA H100 80GB HBM3, 40960\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert planning.this_machine() == Machine(gpus=2, name="NVIDIA H100 80GB HBM3", gpu_gib=40.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert planning.this_machine().gpus == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planning.this_machine() == Machine(gpus=0)


# The command


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record commands in place of running them."""
    run: list[list[str]] = []
    monkeypatch.setattr(reproduce, "run_to_the_end", lambda command: run.append(command) or 0)
    monkeypatch.setattr(planning, "this_machine", lambda: Machine(gpus=2, name="H", gpu_gib=80))
    return run


def test_without_a_recipe_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RECIPES)


def test_an_unknown_recipe_or_setting_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["gsm9k"]) == 2
    assert "found no recipe gsm9k, expected one of demo_calculator" in capsys.readouterr().err
    assert reproduce.main(["reverse_text", "optimizer.lrr=1"]) == 2
    assert "optimizer.lrr" in capsys.readouterr().err


def test_a_machine_that_does_not_fit_is_refused_before_anything_starts(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "this_machine", lambda: Machine(gpus=0))
    assert reproduce.main(["reverse_text"]) == 2
    assert commands == []
    assert "found 0 GPUs" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["reverse_text", "--dry-run"]) == 0
    assert commands == []
    out = capsys.readouterr().out
    assert "GiB planned per rank" in out
    assert "not measured" in out


def test_training_is_launched_with_the_recipe_s_processes_and_judged(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce.main(["gsm8k_lora_0.5b", f"run_root={tmp_path}", "seed=3"]) == 1
    (train,) = commands
    assert train[train.index("--num_processes") + 1] == "2"
    assert train[train.index("--config_file") + 1].endswith("configs/accelerate/ddp.yaml")
    words = train[train.index("train") + 1 :]
    assert words[0] == "experiment=gsm8k_lora"
    assert {"model.path=Qwen/Qwen2.5-0.5B-Instruct", "run_name=recipe-gsm8k_lora_0.5b", "resume=auto"} < set(words)
    assert words[-1] == "seed=3"
    assert "interrupted: found 0 of 116 updates" in capsys.readouterr().out


def test_a_missing_last_evaluation_is_made_and_judged(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "recipe-gsm8k_lora_0.5b", updates=116, passed={0: 30})

    def evaluates(command: list[str]) -> int:
        commands.append(command)
        for word in command:
            if word.startswith("eval.output="):
                write_results(Path(word.partition("=")[2]), [results(54)], model="m", settings={})
        return 0

    monkeypatch.setattr(reproduce, "run_to_the_end", evaluates)
    assert reproduce.main(["gsm8k_lora_0.5b", f"run_root={tmp_path}"]) == 0
    _, evaluate = commands
    assert evaluate[1:4] == ["-m", "lockstep", "evaluate"]
    assert f"model.path={run}/model" in evaluate
    assert [word for word in evaluate if word.startswith(("resume=", "run_name=", "model.path="))] == [
        f"model.path={run}/model"
    ]
    assert json.loads((run / "verdict.json").read_text())["judged_update"] == 116


def test_only_judging_runs_nothing(commands: list[list[str]], tmp_path: Path) -> None:
    make_run(tmp_path / "recipe-gsm8k_lora_0.5b", updates=116, passed={116: 90})
    assert reproduce.main(["gsm8k_lora_0.5b", "--judge", f"run_root={tmp_path}"]) == 1
    assert commands == []
    assert (tmp_path / "recipe-gsm8k_lora_0.5b" / "verdict.md").read_text().splitlines()[0].endswith(": above")


def test_the_judge_reads_no_other_file_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", passed={UPDATES: 50})
    (run / "evaluations" / "before.json").write_text("not an evaluation")
    assert list(judging.evaluations(RECIPE, run / "evaluations")) == [UPDATES]
