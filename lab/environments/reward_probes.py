"""Probes of the reward: answers that should earn nothing, and the reference, which should earn most."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from lockstep.lab.environments.reference_answer import Reference, earn_reference, in_form
from lockstep.lab.environments.subject import Answer, Subject, reward_of
from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.records import Rollout, content_text

EPSILON = 1e-6
"""Differences of rewards up to this are rounding."""
REPEATS = (4, 64)
"""Times that an answer is repeated, as far as the token limit of a turn allows."""
FORMAT_ONLY = "<think>\nI think.\n</think>\n\n<answer></answer>\n\\boxed{}\n####"
"""Usual forms of an answer without one."""
MUCH = 0.5
"""Share of the reference's reward from which an echoed prompt is a fault."""


@dataclass(slots=True)
class Earned:
    """Rewards of each probe by row; None where the episode or the reward failed."""

    reference: Reference
    rollouts: dict[str, list[Rollout]] = field(default_factory=dict)

    def rewards(self, probe: str) -> list[float | None]:
        return [reward_of(rollout) for rollout in self.rollouts.get(probe, ())]

    def most(self, probe: str) -> float | None:
        """Return the largest reward of a probe."""
        return max((reward for reward in self.rewards(probe) if reward is not None), default=None)

    @property
    def has_rewards(self) -> bool:
        return any(self.most(probe) is not None for probe in self.rollouts)

    @property
    def reference_earns(self) -> bool:
        """True if the reference earns something in every row."""
        rewards = self.rewards("reference")
        return bool(rewards) and all(reward is not None and reward > EPSILON for reward in rewards)


async def play_probes(subject: Subject, reference: Reference) -> Earned:
    """Play and score all probes on all rows."""
    rows, earnings = subject.rows, Earned(reference)

    async def probe(name: str, answers: Sequence[Answer]) -> None:
        earnings.rollouts[name] = await subject.earn(rows, answers)

    await probe("empty answer", [""] * len(rows))
    openings = [last_user_text(rollout) for rollout in earnings.rollouts["empty answer"]]
    await probe("echoed prompt", openings)
    await probe("format only", [FORMAT_ONLY] * len(rows))
    answers: list[Answer] = ["yes"] * len(rows)
    if reference.column is not None:
        answers = [reference.answer(row) for row in rows]
        if reference.form != "{answer}":
            await probe("empty form", [in_form("", reference.form)] * len(rows))
    if reference.is_known:
        earnings.rollouts["reference"] = await earn_reference(subject, reference, rows)
    for times in REPEATS:
        repetitions = ["\n".join([answer] * times) if isinstance(answer, str) else answer for answer in answers]
        await probe(f"repeated {times} times", repetitions)
    return earnings


def last_user_text(rollout: Rollout) -> str:
    """Return the text of the last user turn of the prompt."""
    texts = [content_text(message) for message in rollout.prompt if message["role"] == "user"]
    return texts[-1] if texts else ""


async def examine_probes(earned: Earned) -> AsyncIterator[Finding]:
    """Yield one finding per probe."""
    yield _nothing(earned, "empty answer", "a policy learns to say nothing", "Return 0 if the answer is empty")
    yield _echo(earned)
    yield _format_only(earned)
    yield _repetition(earned)
    yield _reference(earned)


def _nothing(earned: Earned, probe: str, effect: str, remedy: str) -> Finding:
    check, measurement = f"reward of an {probe}", _description(earned, probe)
    paid = _count_above(earned.rewards(probe), 0.0)
    if not paid:
        return _unless_all_failed(earned, probe, check, measurement)
    return failure(
        check, f"an {probe} earns up to {earned.most(probe):.3g} in {paid} rows, so {effect}. {remedy}.", measurement
    )


def _echo(earned: Earned) -> Finding:
    probe, check = "echoed prompt", "reward of the echoed prompt"
    measurement = _description(earned, probe)
    most, best = earned.most(probe), earned.most("reference")
    if most is None or most <= EPSILON:
        return _unless_all_failed(earned, probe, check, measurement)
    sentence = (
        f"the text of the prompt earns up to {most:.3g} as an answer, so a policy can learn to copy it. Look for the "
        "answer only where the model has to put it (a tag, the last line), or take it out of the prompt."
    )
    if best is not None and most < MUCH * best:
        return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured=measurement)
    return failure(check, sentence, measurement)


def _format_only(earned: Earned) -> Finding:
    check, probes = "reward of the format alone", ("format only", "empty form")
    rewards = [reward for probe in probes for reward in earned.rewards(probe)]
    measurement = _summary(rewards)
    most = max((reward for reward in rewards if reward is not None), default=None)
    if most is None or most <= EPSILON:
        return _unless_all_failed(earned, "format only", check, measurement)
    best = earned.most("reference")
    if best is not None and most < best - EPSILON:
        sentence = f"the format without an answer earns up to {most:.3g} of {best:.3g}; small shares are safe."
        return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured=measurement)
    sentence = f"the format without an answer earns up to {most:.3g}, as much as a right answer. Check what it holds."
    return failure(check, sentence, measurement)


def _repetition(earned: Earned) -> Finding:
    check = "reward of a repeated answer"
    few, many = (earned.rewards(f"repeated {times} times") for times in REPEATS)
    once = earned.rewards("reference") or [None] * len(few)
    measurement = _summary([*few, *many])
    for row, (single, some, more) in enumerate(zip(once, few, many, strict=True)):
        largest = max((value for value in (some, more) if value is not None), default=None)
        if largest is None:
            continue
        if single is not None and largest > single + EPSILON:
            sentence = (
                f"in row {row} the repeated answer earns {largest:.3g}, the answer once {single:.3g}, so a policy "
                "learns to repeat itself. Count an answer once, and bound the reward."
            )
            return failure(check, sentence, measurement)
        if some is not None and more is not None and more > some + EPSILON and more > EPSILON:
            sentence = (
                f"in row {row} the answer earns {some:.3g} if repeated {REPEATS[0]} times and {more:.3g} if repeated "
                "further, so the reward grows without bound. Count an answer once."
            )
            return failure(check, sentence, measurement)
    return Finding(check=check, measured=measurement)


def _reference(earned: Earned) -> Finding:
    check, reference = "reward of the reference", earned.reference
    if not reference.is_known:
        sentence = (
            "no reference is known, so it was not checked that a right answer earns most. Name its column with "
            "--reference <column>, or give a function that plays well with --player path/to/file.py:function."
        )
        return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence)
    rewards = earned.rewards("reference")
    measurement = f"{_summary(rewards)}, {reference.source}"
    poor = [row for row, reward in enumerate(rewards) if reward is None or reward <= EPSILON]
    if poor:
        cut = [row for row in poor if earned.rollouts["reference"][row].is_cut_off]
        limit = " It was cut: raise rollout.max_tokens_per_turn." if cut else ""
        sentence = (
            f"the reference ({reference.source}) earns nothing in {len(poor)} of {len(rewards)} rows, first in row "
            f"{poor[0]}: {_answer_shown(earned.rollouts['reference'][poor[0]])}.{limit} If a right answer looks "
            "different, say how with --form 'The answer is {answer}', --reference <column> or "
            "--player path/to/file.py:function; otherwise the reward does not recognize right answers."
        )
        return failure(check, sentence, measurement)
    for probe in earned.rollouts:
        if probe == "reference" or probe.startswith("repeated"):
            continue
        for row, (other, own) in enumerate(zip(earned.rewards(probe), rewards, strict=True)):
            if other is not None and own is not None and other > own + EPSILON:
                sentence = (
                    f"in row {row} the probe {probe!r} earns {other:.3g}, more than the reference with {own:.3g}: the "
                    "best policy is not one that answers right."
                )
                return failure(check, sentence, measurement)
    return Finding(check=check, measured=measurement)


def _unless_all_failed(earned: Earned, probe: str, check: str, measured: str) -> Finding:
    if any(reward is not None for reward in earned.rewards(probe)):
        return Finding(check=check, measured=measured)
    sentence = "no episode of this probe has a reward; other lines say why."
    return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured="no reward")


def _count_above(rewards: Sequence[float | None], limit: float) -> int:
    return sum(reward is not None and reward > limit + EPSILON for reward in rewards)


def _description(earned: Earned, probe: str) -> str:
    return _summary(earned.rewards(probe))


def _summary(rewards: Sequence[float | None]) -> str:
    values = [reward for reward in rewards if reward is not None]
    if not values:
        return "no reward"
    low, high = min(values), max(values)
    text = f"{low:.3g}" if high - low <= EPSILON else f"{low:.3g} to {high:.3g}"
    return text if len(values) == len(rewards) else f"{text}, {len(rewards) - len(values)} without a reward"


def _answer_shown(rollout: Rollout) -> str:
    return f"{rollout.answer:.80}".replace("\n", " ") if rollout.sampled_turns else "(no answer)"
