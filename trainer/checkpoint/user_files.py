"""Files of the user that a run reads, code and data, by their hash: what of them was changed between its processes.

Beside each checkpoint. Not covered: modules that the user's files import, directories, and data sets of the hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.rollout.system.plain_files import read_plain
from lockstep.rollout.system.user_functions import file_sha256, is_object

NAME = "user_files.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFiles:
    """Hashes of the files, and what was changed since the run began."""

    hashes: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 by path, or by `object:name`."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Path of a file -> last update for which its earlier content was used."""

    @classmethod
    def of(cls, code: Iterable[str], paths: Iterable[str]) -> UserFiles:
        """Return the files as they are now; what is not there, such as a hub id, is left out.

        code: `path/to/file.py:name` and `object:name`. paths: of data and of other files.
        """
        specs = list(code)
        hashes = {spec: file_sha256(spec) for spec in specs if is_object(spec)}
        for path in sorted({*paths, *(spec.rpartition(":")[0] for spec in specs if not is_object(spec))}):
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
