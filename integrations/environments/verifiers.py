"""Environment `verifiers`: environments of the `verifiers` package, run as agents with an OpenAI client.

    pip install "verifiers<0.3" and the environment's own package
    lockstep train environment=verifiers environment.settings.env_id=gsm8k \
        data.path=gsm8k.jsonl reward.functions=[environment_reward]

Tasks of verifiers 0.4 are played by a host (`verifiers_tasks.py`), if `python` names an interpreter, or if that version
is installed here. With an older one here, a data row has the input columns of such an environment: `prompt`, `answer`,
`info`, `task`, `example_id`, as `load_environment("gsm8k").get_dataset().to_json("gsm8k.jsonl")` writes them. The
package runs the rollout and its rubric. The reward becomes outcome `environment_reward`, each metric
`verifiers_<name>`.

Not covered: rubrics that compare the rollouts of a group (each is scored by itself).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.integrations.environments.agent import AgentEnvironment
from lockstep.integrations.environments.verifiers_tasks import MARGIN_S, VerifiersTasks, position
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.hosts.process import interpreter
from lockstep.rollout.records import Message
from lockstep.rollout.replies import read_number
from lockstep.rollout.system.background_loop import shared_loop

INPUT_COLUMNS = ("answer", "info", "task", "example_id")


def evaluation_rows(env_id: str | None = None, *, args: Mapping[str, Any] | None = None, **limits: Any) -> Any:
    """Return the evaluation data set of an environment, a `datasets.Dataset`; without one, the package gives its
    training data. Takes the settings of `VerifiersEnvironment`, and raises as it does; `DataError` without any data."""
    environment = VerifiersEnvironment(env_id, args=args, **limits)._environment
    if environment is None:
        raise DataError(
            f"the verifiers environment {env_id!r} has no evaluation data of its own, as none of verifiers 0.4; name "
            'held-out tasks in a file of rows {"idx": 900}, and set data.heldout_path to it'
        )
    try:
        rows = environment.get_eval_dataset()
    except Exception as error:  # a user's module may raise anything
        raise DataError(f"the verifiers environment {env_id!r} gives no evaluation data: {error}") from error
    if len(rows) == 0:
        raise DataError(f"the verifiers environment {env_id!r} has an empty evaluation data set")
    return rows


class VerifiersEnvironment(AgentEnvironment):
    """Agent whose episode is a rollout of a verifiers environment."""

    declaration = replace(
        AgentEnvironment.declaration, opens="an interpreter or a package", evaluation_rows=evaluation_rows
    )

    def __init__(
        self,
        env_id: str | None = None,
        *,
        args: Mapping[str, Any] | None = None,
        python: str | None = None,
        timeout_s: float = 600.0,
        max_concurrent: int = 64,
    ):
        """env_id: id of an environment. args: keyword arguments for `verifiers.load_environment`; in 0.4 the
        configuration of the environment. python: interpreter with verifiers 0.4; None: this one, of any version.
        timeout_s, max_concurrent: as for `RunsItself`.

        Raises `ConfigError`: `env_id` is missing, or the package or the environment is not installed or fails to load.
        """
        if env_id is None:
            raise ConfigError("no env_id is set; set environment.settings.env_id=<id of a verifiers environment>")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s} must be greater than 0; set environment.settings.timeout_s=600")
        self._environment = None
        if python is not None or is_of_tasks():
            tasks = VerifiersTasks(interpreter(python), env_id, args or {}, timeout_s=timeout_s)
            super().__init__(tasks.play, timeout_s=timeout_s + 2 * MARGIN_S, max_concurrent=max_concurrent)
            return
        _check_installed(env_id)
        self._environment = _load(env_id, json.dumps(dict(args or {}), sort_keys=True))
        super().__init__(self._play, timeout_s=timeout_s, max_concurrent=max_concurrent)

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        if self._environment is not None:
            return PromptReader().messages(example)
        position(example)
        return ()

    def _play(self, base_url: str, api_key: str, example: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one rollout as an agent: block this thread while the package works in its own loop."""
        # The package's environments keep locks and clients between rollouts.
        return shared_loop().run(_rollout(self._environment, base_url, api_key, example), timeout=self.timeout_s)


def is_of_tasks() -> bool:
    """Return True if the package that is installed here has no `load_environment`, but tasks."""
    if importlib.util.find_spec("verifiers") is None:
        return False
    return tuple(int(part) for part in importlib.metadata.version("verifiers").split(".")[:2]) >= (0, 3)


def _check_installed(env_id: str) -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            "environment verifiers needs the verifiers package; set environment.settings.python=<an interpreter with "
            "verifiers 0.4>, or type: pip install 'verifiers<0.3'"
        )
    if importlib.util.find_spec(_module_of(env_id)) is None:
        raise ConfigError(
            f"the verifiers environment {env_id!r} is not installed (no module {_module_of(env_id)}); install its "
            "package, or set environment.settings.env_id to another one"
        )


def _module_of(env_id: str) -> str:
    """Return the module of an environment by the package's rule: `some_env` for `owner/some-env`."""
    return env_id.replace("-", "_").split("/")[-1]


@functools.cache
def _load(env_id: str, args: str) -> Any:
    """Load an environment once per process, since it may load a data set.

    The package installs handlers for Ctrl-C and SIGTERM (only the main thread can); the run's own are put back.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"the verifiers environment {env_id!r} must first be made in the main thread")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return importlib.import_module("verifiers").load_environment(env_id, **json.loads(args))
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"the verifiers environment {env_id!r} cannot be loaded: {error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def _rollout(environment: Any, base_url: str, api_key: str, example: Mapping[str, Any]) -> Mapping[str, Any]:
    openai = importlib.import_module("openai")
    verifiers = importlib.import_module("verifiers")
    inputs = {name: example[name] for name in INPUT_COLUMNS if example.get(name) is not None}
    # A refusal by the gateway is final, and retries would use up turns.
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        output = await environment.run_rollout(
            {"example_id": 0, **inputs, "prompt": [dict(message) for message in PromptReader().messages(example)]},
            client=verifiers.OpenAIChatCompletionsClient(client),
            model="policy",
            sampling_args={},
        )
    if output.get("error"):  # if the cause is a limit of the episode, the session knows it and the rollout is kept
        raise RuntimeError(f"verifiers: {output['error']}")
    metrics = {f"verifiers_{name}": value for name, value in (output.get("metrics") or {}).items()}
    return {"environment_reward": read_number(output["reward"]), **metrics}
