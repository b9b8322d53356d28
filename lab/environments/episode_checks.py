"""Checks of whole episodes: the same twice, training rows of the sampled tokens, spread within groups, cost."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from lockstep.lab.environments.reward_probes import EPSILON, Earned
from lockstep.lab.environments.scripted_engine import RecordingEngine
from lockstep.lab.environments.subject import Answer, Subject, reward_of
from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.engine.protocol import Engine
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import TokenCounts, count_tokens
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import Message, Rollout, RolloutStatus, content_text

SAME_TEXTS = "same texts, same episode"
AT_ONCE = "episodes at once, same episodes"
SAME_SEED = "same seed, same episode"
CONTEXT_CHARS = 40
MAX_WAIT_S = 0.5
"""Longest wait of an episode for the turns of others."""


async def examine_again(subject: Subject, earned: Earned) -> AsyncIterator[Finding]:
    """Play and score scripted episodes again, in reverse order, and compare."""
    probe = "reference" if earned.reference.is_known else "echoed prompt"
    before = earned.rollouts[probe]
    again = []
    for row, rollout in reversed(list(zip(subject.rows, before, strict=True))):
        player = earned.reference.play_of(row)
        again.append(await (subject.play(row, player) if probe == "reference" else subject.say(row, _excerpt(rollout))))
    yield _same(SAME_TEXTS, before, (await subject.score(again))[::-1], samples=1)
    gate = Gate(len(before))
    together = await asyncio.gather(*map(partial(_play_at, gate, subject, earned), range(len(before))))
    remedy = "Keep what an episode knows in `self`, set by `reset`: not in the class, the module, or a default value."
    yield _same(AT_ONCE, before, await subject.score(together), samples=1, how="at once with the others", remedy=remedy)


@dataclass(slots=True)
class Gate:
    """Start of turns of several episodes: none begins its next turn before the others have reached theirs."""

    number: int
    """Episodes that go on."""
    waiting: list[asyncio.Event] = field(default_factory=list)

    async def arrive(self) -> None:
        """Wait for the others, but not for long: an environment may let one episode wait for another."""
        self.waiting.append(event := asyncio.Event())
        self._open()
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), MAX_WAIT_S)

    def leave(self) -> None:
        self.number -= 1
        self._open()

    def _open(self) -> None:
        if len(self.waiting) >= self.number:
            for event in self.waiting:
                event.set()
            self.waiting.clear()


async def _play_at(gate: Gate, subject: Subject, earned: Earned, row: int) -> Rollout:
    echo = _excerpt(earned.rollouts["echoed prompt"][row])
    play = earned.reference.play_of(subject.rows[row])

    async def player(messages: Sequence[Message]) -> Answer:
        await gate.arrive()
        return await play(messages) if earned.reference.is_known else echo

    try:
        return await subject.play(subject.rows[row], player)
    finally:
        gate.leave()


async def examine_episodes(subject: Subject, engine: Engine, earned: Earned) -> AsyncIterator[Finding]:
    """Play episodes with a real engine, and again from the recording."""
    options, recorder = subject.options, RecordingEngine(engine)
    watch = subject.watch
    samples = await subject.collect(recorder, subject.rows, samples=options.samples)
    rollouts = await subject.score(samples)
    watch.seconds.clear()
    again: list[Rollout] = []
    for group in reversed(range(len(subject.rows))):
        replays = await subject.collect(
            recorder.replay(), [subject.rows[group]], samples=options.samples, first_group=group
        )
        again = [*replays, *again]
    environment_s = sum(map(sum, watch.seconds.values())) / max(1, len(again))
    yield _same(SAME_SEED, rollouts, await subject.score(again), samples=options.samples)
    if subject.rewards.compares_groups:
        reversed_rollouts = [replace(rollout, rollout_id=-rollout.rollout_id) for rollout in samples]
        yield _order(rollouts, await subject.score(reversed_rollouts))
    yield _tokens(rollouts)
    if earned.reference.is_known:
        yield _most(subject, rollouts, earned)
    yield _variance(rollouts, options.samples)
    yield _cost(rollouts, environment_s)


def difference(before: Rollout, after: Rollout) -> str:
    """Return the first difference of two plays of the same tokens, in words; "" without one."""
    for number, (left, right) in enumerate(zip(before.messages, after.messages, strict=False)):
        if left != right:
            old, new = str(left.get("content")), str(right.get("content"))
            if old == new:
                return f"message {number} ({left['role']}) differs in more than its text"
            start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            start = max(0, start - CONTEXT_CHARS // 2)
            change = f"{old[start : start + CONTEXT_CHARS]!r}, then {new[start : start + CONTEXT_CHARS]!r}"
            return f"message {number} ({left['role']}) was {change}"
    if len(before.messages) != len(after.messages):
        return f"the conversation had {len(before.messages)} messages, then {len(after.messages)}"
    if before.status != after.status:
        return f"the episode ended as {before.status}, then as {after.status}"
    for name in {**before.outcome, **after.outcome}:
        if before.outcome.get(name) != after.outcome.get(name):
            return f"outcome {name!r} was {before.outcome.get(name)!r:.60}, then {after.outcome.get(name)!r:.60}"
    for name in {**before.rewards, **after.rewards}:
        if before.rewards.get(name) != after.rewards.get(name):
            return f"reward {name} was {before.rewards.get(name)}, then {after.rewards.get(name)}"
    return ""


def _same(
    check: str,
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    *,
    samples: int,
    how: str = "again",
    remedy: str = "Draw random numbers from a generator that the data row seeds, read no clock, and keep no state "
    "outside the episode.",
) -> Finding:
    """Compare two plays of rows in order. samples: episodes of each row. how: the second ones were played."""
    pairs = enumerate(zip(before, after, strict=True))
    cases = [(number // samples, text) for number, (old, new) in pairs if (text := difference(old, new))]
    measurement = f"{len(before) - len(cases)} of {len(before)} episodes are the same twice"
    if not cases:
        return Finding(check=check, measured=measurement)
    row, text = cases[0]
    sentence = (
        f"played {how} with the same sampled tokens, {len(cases)} of {len(before)} episodes differ. First in that of "
        f"row {row}: {text}. {remedy}"
    )
    return failure(check, sentence, measurement)


def _order(before: Sequence[Rollout], after: Sequence[Rollout]) -> Finding:
    """Compare rewards of groups with those of the same groups in reverse order."""
    check = "rewards of a group ignore its order"
    pairs = [(old, reward_of(old), reward_of(new)) for old, new in zip(before, after, strict=True)]
    changes = [
        (old.group_id, left, right)
        for old, left, right in pairs
        if left != right and (left is None or right is None or abs(left - right) > EPSILON)
    ]
    measurement = f"{len(pairs) - len(changes)} of {len(pairs)} rewards are the same in reverse order"
    if not changes:
        return Finding(check=check, measured=measurement)
    row, left, right = changes[0]
    sentence = (
        f"with the episodes of row {row} in reverse order, one earns {right} instead of {left}. The order of a group "
        "means nothing: return the same number for an episode wherever it stands, also in ties."
    )
    return failure(check, sentence, measurement)


def _tokens(rollouts: Sequence[Rollout]) -> Finding:
    check, counts = "trained tokens are the sampled tokens", TokenCounts()
    episodes = [rollout for rollout in rollouts if rollout.calls]
    if not episodes:
        return failure(check, "no episode made a call of the engine; other lines say why.", "no tokens")
    try:
        for rollout in episodes:
            counts += count_tokens(rollout.calls, rows_from_calls(rollout.calls))
    except EvidenceError as error:
        return failure(check, f"no training rows can be made: {error}.")
    metrics = counts.metrics()
    match, trained_fraction = metrics["rollout/token_match_rate"], metrics["rollout/trained_fraction"]
    branches = metrics["rollout/branch_rate"]
    measurement = f"match {match:.3f}, {counts.trained} of {counts.sampled} tokens, {branches:.0%} of episodes branch"
    if match == trained_fraction == 1.0:
        return Finding(check=check, measured=measurement)
    return failure(check, "rows and record of the engine differ: please report this with the environment.", measurement)


def _most(subject: Subject, rollouts: Sequence[Rollout], earned: Earned) -> Finding:
    check, own = "no sampled episode beats the reference", earned.rewards("reference")
    rewards = [reward for rollout in rollouts if (reward := reward_of(rollout)) is not None]
    measurement = f"{min(rewards):.3g} to {max(rewards):.3g}" if rewards else "no reward"
    for rollout in rollouts:
        reward, best = reward_of(rollout), own[rollout.group_id]
        if reward is not None and best is not None and reward > best + EPSILON:
            sentence = (
                f"a sampled episode of row {rollout.group_id} earns {reward:.3g}, the reference {best:.3g}: either the "
                "reference is not the best play (give one with --player), or the reward pays for something else."
            )
            return failure(check, sentence, measurement)
    return Finding(check=check, measured=measurement)


def _variance(rollouts: Sequence[Rollout], samples: int) -> Finding:
    check = "rewards differ within groups"
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        if (reward := reward_of(rollout)) is not None:
            groups.setdefault(rollout.group_id, []).append(reward)
    spread = [statistics.pstdev(rewards) for rewards in groups.values()]
    num_mixed = sum(deviation > EPSILON for deviation in spread)
    mean = f", mean {statistics.fmean(map(statistics.fmean, groups.values())):.3g}" if groups else ""
    measurement = f"{num_mixed} of {len(groups)} groups of {samples}{mean}"
    if num_mixed:
        return Finding(check=check, measured=measurement)
    sentence = (
        "all episodes of a group earn the same with this model, so GRPO has nothing to learn from these rows: take "
        "easier or harder rows, more samples, partial rewards, or a model that is right sometimes."
    )
    return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured=measurement)


def _cost(rollouts: Sequence[Rollout], environment_s: float) -> Finding:
    number = max(1, len(rollouts))
    calls = sum(rollout.num_turns for rollout in rollouts) / number
    mean_sampled = sum(rollout.num_sampled for rollout in rollouts) / number
    prompts = sum(len(call.prompt) for rollout in rollouts for call in rollout.calls) / number
    seconds = sum(rollout.duration_s for rollout in rollouts) / number
    num_failed = sum(rollout.status is RolloutStatus.FAILED for rollout in rollouts)
    measurement = (
        f"{seconds:.2f} s ({number} at once; {environment_s:.3f} s of it in the environment), {calls:.1f} calls, "
        f"{prompts:.0f} prompt and {mean_sampled:.0f} sampled tokens" + (f", {num_failed} failed" if num_failed else "")
    )
    return Finding(check="cost of an episode", measured=measurement)


def _excerpt(rollout: Rollout) -> str:
    return next((content_text(turn) for turn in rollout.sampled_turns), "")
