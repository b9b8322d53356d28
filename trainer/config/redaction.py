"""Redaction of secrets in configurations and command lines that are logged or printed.

Covered: values under the names of secrets (`api_key`, `token`, `secret`, `password`, ...) at any depth; values in the
format of keys of known services; user and password in URLs. Not covered: other values under other names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

REDACTED = "<redacted>"
_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|password|passwd|credentials?|authorization|auth_?token"
    r"|(access|api|auth|bearer|hf|hub|session|wandb)_?token|token)$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"(sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16}|xox[abp]-[A-Za-z0-9-]{10,}"
    r"|Bearer\s+\S{8,}|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+)"
)
_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of mappings, lists and plain values in which every secret is `REDACTED`.

    Names of environment variables (`api_key_env`) are not secret.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str) and value:
        if _NAME.search(name):
            return REDACTED
        return _URL.sub(REDACTED, _VALUE.sub(REDACTED, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return REDACTED if _NAME.search(name) else value
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line in which every secret is `REDACTED`, in `key=value` and in `key={name: value}`."""
    return [_redact_word(word) for word in words]


def _redact_word(word: str) -> str:
    key, equals, text = word.partition("=")
    name = key.lstrip("+~").rpartition(".")[2]
    if not equals:
        return redact(word)
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:  # a flag such as --config-dir=...
        value = text
    shown = redact(value, name)
    if shown == value:
        return word
    return f"{key}={shown if isinstance(shown, str) else _typed(shown)}"


def _typed(value: Any) -> str:
    """Format a value for Hydra. Texts are quoted, because Hydra would parse some as another type."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_typed, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower()
