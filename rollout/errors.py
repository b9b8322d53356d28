"""All errors Lockstep raises on purpose.

Each derives from `LockstepError`, so a launcher can catch them all, and from the closest standard exception. A message
states what was found, what was expected, and what to type or look at.
"""

from lockstep.rollout.safe_text import safe_text


class LockstepError(Exception):
    """Base of all errors raised on purpose. Its text is safe: messages quote servers, files and models."""

    def __str__(self) -> str:
        return safe_text(super().__str__())


class ConfigError(LockstepError, ValueError):
    """A setting is missing, has the wrong type, or contradicts another."""


class DataError(LockstepError, ValueError):
    """A data set or one of its rows cannot be used."""


class EvidenceError(LockstepError, ValueError):
    """Token evidence of an engine call is missing, non-finite or of the wrong size; the rollout is dropped."""


class TemplateError(LockstepError, ValueError):
    """A chat template cannot be rendered, or its rendering contradicts the messages."""


class EngineError(LockstepError, RuntimeError):
    """The engine is dead, refused a request, or gave an unusable answer."""


class EngineLostError(EngineError):
    """A server is gone, silent, or another process than before. The request may be sent to another server."""


class RefusedError(EngineError):
    """The engine's server refused a request, which it would refuse again."""


class RequestError(EngineError):
    """One request failed in a live engine, for a reason that may pass; it may be sent again."""


class SyncError(LockstepError, RuntimeError):
    """Weights did not reach the engine, or the engine does not compute with them."""


class RankLostError(SyncError):
    """Another rank is gone or does not answer; further collectives would fail."""


class EnvironmentFault(LockstepError, RuntimeError):
    """The process or server of an environment died, hung or gave an unusable answer; the rollout is dropped."""


class SearchError(LockstepError, RuntimeError):
    """A search server does not answer, or its answer cannot be used."""


class ToolServerError(LockstepError, RuntimeError):
    """A server of tools is gone, or its answer cannot be used; the model reads it as the result of its call."""


class RewardError(LockstepError, RuntimeError):
    """Rewards fail too often to continue."""


class SandboxError(LockstepError, RuntimeError):
    """A program of the model was not started, because the system did not isolate it, or its sandbox is lost."""


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint cannot be written, or no complete one was found."""


class HubError(LockstepError, RuntimeError):
    """A model could not be uploaded; the local copy is kept."""


class TrainingError(LockstepError, RuntimeError):
    """The update cannot continue, for example after repeated non-finite gradients."""


class ConnectionLostError(TrainingError):
    """The connection to another rank ended; why, stands in that rank's log."""


class ContextFullError(LockstepError, RuntimeError):
    """A conversation no longer fits the context; tokens sampled so far stay trainable."""


class CallLimitError(LockstepError, RuntimeError):
    """An episode used all its engine calls, or is over."""


def error_named(name: str, text: str) -> LockstepError | None:
    """Return the error of this class name, as another process reported it; None for an unknown name."""
    kind = globals().get(name)
    return kind(text) if isinstance(kind, type) and issubclass(kind, LockstepError) else None
