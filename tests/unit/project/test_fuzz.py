"""Random input from outside is accepted or refused with one of Lockstep's errors, never with another traceback.

Configurations, command lines, data rows, engine calls, replies of reward workers, dumped batches, results of
evaluations and files of a run. Elsewhere: answers and requests of servers (test_engine_answers_fuzz.py), tool calls
(test_tool_calls.py, test_harmony.py), requests to the gateway (test_api.py), manifests (test_checkpoint.py), saved
rollouts and data files (test_security.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import typing
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from lockstep.lab.replay import saved_step, settings_of
from lockstep.rewards.outcomes import Outcome
from lockstep.rewards.workers import pool as isolation
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.errors import ConfigError, DataError, EvidenceError, LockstepError
from lockstep.rollout.records import EngineCall, FinishReason, SamplingSupport, VersionSpan
from lockstep.rollout.safe_text import MAX_CHARS
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.cli import explain
from lockstep.trainer.compose import CONFIG_DIR, to_config
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.evaluate.results import PromptResult, SetResult, read_results, write_results
from lockstep.trainer.setting import declarations
from lockstep.trainer.update.batch_dumps import ATTEMPT, read_dump
from tests.fixtures.mutations import JSON, PLAIN, mutated

pytestmark = pytest.mark.long

ODD_TEXT = st.text(max_size=12) | st.sampled_from(
    [
        "",
        " ",
        "/",
        "..",
        "~no-such-user",
        "a\0b",
        "x" * 5000,
        "./x.py:f",
        ":",
        "x:",
        ":y",
        "\ud800",
        "a/b/c",
        "auto",
    ]
)
NUMBERS = {
    int: st.integers() | st.sampled_from([0, -1, 2**63, 10**400]),
    float: st.floats() | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1e308]),
    bool: st.booleans(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as Hydra accepts them."""
    if kind in NUMBERS:
        return NUMBERS[kind]
    if kind is NoneType:
        return st.none()
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(ODD_TEXT, PLAIN if arguments[1] is Any else values_of(arguments[1]), max_size=2)
    if origin in (typing.Union, UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    return ODD_TEXT


def settings_below(node: type, prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    hints = typing.get_type_hints(node)
    for field in dataclasses.fields(node):
        kind, name = hints[field.name], f"{prefix}{field.name}"
        found += settings_below(kind, f"{name}.") if dataclasses.is_dataclass(kind) else [(name, kind)]
    return found


MADE_AT_LAUNCH = ("data.sources", "eval.sets")
"""Dictionaries of records, which trainer/cli.py makes from the command line."""
SETTINGS = [setting for setting in settings_below(Config) if setting[0] not in MADE_AT_LAUNCH]


@settings(max_examples=400)
@example([("resume", "x" * 300)])
@example([("resume", "~no-such-user")])
@example([("rollout.engine", "server"), ("rollout.urls", ["x" * 300])])
@given(st.lists(st.sampled_from(SETTINGS).flatmap(lambda s: st.tuples(st.just(s[0]), values_of(s[1]))), max_size=4))
def test_a_configuration_without_a_model_is_refused_with_the_names_of_all_values_out_of_range(
    changes: list[tuple[str, Any]],
) -> None:
    config = Config()
    for name, value in changes:
        *path, last = name.split(".")
        node: Any = config
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)
    with pytest.raises(ConfigError) as refused:
        validate(config)
    found = declarations(config)
    wrong = {name for name, (declared, value) in found.items() if value is not None and declared.problem(value)}
    said = str(refused.value)
    assert said
    assert len(said) >= MAX_CHARS or all(name in said for name in wrong)


WORDS = st.sampled_from(
    [name for name, _ in SETTINGS] + ["algorithm", "model", "+x", "~model", "no.such", "++seed", ""]
)


@settings(max_examples=60)
@given(key=WORDS, equals=st.sampled_from(["=", "", "=="]), value=ODD_TEXT | PLAIN.map(str))
def test_a_command_line_is_accepted_or_explained(key: str, equals: str, value: str) -> None:
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            config = to_config(compose("train", overrides=[f"{key}{equals}{value}"]))
        validate(config, needs_data=False)
    except (HydraException, OmegaConfBaseException) as error:
        assert explain(error)  # noqa: PT017
    except (ConfigError, ValueError):  # a bare ValueError is Hydra's, and rewritten in trainer/cli.py
        pass


COLUMNS = st.sampled_from(["messages", "prompt", "question", "answer"]) | st.text(max_size=4)
ROWS = st.dictionaries(COLUMNS, JSON, max_size=4)
FIELDS = st.sampled_from(["role", "content", "tool_calls", "name"])
MESSAGES = st.lists(st.dictionaries(FIELDS, JSON | st.sampled_from(["user", "assistant"])) | JSON, max_size=3)


@settings(max_examples=300)
@given(row=ROWS | MESSAGES.map(lambda found: {"messages": found}), column=st.none() | st.just("prompt"))
def test_the_prompt_of_a_row_is_read_or_refused(row: dict[str, Any], column: str | None) -> None:
    with contextlib.suppress(DataError):
        messages = PromptReader(column=column, system="s").messages(row)
        assert messages


TOKENS = st.lists(st.integers() | PLAIN, max_size=4)


@settings(max_examples=300)
@given(
    prompt_ids=TOKENS, sampled_ids=TOKENS, logprobs=st.lists(st.floats() | PLAIN, max_size=4),
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 5), st.integers(-1, 5)), max_size=3),
)  # fmt: skip
@example(prompt_ids=[1], sampled_ids=[2], logprobs=[10**400], spans=[])
def test_an_engine_answer_is_evidence_or_refused(prompt_ids, sampled_ids, logprobs, spans) -> None:
    with contextlib.suppress(EvidenceError):
        call = EngineCall(
            prompt_ids=tuple(prompt_ids), sampled_ids=tuple(sampled_ids), sampled_logprobs=tuple(logprobs),
            finish_reason=FinishReason.STOP,
            version_spans=tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans),
        )  # fmt: skip
        assert len(call.sampled_ids) == len(call.sampled_logprobs)


@settings(max_examples=200)
@given(offsets=st.lists(st.integers(-2, 6), max_size=5), ids=st.lists(st.integers(0, 9), max_size=5))
@example(offsets=[0, 2, 3], ids=[2, 1, 3])
@example(offsets=[0, 1, 3], ids=[1, 3, 1])
def test_a_sampling_support_is_whole_or_refused(offsets: list[int], ids: list[int]) -> None:
    with contextlib.suppress(EvidenceError):
        support = SamplingSupport(offsets=np.array(offsets, dtype=np.int64), token_ids=np.array(ids, dtype=np.int32))
        kept = [ids[start:end] for start, end in pairwise(offsets)]
        assert all(kept)
        assert [one for part in kept for one in part] == ids
        lacking = (place for place, one in enumerate(kept) if 1 not in one)
        assert support.first_without([1] * len(kept)) == next(lacking, None)


@settings(max_examples=100)
@given(text=JSON.map(json.dumps) | st.text(max_size=20))
def test_an_attempt_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.mktemp("dump")
    (directory / ATTEMPT).write_text(text, errors="replace")
    with pytest.raises(DataError):
        read_dump(directory, CorrectionConfig())


@settings(max_examples=60)
@given(text=JSON.map(yaml.safe_dump) | st.text(max_size=20), line=JSON.map(json.dumps) | st.text(max_size=10))
def test_random_files_of_a_run_are_refused(tmp_path_factory: pytest.TempPathFactory, text: str, line: str) -> None:
    run: Path = tmp_path_factory.mktemp("run")
    (run / "rollouts").mkdir()
    (run / "config.yaml").write_text(text, errors="replace")
    (run / "metrics.jsonl").write_text(line, errors="replace")
    (run / "rollouts" / "step-000001.jsonl").write_text(line.replace("\n", " "), errors="replace")
    with pytest.raises(LockstepError):  # it names no model
        settings_of(run, [], sample=True)
    with pytest.raises(LockstepError):
        saved_step(run, 1)


VERDICTS = {
    "call": "id",
    "verdicts": [{"outcome": "value", "value": 0.5, "turns": [0.5], "detail": ""}],
    "retire": False,
}


@settings(max_examples=200)
@given(reply=mutated(VERDICTS) | st.dictionaries(st.just("verdicts"), JSON), cut=st.integers(0, 3))
def test_a_reply_of_a_reward_worker_is_read_or_it_counts_as_dead(reply: dict[str, Any], cut: int) -> None:
    body = json.dumps(reply).encode()
    body = body[: len(body) - cut]
    with contextlib.suppress(isolation._Died):
        read = isolation._parse(body, "id")
        (verdict,) = isolation._verdicts(read, [1])
        assert math.isfinite(verdict.value) == (verdict.outcome is Outcome.VALUE)


PROMPT = PromptResult(prompt="d", label=None, rewards=(1.0, 0.0), passed=(True, False))


@settings(max_examples=150)
@given(data=st.data())
def test_results_of_an_evaluation_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path: Path = tmp_path_factory.mktemp("results") / "update-000001.json"
    write_results(path, [SetResult(name="", prompts=(PROMPT,), facts={"turns": 1.0})], model="m", settings={"n": 2})
    content = data.draw(mutated(json.loads(path.read_text())) | JSON)
    path.write_text(json.dumps(content))
    with contextlib.suppress(DataError):
        (found,) = {prompt for result in read_results(path, {"n": 2}) for prompt in result.prompts} or {PROMPT}
        assert len(found.rewards) == len(found.passed) > 0
        assert all(map(math.isfinite, found.rewards))
