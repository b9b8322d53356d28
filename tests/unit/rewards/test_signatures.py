"""Signatures of reward functions, of this trainer and of others: called right, or refused with what to write."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.rewards.composition import FaultTolerance, make_reward_set
from lockstep.rewards.meter import Meter
from lockstep.rewards.trl import from_trl
from lockstep.rewards.workers.pool import Isolation, WorkerPool
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout, RolloutStatus, VersionSpan
from lockstep.rollout.saved_rollouts import from_json, to_json
from tests.unit.rewards.test_composition import rollout

HEAD = """
import asyncio, dataclasses, functools
from decimal import Decimal
import numpy as np
import torch

RIGHT = "7"
every = lambda texts: [float(text == RIGHT) for text in texts]
is_same = lambda left, right: float(left == right)
"""
CALLED = {
    # This trainer's
    "own": "def f(rollout): return float(rollout.answer == RIGHT)",
    "another name": "def f(episode): return float(episode.answer == RIGHT)",
    "positional only": "def f(rollout, /): return float(rollout.answer == RIGHT)",
    "keyword only": "def f(*, rollout): return float(rollout.answer == RIGHT)",
    "keyword only group": "def f(*, rollouts): return [float(one.answer == RIGHT) for one in rollouts]",
    "keywords": "def f(rollout, **kwargs): return float(rollout.answer == RIGHT) if not kwargs else 9.0",
    "defaults": "def f(rollout, scale=1.0, *, bias=0.0): return scale * (rollout.answer == RIGHT) + bias",
    "async": "async def f(rollout): return float(rollout.answer == RIGHT)",
    "lambda": "f = lambda r: float(r.answer == RIGHT)",
    "partial": "def g(scale, rollout): return scale * (rollout.answer == RIGHT)\nf = functools.partial(g, 1.0)",
    "instance": "class C:\n    def __call__(self, rollout): return float(rollout.answer == RIGHT)\nf = C()",
    "async instance": "class C:\n    async def __call__(self, rollout): return float(rollout.answer == RIGHT)\nf = C()",
    "class": "class f:\n    def __call__(self, rollout): return float(rollout.answer == RIGHT)",
    "dataclass": "@dataclasses.dataclass\nclass f:\n    scale: float = 1.0\n"
    "    def __call__(self, rollout): return self.scale * (rollout.answer == RIGHT)",
    "class of groups": "class f:\n    def __call__(self, rollouts):"
    " return [float(r.answer == RIGHT) for r in rollouts]",
    "method": "class C:\n    def g(self, rollout): return float(rollout.answer == RIGHT)\nf = C().g",
    "wraps": "def d(g):\n    @functools.wraps(g)\n    def h(*a, **k): return g(*a, **k)\n    return h\n"
    "@d\ndef f(rollout): return float(rollout.answer == RIGHT)",
    "decorator without wraps": "def d(g):\n    def h(*a, **k): return g(*a, **k)\n    return h\n"
    "@d\ndef f(rollout): return float(rollout.answer == RIGHT)",
    "cached": "@functools.lru_cache\ndef g(text): return float(text == RIGHT)\ndef f(rollout):"
    " return g(rollout.answer)",
    "coroutine of a plain function": "async def g(r): return float(r.answer == RIGHT)\ndef f(rollout):"
    " return g(rollout)",
    "any number": "def f(*args): return float(args[0].answer == RIGHT)",
    "group": "def f(rollouts): return [float(one.answer == RIGHT) for one in rollouts]",
    "async group": "async def f(rollouts): return [float(one.answer == RIGHT) for one in rollouts]",
    # TRL's, with texts, because the prompt is a text
    "trl": "def f(prompts, completions, **kwargs): return every(completions)",
    "trl completions": "def f(completions, **kwargs): return every(completions)",
    "trl column": "def f(completions, answer, **kwargs): return [float(c == a) for c, a in zip(completions, answer)]",
    "trl without keywords": "def f(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]",
    "trl keyword only": "def f(*, completions, answer): return [float(c == a) for c, a in zip(completions, answer)]",
    "trl keywords alone": "def f(**kwargs): return every(kwargs['completions'])",
    "trl ids": "def f(completion_ids, **kwargs): return [float(ids == [2, 2]) for ids in completion_ids]",
    "trl prompts": "def f(prompts, **kwargs):"
    " return [float((p, i) == ('q', [2, 2])) for p, i in zip(prompts, kwargs['completion_ids'])]",
    "trl async": "async def f(completions, **kwargs): return every(completions)",
    "trl instance": "class C:\n    def __call__(self, completions, **kw): return every(completions)\n"
    "f = C()",
    "trl class": "class f:\n    __name__ = 'orm'\n"
    "    def __call__(self, completions, answer, **kw): return [float(c == a) for c, a in zip(completions, answer)]",
    "trl partial": "def g(completions, right, **kw): return [float(c == right) for c in completions]\n"
    "f = functools.partial(g, right=RIGHT)",
    "trl decorated": "def d(g):\n    def h(*a, **k): return g(*a, **k)\n    return h\n"
    "@d\ndef f(completions, **kwargs): return every(completions)",
    "trl coroutine": "async def g(c): return [float(x == RIGHT) for x in c]\ndef f(completions, **kw):"
    " return g(completions)",
    "trl default": "def f(completions, missing=None, **kw):"
    " return [float(c == RIGHT and not missing) for c in completions]",
    "trl fact": "def f(completions, solved, **kw):"
    " return [float(c == RIGHT and s == 1) for c, s in zip(completions, solved)]",
    "trl state": "def f(completions, trainer_state, **kw):\n"
    "    assert (trainer_state.global_step, trainer_state.max_steps) == (3, 20)\n"
    "    return every(completions)",
    # verl's
    "verl": "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    assert data_source == 'math' and extra_info == {'index': 5}\n    return is_same(solution_str, ground_truth)",
    "verl keywords": "def f(data_source, solution_str, ground_truth, extra_info, **kwargs):"
    " return is_same(solution_str, ground_truth)",
    "verl short": "def f(solution_str, ground_truth): return 1.0 if solution_str == ground_truth else 0.0",
    "verl dictionary": "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return {'score': is_same(solution_str, ground_truth), 'pred': solution_str}",
    "verl async": "async def f(data_source, solution_str, ground_truth, extra_info):"
    " return is_same(solution_str, ground_truth)",
    "verl async dictionary": "async def f(solution_str, ground_truth):"
    " return {'score': np.float32(is_same(solution_str, ground_truth))}",
}  # fmt: skip
ROW: dict[str, Any] = {"question": "q", "answer": "7", "ground_truth": "7", "data_source": "math",
                       "extra_info": {"index": 5}, "info": {"level": 2}}  # fmt: skip


SPANS = {0: (VersionSpan(version=2, start=0, end=1), VersionSpan(version=3, start=1, end=2)),
         1: (VersionSpan(version=3, start=0, end=1),)}  # fmt: skip


def given(**row: Any) -> list[Rollout]:
    """A right and a wrong rollout."""
    pair = [rollout("7", tokens=2, number=0), rollout("8", number=1)]
    spans = [replace(one.calls[0], version_spans=SPANS[one.rollout_id]) for one in pair]
    made = zip(pair, spans, strict=True)
    return [replace(one, calls=(call,), example={**ROW, **row}, outcome={"solved": 1}) for one, call in made]


def score(
    path: Path, rollouts: list[Rollout], *, mode: Any = "thread", settings: Mapping[str, Any] | None = None
) -> tuple[list[Rollout], dict[str, float]]:
    rewards = make_reward_set(
        [f"{path}:f"],
        settings=None if settings is None else {"f": settings},
        tolerance=FaultTolerance(max_error_rate=1.0),
        isolation=Isolation(mode=mode, workers=1),
    )
    rewards.num_updates = 20
    try:
        return asyncio.run(rewards.score(rollouts)), rewards.take_metrics()
    finally:
        rewards.close()


def write(path: Path, source: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "mine.py").write_text(HEAD + source)
    return path / "mine.py"


@pytest.mark.parametrize("name", CALLED)
def test_a_signature_is_called_with_what_was_sampled(name: str, tmp_path: Path) -> None:
    found, _ = score(write(tmp_path, CALLED[name]), given())
    assert [(one.rewards.get("f"), one.error) for one in found] == [(1.0, None), (0.0, None)]


async def test_all_signatures_give_the_same_in_worker_processes(tmp_path: Path) -> None:
    pool = WorkerPool(Isolation(workers=1))
    try:
        for number, (name, source) in enumerate(CALLED.items()):
            function = pool.load(f"{write(tmp_path / str(number), source)}:f", {})
            verdicts = await function.judge(given(), Meter(num_updates=20), timeout_s=30.0)
            assert [verdict.value for verdict in verdicts] == [1.0, 0.0], (name, verdicts)
    finally:
        pool.close()


# Texts and messages, as TRL's two formats

FORMAT = """
def f(prompts, completions, **kw):
    return [float(isinstance(p, str) and isinstance(c, str)) for p, c in zip(prompts, completions)]
"""
MESSAGES = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("row", "settings", "is_text"),
    [
        ({"prompt": "q", "question": None}, None, True),
        ({"question": "q"}, None, True),
        ({"question": None, "task": "q"}, None, True),
        ({"prompt": MESSAGES, "question": "q"}, None, False),
        ({"messages": MESSAGES, "question": "q"}, None, False),
        ({"question": None}, None, False),
        ({"question": "q"}, {"conversational": True}, False),
        ({"messages": MESSAGES}, {"conversational": False}, True),
    ],
)
def test_the_prompt_of_the_row_decides_between_texts_and_messages(
    row: dict[str, Any], settings: Any, is_text: bool, tmp_path: Path
) -> None:
    found, _ = score(write(tmp_path, FORMAT), given(**row), settings=settings)
    assert [one.rewards["f"] for one in found] == [float(is_text)] * 2


def test_texts_and_messages_have_what_trl_gives(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    thinking = [
        replace(one, messages=(one.messages[0], {**one.messages[1], "reasoning_content": "hm"})) for one in given()
    ]
    texts = from_trl(lambda prompts, completions: None).arguments(thinking)
    assert texts["prompts"] == ["q", "q"]
    assert texts["completions"][0] == "<think>\nhm\n</think>\n\n7"
    messages = from_trl(lambda completions: None, conversational=True).arguments(thinking)
    assert messages["completions"][0][0]["content"] == "<think>\nhm\n</think>\n\n7", "TRL decodes it with the content"
    (one, _) = given()
    tools = replace(
        one,
        calls=one.calls * 2,
        messages=(
            one.messages[0],
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
            {"role": "assistant", "content": "7", "reasoning_content": "so"},
        ),
    )
    (said,) = from_trl(lambda completions: None, conversational=True).arguments([tools])["completions"]
    assert said[0]["tool_calls"][0]["function"]["arguments"] == {"a": 3}, "objects, as TRL parses them"
    assert (said[1]["name"], said[2]["content"], said[2]["reasoning_content"]) == ("add", "7", "so")
    (text,) = from_trl(lambda completions: None).arguments([tools])["completions"]
    assert text.endswith(
        '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>\n<think>\nso\n</think>\n\n7'
    )


# Values that functions return

VALUES = {
    "floats": "[1.0, 0.0]",
    "a tuple": "(1.0, 0.0)",
    "integers": "[1, 0]",
    "booleans": "[True, False]",
    "a numpy array": "np.array([1.0, 0.0])",
    "a numpy array of integers": "np.array([1, 0], dtype=np.int8)",
    "numpy scalars": "[np.float32(1), np.bool_(False)]",
    "0-d arrays": "[np.array(1.0), np.array(0)]",
    "a tensor": "torch.tensor([1.0, 0.0])",
    "a tensor in half precision": "torch.tensor([1.0, 0.0], dtype=torch.bfloat16)",
    "a tensor with a gradient": "torch.tensor([1.0, 0.0], requires_grad=True)",
    "a tensor of booleans": "torch.tensor([True, False])",
    "0-d tensors": "[torch.tensor(1.0), torch.tensor(0)]",
    "a generator": "(x for x in (1.0, 0.0))",
    "a map": "map(float, (1, 0))",
    "values of a dictionary": "{'a': 1.0, 'b': 0.0}.values()",
}


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_numbers_of_all_kinds_are_rewards(mode: str, tmp_path: Path) -> None:
    cases = "\n".join(f"    {name!r}: lambda: {value}," for name, value in VALUES.items())
    source = f"CASES = {{\n{cases}\n}}\ndef f(rollouts): return CASES[rollouts[0].example['case']]()"
    groups = [replace(one, group_id=group) for group, name in enumerate(VALUES) for one in given(case=name)]
    found, _ = score(write(tmp_path, source), groups, mode=mode)
    for one in found:
        assert one.rewards.get("f") == float(one.answer == "7"), (one.example["case"], one.error)


@pytest.mark.parametrize(
    "value", ["np.float64(1)", "np.array(1.0)", "torch.tensor(1.0)", "True", "np.bool_(True)", "1"]
)
def test_a_number_of_one_rollout_may_be_of_any_kind(value: str, tmp_path: Path) -> None:
    found, _ = score(write(tmp_path, f"def f(rollout): return {value}"), given())
    assert [one.rewards["f"] for one in found] == [1.0, 1.0]


@pytest.mark.parametrize(
    "source",
    [
        "def f(rollout): return None if rollout.answer == RIGHT else 0.5",
        "def f(rollouts): return [None if one.answer == RIGHT else 0.5 for one in rollouts]",
        "def f(completions, **kw): return [None if c == RIGHT else 0.5 for c in completions]",
        "def f(solution_str, ground_truth): return None if solution_str == ground_truth else 0.5",
        "def f(solution_str, ground_truth): return {'score': None if solution_str == ground_truth else 0.5}",
    ],
)
def test_none_means_in_each_signature_that_the_function_does_not_apply(source: str, tmp_path: Path) -> None:
    found, metrics = score(write(tmp_path, source), given())
    assert found[1].rewards == {"f": 0.5}
    assert "no reward function applies to this rollout: each returned None" in str(found[0].error)
    assert not any(value for name, value in metrics.items() if name.startswith("reward/errors"))


ODD = {
    "text": ("'1.0'", "wrong_type"),
    "a set": ("{0.5, 1.0}", "wrong_type"),
    "a dictionary": ("{'a': 1.0, 'b': 0.0}", "wrong_type"),
    "bytes": ("b'ab'", "wrong_type"),
    "a number": ("1.0", "wrong_type"),
    "a 0-d tensor": ("torch.tensor(1.0)", "wrong_type"),
    "nothing": ("None", "wrong_type"),
    "too many": ("[1.0] * 3", "wrong_length"),
    "an endless generator": ("iter(lambda: 1.0, None)", "wrong_length"),
    "columns": ("np.ones((2, 1))", "wrong_type"),
    "NaN": ("[float('nan')] * 2", "non_finite"),
    "a tensor with NaN": ("torch.tensor([float('nan')] * 2)", "non_finite"),
    "texts": ("['1', '0']", "wrong_type"),
    "complex": ("np.array([1j, 2j])", "wrong_type"),
    "a list in itself": ("(lambda l: l.append(l) or l)([])", "exception"),
    "a length that lies": ("type('L', (list,), {'__len__': lambda s: 5})([1.0, 0.0])", None),
    "an iterator that raises": ("(1 / x for x in (1, 0))", "exception"),
    "a float that raises": ("[type('F', (float,), {'__float__': lambda s: 1 / 0})(1.0)] * 2", "exception"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_result_that_is_not_a_list_of_rewards_is_a_failure_of_the_call(name: str, tmp_path: Path) -> None:
    value, outcome = ODD[name]
    found, _ = score(write(tmp_path, f"def f(completions, **kw): return {value}"), given())
    if outcome is None:
        assert [one.rewards["f"] for one in found] == [1.0, 0.0]
        return
    assert all(one.status is RolloutStatus.FAILED for one in found)
    assert f"reward f: {outcome}" in str(found[0].error)


# Signatures that are not called

REFUSED = {
    "OpenRLHF": ("def f(queries, prompts, labels, **kwargs): ...", "OpenRLHF"),
    "OpenRLHF without labels": ("def f(queries, prompts): ...", "OpenRLHF"),
    "slime": ("async def f(args, sample, **kwargs): ...", "slime"),
    "slime in batches": ("async def f(args, samples, **kwargs): ...", "slime"),
    "AReaL": ("def f(prompt, completions, prompt_ids, completion_ids, answer, **kwargs): ...", "AReaL"),
    "verl in batches": ("def f(data_sources, solution_strs, ground_truths, extra_infos): ...", "verl's batch reward"),
    "verl's manager": ("class f:\n    def __call__(self, data, return_dict=False): ...", "verl's reward manager"),
    "verl with a server": (
        "async def f(data_source, solution_str, ground_truth, extra_info, reward_router_address): ...",
        "that of verl, but 'reward_router_address' is not passed here",
    ),
    "open-instruct": (
        "class f:\n    def __call__(self, tokenized_prediction, prediction, label, query=None): ...",
        "open-instruct",
    ),
    "EasyR1": ("def f(reward_inputs, format_weight=0.1): ...", "EasyR1"),
    "verifiers": ("def f(completion, answer, **kwargs): ...", "verifiers"),
    "verifiers with all": ("def f(prompt, completion, answer, state, info): ...", "verifiers"),
    "TRL's environments": ("def f(environments, **kwargs): ...", "TRL, but 'environments' is not passed here"),
    "TRL positional": ("def f(completions, /, **kwargs): ...", "TRL, but 'completions' is not passed here by name"),
    "two texts": ("def f(response, ground_truth): ...", "none of a reward"),
    "three": ("def f(question, prediction, target): ...", "none of a reward"),
    "a text": ("def f(text): ...", "none of a reward"),
    "an answer": ("def f(answer, **kwargs): ...", "none of a reward"),
    "nothing": ("def f(): ...", "none of a reward"),
    "hidden": ("def f(*args, **kwargs): ...", r"f\(\*args, \*\*kwargs\) is none"),
    "two functions": (
        "def d(g, h):\n    def k(*a, **b): return g(*a, **b) + h(*a, **b)\n    return k\n"
        "f = d(lambda r: 1.0, lambda r: 0.0)",
        "functools.wraps",
    ),
    "keyword only": ("def f(*, episode, scale): ...", "none of a reward"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_foreign_signature_is_named_and_never_bound_to_a_constant(name: str, tmp_path: Path) -> None:
    source, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says) as refused:
        score(write(tmp_path, source), given())
    text = str(refused.value)
    assert "write `def f(rollout)`, where rollout.answer is the sampled text" in text
    assert "reward.settings" not in text


@pytest.mark.parametrize(
    ("source", "settings", "says"),
    [
        ("def f(rollout, target): ...", {}, r"set reward\.settings\.f\.target=<value>"),
        ("def f(rollout, target): ...", {}, r"or read the column of the row: rollout\.example\['target'\]"),
        ("def f(rollout, target): ...", {"tragte": 1}, r"it takes target: leave out reward\.settings\.f\.tragte"),
        ("def f(rollouts, *, step): ...", {}, r"set reward\.settings\.f\.step=<value>"),
        ("def f(completions): ...", {"x": 1}, r"leave out reward\.settings\.f\.x"),
        ("class f:\n    def __init__(self, low): ...\n    def __call__(self, r): ...", {}, r"settings\.f\.low=<value>"),
        ("class f:\n    def __init__(self): 1 / 0\n    def __call__(self, r): ...", {}, "cannot be made: ZeroDivision"),
        ("class f: ...", {}, "without __call__; write `def __call__"),
        ("f = type", {}, "its signature cannot be read"),
    ],
)
def test_settings_and_classes_that_do_not_fit_are_refused(
    source: str, settings: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        score(write(tmp_path, source), given(), settings=settings)


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("class f:\n    def __init__(self, low): self.low = low\n    def __call__(self, r):"
    " return self.low", {"low": 2.0}),
        ("def f(rollout, low): return low", {"low": 2.0}),
        ("def f(completions, low): return [low] * len(completions)", {"low": 2.0}),
        ("def f(solution_str, ground_truth, low): return low", {"low": 2.0}),
    ],
)  # fmt: skip
def test_settings_reach_functions_of_each_signature(source: str, settings: Any, tmp_path: Path) -> None:
    found, _ = score(write(tmp_path, source), given(), settings=settings)
    assert [one.rewards.get("f") for one in found] == [2.0, 2.0]


def test_a_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    for source in (
        "def f(completions, solution): ...",
        "def f(data_source, solution_str, ground_truth): ...",
    ):
        rows = [replace(one, example={"question": "q", "truth": "7"}) for one in given()]
        found, _ = score(write(tmp_path / str(len(source)), source), rows)
        missing = "solution" if "solution)" in source else "data_source"
        assert f"needs column '{missing}' of the data row" in str(found[0].error)
        assert f"set 'data.columns={{{missing}: <column>}}'" in str(found[0].error)


def test_verls_rows_hold_the_truth_in_their_reward_model(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def f(data_source, solution_str, ground_truth, extra_info): return is_same(solution_str, ground_truth)",
    )
    row = {"data_source": "d", "reward_model": {"style": "rule", "ground_truth": "8"}, "prompt": MESSAGES}
    found, _ = score(path, [replace(one, example=row) for one in given()])
    assert [one.rewards["f"] for one in found] == [0.0, 1.0]


# log_extra, log_metric

LOGS = """
def f(completions, log_extra, log_metric, **kw):
    log_extra("said", [c + "!" for c in completions])
    log_extra("size", np.array([len(c) for c in completions]))
    log_extra("odd", [{"a": 1}, float("nan")])
    log_metric("length", sum(map(len, completions)) / 4)
    log_metric("length", torch.tensor(1.5))
    return [1.0, None]
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_what_a_function_logs_reaches_metrics_and_saved_rollouts(mode: str, tmp_path: Path) -> None:
    (first, second), metrics = score(write(tmp_path, LOGS), given(), mode=mode)
    assert metrics["reward/f/metric/length"] == 1.0
    assert first.logged == {"f": {"said": "7!", "size": 1, "odd": "{'a': 1}"}}
    assert second.logged == {"f": {"said": "8!", "size": 1, "odd": "nan"}}
    assert second.status is RolloutStatus.FAILED
    assert "no reward function applies" in str(second.error)
    assert from_json(to_json(first)).logged == first.logged
    assert "logged" not in to_json(given()[0])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("log_extra('a', [1])", r"log_extra\('a'\): expected a list with one value for each of 2 rollouts"),
        ("log_extra('a', 'xy')", "expected a list"),
        ("log_metric('a', 'x')", r"log_metric\('a'\): found a str, expected a number"),
    ],
)
def test_what_cannot_be_logged_is_an_error_of_the_function(line: str, says: str, tmp_path: Path) -> None:
    source = f"def f(completions, log_extra, log_metric):\n    {line}\n    return [1.0] * 2"
    found, _ = score(write(tmp_path, source), given())
    assert re.search(says, str(found[0].error))


def test_other_values_of_verls_dictionary_are_columns(tmp_path: Path) -> None:
    found, _ = score(write(tmp_path, CALLED["verl dictionary"]), given())
    assert [one.logged for one in found] == [{"f": {"pred": "7"}}, {"f": {"pred": "8"}}]


def test_the_state_of_the_trainer_says_what_it_has(tmp_path: Path) -> None:
    found, _ = score(write(tmp_path, "def f(completions, trainer_state): return trainer_state.epoch"), given())
    assert "exception: AttributeError" in str(found[0].error)


# Sums


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize(("value", "weights"), [(1.7e308, [1.0, 1.0]), (9e99, [1.0, 1.0]), (1.0, [1e308, 1e308])])
def test_rewards_that_add_up_to_infinity_are_refused(mode: Any, value: float, weights: Any, tmp_path: Path) -> None:
    path = write(tmp_path, f"def f(rollout): return {value}\ndef g(rollout): return {value}\n")
    rewards = make_reward_set([f"{path}:f", f"{path}:g"], weights, isolation=Isolation(mode=mode, workers=1))
    try:
        found = asyncio.run(rewards.score(given()))
        metrics = rewards.take_metrics()
    finally:
        rewards.close()
    for one in found:
        assert (one.status, one.reward, one.rewards) == (RolloutStatus.FAILED, 0.0, {})
        assert "non_finite: " in str(one.error)
    assert metrics["reward/errors/non_finite"] >= 2
    assert all(map(math.isfinite, metrics.values()))
