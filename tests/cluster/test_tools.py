"""How the commands of the control plane are found and built, as far as it can be told without building them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from autoscaler.testbed.plane import COMMANDS, KUBERNETES, MissingToolsError, find_tools

TOOLS = Path(__file__).parent / "tools" / "go.mod"
SCRIPT = TOOLS.parents[1] / "build-tools"
USED = ("bash", "dirname", "env", "sed")


def executable(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def built(folder: Path, commands: Iterable[str] = COMMANDS) -> Path:
    """Return the folder, with commands in it that do nothing."""
    for name in commands:
        executable(folder / name)
    return folder


def build(folder: Path, **environment: str) -> str:
    """Return what the script says; it must end well. It finds what it uses, and no more, in `folder`/bin."""
    found = {name: shutil.which(name) for name in USED}
    for name, path in found.items():
        assert path is not None, name
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).symlink_to(path)
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder), **environment}
    return subprocess.run([SCRIPT], env=environment, check=True, capture_output=True, text=True).stdout


def test_all_modules_of_kubernetes_have_one_version() -> None:
    staging = re.findall(r"^\t(\S+) => (\S+) v0\.(\S+)$", TOOLS.read_text(), re.MULTILINE)
    assert len(staging) > 30
    assert {number for _, _, number in staging} == {KUBERNETES.removeprefix("1.")}
    assert re.findall(r"^require k8s\.io/kubernetes v(\S+)$", TOOLS.read_text(), re.MULTILINE) == [KUBERNETES]
    assert all(old == new for old, new, _ in staging)


def test_nothing_is_said_where_everything_is_built(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "go", "echo go1.26.9\n")
    built(tmp_path / ".cache" / "vllm-autoscaler" / f"kubernetes-{KUBERNETES}-go1.26.9")
    assert build(tmp_path) == ""


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        pytest.param({}, "there is no go to build them with", id="no go"),
        pytest.param({}, "this go cannot get go1.26", id="old go"),
        pytest.param({"KUBEBUILDER_ASSETS": "/nowhere"}, "there is no etcd kube-apiserver", id="no assets"),
    ],
)
def test_what_is_missing_is_said_in_one_line_and_is_no_failure(
    tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    if "this go" in words:
        executable(tmp_path / "bin" / "go", "echo go1.19.8\n")
    said = build(tmp_path, **environment)
    assert words in said
    assert len(said.splitlines()) == 1


def test_assets_are_used_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets = built(tmp_path / "assets", COMMANDS[1:])
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    with pytest.raises(MissingToolsError, match="there is no etcd in it"):
        find_tools()
    built(assets)
    assert find_tools() == assets
    assert build(tmp_path, KUBEBUILDER_ASSETS=str(assets)) == ""


def test_the_last_complete_build_of_this_version_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MissingToolsError, match="make cluster-tools"):
        find_tools()
    cache = tmp_path / "vllm-autoscaler"
    built(cache / "kubernetes-1.0.0-go1.26.1")
    built(cache / f"kubernetes-{KUBERNETES}-go1.26.3", COMMANDS[1:])
    with pytest.raises(MissingToolsError):
        find_tools()
    older = built(cache / f"kubernetes-{KUBERNETES}-go1.26.1")
    newer = built(cache / f"kubernetes-{KUBERNETES}-go1.26.2")
    for age, folder in enumerate((newer, older)):
        for name in COMMANDS:
            os.utime(folder / name, (1_000_000 - age, 1_000_000 - age))
    assert find_tools() == newer
