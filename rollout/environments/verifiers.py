"""Environments of the `verifiers` package: they take an OpenAI client, so they are agents behind the gateway.

    pip install "verifiers<0.3" and the environment's own package
    python scripts/train.py environment=verifiers environment.settings.env_id=gsm8k \
        data.path=gsm8k.jsonl reward.functions=[environment_reward]

A data row is what such an environment calls its input: `prompt`, `answer`, `info`, `task`, `example_id`, as
`load_environment("gsm8k").get_dataset().to_json("gsm8k.jsonl")` writes them. The package runs the rollout and its
rubric; the reward comes back as outcome `environment_reward`, each metric as `verifiers_<name>`.

Not covered: rubrics that compare the rollouts of a group (each is scored by itself), and the harness programs that
replaced these environments in verifiers 0.3; `environment=agent` takes those that can be given a base URL.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import signal
import threading
from collections.abc import Mapping
from typing import Any

from rollout.environments.agent import AgentEnvironment
from rollout.environments.prompt import Prompt
from rollout.errors import ConfigError
from rollout.system.background_loop import BackgroundLoop

INPUT_COLUMNS = ("answer", "info", "task", "example_id")


class VerifiersEnvironment(AgentEnvironment):
    """An agent episode that is a rollout of a verifiers environment."""

    def __init__(
        self,
        env_id: str | None = None,
        *,
        args: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        max_concurrent: int = 64,
    ):
        """env_id: as for `verifiers.load_environment`. args: its keyword arguments. The rest as for `AgentEnvironment`.

        Raises:
            ConfigError: no id is given, or the package or the environment is not installed or fails to load.
        """
        if env_id is None:
            raise ConfigError(
                "no environment is named; set environment.settings.env_id=<id of a verifiers environment>"
            )
        _check_installed(env_id)
        environment = _load(env_id, json.dumps(dict(args or {}), sort_keys=True))
        super().__init__(
            functools.partial(_play, environment, timeout_s), timeout_s=timeout_s, max_concurrent=max_concurrent
        )


def _check_installed(env_id: str) -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError("environment verifiers needs the verifiers package; type: pip install 'verifiers<0.3'")
    version = importlib.metadata.version("verifiers")
    if tuple(int(part) for part in version.split(".")[:2]) >= (0, 3):
        raise ConfigError(
            f"found verifiers {version}, which has no load_environment any more; type: pip install 'verifiers<0.3'"
        )
    if importlib.util.find_spec(_module_of(env_id)) is None:
        raise ConfigError(
            f"the verifiers environment {env_id!r} is not installed (no module {_module_of(env_id)}); install its "
            "package, or set environment.settings.env_id to another one"
        )


def _module_of(env_id: str) -> str:
    """The package's own rule: `owner/some-env` is module `some_env`."""
    return env_id.replace("-", "_").split("/")[-1]


@functools.cache
def _load(env_id: str, args: str) -> Any:
    """Load an environment once per process: it may bring a data set with it.

    The package takes Ctrl-C and SIGTERM for itself, which only the main thread can do, and which a run must not let
    it: they belong to whoever had them before.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"the verifiers environment {env_id!r} must first be made in the main thread")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return importlib.import_module("verifiers").load_environment(env_id, **json.loads(args))
    except Exception as error:  # whatever somebody's module raises
        raise ConfigError(f"the verifiers environment {env_id!r} cannot be loaded: {error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _play(
    environment: Any, timeout_s: float, base_url: str, api_key: str, example: Mapping[str, Any]
) -> Mapping[str, Any]:
    """One rollout, as an agent: blocks its own thread while the package works in its loop."""
    return _loop().run(_rollout(environment, base_url, api_key, example), timeout=timeout_s)


@functools.cache
def _loop() -> BackgroundLoop:
    """One loop for all rollouts, as the package itself has it: its environments keep locks and clients between them."""
    return BackgroundLoop()


async def _rollout(environment: Any, base_url: str, api_key: str, example: Mapping[str, Any]) -> Mapping[str, Any]:
    openai = importlib.import_module("openai")
    verifiers = importlib.import_module("verifiers")
    inputs = {name: example[name] for name in INPUT_COLUMNS if example.get(name) is not None}
    # A refusal by the gateway is final; trying again would only cost turns.
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        output = await environment.run_rollout(
            {"example_id": 0, **inputs, "prompt": [dict(message) for message in Prompt().messages(example)]},
            client=verifiers.OpenAIChatCompletionsClient(client),
            model="policy",
            sampling_args={},
        )
    if output.get("error"):  # where a limit of the episode is the cause, the session knows and the rollout is kept
        raise RuntimeError(f"verifiers: {output['error']}")
    metrics = {f"verifiers_{name}": value for name, value in (output.get("metrics") or {}).items()}
    return {"environment_reward": float(output["reward"]), **metrics}
