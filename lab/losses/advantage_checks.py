"""Checks of an advantage estimator: outputs, independence of the order of rollouts, degenerate groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.errors import LockstepError, RewardError, TrainingError
from lockstep.trainer.objective.advantages.critic import Credit, TokenAdvantages
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, RewardTerms, TurnInputs
from lockstep.trainer.objective.declare import Advantage

REWARDS = (0.1, 0.7, 0.4, 1.0, 0.0, 1.0, 0.1, 0.1, 0.1, 0.6)
GROUPS = (0, 0, 0, 1, 1, 1, 2, 2, 2, 3)
"""Two groups that differ, one of equal rewards, one of a single rollout."""
TOLERANCE = 1e-9


def examine_advantage(
    advantage: Advantage, settings: Mapping[str, Any], update: Callable[[], Iterable[Finding]] = lambda: ()
) -> Iterator[Finding]:
    """Yield the finding of each check.

    Args:
        settings: of the estimator, by name; declared defaults for others.
        update: further checks, of an estimator whose outputs are usable.
    """
    if advantage.needs_critic:
        yield from _CriticExamination(advantage, settings).all(update)
        return
    examination = _Examination(advantage, settings)
    for check in (
        examination.outputs,
        examination.order,
        examination.names_of_groups,
        examination.scope,
        examination.equal_rewards,
        examination.groups_of_one,
        examination.sizes_of_rewards,
    ):
        name = CHECKS[check.__name__]
        try:
            yield replace(check(), check=name)
        except LockstepError as error:
            yield failure(name, f"{error}.")
            if check == examination.outputs:
                return
    yield from update()


CHECKS = {
    "outputs": "one finite advantage per rollout",
    "order": "rollouts in another order",
    "names_of_groups": "groups with other numbers",
    "scope": "rollouts that it compares",
    "equal_rewards": "a group of equal rewards",
    "groups_of_one": "groups of one, one group, no rollouts",
    "sizes_of_rewards": "rewards of other sizes",
}
OK = Finding(check="")


class _Examination:
    """An estimator without a critic, on toy rewards."""

    def __init__(self, advantage: Advantage, settings: Mapping[str, Any]) -> None:
        self._advantage, self._settings = advantage, settings
        self._rewards_S = torch.tensor(REWARDS, dtype=torch.float64)
        self._group_S = torch.tensor(GROUPS)

    def _of(self, rewards_S: Tensor | None = None, group_S: Tensor | None = None) -> Tensor:
        """Return the advantages of these rewards, by default of the toy."""
        rewards_S = self._rewards_S if rewards_S is None else rewards_S
        group_S = self._group_S if group_S is None else group_S
        greedy_S = 0.25 + 0.125 * (group_S % 4).double() if self._advantage.needs_greedy else None
        turns = None
        if self._advantage.needs_states:  # one turn per rollout, from the prompt
            turns = TurnInputs(returns_K=rewards_S, rollout_K=torch.arange(len(rewards_S)), state_K=group_S)
        inputs = AdvantageInputs(
            rewards_S=rewards_S,
            group_S=group_S,
            greedy_rewards_S=greedy_S,
            terms=RewardTerms(
                rewards_SF=torch.stack([0.75 * rewards_S, 0.25 * rewards_S], dim=1), weights_F=torch.ones(2)
            ),
            turns=turns,
        )
        found_S = self._advantage(inputs, **self._settings).advantages_S
        if not bool(found_S.isfinite().all()):
            raise TrainingError(f"advantages that are not finite for rewards {rewards_S.tolist()[:6]}")
        return found_S

    def outputs(self) -> Finding:
        rewards_S, group_S = self._rewards_S.clone(), self._group_S.clone()
        first_S, second_S = self._of(rewards_S, group_S), self._of(rewards_S, group_S)
        if not (torch.equal(rewards_S, self._rewards_S) and torch.equal(group_S, self._group_S)):
            return failure("", "It changes its inputs in place; work on a copy.")
        if not torch.equal(first_S, second_S):
            return failure("", "Two calls with the same rewards differ, so ranks would train on different advantages.")
        if not bool(first_S.any()):
            return failure("", "All advantages are 0 for rewards that differ, so nothing is trained.")
        for group in (0, 1):
            rewards_G, found_G = rewards_S[group_S == group], first_S[group_S == group]
            if bool(found_G[rewards_G.argmax()] < found_G[rewards_G.argmin()]):
                return failure(
                    "",
                    "The best rollout of a group has a smaller advantage than the worst, so wrong answers are "
                    "rewarded: the sign is wrong; subtract the baseline from the reward.",
                )
        return OK

    def order(self) -> Finding:
        order = torch.tensor([7, 2, 9, 0, 4, 8, 1, 3, 6, 5])
        found_S = self._of(self._rewards_S[order], self._group_S[order])
        return self._same(
            found_S,
            self._of()[order],
            "in another order; take group_S, which names the group of each rollout, and not its place",
        )

    def names_of_groups(self) -> Finding:
        other = torch.tensor([12, 8, 40, 4])  # equal modulo 4 to 0, as are greedy rewards
        names = other[self._group_S] if not self._advantage.needs_greedy else self._group_S + 4
        return self._same(
            self._of(group_S=names),
            self._of(),
            "with other numbers of groups; they are names, in any order and with gaps",
        )

    def scope(self) -> Finding:
        """Say whether advantages depend on other groups. Either is exact: they are computed once, before ranks divide
        the step."""
        alone_S = torch.cat(
            [self._of(self._rewards_S[self._group_S == g], self._group_S[self._group_S == g]) for g in range(4)]
        )
        is_local = _difference(alone_S, self._of()) <= TOLERANCE
        return replace(OK, measured="its group" if is_local else "the whole step")

    def equal_rewards(self) -> Finding:
        for size in (0.1, 1.0, 1e6):
            found_S = self._of(torch.tensor([size] * 3 + [0.0, 1.0, 0.5], dtype=torch.float64), self._group_S[:6])
            if self._advantage.compares_group and bool(found_S[:3].any()):
                return failure(
                    "",
                    f"A group of three rewards {size:g} has the advantage {found_S[0]:.1e}, expected exactly 0, "
                    "because rounding would train as a signal; set it to 0 where `GroupStatistics.is_flat_S` is true.",
                )
        return OK

    def groups_of_one(self) -> Finding:
        apart_S = self._of(group_S=torch.arange(len(REWARDS)))
        self._of(group_S=torch.zeros(len(REWARDS), dtype=torch.int64))
        self._of(self._rewards_S[:1], self._group_S[:1])
        self._of(self._rewards_S[:0], self._group_S[:0])
        if not bool(apart_S.any()) and not self._advantage.compares_group:
            return Finding(
                check="",
                verdict=Verdict.NOTE,
                sentence="In groups of one all advantages are 0; write @advantage(compares_group=True) above the "
                "function, so that rollout.samples_per_prompt=1 is refused.",
            )
        return OK

    def sizes_of_rewards(self) -> Finding:
        for factor in (1e-9, 1e9):
            self._of(self._rewards_S * factor)
        try:
            self._of(self._rewards_S - 1e6)
        except RewardError:  # the estimator's own refusal
            return replace(OK, measured="from 0 on")
        return OK

    @staticmethod
    def _same(found_S: Tensor, expected_S: Tensor, when: str) -> Finding:
        change = _difference(found_S, expected_S)
        if change <= TOLERANCE:
            return replace(OK, measured=f"{change:.0e}")
        return failure("", f"Advantages change by {change:.0%} {when}.", f"{change:.0e}")


class _CriticExamination:
    """An estimator with a critic, on toy tokens."""

    def __init__(self, advantage: Advantage, settings: Mapping[str, Any]) -> None:
        self._advantage, self._settings = advantage, settings
        generator = torch.Generator().manual_seed(0)
        self._rollout_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
        num = len(self._rollout_N)
        self._credit = Credit(
            rewards_N=torch.randn(num, generator=generator),
            values_N=torch.randn(num, generator=generator),
            rollout_N=self._rollout_N,
            turns_N=torch.zeros(num, dtype=torch.int64),
            keep_N=torch.arange(num) != 4,
        )

    def all(self, update: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
        name = "a finite advantage and return per token"
        try:
            everything, half = torch.ones(len(self._rollout_N), dtype=torch.bool), self._rollout_N < 2
            first, second, part = self._of(everything), self._of(everything), self._of(half)
            self._of(torch.zeros_like(half))
        except LockstepError as error:
            yield failure(name, f"{error}.")
            return
        yield Finding(check=name)
        name = "same inputs, same advantages"
        is_same = torch.equal(first.advantages_N, second.advantages_N) and torch.equal(
            first.returns_N, second.returns_N
        )
        yield Finding(check=name) if is_same else failure(name, "Two calls with the same inputs differ.")
        name = "tokens of other minibatches"
        is_zero = not bool(part.advantages_N[~half].any() or part.returns_N[~half].any())
        yield (
            Finding(check=name)
            if is_zero
            else failure(name, "Tokens outside of chosen_N have advantages; compute only the chosen ones, 0 elsewhere.")
        )
        yield from update()

    def _of(self, chosen_N: Tensor) -> TokenAdvantages:
        return self._advantage(self._credit, chosen_N, **self._settings)


def _difference(found_S: Tensor, expected_S: Tensor) -> float:
    return float((found_S - expected_S).abs().max() / expected_S.abs().max().clamp(min=1e-12))
