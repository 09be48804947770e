"""The quick import of the Kubernetes client; each in a process of its own, since modules are imported once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLIM = "from autoscaler.sources.kubernetes_slim import slim_client; slim_client()\n"
CONNECT = """
import asyncio, sys
from autoscaler.clock import SystemClock
from autoscaler.sources.kubernetes_api import KubernetesApi

async def main():
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=sys.argv[1], environ={})
    await api.close()

asyncio.run(main())
assert not any(name.startswith("kubernetes_asyncio.client.models.") for name in sys.modules)
assert "kubernetes_asyncio.client.rest" in sys.modules
"""
KUBECONFIG = """{apiVersion: v1, kind: Config, current-context: a,
clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: a, user: {}}],
contexts: [{name: a, context: {cluster: a, user: a}}]}"""


def python(code: str, *arguments: str, path: Path | None = None) -> None:
    """Run the code in a new process, where warnings are errors, with `path` first among the places of packages."""
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path is not None else {})}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    result = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_connection_needs_none_of_the_models(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG, encoding="utf-8")
    python(CONNECT, str(file))


def test_the_quick_client_is_the_real_one() -> None:
    python(
        SLIM
        + "from kubernetes_asyncio.client import ApiClient, Configuration\n"
        + "from kubernetes_asyncio.config import ConfigException, load_kube_config\n"
        + "import kubernetes_asyncio.client.api_client as real\n"
        + "assert ApiClient is real.ApiClient and 'site-packages' in real.__file__\n"
        + "assert ApiClient.__init__.__globals__['kubernetes_asyncio'].client.ApiClient is ApiClient\n"
    )


def test_what_was_imported_before_is_left_alone() -> None:
    python(
        "import kubernetes_asyncio as before\n"
        + SLIM
        + "import sys\nassert sys.modules['kubernetes_asyncio'] is before\n"
    )


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(
            {"client/__init__.py": "class ApiClient: pass\nclass Configuration: pass\n"}, id="no such modules"
        ),
        pytest.param(
            {
                "client/__init__.py": "class ApiClient: pass\nclass Configuration: pass\n",
                "client/configuration.py": "class Settings: pass\n",
                "client/api_client.py": "",
            },
            id="other names",
        ),
        pytest.param(
            {
                "client/__init__.py": "class V1Pod: pass\nfrom .api_client import ApiClient, Configuration\n",
                "client/api_client.py": "from . import V1Pod\nclass ApiClient: pass\nclass Configuration: pass\n",
                "client/configuration.py": "from .api_client import Configuration\n",
            },
            id="needs more",
        ),
    ],
)
def test_another_layout_is_imported_as_it_comes(files: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "kubernetes_asyncio"
    for name, text in {"__init__.py": "ours = True\n", "client/exceptions.py": "", **files}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    python(
        SLIM
        + "import kubernetes_asyncio\n"
        + "from kubernetes_asyncio.client import ApiClient, Configuration\n"
        + "assert kubernetes_asyncio.ours\n",
        path=tmp_path,
    )


def test_without_the_package_it_is_left_to_the_import_to_say_so() -> None:
    python(
        "import importlib.util as util\nfound = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'kubernetes_asyncio' else found(name, *rest)\n"
        + SLIM
        + "import sys\nassert 'kubernetes_asyncio' not in sys.modules\n"
    )
