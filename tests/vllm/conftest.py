"""A real vLLM for the tests of this folder: one place a release, in which each test starts the servers that it needs.

Without the engines the tests are skipped, with one line that says how to get them; with CI=true they fail.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.server import MissingEngineError, Place, environment, new_place

HERE = Path(__file__).parent
RELEASES = tuple(sorted(pins.stem for pins in (HERE / "engines").glob("*.txt")))


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line("markers", "vllm: runs real vLLM servers")
    config.addinivalue_line("markers", "newest: on the newest release only")
    config.addinivalue_line("markers", "demonstration: takes minutes, by make test-demonstrations")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that has a place on every release, or on the newest where it says so."""
    if "place" in metafunc.fixturenames:
        newest = metafunc.definition.get_closest_marker("newest") is not None
        rows = [
            pytest.param(release, marks=pytest.mark.vllm, id=release)
            for release in (RELEASES[-1:] if newest else RELEASES)
        ]
        metafunc.parametrize("place", rows, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip where a release is missing: from here, so that all of it makes one line of the summary. CI fails."""
    if item.get_closest_marker("vllm") is None:
        return
    try:
        for release in RELEASES:
            environment(release)
    except MissingEngineError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """Return a place for servers of one release."""
    async with new_place(request.param) as one:
        yield one
