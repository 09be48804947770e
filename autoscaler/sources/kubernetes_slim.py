"""kubernetes_asyncio without its 800 models: they take a second to import, and none of them is used here."""

import importlib
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

PACKAGE = "kubernetes_asyncio"
WANTED = {"Configuration": "configuration", "ApiClient": "api_client"}
"""What `client` holds then, and which of its modules each comes from."""


def slim_client() -> None:
    """Make `kubernetes_asyncio.client` and its `config` importable in a tenth of the time.

    Bare packages take the places of those whose `__init__` imports every model; the modules in them are the real ones.
    Does nothing where the package was imported already. Where it is laid out differently, it is left as it was.
    """
    if PACKAGE in sys.modules:
        return
    spec = find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    package = _bare(PACKAGE, places)
    client = _bare(f"{PACKAGE}.client", (str(Path(place) / "client") for place in places))
    models = _bare(f"{PACKAGE}.client.models", ())
    package.client, client.models = client, models  # type: ignore[attr-defined]
    try:
        for name, module in WANTED.items():
            setattr(client, name, getattr(importlib.import_module(f"{PACKAGE}.client.{module}"), name))
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]


def _bare(name: str, places: Iterable[str]) -> ModuleType:
    """Return a package of that name, imported from nowhere, whose modules are in `places`."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = list(places)
    module = sys.modules[name] = module_from_spec(spec)
    return module
