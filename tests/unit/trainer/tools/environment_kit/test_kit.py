"""Examination of environments: planted faults are found, and environments without a fault pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.examination.finding import Finding, Verdict
from lockstep.trainer.tools.environment_kit.journal import Journal
from lockstep.trainer.tools.environment_kit.kit import findings
from lockstep.trainer.tools.environment_kit.subject import Options
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.policies import TOKENIZER, Policy

ROWS = [
    {"question": f"What is {number} times 11?", "answer": str(11 * number), "level": f"level{number % 3}"}
    for number in range(3, 9)
]
RIGHT = """
from lockstep.rollout.episode.environment import Step


class Question:
    tools = ()

    async def reset(self, example):
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        return Step(done=True)


class Guess(Question):
    async def step(self, message):
        return Step(messages=({"role": "user", "content": "go on"},))
"""


class Pool(Policy):
    """A scripted engine with a loop, in place of a pool of real ones."""

    loop: BackgroundLoop


def says(prompt: str) -> str:
    return "33" if "3 times" in prompt else "I do not know"


@contextmanager
def scripted(config: Config) -> Iterator[Any]:
    with BackgroundLoop() as loop:
        pool = Pool(says)
        pool.loop = loop
        yield pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_qwen3(tied=True).config.save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture
def examined(model: Path, tmp_path: Path):
    """Return a function that examines an environment of a file, or a built-in one, and returns findings by check."""

    def examine(
        source: str = RIGHT,
        environment: str = "Question",
        *,
        reward: str = "exact_match",
        rows: list[dict[str, Any]] = ROWS,
        settings: dict[str, Any] | None = None,
        max_turns: int = 3,
        **options: Any,
    ) -> dict[str, Finding]:
        file = tmp_path / "own.py"
        file.write_text(source)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = Config()
        config.model.path = str(model)
        config.data.path = str(tmp_path / "rows.jsonl")
        config.data.heldout_path = None
        in_file = f"class {environment}" in source or f"def {environment}" in source
        config.environment.name = f"{file}:{environment}" if in_file else environment
        config.environment.settings = {
            key: [value.format(file=file) for value in values] if isinstance(values, list) else values
            for key, values in (settings or {}).items()
        }
        config.environment.max_turns = max_turns
        config.reward.functions = [f"{file}:{reward}" if f"def {reward}" in source else reward]
        config.reward.isolation = "thread"
        config.rollout.max_tokens_per_turn, config.rollout.max_model_len = 256, 2048
        options = {name: str(value).format(file=file) if name == "player" else value for name, value in options.items()}
        given = Options(**{"rows": 6, "samples": 2, "deadline_s": 30.0, **options})
        return {one.check: one for one in findings(config, given, Journal(), open_engine=scripted)}

    return examine


def failed(found: dict[str, Finding]) -> set[str]:
    return {name for name, one in found.items() if one.verdict is Verdict.FAILS}


class TestWithoutAFault:
    def test_a_question_with_an_answer_passes(self, examined):
        found = examined()
        assert failed(found) == set()
        assert found["reward of the reference"].measured == "1, column answer"
        assert found["trained tokens are the sampled tokens"].measured.startswith("match 1.000")
        assert found["rewards differ within groups"].verdict is Verdict.NOTE
        assert found["reward ignores other columns"].measured == "level"

    @pytest.mark.parametrize(
        ("reward", "shown"),
        [
            ("demo_answer", "1, column answer as 'The answer is {answer}'"),
            ("question_answer", "1, column answer as '<answer>{answer}</answer>'"),
            ("numeric", "1, column answer"),
        ],
    )
    def test_the_form_of_a_right_answer_is_found(self, examined, reward, shown):
        found = examined(reward=reward)
        assert failed(found) == set()
        assert found["reward of the reference"].measured == shown

    def test_a_column_without_a_usual_name_is_found_by_what_it_earns(self, examined):
        rows = [{"question": row["question"], "number": row["answer"]} for row in ROWS]
        source = RIGHT + (
            "def found(rollout):\n    return float(rollout.messages[-1]['content'] == rollout.example['number'])\n"
        )
        found = examined(source, reward="found", rows=rows)
        assert failed(found) == set()
        assert found["reward of the reference"].measured == "1, column number"

    def test_a_player_shows_what_no_column_can(self, examined):
        source = RIGHT + (
            "def twice(rollout):\n"
            "    said = [turn['content'] for turn in rollout.messages if turn['role'] == 'assistant']\n"
            "    return float(said == ['first', 'second', 'third'])\n"
            "def best(messages, row):\n"
            "    return ('first', 'second', 'third')[sum(turn['role'] == 'assistant' for turn in messages)]\n"
        )
        rows = [{"question": row["question"]} for row in ROWS]
        found = examined(source, "Guess", reward="twice", rows=rows)
        assert found["reward of the reference"].verdict is Verdict.NOTE
        assert "no reference is known" in found["reward of the reference"].sentence
        found = examined(source, "Guess", reward="twice", rows=rows, player="{file}:best")
        assert failed(found) == set()
        assert found["reward of the reference"].measured.startswith("1, played by ")


class TestGroupWiseRewards:
    def test_a_scripted_answer_is_a_group_of_its_own_and_episodes_are_whole_groups(self, examined):
        source = RIGHT + (
            "sizes = []\n"
            "def brief(rollouts):\n"
            "    sizes.append(len(rollouts))\n"
            "    right = [one.messages[-1]['content'] == one.example['answer'] for one in rollouts]\n"
            "    shortest = min(one.num_sampled for one in rollouts)\n"
            "    return [float(ok and one.num_sampled == shortest) for ok, one in zip(right, rollouts)]\n"
        )
        found = examined(source, reward="brief", samples=3)
        assert failed(found) == set()
        assert found["reward of the reference"].measured == "1, column answer"
        assert found["rewards of a group ignore its order"].measured == "18 of 18 rewards are the same in reverse order"
        module = [module for name, module in sys.modules.items() if name.startswith("lockstep_user_own")][-1]
        assert set(vars(module)["sizes"]) == {1, 3}

    def test_built_ins_that_compare_are_examined_on_episodes_alone(self, examined):
        found = examined(reward="majority_vote")
        assert failed(found) == set()
        assert found["rewards of answers"].verdict is Verdict.NOTE
        assert {"reward of an empty answer", "reward reads the reference"}.isdisjoint(found)
        assert found["answer in the prompt"].measured.startswith("0 of 6 rows")
        assert found["rewards differ within groups"].measured == "0 of 6 groups of 2, mean 0.167"
        assert found["reward functions answer"].measured.endswith("0 without a reward")

    def test_a_reward_that_depends_on_the_order_of_the_group(self, examined):
        source = RIGHT + "def ranked(rollouts):\n    return [float(place) for place, _ in enumerate(rollouts)]\n"
        found = examined(source, reward="ranked")
        assert "rewards of a group ignore its order" in failed(found)
        assert "with the episodes of row 0 in reverse order, one earns 1.0 instead of 0.0" in (
            found["rewards of a group ignore its order"].sentence
        )

    def test_a_function_that_fails_on_a_group_of_one(self, examined):
        source = RIGHT + (
            "def relative(rollouts):\n"
            "    lengths = [one.num_sampled for one in rollouts]\n"
            "    return [sum(l < other for other in lengths) / (len(lengths) - 1) for l in lengths]\n"
        )
        found = examined(source, reward="relative")
        assert "reward functions answer" in failed(found)
        assert "ZeroDivisionError" in found["reward functions answer"].sentence


class TestPlantedFaults:
    def test_an_answer_in_the_prompt(self, examined):
        source = RIGHT.replace('example["question"]', 'example["question"] + " Hint: " + example["answer"]')
        found = examined(source)
        assert {"answer in the prompt", "prompt without the reference"} <= failed(found)
        assert "in 6 of 6 rows (row 0 holds" in found["answer in the prompt"].sentence

    def test_an_answer_in_the_prompt_of_the_data(self, examined):
        rows = [{**row, "question": f"{row['question']} It is {row['answer']}."} for row in ROWS]
        assert failed(examined(rows=rows)) == {"answer in the prompt"}

    def test_an_encoded_answer_in_the_prompt(self, examined):
        source = RIGHT.replace('example["question"]', 'example["question"] + str(int(example["answer"]) ** 2)')
        assert failed(examined(source)) == {"prompt without the reference"}

    def test_a_reward_for_an_empty_answer(self, examined):
        source = RIGHT + (
            "def lenient(rollout):\n"
            "    return float(rollout.example['answer'].startswith(rollout.messages[-1]['content']))\n"
        )
        found = examined(source, reward="lenient")
        assert failed(found) == {"reward of an empty answer"}
        assert found["reward of an empty answer"].sentence.startswith("an empty answer earns up to 1 in 6 rows")

    @pytest.mark.parametrize(
        ("old", "new", "differs"),
        [
            ('"go on"', 'f"go on {random.random()}"', "message 2 (user) was 'go on "),
            ("(messages=", '(outcome={"luck": random.random()}, messages=', "outcome 'luck' was "),
        ],
    )
    def test_an_environment_that_draws_random_numbers(self, examined, old, new, differs):
        found = examined("import random\n" + RIGHT.replace(old, new), "Guess")
        assert {"same texts, same episode", "same seed, same episode"} <= failed(found)
        assert differs in found["same seed, same episode"].sentence

    def test_a_reward_that_draws_random_numbers(self, examined):
        source = "import random\n" + RIGHT + "def lucky(rollout):\n    return random.random()\n"
        found = examined(source, reward="lucky")
        assert "reward lucky was " in found["same seed, same episode"].sentence

    def test_state_that_outlives_the_episode(self, examined):
        source = RIGHT.replace("tools = ()", "tools = ()\n    seen = []").replace(
            'return Step(messages=({"role": "user", "content": "go on"},))',
            'self.seen.append(1)\n        return Step(messages=({"role": "user", "content": str(len(self.seen))},))',
        )
        assert "same texts, same episode" in failed(examined(source, "Guess"))

    def test_a_tool_that_never_returns(self, examined):
        source = (
            "import time\n"
            "def slow(query: str) -> str:\n"
            '    """Search.\n\n    Args:\n        query: words\n    """\n'
            "    time.sleep(1000)\n"
            "def quick(number: int) -> int:\n"
            '    """Square.\n\n    Args:\n        number: any\n    """\n'
            "    return number * number\n"
        )
        found = examined(source, "tools", settings={"files": ["{file}:slow,quick"], "tool_timeout_s": 0.2})
        assert failed(found) == {"tool slow", "calls return in time"}
        assert 'tool slow never answered a call with {"query": "a"}' in found["tool slow"].sentence
        assert found["tool quick"].measured == "1"

    def test_a_step_that_never_returns(self, examined):
        source = "import asyncio\n" + RIGHT.replace("return Step(done=True)", "await asyncio.sleep(1000)")
        found = examined(source, deadline_s=0.2)
        assert failed(found) == {"calls return in time"}
        assert "Question.step did not return in 0.2 s after " in found["calls return in time"].sentence

    def test_a_reward_above_one_for_repetition(self, examined):
        source = RIGHT + (
            "def often(rollout):\n"
            "    return float(rollout.messages[-1]['content'].split().count(rollout.example['answer']))\n"
        )
        found = examined(source, reward="often")
        assert failed(found) == {"reward of a repeated answer", "reward of several answers"}
        assert "earns 64, the answer once 1" in found["reward of a repeated answer"].sentence

    def test_a_reward_that_reads_the_wrong_column(self, examined):
        source = RIGHT + (
            "def wrong(rollout):\n    return float(rollout.messages[-1]['content'] == rollout.example['level'])\n"
        )
        found = examined(source, reward="wrong")
        assert failed(found) == {
            "reward reads the reference", "reward ignores other columns", "reward of the reference"
        }  # fmt: skip
        assert "value of column 'level' as an answer earns more" in found["reward ignores other columns"].sentence

    def test_a_reward_that_also_reads_another_column(self, examined):
        source = RIGHT + (
            "def both(rollout):\n"
            "    right = rollout.messages[-1]['content'] == rollout.example['answer']\n"
            "    return right * (1.0 if rollout.example['level'] == 'level0' else 0.5)\n"
        )
        found = examined(source, reward="both")
        assert failed(found) == {"reward ignores other columns"}
        assert failed(examined(source, reward="both", reads=("level",))) == set()

    def test_a_reward_that_pays_for_the_prompt(self, examined):
        source = RIGHT + "def long(rollout):\n    return min(1.0, len(rollout.messages[-1]['content']) / 20)\n"
        assert {"reward of the echoed prompt", "reward of a repeated answer"} <= failed(examined(source, reward="long"))


class TestFaultsOfUserCode:
    @pytest.mark.parametrize(
        ("old", "new", "sentence"),
        [
            ("return Step(done=True)", "return {}['x']", "Question.step raised KeyError: 'x' after "),
            ("return Step(done=True)", "return None", "Question.step returned None; expected rollout.episode"),
            ("return Step(done=True)", "return Step()", "returned neither messages nor done=True"),
            ("return Step(done=True)", "return Step(messages=('x',))", "returned the message 'x'"),
            ("async def step", "def step", "Question.step is not async"),
            (
                'return [{"role": "user", "content": example["question"]}]',
                "return 'hello'",
                "Question.reset returned str",
            ),
            ('example["question"]', 'example["nothing"]', "Question.reset raised KeyError: 'nothing'"),
            ("tools = ()", "tools = None", "Question.tools holds None"),
            ("return Step(done=True)", "raise SystemExit(3)", "Question.step raised SystemExit: 3"),
        ],
    )
    def test_a_broken_contract_is_a_verdict(self, examined, old, new, sentence):
        found = examined(RIGHT.replace(old, new))
        assert found["environment keeps its contract"].verdict is Verdict.FAILS
        assert sentence in found["environment keeps its contract"].sentence

    @pytest.mark.parametrize(
        ("body", "sentence"),
        [
            ("return 'good'", "reward bad: wrong_type: returned str 'good'"),
            ("return float('nan')", "reward bad: non_finite: returned nan"),
            ("raise ValueError('no')", "reward bad: exception: ValueError in line 19 of "),
            ("import time; time.sleep(1000)", "reward bad: timeout: "),
        ],
    )
    def test_a_broken_reward_is_a_verdict(self, examined, body, sentence):
        found = examined(RIGHT + f"def bad(rollout):\n    {body}\n", reward="bad", deadline_s=0.2)
        assert found["reward functions answer"].verdict is Verdict.FAILS
        assert sentence in found["reward functions answer"].sentence


SHARED = """
from lockstep.rollout.episode.environment import Step


class Shared:
    tools = ()
    row = {}

    async def reset(self, example):
        Shared.row = example
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        is_right = message["content"] == Shared.row["answer"]
        return Step(done=True, outcome={"environment_reward": float(is_right)})


class Turns(Shared):
    def __init__(self, seen=[]):
        self.seen = seen

    async def reset(self, example):
        self.seen.clear()
        self.answer = example["answer"]
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        self.seen.append(message["content"])
        if len(self.seen) < 2:
            return Step(messages=({"role": "user", "content": "again"},))
        is_right = self.seen == [self.answer] * 2
        return Step(done=True, outcome={"environment_reward": float(is_right)})
"""
TELLS = """
from lockstep.rollout.episode.environment import Step


class Tells:
    tools = ()

    async def reset(self, example):
        self.answer, self.left = example["answer"], 2
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        self.left -= 1
        if message["content"] == self.answer or not self.left:
            return Step(done=True)
        return Step(messages=({"role": "user", "content": f"No, it is {self.answer}. Again!"},))
"""
CALLED = """
import json
from lockstep.rollout.episode.environment import Step


class Called:
    tools = ({"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}},)

    async def reset(self, example):
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message):
        calls = message.get("tool_calls") or ()
        if not calls:
            return Step(done=True)
        arguments = calls[0]["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return Step(messages=({"role": "tool", "name": "look", "content": arguments["place"]},))
"""


def reward(body: str) -> str:
    """Return the environment without a fault, with a reward function `paid` that returns an expression."""
    return (
        f"{RIGHT}\nimport re\ndef paid(rollout):\n"
        "    said, answer = rollout.answer, rollout.example['answer']\n"
        f"    return float({body})\n"
    )


class TestPlantedExploits:
    @pytest.mark.parametrize("environment", ["Shared", "Turns"])
    def test_state_that_episodes_share(self, examined, environment):
        found = examined(SHARED, environment, reward="environment_reward")
        assert "episodes at once, same episodes" in failed(found)
        assert "same texts, same episode" not in failed(found)
        sentence = found["episodes at once, same episodes"].sentence
        assert "played at once with the others" in sentence
        assert "Keep what an episode knows in `self`" in sentence

    def test_an_environment_that_tells_the_answer(self, examined):
        found = examined(TELLS, "Tells")
        assert failed(found) == {"answer told after a wrong one"}
        sentence = found["answer told after a wrong one"].sentence
        assert "the environment says the value of column 'answer', first in row 0: No, it is " in sentence
        assert "Repeating it earns 1" in sentence

    def test_an_answer_that_is_told_at_the_end_is_a_note(self, examined):
        source = TELLS.replace("not self.left:", "self.left < 0:") + (
            "def first(rollout):\n    return float(rollout.sampled_turns[0]['content'] == rollout.example['answer'])\n"
        )
        found = examined(source, "Tells", reward="first")
        assert failed(found) == set()
        assert found["answer told after a wrong one"].verdict is Verdict.NOTE

    @pytest.mark.parametrize(
        ("body", "checks"),
        [
            ("answer in said", {"reward of several answers", "reward of a near miss", "reward of a repeated answer"}),
            ("re.search(rf'\\b{answer}\\b', said) is not None", {"reward of several answers"}),
            ("answer in said.split()", {"reward of several answers"}),
            ("said.startswith(answer)", {"reward of a near miss"}),
            ("said.endswith(answer)", {"reward of a near miss"}),
            ("said.isdigit() and abs(int(said) - int(answer)) < 5", {"reward of a near miss"}),
            ("said.isdigit()", {"reward of a near miss", "reward reads the reference"}),
            ("(said.split()[-1:] == [answer]) * min(1.0, 0.5 + len(said) / 100)", {"reward of a padded answer"}),
        ],
    )
    def test_a_reward_that_pays_for_less_than_the_answer(self, examined, body, checks):
        found = examined(reward(body), reward="paid")
        assert failed(found) - {"reward of a repeated answer"} == checks - {"reward of a repeated answer"}

    def test_the_built_in_that_looks_anywhere_is_named(self, examined):
        assert failed(examined(reward="contains")) == {"reward of several answers"}

    def test_a_reward_that_counts_what_the_environment_says(self, examined):
        source = TELLS + (
            "def anyone(rollout):\n"
            "    return float(any(rollout.example['answer'] == word.strip('.!') for turn in rollout.messages[1:]\n"
            "                     for word in str(turn['content']).split()))\n"
        )
        assert {"reward of a near miss", "answer told after a wrong one"} <= failed(
            examined(source, "Tells", reward="anyone")
        )

    @pytest.mark.parametrize(
        ("body", "check"),
        [
            ("(said == answer) * (time.time() % 1)", "same texts, same episode"),  # the clock
            ("(said == answer) * (1 + next(calls) % 2)", "same texts, same episode"),  # the number of the call
            ("(said == answer) * next(calls)", "episodes at once, same episodes"),
            ("said not in seen and not seen.add(said)", "same texts, same episode"),  # an answer pays once in a process
        ],
    )
    def test_a_reward_that_depends_on_when_it_is_called(self, examined, body, check):
        source = reward(body).replace("import re", "import itertools, re, time\ncalls, seen = itertools.count(), set()")
        assert check in failed(examined(source, reward="paid"))

    def test_a_reset_that_ignores_its_row(self, examined):
        found = examined(RIGHT.replace('example["question"]', '"What is 3 times 11?"'))
        assert failed(found) == {"prompts differ between rows"}
        assert found["prompts differ between rows"].measured == "1 prompts for 6 rows"

    def test_a_task_that_is_told_after_the_first_turn_may_have_one_prompt(self, examined):
        found = examined(TELLS.replace('example["question"]', '"Guess!"'), "Tells")
        assert failed(found) == {"answer told after a wrong one"}

    def test_an_episode_that_ends_at_the_limit_alone(self, examined):
        found = examined(RIGHT, "Guess")
        assert failed(found) == {"episodes end by themselves"}
        assert "ended at environment.max_turns=3" in found["episodes end by themselves"].sentence

    def test_an_environment_that_changes_its_row(self, examined):
        source = RIGHT.replace("return [{", "example['level'] += '!'\n        return [{")
        found = examined(source)
        assert "environment keeps its contract" in failed(found)
        assert (
            "Question.reset changed column 'level' of the data row" in found["environment keeps its contract"].sentence
        )

    def test_an_environment_that_fails_on_a_call_without_its_argument(self, examined):
        found = examined(CALLED, "Called")
        assert failed(found) == {"tool look", "environment keeps its contract"}
        assert "Called.step raised KeyError: 'place'" in found["tool look"].sentence
