"""The APIs in which clients can talk to the gateway: each translates to its inner request and from its inner reply."""

from __future__ import annotations

from lockstep.integrations.gateway.dialects.anthropic_messages import MESSAGES
from lockstep.integrations.gateway.dialects.chat_completions import CHAT_COMPLETIONS
from lockstep.integrations.gateway.dialects.completions import COMPLETIONS
from lockstep.integrations.gateway.dialects.dialect import Dialect
from lockstep.integrations.gateway.dialects.responses import RESPONSES

DIALECTS = (CHAT_COMPLETIONS, RESPONSES, MESSAGES, COMPLETIONS)


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a URL's path; that of chat completions for paths that belong to none."""
    return next((dialect for dialect in DIALECTS if f"/v1{dialect.path}" in path), CHAT_COMPLETIONS)
