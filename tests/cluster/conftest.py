"""The control plane that all tests of this folder share, and a namespace of its own for each.

Without the commands the tests are skipped, with one line that says how to get them; with CI=true they fail.
"""

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from autoscaler.testbed.plane import GPUS, MissingToolsError, Plane, find_tools, running_plane
from tests.cluster.manifests import Place, Pool, eventually, grant, new_place, takes_pods
from tests.cluster.proxy import Proxy, running_proxy
from tests.cluster.site import DEPLOYED, Site, site_of

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "cluster: runs against a real control plane")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need the control plane."""
    for item in items:
        if HERE in item.path.parents and "plane" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip where the commands are missing: from here, so that all of it makes one line of the summary. CI fails."""
    if item.get_closest_marker("cluster") is None:
        return
    try:
        find_tools()
    except MissingToolsError as error:
        missing = f"no control plane: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane() -> AsyncIterator[Plane]:
    """Return a control plane for all tests. Its parts are processes, so that it needs no event loop while it runs."""
    async with running_plane() as one:
        yield one


@pytest.fixture
async def place(plane: Plane) -> AsyncIterator[Place]:
    """Return a namespace of its own; it goes, with all that is in it, soon after the test."""
    name = f"test-{secrets.token_hex(4)}"
    await plane.mend()
    async with plane.api() as api:
        one = await new_place(plane, api, name)
        yield one
        await api.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
async def outage(place: Place) -> AsyncIterator[None]:
    """Let the test break the plane: afterwards, and before its namespace goes, the plane is as new.

    A controller or a scheduler that has lost its API server is slow for up to a minute after that is back.
    """
    yield
    await place.plane.renew()


@pytest.fixture
async def pool(place: Place) -> AsyncIterator[Pool]:
    """Return a node that only this test uses."""
    kubelet = place.plane.fake_kubelet(place.namespace, [place.namespace], gpus=GPUS, labels={"pool": place.namespace})
    kubelet.start()
    await eventually(lambda: takes_pods(place, place.namespace), f"node {place.namespace}")
    yield Pool(place.namespace, kubelet)
    await kubelet.stop()
    await place.api.request("DELETE", f"/api/v1/nodes/{place.namespace}")


@pytest.fixture
async def site(place: Place, tmp_path: Path) -> Site:
    """Return a namespace of its own, with an account that has the rights of deploy/overlays/live."""
    await grant(place, DEPLOYED, "subject")
    return await site_of(place, "subject", tmp_path)


@pytest.fixture
async def proxy(plane: Plane) -> AsyncIterator[Proxy]:
    """Return a proxy in front of the API server."""
    async with running_proxy(plane) as one:
        yield one
