"""Examination of an environment with its data, tools and rewards (`lockstep check-environment`).

Scripted episodes come first: they need no model and find most faults in seconds. Then a real engine plays episodes,
which are played again from its recording.

Not covered: whether the task can be learned, and whether a reward that passes the probes means what it should.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from lockstep.lab.environments.column_checks import examine_columns
from lockstep.lab.environments.episode_checks import examine_again, examine_episodes
from lockstep.lab.environments.exploit_checks import examine_exploits
from lockstep.lab.environments.journal import Journal
from lockstep.lab.environments.reference_answer import find_reference
from lockstep.lab.environments.reward_probes import examine_probes, play_probes
from lockstep.lab.environments.subject import Hung, Options, Subject
from lockstep.lab.environments.tool_checks import examine_tools
from lockstep.lab.environments.watched_environment import FaultKind, Watch
from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.records import RolloutStatus
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.build import images_of_data, make_chat, make_rewards
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Prompts, training_data
from lockstep.trainer.engines.start import open_engine
from lockstep.trainer.run.library_logs import quiet_third_parties

START_LIMIT_S = 300.0
"""Time limit for model, data and engine to load."""

OpenEngine = Callable[..., AbstractContextManager[EnginePool]]
"""Takes what `open_engine` does."""


def record(findings: Iterable[Finding], journal: Journal, *, accepted: Sequence[str] = ()) -> None:
    """Write findings to the journal. accepted: names of checks whose failures are notes."""
    quiet_third_parties()
    for finding in findings:
        if finding.check in accepted and finding.verdict is Verdict.FAILS:
            finding = replace(finding, verdict=Verdict.NOTE, sentence=f"accepted: {finding.sentence}")
        journal.add(finding)
    journal.done()


def findings(
    config: Config, options: Options, journal: Journal, *, open_engine: OpenEngine = open_engine
) -> Iterator[Finding]:
    """Examine the environment of a configuration, and yield the findings in the order of the table.

    Raises `LockstepError` if model, data or engine cannot be used.
    """
    config.reward.timeout_s = min(config.reward.timeout_s, options.deadline_s)
    config.reward.on_error, config.reward.max_error_rate = {}, 1.0  # an error is a finding here, not the end
    with journal.doing("the loading of model, data and rewards", limit_s=START_LIMIT_S):
        chat = make_chat(config.model, history=config.environment.history)
        data = training_data(config.data, config.environment, config.reward, **images_of_data(config.model, chat))
        rows = Prompts(data, seed=config.seed, shuffle=config.data.shuffle).take(min(options.rows, sum(map(len, data))))
        rewards = make_rewards(config)
        rewards.load()
    watch = Watch(journal, options.deadline_s)
    subject = Subject(config=config, chat=chat, rows=rows, rewards=rewards, options=options, watch=watch)
    try:
        yield from _examine(subject, open_engine)
    except Hung:
        yield Finding(
            check="other checks",
            verdict=Verdict.NOTE,
            sentence="checks after the call that never returned were not made; examine again when it returns.",
            measured="not made",
        )
    finally:
        rewards.close()
    yield _contract(subject)
    yield _ends(subject)
    yield _deadlines(subject)
    yield _reward_errors(subject)


def _examine(subject: Subject, open_engine: OpenEngine) -> Iterator[Finding]:
    with BackgroundLoop() as loop:
        earnings = loop.run(play_probes(subject, loop.run(find_reference(subject))))
        if all(rollout.status is RolloutStatus.FAILED for rollout in subject.played):
            return
        yield from _all(loop, examine_tools(subject, subject.tools))
        is_scored = earnings.has_rewards or not subject.rewards.compares_groups
        yield from _all(loop, examine_columns(subject, earnings, is_scored=is_scored))
        if is_scored:
            yield from _all(loop, examine_probes(earnings))
            yield from _all(loop, examine_exploits(subject, earnings))
        else:
            sentence = (
                "a scripted answer is a group of its own, to which the rewards do not apply, so none was tried; "
                "the rewards of groups are those of the engine's episodes below."
            )
            yield Finding(check="rewards of answers", verdict=Verdict.NOTE, sentence=sentence, measured="not checked")
        yield from _all(loop, examine_again(subject, earnings))
    if subject.hanging_tools:
        names = ", ".join(subject.hanging_tools)
        sentence = f"no episodes of the engine were played, because each call of {names} takes its whole time limit."
        yield Finding(check="episodes of the engine", verdict=Verdict.NOTE, sentence=sentence, measured="not played")
        return
    with ExitStack() as stack:
        with subject.watch.journal.doing("the start of the engine", limit_s=START_LIMIT_S):
            engine = stack.enter_context(open_engine(subject.config, subject.chat.images))
        yield from _all(engine.loop, examine_episodes(subject, engine, earnings))


def _all(loop: BackgroundLoop, found: AsyncIterator[Finding]) -> Iterator[Finding]:
    """Yield what an asynchronous iterator yields, run in a loop."""

    async def following() -> Finding | None:
        return await anext(found, None)

    while (finding := loop.run(following())) is not None:
        yield finding


def _contract(subject: Subject) -> Finding:
    check, faults = "environment keeps its contract", [f for f in subject.watch.faults if f.kind is not FaultKind.HUNG]
    failures = [rollout for rollout in subject.played if rollout.status is RolloutStatus.FAILED]
    overlong = [
        rollout for rollout in subject.played if rollout.status is RolloutStatus.CONTEXT_FULL and not rollout.calls
    ]
    measurement = f"{len(subject.played)} scripted episodes, {len(failures)} failed"
    if faults:
        first = faults[0]
        after = f" after {first.after}" if first.after else ""
        sentence = f"{first.place} {first.text}{after} ({len(faults)} such calls)."
        if first.kind is not FaultKind.CHANGED_ROW:
            sentence += " In training this costs the episode: answer what the model does wrong with a message."
        return failure(check, sentence, measurement)
    if failures and not subject.watch.faults:
        return failure(check, f"{len(failures)} episodes failed, the first with: {failures[0].error}.", measurement)
    if overlong:
        limit = subject.config.rollout.max_model_len
        sentence = f"the first prompt of {len(overlong)} episodes does not fit rollout.max_model_len={limit}; raise it."
        return failure(check, sentence, measurement)
    return Finding(check=check, measured=measurement)


def _ends(subject: Subject) -> Finding:
    check, number = "episodes end by themselves", len(subject.played)
    num_ended = sum(rollout.status is not RolloutStatus.MAX_TURNS for rollout in subject.played)
    measurement = f"{num_ended} of {number} scripted episodes"
    if num_ended or not number or subject.options.player:  # whose play may need the whole length
        return Finding(check=check, measured=measurement)
    limit = subject.config.max_turns
    sentence = (
        f"every scripted episode, whatever was said, ended at environment.max_turns={limit}: return Step(done=True) "
        f"when there is an answer, or raise the limit; if it is meant to end them, add --accept '{check}'."
    )
    return failure(check, sentence, measurement)


def _deadlines(subject: Subject) -> Finding:
    check, limit_s = "calls return in time", subject.options.deadline_s
    hung = [fault for fault in subject.watch.faults if fault.kind is FaultKind.HUNG]
    slowest = max(
        ((max(times), place) for place, times in subject.watch.seconds.items() if times), default=(0.0, "none")
    )
    measurement = f"the slowest, {slowest[1]}, took {slowest[0]:.3f} s"
    if hung:
        after = f" after {hung[0].after}" if hung[0].after else ""
        return failure(check, f"{hung[0].place} {hung[0].text}{after}. Give what it waits for a limit.", measurement)
    if subject.hanging_tools:
        sentence = f"tool {', '.join(subject.hanging_tools)} does not return within the limit of a tool call."
        return failure(check, sentence, measurement)
    if slowest[0] > limit_s / 2:
        sentence = f"{slowest[1]} needs more than half of --deadline {limit_s:g}."
        return Finding(check=check, verdict=Verdict.NOTE, sentence=sentence, measured=measurement)
    return Finding(check=check, measured=measurement)


def _reward_errors(subject: Subject) -> Finding:
    check, errors = "reward functions answer", subject.errors
    number = sum(errors.values())
    measurement = f"{subject.num_scored} calls, {number} without a reward"
    if not errors:
        return Finding(check=check, measured=measurement)
    sentence = f"{number} of {subject.num_scored} episodes got no reward, the first because: {next(iter(errors))}."
    return failure(check, sentence, measurement)
