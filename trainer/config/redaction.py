"""Redaction of secrets in configurations and command lines that are logged, stored or printed.

Covered: values under the names of secrets (`api_key`, `x-api-key`, `token`, `password`, ...) at any depth, with whole
mappings and lists under them, and after a flag of such a name; values in the format of keys of known services;
passwords and keys in URLs. Not covered: other values under other names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

REDACTED = "<redacted>"

NAMES = (
    r"(api|access|private|secret|signing|encryption|ssh|auth|openai|anthropic|gemini|google|azure|wandb|hf|hub|engine)"
    r"[_-]?key",
    r"secret(s|[_-]?access[_-]?key)?|client[_-]?secret",
    r"pass(word|wd|phrase|code)s?|pwd",
    r"credentials?|creds",
    r"(proxy[_-]?)?auth(orization)?|bearer|jwt|(set[_-]?)?cookies?",
    r"((access|api|auth|bearer|client|gh|github|gitlab|hf|hub|id|openai|refresh|secret|security|session|slack|wandb)"
    r"[_-]?)?tokens?",
)
"""Ends of secret names, after a separator or at the start. `max_tokens`, `token_budget` and `num_tokens` are counts."""
COUNTS = re.compile(
    r"(^|[._-])(max|min|num|n|total|new|completion|prompt|query|response|stop|special|extra|sampled|pad|eos|bos|unk)[_-]tokens?$",
    re.IGNORECASE,
)
_NAME = re.compile(rf"(^|[._-])({'|'.join(NAMES)})$", re.IGNORECASE)

VALUES = {
    # https://docs.github.com/en/code-security/secret-scanning/introduction/supported-secret-scanning-patterns and
    # https://github.blog/engineering/platform-security/behind-githubs-new-authentication-token-formats/
    "GitHub": r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}",
    # https://docs.gitlab.com/security/tokens/#token-prefixes
    "GitLab": r"gl(pat|oas|dt|rt|ptt|ft|imt|agent|cbt|soat|ffct)-[A-Za-z0-9_.-]{16,}",
    # https://huggingface.co/docs/hub/security-tokens
    "Hugging Face": r"(hf|api_org)_[A-Za-z0-9]{16,}",
    # https://github.com/gitleaks/gitleaks/blob/master/config/gitleaks.toml: OpenAI, Anthropic, Stripe, AWS, Google,
    # Slack, npm, PyPI, SendGrid, private keys. A digit tells keys from names such as sk-learn-of-some-kind.
    "OpenAI, Anthropic, OpenRouter, Stripe": r"[sr]k[-_](?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}",
    "AWS": r"(AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}",
    "Google": r"AIza[0-9A-Za-z_-]{30,}|ya29\.[0-9A-Za-z_-]{16,}",
    "Slack": r"x(ox[abeoprs]|app)-[A-Za-z0-9-]{10,}",
    "npm": r"npm_[A-Za-z0-9]{16,}",
    "PyPI": r"pypi-[A-Za-z0-9_-]{16,}",
    "SendGrid": r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    # Documentation of the services: console.groq.com, docs.x.ai, build.nvidia.com, replicate.com, fireworks.ai
    "Groq, xAI, NVIDIA, Replicate, Fireworks": r"(gsk_|xai-|nvapi-|r8_|fw_)[A-Za-z0-9_-]{16,}",
    # RFC 6750, RFC 7617, RFC 7519
    "HTTP": r"(?i:(Bearer|Basic|Token)\s+)((?=[A-Za-z._~+/-]*[0-9=])[A-Za-z0-9._~+/=-]{8,}|[A-Za-z0-9._~+/-]{24,})",
    "JWT": r"eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+",
}
"""Formats of keys, by service, with the page that defines or lists them."""
_VALUE = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(VALUES.values())})")
_USER = re.compile(r"(?<=://)[^\s/?#\"']*[^\s\"']*(?=@[A-Za-z0-9\[])")
"""User and password of a URL (RFC 3986, 3.2.1). Passwords are often not percent-encoded, so it ends at the last @."""
_PAIR = re.compile(r"(?<![\w.-])(-{0,2}([A-Za-z][\w.-]*)(?:=|(?<=\w)(?:,\s*|\s+)))(?!--)([^\s&;,#\"'`\]})]+)")
"""A name and its value in a text: in the query of a URL, in front of a command, or as a flag of one."""
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_BARE = re.compile(r"(?!(?i:null|true|false|nan|inf)$)(\.{0,2}/|[A-Za-z_])[\w/.:@-]*")
"""Texts that Hydra reads as texts without quotes."""


def is_secret(name: str, value: Any) -> bool:
    """True if the name is that of a secret. Names of environment variables (`api_key_env`) are not secret; a number
    under `tokens` is a count."""
    is_count = name.lower().endswith("tokens") and str(value).strip("[]").isdecimal()
    return _NAME.search(name) is not None and COUNTS.search(name) is None and not is_count


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of mappings, lists and plain values in which every secret is `REDACTED`."""
    if value is None or isinstance(value, bool):
        return value
    is_hidden = is_secret(name, value)
    if isinstance(value, Mapping):
        if is_hidden:  # credentials: {user: a, pass: b}
            return {redact_text(str(key)): REDACTED for key in value}
        return {
            redact_text(key) if isinstance(key, str) else key: redact(item, str(key)) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item, name) for item in value] if is_hidden else _redact_list(value)
    if is_hidden and value != "":
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return a text in which keys of known formats, passwords of URLs and values of secret names are `REDACTED`."""
    text = _VALUE.sub(REDACTED, text)
    if "://" in text:
        text = _USER.sub(REDACTED, text)
    return _PAIR.sub(_redact_pair, text)


def _redact_pair(found: re.Match[str]) -> str:
    start, name, value = found.groups()
    # Without = only a flag has a value: prose says "token 5".
    is_pair = start.endswith("=") or start.startswith("-")
    return f"{start}{REDACTED}" if is_pair and is_secret(name, value) else found[0]


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line in which every secret is `REDACTED`: in `key=value`, `key={name: value}`, `--key value`."""
    return [REDACTED if after else _redact_word(word) for word, after in zip(words, _after_flags(words), strict=True)]


def _redact_list(values: Sequence[Any]) -> list[Any]:
    """Redact a list that may be a command line: `[--hf-token, X]`, `[--api-key=X]`."""
    return [
        REDACTED if after else _redact_word(item) if isinstance(item, str) and item.startswith("-") else redact(item)
        for item, after in zip(values, _after_flags(values), strict=True)
    ]


def _after_flags(words: Sequence[Any]) -> list[bool]:
    """Return True for each word that is the value of a flag with a secret name."""
    flags = [_FLAG.fullmatch(word) if isinstance(word, str) else None for word in words]
    return [
        flag is not None and not str(word).startswith("--") and is_secret(flag[1], word)
        for flag, word in zip([None, *flags], words, strict=False)
    ]


def _redact_word(word: str) -> str:
    key, equals, text = word.partition("=")
    name = key.lstrip("+~-").rpartition(".")[2]
    if not equals:
        return redact_text(word)
    if any(is_secret(part, text) for part in key.lstrip("+~-").split(".")):  # credentials.user=a
        return word if text in ("", "null") else f"{key}={REDACTED}"
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:  # a flag such as --config-dir=...
        value = text
    safe_value = redact(value, name)
    if safe_value == value:
        return word
    return f"{key}={safe_value if isinstance(safe_value, str) else override_value(safe_value)}"


def override_value(value: Any) -> str:
    """Format a value for Hydra. Texts are quoted where Hydra might read another type."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {override_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(override_value, value)) + "]"
    if isinstance(value, str):
        if _BARE.fullmatch(value):
            return value
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value).lower()
