"""The pod's folder: the target that outlives the engine, and the state for those who read files.

A Kubernetes emptyDir survives the restart of a container, so that an engine that crashed comes back with its values.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from .limits import LARGEST_BODY, BadRequestError, Target, read_target

FOLDER_VARIABLE = "AUTOSCALER_PLUGIN_DIR"


class Folder:
    """The target's file and one engine's state file in a folder, written by rename: nobody reads half of one."""

    def __init__(self, path: Path, engine: int) -> None:
        """Use the folder; it is looked at when first needed."""
        self._target = path / "target.json"
        self._state = path / f"state-{engine}.json"
        self._seen: tuple[int, int, int] | None = None
        self.writable = os.access(path, os.W_OK | os.X_OK)

    def changed_target(self) -> Target | None:
        """Return the target when its file is another one than at the last call; None when not, or without a file.

        Raises: BadRequestError, for what is not a target or cannot be read.
        """
        try:
            status = self._target.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen == self._seen:
                return None
            self._seen = seen
            with self._target.open("rb") as file:
                content = file.read(LARGEST_BODY + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadRequestError(f"cannot be read: {error.strerror}") from error
        if len(content) > LARGEST_BODY:
            raise BadRequestError(f"over {LARGEST_BODY} bytes")
        return read_target(content)

    def save_target(self, target: Target) -> None:
        """Keep the target for the engine's next start."""
        self._write(self._target, target.document())

    def save_state(self, state: dict[str, Any]) -> None:
        """Show the state, with the time."""
        self._write(self._state, {**state, "at": time.time()})

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        # A full or lost disk costs the values at the next start; it is no reason to disturb an engine that serves.
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(path)
            self.writable = True
        except OSError:
            self.writable = False


def folder_of(engine: int) -> Folder | None:
    """Return the folder that the environment names, if it names one."""
    path = os.environ.get(FOLDER_VARIABLE)
    return Folder(Path(path), engine) if path else None
