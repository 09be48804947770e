"""The control plane that all tests of this folder share, and a namespace of its own for each.

Without the commands the tests are skipped, with one line that says how to get them.
"""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.api import ApiError
from tests.cluster.manifests import Place, eventually
from tests.cluster.plane import MissingToolsError, Plane, find_tools, running_plane

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "cluster: runs against a real control plane")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture(scope="session")
def tools() -> Path:
    """Return the folder with the commands."""
    try:
        return find_tools()
    except MissingToolsError as error:
        pytest.skip(f"no control plane: {error}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane(tools: Path) -> AsyncIterator[Plane]:
    """Return a control plane for all tests. Its parts are processes, so that it needs no event loop while it runs."""
    async with running_plane(tools) as one:
        yield one


@pytest.fixture
async def place(plane: Plane) -> AsyncIterator[Place]:
    """Return a namespace of its own; it goes, with all that is in it, soon after the test."""
    name = f"test-{secrets.token_hex(4)}"
    async with plane.api() as api:
        await api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

        async def has_account() -> bool:
            try:
                await api.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")
            except ApiError:
                return False
            return True

        # Pods cannot be made before their default account is there.
        await eventually(has_account, "default account")
        yield Place(plane, api, name)
        await api.request("DELETE", f"/api/v1/namespaces/{name}")
