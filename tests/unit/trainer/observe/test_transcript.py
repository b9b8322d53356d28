"""Transcripts and tables of rollouts with worked examples and sub-agents: examples are no sampled turns."""

from __future__ import annotations

from lockstep.lab.environments.episode_checks import _excerpt
from lockstep.lab.environments.reward_probes import _answer_shown, last_user_text
from lockstep.rollout.environments.demo.calculator import calculator
from lockstep.rollout.environments.subagents import SubAgents
from lockstep.trainer.observe.transcript import parts
from tests.fixtures.policies import Policy, play
from tests.unit.rollout.test_sampled import ASKED, EXAMPLES, PROMPTS, SYSTEM, delegating


async def test_worked_examples_are_apart_from_the_turns_of_a_rollout_with_sub_agents() -> None:
    rollout = await play(SubAgents([calculator]), Policy(delegating), example=PROMPTS["worked examples"])
    examples, shown = parts(rollout)
    assert examples == EXAMPLES
    assert shown[:2] == [SYSTEM, ASKED]
    assert [turn["role"] for turn in shown[2:]] == ["assistant", "tool", "assistant"]
    assert last_user_text(rollout) == "3+4?"
    assert (_excerpt(rollout), _answer_shown(rollout)) == ("", "done")
