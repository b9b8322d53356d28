"""Status of an episode that a user's function has run."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.rollout.errors import ConfigError, EngineError, LockstepError
from lockstep.rollout.records import EngineCall, FinishReason, RolloutStatus
from lockstep.rollout.system.deadline import DeadlineExceeded
from lockstep.rollout.system.user_functions import fault


def ending(
    name: str,
    *,
    error: BaseException | None,
    failure: LockstepError | None,
    limit: RolloutStatus | None,
    calls: Sequence[EngineCall],
) -> tuple[RolloutStatus, str | None]:
    """Return the status of the episode, and a sentence if it is FAILED.

    Raises `EngineError` if the engine failed, `ConfigError` if the chat template drops the tools of the requests.

    Args:
        name: name of the function, for the sentence.
        error: error raised by the function.
        failure: failure of the engine, its evidence or the chat template; it decides even if the function caught it.
        limit: status of the limit that ended the episode; what was sampled before is trained.
    """
    if isinstance(failure, EngineError | ConfigError):
        raise failure
    if failure is not None:
        return RolloutStatus.FAILED, f"{type(failure).__name__}: {failure}"
    if limit is not None:
        return limit, None
    if isinstance(error, DeadlineExceeded):
        return RolloutStatus.FAILED, f"{name} did not finish: {error}; raise environment.settings.timeout_s"
    if error is not None:
        return RolloutStatus.FAILED, f"{name} raised {fault(error)}"
    was_cut = bool(calls) and calls[-1].finish_reason is FinishReason.LENGTH
    return (RolloutStatus.TRUNCATED if was_cut else RolloutStatus.COMPLETED), None
