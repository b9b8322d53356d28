"""Files of the user that a run reads, code and data, by their hash: what of them was changed between its processes.

Beside each checkpoint. Not covered: modules that the user's files import, directories, and data sets of the hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.rollout.system.plain_files import read_plain
from lockstep.rollout.system.user_functions import file_sha256, is_object
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.user_code import code_of_files
from lockstep.trainer.setting import declarations

NAME = "user_files.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFiles:
    """Hashes of the files, and what was changed since the run began."""

    hashes: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by path, or by `object:name`."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Path of a file -> last update for which its earlier content was used."""

    @classmethod
    def of(cls, config: Config) -> UserFiles:
        """Return the files that the settings name, as they are now; files that are not there are left out."""
        hashes = {}
        for spec in code_of_files(config.environment, config.reward, config.algorithm):
            if is_object(spec):
                hashes[spec] = file_sha256(spec)
        for path in sorted(_paths(config)):
            place = Path(path).expanduser()
            if place.is_file():
                with place.open("rb") as stream:
                    hashes[path] = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(hashes=hashes)

    @classmethod
    def read(cls, checkpoint: Path) -> UserFiles:
        """Return the files of a checkpoint; none for one of an older version, or if the record is damaged."""
        try:
            values = json.loads(read_plain(checkpoint / NAME))
            hashes, changes = dict(values["hashes"]), dict(values["changes"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls()
        if not all(type(value) is int for value in changes.values()):
            return cls()
        return cls(hashes=hashes, changes=changes)

    def save(self, directory: Path) -> None:
        """Write the record into the directory of a checkpoint."""
        (directory / NAME).write_text(json.dumps(asdict(self), indent=2))

    def changed_since(self, before: UserFiles) -> list[str]:
        """Return the files on both sides whose content differs."""
        return [path for path, value in self.hashes.items() if before.hashes.get(path, value) != value]

    def after(self, before: UserFiles, *, update: int) -> UserFiles:
        """Return these files with the changes until a checkpoint, and those since it. update: of the checkpoint."""
        since = dict.fromkeys(self.changed_since(before), update)
        return UserFiles(hashes=self.hashes, changes={**before.changes, **since})


def _paths(config: Config) -> Iterator[str]:
    """Yield the paths of code and data; some are hub ids."""
    for spec in code_of_files(config.environment, config.reward, config.algorithm):
        if not is_object(spec):
            yield spec.rpartition(":")[0]
    data_sets = [*config.data.training_sets().values(), *config.heldout_sets().values()]
    yield from (one.path for one in (*data_sets, *config.demonstration_sets().values()))
    yield from (
        value for declared, value in declarations(config).values() if declared.is_path and isinstance(value, str)
    )
