"""Command line: compose and check a `Config`, or exit with one line per problem that says what to type instead.

Hydra composes and overrides. Its error messages name internals, so they are rewritten here.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.rollout.errors import ConfigError, LockstepError
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.system.compute_threads import wait_briefly
from lockstep.rollout.system.orphan_guard import exit_when_orphaned
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.command_line import settings_files, without_file
from lockstep.trainer.compose import (
    CONFIG_DIR,
    TASK,
    all_keys,
    drop_prepared_heldout,
    preset_names,
    refuse_demo_parts,
    schema,
    sets,
    to_config,
    type_problem,
)
from lockstep.trainer.config.hints import closest
from lockstep.trainer.config.redaction import redact_text, redact_words
from lockstep.trainer.config.schema import Config
from lockstep.trainer.setting import declarations, free_form
from lockstep.trainer.words import readable, refuse_unreadable

if TYPE_CHECKING:
    from lockstep.trainer.resumption import SavedRun
    from lockstep.trainer.settings_file import SettingsFile

INTERRUPTED = "interrupted"
EXIT_LIMIT_S = 60.0
"""Time that engines and loggers have to close after a failure [s]."""
QUANTIZED = re.compile(r"4bit|8bit|quant|qlora", re.IGNORECASE)
"""Settings of other trainers that quantize the weights under adapters on loading."""
OWN = {
    "environment": "environment.name={}",
    "reward": "'reward.functions=[{}]'",
    "model": "model.path={}",
    "data": "data.path={}",
}
"""Settings that take a path where the group of the same name takes the name of a file under configs/."""


def launch(
    main: Callable[[Any], None],
    *,
    config_name: str = "train",
    config_class: type = Config,
    check: Callable[[Any], None] = validate,
    description: str | None = None,
    frequent: Sequence[str] = (),
) -> None:
    """Compose the configuration from `sys.argv`, with a settings file if a word names one, check it, and call `main`.

    Exits with status 2 and one line per problem for a mistake in the configuration, with status 1 and the message for
    another `LockstepError`.

    Args:
        config_name: file under configs/.
        config_class: dataclass schema of the configuration.
        check: raises `ConfigError` for values that are missing or in conflict.
        description: of the command, for `--help`. frequent: names of the settings that most calls need, for `--help`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the command ends at once while it imports this
    wait_briefly()
    end_with_launcher()
    notices: list[str] = []
    configs: list[Any] = []
    words = readable(sys.argv[1:])
    if description and {"--help", "-h"} & set(words):
        print(usage(description, frequent, config_class))
        return
    file: SettingsFile | None = None
    try:
        refuse_unreadable(words, schema(config_class))
        if settings_files(words):
            from lockstep.trainer.settings_file import settings_file  # other runs do not load it

            file = settings_file(words, config_class, base=config_name)
        configs = composed(without_file(words), file, notices, config_name, config_class, check)
    except (HydraException, OmegaConfBaseException) as error:
        _print(explain(error, config_class))
        sys.exit(2)
    except LockstepError as error:
        beside = file.kept_beside(words) if file else ""
        words = [*(file.words if file else ()), *words]
        hint = None
        if sets(words, "resume"):
            from lockstep.trainer.resumption import new_run_hint

            hint = new_run_hint(words)
        if hint and not sets(words, "experiment", *chain(*TASK.values())):  # a mistyped name, and nothing else to mend
            messages = [f"{hint}; name a run, or set model.path, data.path and reward for a new one"]
        else:
            messages = [*notices, hint, _message(error), f"kept: {beside}" if beside else ""]
        _print("\n".join(filter(None, messages)))
        sys.exit(_status(error))
    except KeyboardInterrupt:
        _print(INTERRUPTED)
        sys.exit(130)
    if any(notices) and os.environ.get("RANK", "0") == "0":
        _print("\n".join(filter(None, notices)))
    for config in configs:
        run_or_end(lambda config=config: main(config))


def usage(description: str, frequent: Sequence[str], config_class: type = Config) -> str:
    """Return the text of `--help`. Arguments as for `launch`."""
    declared, width = declarations(config_class()), max(map(len, frequent), default=0)
    lines = [f"  {name:{width}}  {declared[name][0].description}" for name in frequent]
    return "\n".join(
        [
            f"usage: {os.path.basename(sys.argv[0])} [my_run.yaml] [setting=value ...]\n",
            description.strip(),
            *(["\nMost need these settings:\n", *lines] if lines else []),
            "\nAll settings: docs/settings.md, or `--cfg job` in place of `--help`. Options of Hydra: `--hydra-help`.",
        ]
    )


def end_with_launcher() -> None:
    """Let a rank end when its launcher was killed, which then cannot end it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        exit_when_orphaned(
            message=f"rank {os.environ.get('RANK', '?')} ends, because its launcher is gone; start the run again with "
            "resume=auto"
        )


def composed(
    typed: Sequence[str],
    file: SettingsFile | None,
    notices: list[str],
    config_name: str = "train",
    config_class: type = Config,
    check: Callable[[Any], None] = validate,
) -> list[Any]:
    """Return the checked configuration, also of a run that is resumed; none after `--help` and `--cfg`.

    typed: words of the command line, on top of the file. notices: gets sentences on what was left out. Raises
    `ConfigError`, and errors of Hydra and OmegaConf, which `explain` turns into a sentence.
    """
    ConfigStore.instance().store(name="schema", node=schema(config_class))
    trees: list[DictConfig] = []
    configs: list[Any] = []
    words = [*(file.words if file else ()), *typed]
    stored_run: SavedRun | None = None
    if config_class is Config and sets(words, "resume"):
        from lockstep.trainer.resumption import check_resumed, saved_run, store_base  # a new run does not load it

        stored_run = saved_run(words)
        if stored_run is not None:
            config_name = store_base(stored_run.settings, path=stored_run.path)
    if file is not None:
        config_name = file.store(config_name)
    # Hydra adds lines to errors of its task, so the task only returns the tree.
    main_of_hydra = hydra.main(config_path=str(CONFIG_DIR), config_name=config_name, version_base="1.3")
    _composed_by(main_of_hydra(trees.append), typed)
    for tree in trees:
        config = to_config(tree, config_class)
        if stored_run is not None:
            check_resumed(stored_run, config, words)
        if isinstance(config, Config):
            notices.append(drop_prepared_heldout(config.data, words))
            refuse_demo_parts(config, words)
        check(config)
        configs.append(config)
    if stored_run is not None and stored_run.unknown:
        unknown_names = ", ".join(stored_run.unknown)
        notices.append(f"{stored_run.path} holds settings that this version does not know, left out: {unknown_names}")
    return configs


def run_or_end(work: Callable[[], None]) -> None:
    """Call `work`. After a failure, print it and end the process without destroying what is open.

    Transports and process groups that are destroyed while others use them wait for these, or abort with status -6.
    """
    try:
        work()
    except LockstepError as error:
        _print(_message(error))
        status = _status(error)
    except KeyboardInterrupt:
        _print(INTERRUPTED)
        status = 130
    except Exception:
        traceback.print_exc()
        status = 1
    else:
        return
    watchdog = threading.Timer(EXIT_LIMIT_S, os._exit, (status,))
    watchdog.daemon = True
    watchdog.start()
    atexit._run_exitfuncs()  # engines, loggers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _message(error: LockstepError) -> str:
    text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return "\n".join([text, *vars(error).get("__notes__", [])])


def _status(error: LockstepError) -> int:
    return 2 if isinstance(error, ConfigError) else 1


def _composed_by(compose: Callable[[], Any], words: Sequence[str]) -> None:
    """Run Hydra, which reads `sys.argv`, on words. Raises `ConfigError` for `group=5`, `group=null` and `group=[a]`,
    for which Hydra raises a bare ValueError or TypeError."""
    command, sys.argv = sys.argv, [sys.argv[0], *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise instead of printing, so that messages can be rewritten
    try:
        compose()
    except (ValueError, TypeError) as error:  # Hydra's for a group that is set to a list
        for word in words:
            group, _, option = word.lstrip("+").partition("=")
            options = preset_names(group)
            if options and option not in options:
                raise ConfigError(_no_such_option(group, option, options)) from error
        raise ConfigError(f"{' '.join(redact_words(words))} cannot be read ({error}); expected key=value") from error
    finally:
        sys.argv = command


def explain(error: Exception, config_class: type = Config) -> str:
    """Return one sentence for an error of Hydra or OmegaConf, with the closest existing name."""
    text = f"{error}\n{error.__cause__ or ''}"
    keys = all_keys(schema(config_class))
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match.group(1)
        if QUANTIZED.search(key):
            return (
                f"{key} is not a setting: weights are not quantized on loading; for QLoRA set model.path to a "
                "quantized checkpoint (docs/adapters.md) and model.lora.rank=16; set model.dtype=bfloat16 to save "
                "memory without"
            )
        if "not in" in text or "Key" in text:
            return f"{key} is not a setting{closest(key, keys)}; `--cfg job` prints all of them"
    if match := re.search(r"Key '([^']+)' not in '(\w+)'(?:\n\s+full_key: (\S+))?", text):
        key = match.group(3) or match.group(1)
        return f"{key} is not a setting{closest(key, keys)}; `--cfg job` prints all of them"
    if match := re.search(r"([^\n]+)\n\s+full_key: ([^\s\[]+)", text):
        return f"{match.group(2)}: {type_problem(match.group(1))}; {_default_override(match.group(2), config_class)}"
    if match := re.search(r"Error parsing override '([^']+)'|LexerNoViableAltException: (.+)", text):
        return (
            f"{match.group(1) or match.group(2)} is not key=value; quote values with spaces, quotes or brackets twice, "
            "for example \"key='a (b)'\""
        )
    if match := re.search(r"(?:Could not find|In 'train': Could not find) '([^']+)'", text):
        group, _, option = match.group(1).partition("/")
        if options := preset_names(group):
            return _no_such_option(group, option, options)
    if match := re.search(r"Could not override '([^']+)'[^\n]*", text):
        return match.group(0)
    return " ".join(str(error).split("\n")[:2])


def _no_such_option(group: str, option: str, options: list[str]) -> str:
    own = f"; for your own, type {OWN[group].format(option)}" if group in OWN and re.search("[./:]", option) else ""
    return f"{group}={option} does not exist{closest(option, options)}; expected one of: {', '.join(options)}{own}"


def _default_override(key: str, config_class: type) -> str:
    """Return the override that restores the default of a setting; for a section, its first settings."""
    tree = schema(config_class)
    while key and key not in all_keys(tree):  # a key of a dict
        key = key.rpartition(".")[0]
    if not key:
        return "leave it out for the default"
    value = OmegaConf.select(tree, key)
    if isinstance(value, DictConfig) and key not in free_form(config_class()):
        return f"leave {key} out, or set one of {', '.join(f'{key}.{name}' for name in list(value)[:3])}"
    entry = declarations(config_class()).get(key)
    if entry is not None and entry[0].example:
        return f"set it, for example {entry[0].example}"
    if value is None:
        return f"leave {key} out for the default"
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return f"set {key}={json.dumps(plain, separators=(',', ':')).replace(chr(34), '')} (the default)"


def _print(message: str) -> None:
    print_error(redact_text(message))
