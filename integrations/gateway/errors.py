"""Errors that a client gets as the answer to a request. Each dialect has its own form for them."""

from __future__ import annotations

import reprlib
from typing import TypeVar

from lockstep.rollout.errors import LockstepError

T = TypeVar("T")

CONVERSATION = "(conversation)"
"""`ApiError.param` of an error about the whole conversation. Each dialect has its own name for the field."""

MAX_QUOTED = 80
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = MAX_QUOTED


class ApiError(LockstepError):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        """status: client libraries retry 408, 409, 429 and 5xx. kind: `type` in the form of OpenAI. param: the wrong
        field of the request. code: the error's name for programs."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param and param[:MAX_QUOTED]  # it may be a client's own key
        self.code = code


def not_supported(field: str, *, why: str) -> ApiError:
    return ApiError(f"{field} is not supported: {why}", param=field, code="unsupported_parameter")


def unknown_field(field: str) -> ApiError:
    return ApiError(f"unrecognized request argument: {quoted(field)}", param=field, code="unknown_parameter")


def wrong_type(field: str, value: object, *, expected: str) -> ApiError:
    return ApiError(f"{field}: expected {expected}, found {quoted(value)}", param=field, code="invalid_type")


def server_error(message: str, *, status: int = 500) -> ApiError:
    return ApiError(message, status=status, kind="server_error")


def checked(value: object, kind: type[T], field: str, *, expected: str) -> T:
    """Return a JSON value of exactly this type (true is not an integer). Raises `ApiError` for another."""
    if type(value) is not kind:
        raise wrong_type(field, value, expected=expected)
    return value


def quoted(value: object) -> str:
    """Return a client's value for a message, cut to 80 characters, without a pass over the whole value."""
    return _SHORT.repr(value)[:MAX_QUOTED]
