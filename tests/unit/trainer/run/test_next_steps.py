"""The sentence and the commands printed at the end of a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.names import model_problems
from lockstep.trainer.config.schema import ModelConfig, TeacherConfig
from lockstep.trainer.config.tree import plain
from lockstep.trainer.observe.trackers.view import program
from lockstep.trainer.run import next_steps as module
from lockstep.trainer.run.next_steps import next_steps, outcome
from lockstep.trainer.tools.run_as_word import refuse_runs
from tests.fixtures.composed import composed
from tests.fixtures.paths import ROOT

RUN = Path("runs/my run")
DATA = ["data.path=a.jsonl", "data.columns={prompt: task}", "reward.functions=[f.py:g]"]
WORDS = [*DATA, "optimizer.lr=1e-4", "updates=5"]
HELDOUT = "data.heldout_path=b.jsonl"


@pytest.fixture(autouse=True)
def active_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setattr(module, "lockstep", lambda: "lockstep")  # an environment may lack the entry point


def steps(*settings: str, **changes: object) -> dict[str, list[str]]:
    defaults = {"run": RUN, "model": RUN / "model", "update": 5, "launcher": "lockstep", "trackers": {}}
    lines = next_steps(composed(HELDOUT, *WORDS, *settings), WORDS, **(defaults | changes)).splitlines()  # type: ignore[arg-type]
    return {line.split()[0]: shlex.split(line[14:]) for line in lines}


def evaluation(*words: str) -> list[str]:
    config, model = composed(HELDOUT, *words), RUN / "model"
    lines = next_steps(config, words, run=RUN, model=model, update=5, launcher="", trackers={}).splitlines()
    return next(shlex.split(line)[3:] for line in lines if line.startswith("evaluate"))


def metrics(rewards: list[float | None], name: str = "reward/mean") -> list[dict[str, float | None]]:
    """Make a line of metrics.jsonl per step, ten seconds apart."""
    return [{"step": i, name: reward, "time/run": 60.0 + 10 * i} for i, reward in enumerate(rewards, start=1)]


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([], ""),
        ([0.25], "; mean reward 0.250 in the only step"),
        ([None, 0.25], "; mean reward 0.250 in the only step"),
        ([0.25, 0.5], "; mean reward 0.250 in the first step and 0.500 in the last"),
        ([0.25, 9.0, 0.5], "; mean reward 0.250 in the first step and 0.500 in the last"),
        ([0.0, 0.5, 9.0, 1.0, 3.0], "; mean reward 0.250 in the first 2 steps and 2.000 in the last 2"),
        ([0.2] * 5 + [9.0] * 7 + [0.8] * 5, "; mean reward 0.200 in the first 5 steps and 0.800 in the last 5"),
    ],
)
def test_a_run_says_what_the_reward_was_at_both_ends(rewards: list[float | None], said: str):
    assert outcome(metrics(rewards), len(rewards), [], seconds=305) == f"reached update {len(rewards)} in 0:05:05{said}"


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes():
    lines = [{"step": i, "time/run": age} for i, age in enumerate([50.0, 100.0, 60.0, 90.0, 70.0])]
    assert outcome(lines, 5, [], seconds=80) == "reached update 5 in 0:04:30"
    assert outcome(lines, 5, [], seconds=10) == "reached update 5 in 0:04:30", "nothing was left to train"


def test_a_run_says_how_many_rollouts_were_not_trained():
    lines = metrics([0.5, 0.5])
    lines[0] |= {"rollout/dropped_reward": 7.0, "rollout/dropped_prompt": 1.0, "rollout/dropped_fraction": 1.0}
    lines[1] |= {"rollout/dropped_reward": 2.0, "rollout/dropped_prompt": 0.0}
    assert outcome(lines, 2, [], seconds=1).endswith("; 10 rollouts were not trained: reward 9, prompt 1")


def test_a_run_says_what_held_out_data_gave():
    assert outcome(metrics([0.5]), 1, ["held-out data 0.1", "hard 0.2"], seconds=1).endswith(
        "in the only step; held-out data 0.1; hard 0.2"
    )


def test_a_run_without_rollouts_says_its_losses():
    lines = [{"step": 0, "eval/cross_entropy": 3.0}, *metrics([2.0, 1.0], "loss/demonstrations")]
    lines[-1] |= {"eval/cross_entropy": 1.5, "eval/hard/cross_entropy": 1.75, "eval/perplexity": 4.5}
    assert outcome(lines, 2, [], seconds=300) == (
        "reached update 2 in 0:05:00; mean loss 2.0000 in the first step and 1.0000 in the last; "
        "eval/cross_entropy 3.0000 before training and 1.5000 after update 2; eval/hard/cross_entropy 1.7500 after "
        "update 2"
    )
    mixed = [line | {"reward/mean": 0.5} for line in metrics([2.0, 1.0], "loss/demonstrations")]
    assert "loss" not in outcome(mixed, 2, [], seconds=300)


def test_the_evaluation_uses_the_runs_data_and_rewards():
    assert steps()["evaluate"] == ["lockstep", "evaluate", "model.path=runs/my run/model", *DATA]


def test_the_evaluation_compares_with_the_model_the_run_began_from():
    assert steps("model.path=models/base")["evaluate"] == [
        "lockstep", "evaluate", "model.path=runs/my run/model", *DATA, "eval.compare_to=models/base"
    ]  # fmt: skip
    words = [*WORDS, "model.path=m", "eval.compare_to=other"]
    lines = next_steps(
        composed(HELDOUT, *words), words, run=RUN, model=RUN / "model", update=5, launcher="", trackers={}
    )
    assert lines.count("eval.compare_to=") == 1
    adapter = RUN / "model/adapter"
    assert "compare_to" not in " ".join(steps("model.path=models/base", adapter=adapter)["evaluate"])


def test_the_evaluation_repeats_no_setting():
    words = [*DATA, "optimizer.lr=1e-4", "reward.functions=[typed.py:g]", "reward.weights=[1.0]"]
    lines = next_steps(
        composed(HELDOUT, *words), words, run=RUN, model=RUN / "model", update=5, launcher="", trackers={}
    )
    (evaluate,) = (shlex.split(line)[3:] for line in lines.splitlines() if line.startswith("evaluate"))
    assert evaluate == [
        "model.path=runs/my run/model", *DATA[:2], "reward.functions=[typed.py:g]", "reward.weights=[1.0]"
    ]  # fmt: skip


class TestRunInPlaceOfWords:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        run = Path("runs/mine")
        (run / "model").mkdir(parents=True)
        config = composed(HELDOUT, *WORDS, "model.path=models/base", "model.lora.rank=4", "environment.max_turns=3")
        (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(config))))
        (run / "model/config.json").write_text("{}")
        Path("runs/latest").symlink_to("mine")
        return run

    @pytest.mark.parametrize("word", ["runs/mine", "runs/mine/", "runs/latest"])
    def test_it_is_refused_with_the_command_that_evaluates_its_model(self, run: Path, word: str):
        with pytest.raises(ConfigError) as refused:
            refuse_runs(["eval.prompts=3", word])
        sentence, _, command = str(refused.value).partition(": ")
        assert sentence == f"{word} is a run; to evaluate its model type"
        program, name, *words = shlex.split(command)
        assert (program, name, words[0], words[-1]) == (
            "lockstep", "evaluate", f"model.path={run}/model", "eval.compare_to=models/base"
        )  # fmt: skip
        again, config = composed(*words), composed(HELDOUT, *WORDS, "environment.max_turns=3")
        assert (again.data, again.reward, again.environment) == (config.data, config.reward, config.environment)
        assert again.model.lora.rank == 0
        refuse_runs(["eval.prompts=3", f"model.path={word}", "runs"])

    def test_a_run_with_an_adapter_alone_is_evaluated_with_it(self, run: Path):
        (run / "model/config.json").unlink()
        with pytest.raises(ConfigError, match="runs/mine is a run without a saved model; write the model of a check"):
            refuse_runs([str(run)])
        (run / "model/adapter").mkdir()
        with pytest.raises(ConfigError, match=r"model.path=models/base 'model.adapters=\{trained: runs/mine/model/ada"):
            refuse_runs([str(run)])

    def test_as_the_path_of_a_model_it_is_refused_with_its_model(self, run: Path):
        checkpoint = run / "checkpoints/step-12"
        checkpoint.mkdir(parents=True)
        for name in ("manifest.json", "config.json"):
            (checkpoint / name).write_text("{}")
        model, teacher = ModelConfig(path=str(run)), TeacherConfig(path=str(checkpoint))
        first, second = model_problems(model, teacher)
        assert first == "model.path=runs/mine is a run; set model.path=runs/mine/model for the model that it has left"
        assert second.startswith(
            "teacher.path=runs/mine/checkpoints/step-12 is a checkpoint, which holds no model files"
        )
        assert "lockstep publish runs/mine --repo <user>/<name> --checkpoint 12 --out <folder>" in second


def test_a_finished_run_resumes_to_twice_its_updates_and_a_stopped_one_to_its_goal():
    assert steps()["resume"][-3:] == ["run_name=my run", "resume=auto", "updates=10"]
    assert steps(update=3)["resume"][-1] == "updates=5"
    assert "optimizer.lr=1e-4" not in steps()["resume"], "the run's config.yaml holds it"


def test_the_evaluation_of_a_resumed_run_has_the_settings_that_its_command_did_not_repeat():
    config = composed(
        HELDOUT, *DATA, "model.path=m", "environment.settings={url: 'http://a?b', hints: true}", "optimizer.lr=1"
    )
    config.resume = "auto"
    words = ["run_name=my run", "resume=auto"]
    lines = next_steps(
        config, words, run=RUN, model=RUN / "model", update=5, launcher="python", trackers={}
    ).splitlines()
    (evaluate,) = (shlex.split(line)[3:] for line in lines if line.startswith("evaluate"))
    assert evaluate[0] == "model.path=runs/my run/model"
    again = composed(*evaluate[1:])
    assert (again.data, again.environment, again.reward) == (config.data, config.environment, config.reward)
    assert not any(word.startswith(("optimizer.", "resume")) for word in evaluate)


def test_without_held_out_data_no_evaluation_is_offered():
    assert "evaluate" not in steps("data.heldout_path=null")


def test_rewards_per_turn_are_read_by_the_evaluation_too():
    assert steps("algorithm.turn_rewards=true")["evaluate"][3:4] == ["algorithm.turn_rewards=true"]


def test_a_run_without_rollouts_offers_none_to_inspect():
    assert "inspect" in steps()
    assert "inspect" not in steps("algorithm.trains_on=demonstrations")


def test_secrets_are_redacted():
    lines = next_steps(
        composed(*WORDS),
        [*WORDS, "gateway.api_key=hunter2", "reward.settings.judge={token: hunter2}"],
        run=RUN,
        model=RUN / "model",
        update=5,
        launcher="python",
        trackers={},
    )
    assert "hunter2" not in lines
    assert "'gateway.api_key=<redacted>'" in lines


def test_a_critic_is_listed_if_the_run_has_one():
    assert "critic" not in steps()
    assert "critic" in steps(critic=RUN / "critic")


def test_commands_can_be_pasted_where_the_user_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    pasted = steps()
    assert [pasted[name][1] for name in ("resume", "evaluate", "inspect", "report")] == [
        "train",
        "evaluate",
        "inspect-run",
        "report",
    ]
    assert pasted["inspect"][-1] == str(RUN)
    elsewhere = steps(run=Path("/data/runs/a"), model=Path("/data/runs/a/model"))
    assert elsewhere["report"][-1] == "/data/runs/a"
    monkeypatch.chdir(ROOT)
    assert steps(run=tmp_path / "a")["inspect"] == ["lockstep", "inspect-run", str(tmp_path / "a")]
    assert steps(run=ROOT / "runs" / "a")["inspect"][-1] == "runs/a"


def test_the_data_of_each_tracker_and_their_command_are_listed():
    assert steps(trackers={"TensorBoard": "tensorboard --logdir a  # data: a"})["TensorBoard"][:2] == [
        "tensorboard",
        "--logdir",
    ]


def test_programs_of_an_environment_that_is_not_active_have_their_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert program("python") == "python"
    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))  # as `make` runs it
    monkeypatch.chdir(ROOT)
    assert program("python") == ".venv/bin/python"
    assert program("accelerate") == ".venv/bin/accelerate"
    monkeypatch.chdir(tmp_path)
    assert program("python") == str(ROOT / ".venv/bin/python")
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)  # conda, or the system's own Python
    assert program("python") == "python"
