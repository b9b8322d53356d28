"""Lists of saved rollouts: filters, search, damage, hostile names; one rollout with its tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lockstep.lab.watch import rollout_search
from lockstep.lab.watch.rollout_search import Query, RolloutSearch
from lockstep.lab.watch.run_table import WatchedRun
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import ImageSpan, Prompt, Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import write_rollouts
from tests.unit.lab.pages.test_run_report import line, rollout, write_run

FILE = "step-000002.jsonl"


def asked(number: int, reward: float, question: str, **more: Any) -> Rollout:
    one = rollout(number, reward, **more)
    return replace(one, messages=({"role": "user", "content": question}, *one.messages[1:]))


def longer(one: Rollout) -> Rollout:
    call = replace(one.calls[1], sampled_ids=(2, 3, 4), sampled_logprobs=(-0.5, -0.1, -0.2))
    return replace(one, calls=(one.calls[0], call))


@pytest.fixture
def run(tmp_path: Path) -> WatchedRun:
    rollouts = [
        asked(0, 0.5, "compute 1+1"),
        asked(1, 1.0, "compute 2+2", said="Ünïcode\nanswer"),
        asked(2, 0.0, "compute 1+1", status=RolloutStatus.FAILED, error="boom"),
        longer(asked(3, 0.25, "compute 3+3")),
    ]
    path = write_run(tmp_path / "run", [line(1), line(2)], rollouts)
    write_rollouts(path / "rollouts/step-000001.jsonl", [asked(0, 0.125, "compute 1+1"), asked(1, 0.0, "compute 9+9")])
    return WatchedRun(path, Path(path.name))


def ids(found: dict[str, Any]) -> list[int]:
    return [head["id"] for head in found["rollouts"]]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"order": "worst"}, [2, 3, 0, 1]),
        ({"order": "best"}, [1, 0, 3, 2]),
        ({"order": "longest"}, [3, 0, 1, 2]),
        ({"only_failed": True}, [2]),
        ({"text": "COMPUTE 1+1"}, [0, 2]),
        ({"text": "ünïcode\nansw"}, [1]),
        ({"text": 'calculator(expression="The answer'}, [0, 2, 3]),
        ({"prompt": "compute 3+3"}, [3]),
    ],
)
def test_filters_and_orders(run: WatchedRun, query: dict[str, Any], expected: list[int]):
    assert ids(RolloutSearch().of_step(run, FILE, Query(**query))) == expected


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="expected one of saved, worst, best, longest"):
        Query(order="__class__")


def test_a_prompt_is_followed_over_time_newest_first(run: WatchedRun):
    search = RolloutSearch()
    query = Query(prompt=search.prompt_of(run, FILE, 0))
    found = search.of_all_steps(run, query, before="", deadline=math.inf)
    assert [(head["update"], head["id"]) for head in found["rollouts"]] == [(2, 0), (2, 2), (1, 0)]
    assert found["before"] == ""


def test_a_search_over_all_steps_goes_on_where_it_stopped(run: WatchedRun):
    search = RolloutSearch()
    found = search.of_all_steps(run, Query(text="compute"), before="", deadline=-math.inf)
    assert ids(found) == [0, 1, 2, 3]
    assert found["before"] == FILE
    rest = search.of_all_steps(run, Query(text="compute"), before=FILE, deadline=-math.inf)
    assert ids(rest) == [0, 1]
    assert rest["before"] == ""


@pytest.mark.parametrize("query", [{"text": "ünïcode\nansw"}, {"text": 'calculator(expression="The'}, {"text": "+"}])
def test_a_search_over_all_steps_finds_what_a_list_of_a_step_finds(run: WatchedRun, query: dict[str, Any]):
    listed = RolloutSearch().of_step(run, FILE, Query(**query))
    found = RolloutSearch().of_all_steps(run, Query(**query), before="", deadline=-math.inf)
    assert ids(found) == ids(listed) != []


def test_a_damaged_line_is_counted_and_the_others_are_listed(run: WatchedRun):
    path = run.path / "rollouts" / FILE
    path.write_text('{"rollout_id": 1}\n' + path.read_text() + "garbage")
    found = RolloutSearch().of_step(run, FILE, Query())
    assert ids(found) == [0, 1, 2, 3]
    assert found["damaged"] == 2
    assert found["rollouts"][0]["line"] == 1
    with pytest.raises(ConfigError, match="is not a saved rollout"):
        RolloutSearch().rollout(run, FILE, 0)


@pytest.mark.parametrize(
    "name", ["../config.yaml", "step-000001.jsonl/../../config.yaml", "", "/etc/passwd", "step-1.json"]
)
def test_only_files_of_rollouts_are_read(run: WatchedRun, name: str):
    with pytest.raises(OSError, match="is not a name that a run gives"):
        RolloutSearch().of_step(run, name, Query())


def test_a_link_to_elsewhere_is_not_followed(run: WatchedRun, tmp_path: Path):
    (run.path / "rollouts/step-000003.jsonl").symlink_to(run.path / "rollouts" / FILE)
    with pytest.raises(OSError, match="is a link"):
        RolloutSearch().of_step(run, "step-000003.jsonl", Query())


def test_a_list_that_has_changed_is_read_again(run: WatchedRun):
    search = RolloutSearch()
    assert len(ids(search.of_step(run, FILE, Query()))) == 4
    write_rollouts(run.path / "rollouts" / FILE, [asked(7, 0.5, "new")])
    assert ids(search.of_step(run, FILE, Query())) == [7]


def test_one_rollout_has_messages_and_tokens(run: WatchedRun, monkeypatch: pytest.MonkeyPatch):
    one = RolloutSearch().rollout(run, FILE, 2)
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert one["messages"][1]["calls"] == ['calculator(expression="The answer is 3")']
    assert one["error"] == "boom"
    assert one["calls"][0]["prompt"] == [(1, "[1]")]
    assert one["calls"][0]["sampled"] == [(2, "[2]", -0.5), (3, "[3]", -0.1)]
    monkeypatch.setattr(rollout_search, "MAX_TOKENS", 2)
    cut = RolloutSearch().rollout(run, FILE, 2)
    assert sum(len(call["prompt"]) + len(call["sampled"]) for call in cut["calls"]) == 2
    assert cut["isCut"]


def test_tokens_have_the_texts_of_the_tokenizer_that_the_run_saved(run: WatchedRun):
    (run.path / "model").mkdir()
    tokenizer = Tokenizer(WordLevel({"a": 0, "who": 1, "says": 2}, unk_token="a"))
    tokenizer.save(str(run.path / "model/tokenizer.json"))
    one = RolloutSearch().rollout(run, FILE, 0)
    assert one["calls"][0]["prompt"] == [(1, "who")]
    assert one["calls"][0]["sampled"] == [(2, "says", -0.5), (3, "[3]", -0.1)]
    (run.path / "model/tokenizer.json").write_text("{}")
    assert RolloutSearch().rollout(run, FILE, 0)["calls"][0]["prompt"] == [(1, "[1]")]


def with_image(one: Rollout, digest: str) -> Rollout:
    image = {"type": "image", "digest": digest}
    prompt = {"role": "user", "content": [{"type": "text", "text": "see"}, image]}
    spans = (ImageSpan(start=1, end=4, digest=digest),)
    first = replace(one.calls[0], prompt=Prompt(own_ids=(1, 7, 7, 7, 2)), images=spans)
    second = replace(one.calls[1], prompt=Prompt(own_ids=(3, 4), base=first, num_shared=6), images=spans)
    return replace(one, messages=(prompt, *one.messages[1:]), calls=(first, second))


def test_an_image_is_one_piece_of_its_message_and_one_token(tmp_path: Path):
    path = write_run(tmp_path / "run", [line(1), line(2)], [with_image(rollout(0, 1.0), "a" * 64)])
    one = RolloutSearch().rollout(WatchedRun(path, Path("run")), FILE, 0)
    image = {"digest": "a" * 64, "name": "[image aaaaaa…]"}
    assert one["messages"][0]["pieces"] == [{"text": "see"}, image]
    assert one["messages"][2]["pieces"] == [{"text": "The answer is 3"}]
    assert one["question"] == "see [image aaaaaa…]"
    assert one["calls"][0]["prompt"] == [(1, "[1]"), {**image, "tokens": 3}, (2, "[2]")]
    assert one["calls"][1]["prompt"] == [(3, "[3]"), (4, "[4]")]
