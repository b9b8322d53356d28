"""Tree of a resolved configuration that highlights changes from the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.text import Text
from rich.tree import Tree

from lockstep.trainer.config.redaction import redact
from lockstep.trainer.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSetting:
    path: tuple[str, ...]
    value: Any
    default: Any
    """Default of the schema; the value itself for a setting of another version."""

    @property
    def is_changed(self) -> bool:
        return self.value != self.default

    @property
    def text(self) -> str:
        return flow(self.value)


def plain(config: Config) -> dict[str, Any]:
    """Return all settings as nested dicts, without secrets."""
    return redact(OmegaConf.to_container(OmegaConf.structured(config)))


def settings(values: Mapping[str, Any]) -> list[ResolvedSetting]:
    """Return every setting of nested dicts from `plain`, in order."""
    return list(_walk((), values, plain(Config())))


def _walk(path: tuple[str, ...], values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[ResolvedSetting]:
    for name, value in values.items():
        default = defaults.get(name, value)
        # A dict whose default has keys is a section; an empty default is a free-form setting.
        if isinstance(value, Mapping) and isinstance(default, Mapping) and default:
            yield from _walk((*path, str(name)), value, default)
        else:
            yield ResolvedSetting(path=(*path, str(name)), value=value, default=default)


def settings_tree(values: Mapping[str, Any]) -> Tree:
    """Return the tree of the settings that are not defaults, for a terminal. Values are plain text, without markup."""
    all_settings = settings(values)
    changes = [setting for setting in all_settings if setting.is_changed]
    others = f"  {len(all_settings) - len(changes)} others have the defaults of the schema; --cfg job prints all"
    tree = Tree(Text.assemble(("settings", "bold"), (others, "dim")))
    branches: dict[tuple[str, ...], Tree] = {(): tree}
    for setting in changes:
        for depth in range(1, len(setting.path)):
            section = setting.path[:depth]
            if section not in branches:
                branches[section] = branches[section[:-1]].add(Text(section[-1], style="cyan"))
        line = Text.assemble((setting.path[-1], "bold"), " ", (setting.text, "bold"))
        if setting.default not in ("", []):  # else it is required
            line.append(f"  (default {flow(setting.default)})", style="dim")
        branches[setting.path[:-1]].add(line)
    return tree


def flow(value: Any) -> str:
    """Format a value as one line of YAML: null, true, [a, b]."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n").strip()
