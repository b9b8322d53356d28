"""Chat templates that replace a model's own: shipped ones by name, others as files.

Imports nothing heavy, because settings are checked with it.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.rollout.errors import ConfigError

SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
"""Files of shipped templates by name."""
CONTROL_TOKENS = {"hermes": ("<|im_start|>", "<|im_end|>")}
"""Control tokens that a shipped template writes; a tokenizer without them is not made for it."""


def template_text(chosen: str) -> str:
    """Return the Jinja text of a shipped template or of a file. Raises `ConfigError` if neither can be read."""
    try:
        return SHIPPED.get(chosen, Path(chosen).expanduser()).read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.chat_template={chosen} is neither {' nor '.join(SHIPPED)} nor a file that can be read ({error}); "
            "set model.chat_template=hermes, or model.chat_template=<file.jinja>"
        ) from error
