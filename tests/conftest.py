"""Options of all tests.

How hard Hypothesis searches, by HYPOTHESIS_PROFILE: `default` in every run, `nightly` when there is time. Both draw new
examples each time, under CI too; a failure prints the blob that reproduces it.

`--update-golden` rewrites the golden decisions, for review as a diff. `--screenshots DIR` keeps what a browser showed.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=60,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=1100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.decisions")
    parser.addoption("--screenshots", type=Path, metavar="DIR", help="write pictures of pages here, to be looked at")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Return whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def screenshots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder for pictures of pages."""
    folder: Path = request.config.getoption("--screenshots") or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    return folder
