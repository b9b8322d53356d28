"""Secrets out of configurations before they are logged.

Covered: values under names that say what they are (`api_key`, `token`, `secret`, `password`, ...), at any depth; values
that look like keys of known services wherever they stand; user and password in URLs. Not covered: a secret under an
innocent name that looks like a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    """A copy of a configuration (mappings, lists, plain values) in which every secret is `REDACTED`.

    Names of environment variables (`api_key_env`) stay: they are no secrets.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value]
    if isinstance(value, str) and value:
        if _NAME.search(name):
            return REDACTED
        return _URL.sub(REDACTED, _VALUE.sub(REDACTED, value))
    return value
