"""Examination of environments: planted faults are found, and environments without a fault pass."""

from __future__ import annotations

import sys

import pytest

from lockstep.lab.finding import Verdict
from tests.unit.lab.environments.conftest import RIGHT, ROWS, failed


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
