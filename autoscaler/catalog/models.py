"""A model by its name or its folder: the shipped configurations lie beside this file, one's own reads the same way."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autoscaler.catalog.configuration import read_configuration, unusable
from autoscaler.core.kv import ModelShape

FOLDER = Path(__file__).parent / "models"
CONFIGURATION, INDEX = "config.json", "model.safetensors.index.json"


@cache
def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def model(name_or_path: str) -> ModelShape:
    """Return the shipped model of that name, or the one in that folder or file. Raises ModelError, with every mistake.

    A folder's weights count by their size: the index of the safetensors says it, or the files themselves.
    """
    name = name_or_path.lower()
    if name in model_names():
        return _read(FOLDER / f"{name}.json", name)
    path = Path(name_or_path)
    if not path.exists():
        known = ", ".join(model_names())
        raise unusable(name_or_path, f"no such model; it is a config.json, a folder with one, or one of {known}")
    folder = path if path.is_dir() else path.parent
    file = folder / CONFIGURATION if path.is_dir() else path
    shape = _read(file, str(path))
    size = _checkpoint_bytes(folder) if file.name == CONFIGURATION else None
    # extra layers for speculative decoding are in the files but not loaded
    return shape if size is None or _has_extra_layers(file) else replace(shape, checkpoint_bytes=size)


def _read(file: Path, name: str) -> ModelShape:
    configuration = _json(file)
    return read_configuration(str(file), configuration, str(configuration.get("_model", name)))


def _json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unusable(str(file), f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # bytes that are no text, text that is no JSON
        raise unusable(str(file), f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise unusable(str(file), "must be an object, as Hugging Face's config.json is")
    return found


def _has_extra_layers(file: Path) -> bool:
    return bool(_json(file).get("num_nextn_predict_layers"))


def _checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights' files; None when there are none."""
    index = folder / INDEX
    if index.exists():
        metadata = _json(index).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
            raise unusable(str(index), "must give the weights' bytes", key="metadata.total_size", value=size)
        return int(size)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) or None
