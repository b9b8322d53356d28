"""Errors in the form of the OpenAI API: what a client library turns into its own exceptions."""

from __future__ import annotations

from typing import Any

from rollout.errors import LockstepError


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
        """
        Args:
            message: what was found and what was expected.
            status: of the HTTP response. Client libraries retry 408, 409, 429 and 5xx by themselves.
            kind: `type` in the body.
            param: the field of the request that is wrong.
            code: for programs.
        """
        super().__init__(message)
        self.status = status
        self._body = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def code(self) -> str | None:
        return self._body["code"]

    def body(self) -> dict[str, Any]:
        return {"error": dict(self._body)}


def not_supported(field: str, *, why: str) -> ApiError:
    return ApiError(f"{field} is not supported: {why}", param=field, code="unsupported_parameter")


def wrong_type(field: str, value: object, *, expected: str) -> ApiError:
    return ApiError(f"{field}: expected {expected}, found {shown(value)}", param=field, code="invalid_type")


def server_error(message: str, *, status: int = 500) -> ApiError:
    return ApiError(message, status=status, kind="server_error")


def shown(value: object) -> str:
    """A value of the client's as it may be quoted in a message: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
