"""The plugin for vLLM in a directory: as a wheel would be there, and as Python finds it."""

import base64
import csv
import hashlib
import json
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution, distributions
from pathlib import Path

import pytest

from autoscaler.cli.main import run
from autoscaler.vllm_plugin import __version__

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_autoscaler_plugin"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory into which the command installed it."""
    assert run(["plugin-install", str(tmp_path / "plugins")]) == 0
    return tmp_path / "plugins"


def found(directory: Path) -> PathDistribution:
    (one,) = distributions(path=[str(directory)])
    assert isinstance(one, PathDistribution)
    return one


def test_python_finds_the_distribution_and_its_entry_points(directory: Path) -> None:
    one = found(directory)
    assert (one.metadata["Name"], one.version) == ("vllm-autoscaler-plugin", __version__)
    names = {(point.group, point.name): point.value for point in one.entry_points}
    assert names == {
        ("vllm.general_plugins", "autoscaler"): f"{PACKAGE}:register",
        ("vllm.endpoint_plugins", "autoscaler"): f"{PACKAGE}:LimitsEndpoint",
    }


def test_both_distributions_bring_the_same_entry_points() -> None:
    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    plugin = tomllib.loads((ROOT / "autoscaler" / "vllm_plugin" / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]
    assert json.loads(json.dumps(daemon).replace("autoscaler.vllm_plugin", PACKAGE)) == plugin


def test_it_is_the_source_file_by_file_with_true_digests(directory: Path) -> None:
    source = ROOT / "autoscaler" / "vllm_plugin"
    assert {file.name: file.read_bytes() for file in (directory / PACKAGE).iterdir()} == {
        file.name: file.read_bytes() for file in source.glob("*.py")
    }
    (metadata,) = directory.glob("*.dist-info")
    rows = {name: (digest, size) for name, digest, size in csv.reader((metadata / "RECORD").read_text().splitlines())}
    there = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert set(rows) == there
    for name, (digest, size) in rows.items():
        if digest:
            content = (directory / name).read_bytes()
            sha = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={sha}", str(len(content)))


def test_it_is_imported_without_the_daemon_and_without_vllm(directory: Path) -> None:
    code = (
        "import sys, vllm_autoscaler_plugin as p; p.register();"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in {'autoscaler', 'vllm', 'numpy', 'httpx'}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert "no scheduler that we know" in done.stderr


def test_a_newer_one_takes_the_place_of_an_older_one(directory: Path) -> None:
    (metadata,) = directory.glob("*.dist-info")
    metadata.rename(directory / f"{PACKAGE}-0.0.9.dist-info")
    assert run(["plugin-install", str(directory)]) == 0
    assert found(directory).version == __version__


def test_where_nothing_can_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / PACKAGE).write_text("in the way")
    assert run(["plugin-install", str(tmp_path / "plugins")]) == 1
    assert "cannot write to" in capsys.readouterr().err
