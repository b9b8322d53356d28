"""The packages of trackers, and the login that a run tracked by Weights & Biases needs.

Imports nothing of W&B, whose import starts a service. Where its settings files name a server, a key or a mode, the
login is assumed.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.trainer.config.groups.outputs_settings import LoggerConfig

SERVER = "https://api.wandb.ai"


def package_problems(logger: LoggerConfig) -> Iterator[str]:
    """Yield one sentence per tracker whose package is missing."""
    for name in logger.trackers:
        if importlib.util.find_spec(name) is None:
            yield (
                f"logger.{name}=true needs {name}, which is not installed; `pip install 'lockstep-rl[{name}]'`, or "
                f"set logger.{name}=false"
            )


def tracking_problems(logger: LoggerConfig) -> Iterator[str]:
    """Yield missing packages, and the problem of a run that shall log to W&B's server and has no login."""
    yield from package_problems(logger)
    if (logger.wandb_mode or "online") == "online" and not _has_login():
        yield (
            f"logger.wandb={logger.wandb} logs to {_server()}, and no login was found; log in with "
            "`wandb login` (or set WANDB_API_KEY), or set logger.wandb=offline and upload later with `wandb sync`"
        )


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL", SERVER)


def _has_login() -> bool:
    """Return True if W&B would find a key: in the environment, in netrc, or in its settings files."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(os.path.expanduser("~"))
    own = Path(os.environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb")) / "settings"
    if any(
        name in text for text in map(_text, (own, Path("wandb/settings"))) for name in ("base_url", "api_key", "mode")
    ):
        return True
    path_of_login = os.environ.get("NETRC")
    return any(
        _is_known(path) for path in ([Path(path_of_login)] if path_of_login else [home / ".netrc", home / "_netrc"])
    )


def _is_known(path: Path) -> bool:
    """Return True if this netrc file has an entry for the server."""
    try:
        return netrc.netrc(path).authenticators(urlsplit(_server()).hostname or "") is not None
    except FileNotFoundError:
        return False
    except (OSError, netrc.NetrcParseError):  # W&B reports what is wrong with it
        return True


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
