"""Every error Lockstep raises on purpose.

Each derives from `LockstepError` (so a launcher can catch them all) and from the closest standard
exception (so ordinary code can catch them without knowing Lockstep). A message says what was found,
what was expected, and what to type or look at.
"""


class LockstepError(Exception):
    """Base of all errors that are raised on purpose."""


class ConfigError(LockstepError, ValueError):
    """A setting is missing, of the wrong type, or inconsistent with another one."""


class DataError(LockstepError, ValueError):
    """A data set or one of its rows cannot be used."""


class EvidenceError(LockstepError, ValueError):
    """Token evidence of an engine call is missing, non-finite or of the wrong size; the rollout is dropped."""


class TemplateError(LockstepError, ValueError):
    """A chat template cannot be rendered or its rendering contradicts what it must show."""


class EngineError(LockstepError, RuntimeError):
    """The engine is dead, refused a request, or answered something that cannot be used."""


class RequestError(EngineError):
    """One request failed for a reason that may pass, in an engine that lives: it may be asked again."""


class SyncError(LockstepError, RuntimeError):
    """Weights did not reach the engine, or the engine does not compute with them."""


class RankLostError(SyncError):
    """Another rank is gone or does not answer: whatever all ranks do together can only fail."""


class RewardError(LockstepError, RuntimeError):
    """Rewards fail too often to go on."""


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint cannot be written, or none that is complete can be found."""


class HubError(LockstepError, RuntimeError):
    """A model could not be uploaded; it stays where it is."""


class TrainingError(LockstepError, RuntimeError):
    """The update itself cannot go on (for example: repeatedly non-finite gradients)."""


class ContextFullError(LockstepError, RuntimeError):
    """A conversation no longer fits the model; what was sampled of it stays trainable."""


class CallLimitError(LockstepError, RuntimeError):
    """An episode has made as many engine calls as it may, or is over."""


def error_named(name: str, text: str) -> LockstepError | None:
    """The error that another process has reported by the name of its class; None if it is none of these."""
    kind = globals().get(name)
    return kind(text) if isinstance(kind, type) and issubclass(kind, LockstepError) else None
